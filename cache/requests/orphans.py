"""Pages that live requests held when an epoch ended: out of use, in no tree, until they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import TypeVar

from kvpact.cache.copies.side_pools import SidePools
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.requests.table import Request
from kvpact.cache.tree.node import Tier

__all__ = ["Orphans"]

T = TypeVar("T", bound=Hashable)


class Orphans:
    """Counts, per device page, the requests of an earlier epoch that hold it."""

    def __init__(self, pools: Mapping[Tier, PagePool], side: SidePools) -> None:
        self._pools = pools
        self._side = side
        self._pages: Counter[int] = Counter()
        self._side_pages: Counter[tuple[str, int]] = Counter()
        self._lost: dict[str, Request] = {}

    # -- taking ----------------------------------------------------------------------------------

    def take(
        self,
        requests: Iterable[Request],
        *,
        among: Iterable[Request],
        but: Container[int] = (),
        but_side: Container[tuple[str, int]] = (),
    ) -> None:
        """All that ``requests`` hold is orphaned: they have no path and no pages of their own.

        They are ``among`` the live ones, of which others may hold orphans of an earlier epoch.
        ``but`` what a tree owns from now on, of lost requests too.
        """
        for request in [*requests, *self._lost.values()]:
            for node in [] if request.held is None else request.held.path():
                request.orphans += node.device.pages
                for name, pages in node.device.side.items():
                    request.side_orphans += [(name, page) for _, page in pages]
            request.orphans += request.private
            request.orphans = [page for page in request.orphans if page not in but]
            request.side_orphans = [pair for pair in request.side_orphans if pair not in but_side]
            request.held, request.private = None, []
        alive = [*among, *self._lost.values()]
        self._pages = Counter(page for request in alive for page in request.orphans)
        self._side_pages = Counter(pair for request in alive for pair in request.side_orphans)

    def lose(self, request: Request) -> None:
        """Keep the pages of a request that ranks differ in until the engine aborts it."""
        self._lost[request.name] = request

    # -- giving back -----------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """A request ends: the orphaned pages that nobody else holds are free."""
        pages, request.orphans = request.orphans, []
        self._pools[Tier.DEVICE].free(_forget(self._pages, pages))
        pairs, request.side_orphans = request.side_orphans, []
        gone = _forget(self._side_pages, pairs)
        for side in self._side:
            side.pools[Tier.DEVICE].free([page for name, page in gone if name == side.spec.name])

    def release_lost(self, name: str) -> None:
        """A lost request was aborted by the engine."""
        request = self._lost.pop(name, None)
        if request is not None:
            self.release(request)

    # -- looking ---------------------------------------------------------------------------------

    @property
    def pages(self) -> list[int]:
        """Device pages that only requests of an earlier epoch hold."""
        return list(self._pages)

    @property
    def side_pages(self) -> list[tuple[str, int]]:
        """Likewise of side pools, by name."""
        return list(self._side_pages)

    def side_pages_of(self, name: str) -> list[int]:
        """Likewise of one side pool."""
        return [page for owner, page in self._side_pages if owner == name]


def _forget(counts: Counter[T], held: list[T]) -> list[T]:
    """Count ``held`` down; what nobody holds any more."""
    for one in held:
        counts[one] -= 1
    gone = [one for one in dict.fromkeys(held) if counts[one] == 0]
    for one in gone:
        del counts[one]
    return gone
