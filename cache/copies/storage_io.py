"""The storage tier of one rank: pages of the host pool go out under content keys and come back.

Workers do the I/O beside the scheduler's thread; this collects their endings and, while a request
is open, *holds* the host pages it reads or will write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.storage.checksum import SealedPage, seal
from kvpact.cache.storage.keys import PageKeys
from kvpact.cache.storage.requests import Kind, StorageEnding, StorageRequest, Workers
from kvpact.cache.tree.node import Node, Tokens

__all__ = ["StorageIo"]

OnEnd = Callable[[int], None]


class StorageIo:
    """One per rank. ``on_end(leading)`` of a request is called in :meth:`collect` only."""

    def __init__(
        self, workers: Workers, keys: PageKeys, pool: PagePool, tensors: PagedMemory
    ) -> None:
        self.workers = workers
        self.keys = keys
        self._pool = pool
        self._tensors = tensors
        self._open: dict[int, tuple[list[int], Callable[[StorageEnding], None]]] = {}
        self._last_ticket = 0

    @property
    def room(self) -> int:
        """Requests that can still be taken."""
        return self.workers.room

    def change_weights(self, version: str) -> None:
        """From now on pages are computed by weights ``version``; the tree must be empty."""
        self.keys = PageKeys(self.keys.identity, version)

    def keys_of(self, node: Node) -> list[bytes]:
        """The content keys of the pages of ``node``; computed once and kept with it."""
        chain: list[Node] = []
        at = node
        while at.parent is not None and not at.keys:
            chain.append(at)
            at = at.parent
        for below in reversed(chain):
            above = below.parent
            known = above.keys if above is not None else ()
            parent = known[-1] if known else self.keys.start(below.namespace)
            below.keys = tuple(self.keys.extend(parent, below.tokens))
        return list(node.keys)

    def keys_from(self, tokens: Tokens, namespace: str) -> list[bytes]:
        """The content keys of the whole pages of a prompt."""
        return self.keys.of(tokens, namespace)

    def put(self, keys: Sequence[bytes], pages: list[int], on_end: OnEnd) -> bool:
        """Write ``pages`` of the host pool under ``keys``; False: the workers are busy.

        The checksums are bound to the keys here and now: whatever happens to the pages while a
        thread reads them, nothing wrong is ever served under these keys.
        """
        data = self._tensors.read_pages(pages)
        sealed = tuple(seal(key, page) for key, page in zip(keys, data, strict=True))
        return self._submit(Kind.PUT, (), sealed, pages, lambda ending: on_end(ending.leading))

    def get(self, keys: Sequence[bytes], pages: list[int], on_end: OnEnd) -> int:
        """Read ``keys`` into ``pages``; returns the ticket, 0: the workers are busy."""

        def arrived(ending: StorageEnding) -> None:
            good = ending.leading
            data = [page for page in ending.pages[:good] if page is not None]
            self._tensors.write_pages(pages[:good], data)
            on_end(good)

        taken = self._submit(Kind.GET, tuple(keys), (), pages, arrived)
        return self._last_ticket if taken else 0

    def ask(self, keys: Sequence[bytes], on_end: OnEnd) -> bool:
        """How many leading ``keys`` are there; False: the workers are busy."""

        def ended(ending: StorageEnding) -> None:
            on_end(ending.leading)

        return self._submit(Kind.EXISTS, tuple(keys), (), [], ended)

    def clear(self, on_end: OnEnd) -> bool:
        """Empty this rank's storage; False: the workers are busy."""
        return self._submit(Kind.CLEAR, (), (), [], lambda ending: on_end(ending.leading))

    def stop(self, ticket: int) -> None:
        """End an open request now, with what has arrived so far."""
        if ticket in self._open:
            self._ended(self.workers.abandon(ticket))

    @property
    def is_busy(self) -> bool:
        """A request has not ended on this rank."""
        return bool(self._open)

    def collect(self) -> None:
        """Tell everyone concerned which of their requests have ended on this rank."""
        for ending in self.workers.collect():
            self._ended(ending)

    def _submit(
        self,
        kind: Kind,
        keys: tuple[bytes, ...],
        sealed: tuple[SealedPage, ...],
        pages: list[int],
        on_end: Callable[[StorageEnding], None],
    ) -> bool:
        ticket = self._last_ticket + 1
        request = StorageRequest(ticket=ticket, kind=kind, keys=keys, pages=sealed)
        if not self.workers.submit(request):
            return False
        self._last_ticket = ticket
        self._pool.hold(pages)
        self._open[ticket] = (pages, on_end)
        return True

    def _ended(self, ending: StorageEnding) -> None:
        pages, on_end = self._open.pop(ending.ticket)
        on_end(ending)
        self._pool.release(pages)
