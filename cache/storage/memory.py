"""Pages in this process's memory: for tests, the simulator, and hosts with memory to spare."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from kvpact.cache.storage.checksum import SealedPage
from kvpact.cache.storage.protocol import BackendBase
from kvpact.consensus.core.errors import BadInput, InternalError

__all__ = ["MemoryBackend"]


class MemoryBackend(BackendBase):
    """A dictionary of at most ``capacity_bytes`` of pages; the least recently used go first.

    A get and a put are uses, `exists` is not. A put of many pages may evict its own first ones
    no earlier than all others: what it acknowledges is there when it returns.
    """

    name = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise BadInput(
                f"storage memory: capacity_bytes must be at least 1, not {capacity_bytes}"
            )
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._pages: collections.OrderedDict[bytes, SealedPage] = collections.OrderedDict()

    def check_integrity(self) -> None:
        """Raises `InternalError` unless the bytes add up and stay within the capacity."""
        with self._lock:
            total = sum(len(page.page) for page in self._pages.values())
            if total != self.used_bytes or total > self.capacity_bytes:
                raise InternalError(
                    f"pages of {total} bytes, counted {self.used_bytes}, of {self.capacity_bytes}"
                )

    def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._pages for key in keys]

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        with self._lock:
            return [self._touched(key) for key in keys]

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        with self._lock:
            return self._keep(pages)

    def _remove(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._drop(key) for key in keys]

    def _clear(self) -> bool:
        with self._lock:
            self._pages.clear()
            self.used_bytes = 0
            return True

    def _drop_wrong(self, wrong: Sequence[SealedPage]) -> None:
        with self._lock:
            for page in wrong:
                held = self._pages.get(page.key)
                if held is not None and held.checksum == page.checksum:
                    self._drop(page.key)

    def _touched(self, key: bytes) -> SealedPage | None:
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
        return page

    def _keep(self, pages: Sequence[SealedPage]) -> list[bool]:
        kept: list[bool] = []
        batch_bytes = 0
        for page in pages:
            held = self._touched(page.key)
            if held is not None and held.checksum == page.checksum:
                size, known = len(held.page), True
            else:
                size, known = len(page.page), False
            # A batch never pushes out its own beginning: from the first that does not fit, none is
            # kept, so that what stays is its leading pages.
            if batch_bytes + size > self.capacity_bytes or (kept and not kept[-1]):
                kept.append(False)
                continue
            batch_bytes += size
            kept.append(True)
            if not known:
                self._drop(page.key)
                self._make_room(size)
                self._pages[page.key] = SealedPage(page.key, bytes(page.page), page.checksum)
                self.used_bytes += size
                self._count("stored")
        return kept

    def _make_room(self, size: int) -> None:
        while self.used_bytes + size > self.capacity_bytes:
            _, oldest = self._pages.popitem(last=False)
            self.used_bytes -= len(oldest.page)
            self._count("evicted")

    def _drop(self, key: bytes) -> bool:
        page = self._pages.pop(key, None)
        if page is None:
            return False
        self.used_bytes -= len(page.page)
        return True
