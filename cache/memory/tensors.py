"""The K and V tensors of one tier on this rank, where kvpact allocates them itself.

K and V share one allocation of ``2 * layers`` planes: plane ``i`` is K of layer ``i``, plane
``layers + i`` is V of layer ``i``. A page is the same ``page_size`` slots of every plane, so one
gather or scatter along the page dimension moves K and V of all layers at once::

    k, v    [layers, slots, heads, dim]            slot = page_index * page_size + offset
    words   [2 * layers, num_pages, page_words]    the same memory as whole integers
"""

from __future__ import annotations

import torch

from kvpact.cache.memory.paged import PagedMemory, word_for
from kvpact.cache.memory.shape import KVShape
from kvpact.consensus.core.errors import Misuse, ResourceError

__all__ = ["KVTensors"]


class KVTensors(PagedMemory):
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
        where = torch.device(device)
        if num_pages < 0 or page_size < 1:
            raise Misuse(
                f"KVTensors needs num_pages >= 0 and page_size >= 1, not {num_pages}, {page_size}"
            )
        if pin_memory and (where.type != "cpu" or not torch.cuda.is_available()):
            raise Misuse(
                f"pin_memory needs CUDA and device 'cpu', here the device is {str(where)!r}"
                f" and CUDA is {'' if torch.cuda.is_available() else 'not '}available"
            )
        self.shape = shape
        layers = shape.layers
        size = (2 * layers, num_pages, page_size * shape.heads * shape.dim)
        try:
            planes = torch.zeros(size, dtype=shape.torch_dtype, device=where, pin_memory=pin_memory)
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"cannot allocate {num_pages} pages of {shape.bytes_per_page(page_size)} bytes"
                f" on {str(where)!r}: {str(error).splitlines()[0]}"
            ) from error
        slots = (layers, num_pages * page_size, shape.heads, shape.dim)
        self.k: torch.Tensor = planes[:layers].view(slots)
        self.v: torch.Tensor = planes[layers:].view(slots)
        self.words: torch.Tensor = planes.view(word_for(shape.plane_bytes(page_size)))
        super().__init__(
            [self.words],
            [((0, layer), (0, layers + layer)) for layer in range(layers)],
            num_pages=num_pages,
            page_size=page_size,
            described=f"{layers}x{shape.heads}x{shape.dim} {shape.dtype}",
        )
