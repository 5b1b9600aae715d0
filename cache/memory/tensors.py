"""The real K and V tensors of one tier on this rank.

K and V share one allocation of ``2 * layers`` *planes*: plane ``i`` is K of layer ``i``, plane
``layers + i`` is V of layer ``i``. A page is the same ``page_size`` slots of every plane, so one
gather or scatter along the page dimension moves K and V of all layers at once::

    k, v    [layers, slots, heads, dim]            slot = page_index * page_size + offset
    words   [2 * layers, num_pages, page_words]    the same memory as whole integers

Bytes are copied and compared as integers: exact whatever the dtype (NaN equals itself), and the
widest integer that divides a page is the quickest to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpact.cache.memory.shape import KVShape
from kvpact.consensus.core.errors import Misuse, ResourceError

__all__ = ["KVTensors", "PageWords"]

PageWords = NDArray[Any]
"""``[2 * layers, n, page_words]`` of the integer type of the tensors it belongs to."""

_WORDS: tuple[tuple[int, torch.dtype], ...] = (
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)


class KVTensors:
    """K and V of ``num_pages`` pages of ``page_size`` tokens on ``device``, zero at first.

    ``pin_memory`` asks for page-locked host memory (CUDA copies need it to be asynchronous).
    Raises `Misuse` for impossible arguments, `ResourceError` where the memory cannot be had.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        if num_pages < 0 or page_size < 1:
            raise Misuse(
                f"KVTensors needs num_pages >= 0 and page_size >= 1, not {num_pages}, {page_size}"
            )
        if pin_memory and (self.device.type != "cpu" or not torch.cuda.is_available()):
            raise Misuse(
                f"pin_memory needs CUDA and device 'cpu', here the device is {str(self.device)!r}"
                f" and CUDA is {'' if torch.cuda.is_available() else 'not '}available"
            )
        self.plane_bytes = shape.plane_bytes(page_size)
        self.bytes_per_page = shape.bytes_per_page(page_size)
        num_planes = 2 * shape.layers
        elements = page_size * shape.heads * shape.dim
        planes = self._allocate((num_planes, num_pages, elements), pin_memory)
        slots = (shape.layers, num_pages * page_size, shape.heads, shape.dim)
        self.k: torch.Tensor = planes[: shape.layers].view(slots)
        self.v: torch.Tensor = planes[shape.layers :].view(slots)
        self.k_pages: torch.Tensor = planes[: shape.layers]
        self.v_pages: torch.Tensor = planes[shape.layers :]
        """``[layers, num_pages, page elements]``: K and V by page."""
        word = next(word for size, word in _WORDS if self.plane_bytes % size == 0)
        self.words: torch.Tensor = planes.view(word)
        # numpy moves whole pages two to six times quicker than index_copy_ on the CPU.
        self.host_words: PageWords | None = (
            self.words.numpy() if self.device.type == "cpu" else None
        )
        self.word_type: np.dtype[Any] = np.dtype(str(word).removeprefix("torch."))

    def gather(self, pages: Sequence[int]) -> PageWords:
        """Copy pages out: ``[2 * layers, len(pages), page_words]``. From CUDA this waits."""
        if self.host_words is not None:
            return self.host_words.take(self._indices(pages), 1)
        index = torch.from_numpy(self._indices(pages)).to(self.device)
        return self.words.index_select(1, index).cpu().numpy()

    def scatter(self, pages: Sequence[int], data: PageWords) -> None:
        """Overwrite ``pages`` with ``data`` (as `gather` returns it). To CUDA this waits."""
        if self.host_words is not None:
            self.host_words[:, self._indices(pages)] = data
            return
        index = torch.from_numpy(self._indices(pages)).to(self.device)
        self.words.index_copy_(1, index, torch.from_numpy(data).to(self.device))

    def read_page(self, page_index: int) -> bytes:
        """The bytes of one page: K of every layer, then V of every layer."""
        return self.gather([page_index]).tobytes()

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """`read_page` of many pages in one gather."""
        by_page = np.ascontiguousarray(self.gather(pages).transpose(1, 0, 2))
        return [page.tobytes() for page in by_page]

    def write_page(self, page_index: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite one page with what `read_page` returned; `Misuse` if the length differs."""
        self.write_pages([page_index], [data])

    def write_pages(
        self, pages: Sequence[int], data: Sequence[bytes | bytearray | memoryview]
    ) -> None:
        """`write_page` of many pages in one scatter; all lengths are checked before any write."""
        if len(pages) != len(data):
            raise Misuse(f"{len(pages)} pages but the bytes of {len(data)}")
        for page_index, page in zip(pages, data, strict=True):
            if len(page) != self.bytes_per_page:
                raise Misuse(
                    f"page {page_index} needs {self.bytes_per_page} bytes, not {len(page)}:"
                    " were they written with another KVShape, dtype or page_size?"
                )
        if not pages:
            return
        joined = np.frombuffer(bytearray().join(data), dtype=self.word_type)
        by_page = joined.reshape(len(pages), 2 * self.shape.layers, -1)
        self.scatter(pages, by_page.transpose(1, 0, 2))

    def same_page(self, page_index: int, other: KVTensors, other_index: int) -> bool:
        """Whether a page here and a page of ``other`` hold the same bytes in every plane."""
        return self.same_pages([page_index], other, [other_index])[0]

    def same_pages(
        self, pages: Sequence[int], other: KVTensors, other_pages: Sequence[int]
    ) -> list[bool]:
        """`same_page` pair by pair; `Misuse` where the two are not made alike."""
        if self.shape != other.shape or self.page_size != other.page_size:
            raise Misuse(
                f"cannot compare pages of {self.shape} x {self.page_size} tokens"
                f" with {other.shape} x {other.page_size}"
            )
        if len(pages) != len(other_pages):
            raise Misuse(f"cannot compare {len(pages)} pages with {len(other_pages)}")
        equal = (self.gather(pages) == other.gather(other_pages)).all(axis=(0, 2))
        return [bool(value) for value in equal]

    def _indices(self, pages: Sequence[int]) -> NDArray[np.int64]:
        # Negative ids would silently index from the end.
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            unknown = next(page for page in pages if not 0 <= page < self.num_pages)
            raise Misuse(f"page {unknown} does not exist: there are {self.num_pages} pages")
        return np.array(pages, dtype=np.int64)

    def _allocate(self, size: tuple[int, ...], pin_memory: bool) -> torch.Tensor:
        try:
            return torch.zeros(
                size, dtype=self.shape.torch_dtype, device=self.device, pin_memory=pin_memory
            )
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"cannot allocate {self.num_pages} pages of {self.bytes_per_page} bytes"
                f" on {str(self.device)!r}: {str(error).splitlines()[0]}"
            ) from error
