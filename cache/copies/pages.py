"""Pages copied between two memories of the host: neighbours in one go, strays through a buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvpact.cache.memory.paged import PagedMemory, PageWords
from kvpact.consensus.core.errors import Misuse

__all__ = ["HostCopier", "runs"]

MIN_RUN_BYTES = 4096
"""Runs of fewer bytes go through the buffer: a call costs more than the second copy of them."""

BUFFER_BYTES = 256 << 10
"""Half of a core's cache, about: what was just gathered is scattered from there."""

PageIndex = NDArray[np.int64]


class HostCopier:
    """Copies pages between two host memories that are laid out alike. One thread each.

    Raises `Misuse` where one of them is not the host's.
    """

    def __init__(self, device: PagedMemory, host: PagedMemory) -> None:
        if device.host_groups is None or host.host_groups is None:
            raise Misuse("this mover copies between CPU tensors: use CudaMover for a CUDA device")
        self._to_host = tuple(zip(device.host_groups, host.host_groups, strict=True))
        self._to_device = tuple(zip(host.host_groups, device.host_groups, strict=True))
        self._buffer: NDArray[np.uint8] = np.empty(BUFFER_BYTES, dtype=np.uint8)

    def copy(self, to_device: bool, source: PageIndex, target: PageIndex) -> None:
        """Page ``source[i]`` goes to page ``target[i]``, in every plane."""
        pairs = self._to_device if to_device else self._to_host
        for from_group, to_group in pairs:
            planes, _, words = from_group.shape
            page_bytes = planes * words * from_group.itemsize
            found = list(runs(source, target))
            if page_bytes * len(source) >= MIN_RUN_BYTES * len(found):
                for first, into, length in found:
                    to_group[:, into : into + length] = from_group[:, first : first + length]
            else:
                self._through_buffer(from_group, to_group, source, target)

    def _through_buffer(
        self, from_group: PageWords, to_group: PageWords, source: PageIndex, target: PageIndex
    ) -> None:
        """A piece at a time, so small that it does not leave the core's cache in between."""
        planes, _, words = from_group.shape
        pages = max(1, BUFFER_BYTES // (planes * words * from_group.itemsize))
        for start in range(0, len(source), pages):
            piece = source[start : start + pages]
            if from_group.flags.c_contiguous:
                size = planes * len(piece) * words * from_group.itemsize
                staged = self._buffer[:size].view(from_group.dtype)
                staged = staged.reshape(planes, len(piece), words)
                # Pages were checked when they were submitted; "clip" spares a second buffer.
                from_group.take(piece, 1, staged, "clip")
            else:
                staged = from_group[:, piece]
            to_group[:, target[start : start + pages]] = staged


def runs(source: PageIndex, target: PageIndex) -> Iterator[tuple[int, int, int]]:
    """Neighbours that go to neighbours: first page, the page that it goes to, how many."""
    steps = (np.diff(source) != 1) | (np.diff(target) != 1)
    starts = [0, *(np.flatnonzero(steps) + 1).tolist(), len(source)]
    for start, end in itertools.pairwise(starts):
        if end > start:
            yield int(source[start]), int(target[start]), end - start
