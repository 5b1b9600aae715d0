"""The shape of what one token keeps: plain numbers, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvpact.consensus.core.errors import Misuse

if TYPE_CHECKING:
    import torch

__all__ = ["ITEM_BYTES", "KVShape"]

#: Bytes of one element, by the name that torch gives the type.
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class KVShape(msgspec.Struct, frozen=True):
    """The KV of one token on this rank: ``layers * heads * dim`` elements of K and as many of V.

    ``dtype`` is a name such as ``"float16"``. Raises `Misuse` where a number is below 1 or the
    name is unknown.
    """

    layers: int
    heads: int
    dim: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "dim"):
            value: int = getattr(self, name)
            if value < 1:
                raise Misuse(f"KVShape.{name} must be at least 1, not {value}")
        if self.dtype not in ITEM_BYTES:
            raise Misuse(
                f"KVShape.dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch knows it."""
        import torch  # here, so that a configuration is made without it

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def plane_bytes(self, page_size: int) -> int:
        """Bytes of one page in one plane (K or V of one layer)."""
        return page_size * self.heads * self.dim * ITEM_BYTES[self.dtype]

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page: K and V of all layers."""
        return 2 * self.layers * self.plane_bytes(page_size)
