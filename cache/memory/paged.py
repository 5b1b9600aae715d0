"""Memory in pages: whole pages in and out, wherever their bytes lie.

A page's bytes lie in *planes*: K of one layer, say. Planes of one allocation that are alike form a
*group*; page ``i`` is row ``i`` of every plane of every group::

    group   [planes, num_pages, page_words]    as integers, each row contiguous

The bytes of a page are those of its planes, group by group. They are copied and compared as
integers: exact whatever the dtype (NaN equals itself), and the widest integer that divides a row
is the quickest to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpact.consensus.core.errors import Misuse

__all__ = ["PageBytes", "PageWords", "PagedMemory", "Plane", "word_for"]

PageWords = NDArray[Any]
"""One group on the host: ``[planes, num_pages, page_words]`` of its integer type."""

PageBytes = NDArray[np.uint8]
"""``[n, bytes_per_page]``: whole pages, one after the other."""

Plane = tuple[int, int]
"""A group and a plane in it, both counted from 0."""

_WORDS: tuple[tuple[int, torch.dtype], ...] = (
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)


def word_for(*bytes_each: int) -> torch.dtype:
    """The widest integer type of which each of ``bytes_each`` is a whole number."""
    return next(word for size, word in _WORDS if not any(each % size for each in bytes_each))


class PagedMemory:
    """``num_pages`` pages of ``page_size`` tokens in ``groups``, all on one device.

    ``layer_planes`` names the planes of each layer, in the order in which a forward pass reads
    them. ``described`` says in words what lies in a page: of what is stored under another text,
    nothing fits here. Base of :class:`~kvpact.cache.memory.tensors.KVTensors` (kvpact's own) and
    :class:`~kvpact.cache.memory.engine_tensors.EngineTensors` (an engine's).
    """

    def __init__(
        self,
        groups: Sequence[torch.Tensor],
        layer_planes: Sequence[Sequence[Plane]],
        *,
        num_pages: int,
        page_size: int,
        described: str,
    ) -> None:
        self.described = described
        self.groups = tuple(groups)
        self.layer_planes = tuple(tuple(planes) for planes in layer_planes)
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = self.groups[0].device
        #: Planes, and bytes of a page in each, by group: memories that agree in it can be copied.
        self.layout = tuple(
            (group.shape[0], group.shape[2] * group.element_size()) for group in self.groups
        )
        self._sizes = [planes * row_bytes for planes, row_bytes in self.layout]
        self.bytes_per_page = sum(self._sizes)
        #: The groups as NumPy sees them: where the memory is the host's.
        self.host_groups: tuple[PageWords, ...] | None = (
            tuple(group.numpy() for group in self.groups) if self.device.type == "cpu" else None
        )

    def gather(self, pages: Sequence[int]) -> PageBytes:
        """Copy pages out: ``[len(pages), bytes_per_page]``. From CUDA this waits."""
        index = self._indices(pages)
        if self.host_groups is not None:
            rows = [group[:, index] for group in self.host_groups]
        else:
            there = torch.from_numpy(index).to(self.device)
            rows = [group.index_select(1, there).cpu().numpy() for group in self.groups]
        parts = [
            np.ascontiguousarray(part.transpose(1, 0, 2)).view(np.uint8).reshape(len(pages), size)
            for part, size in zip(rows, self._sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def scatter(self, pages: Sequence[int], data: PageBytes) -> None:
        """Overwrite ``pages`` with ``data`` (as `gather` returns it). To CUDA this waits."""
        index = self._indices(pages)
        start = 0
        for number, (planes, row_bytes) in enumerate(self.layout):
            size = planes * row_bytes
            part = np.ascontiguousarray(data[:, start : start + size])
            start += size
            self._scatter_group(number, index, part)

    def read_page(self, page_index: int) -> bytes:
        """The bytes of one page: those of its planes, one after the other."""
        return self.gather([page_index]).tobytes()

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """`read_page` of many pages in one gather."""
        return [page.tobytes() for page in self.gather(pages)]

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
        if pages:
            joined = np.frombuffer(bytearray().join(data), dtype=np.uint8)
            self.scatter(pages, joined.reshape(len(pages), self.bytes_per_page))

    def same_page(self, page_index: int, other: PagedMemory, other_index: int) -> bool:
        """Whether a page here and a page of ``other`` hold the same bytes in every plane."""
        return self.same_pages([page_index], other, [other_index])[0]

    def same_pages(
        self, pages: Sequence[int], other: PagedMemory, other_pages: Sequence[int]
    ) -> list[bool]:
        """`same_page` pair by pair; `Misuse` where the two are not made alike."""
        if self.layout != other.layout or self.page_size != other.page_size:
            raise Misuse(
                f"cannot compare pages of {self.described} x {self.page_size} tokens with"
                f" {other.described} x {other.page_size}"
            )
        if len(pages) != len(other_pages):
            raise Misuse(f"cannot compare {len(pages)} pages with {len(other_pages)}")
        equal = (self.gather(pages) == other.gather(other_pages)).all(axis=1)
        return [bool(value) for value in equal]

    def _scatter_group(self, number: int, index: NDArray[np.int64], part: PageBytes) -> None:
        planes, _ = self.layout[number]
        group = self.groups[number]
        word = np.dtype(str(group.dtype).removeprefix("torch."))
        rows = part.view(word).reshape(len(index), planes, group.shape[2]).transpose(1, 0, 2)
        if self.host_groups is not None:
            self.host_groups[number][:, index] = rows
            return
        there = torch.from_numpy(index).to(self.device)
        group.index_copy_(1, there, torch.from_numpy(np.ascontiguousarray(rows)).to(self.device))

    def _indices(self, pages: Sequence[int]) -> NDArray[np.int64]:
        # Negative ids would silently index from the end.
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            unknown = next(page for page in pages if not 0 <= page < self.num_pages)
            raise Misuse(f"page {unknown} does not exist: there are {self.num_pages} pages")
        return np.array(pages, dtype=np.int64)
