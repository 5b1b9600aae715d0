"""Collects the parts of one step and hands them over as one merged copy per direction and pool.

While a part is on its way its source and target pages are *held*: whoever frees them meanwhile,
nobody gets them before the copy has really ended on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cache.mover import Direction, Mover, Part
from cache.node import Tier
from cache.page_pool import PagePool
from cache.side_pools import SidePool

__all__ = ["CopyDesk"]

_TIERS = {
    Direction.TO_HOST: (Tier.DEVICE, Tier.HOST),
    Direction.TO_DEVICE: (Tier.HOST, Tier.DEVICE),
}
#: The name of the KV pages among the routes; side pools have names of their own.
_KV = ""

#: Source and target pages.
Pair = tuple[Sequence[int], Sequence[int]]


class _Copy:
    """What one node asked for: done when its part on every route has ended."""

    __slots__ = ("left", "ok", "on_end")

    def __init__(self, left: int, on_end: Callable[[bool], None]) -> None:
        self.left = left
        self.ok = True
        self.on_end = on_end


class _Route:
    """One kind of pages: a mover, the pools it copies between, and what is queued for it."""

    __slots__ = ("mover", "pools", "running", "waiting")

    def __init__(self, mover: Mover, pools: Mapping[Tier, PagePool]) -> None:
        self.mover = mover
        self.pools = pools
        self.waiting: dict[Direction, list[Part]] = {direction: [] for direction in Direction}
        self.running: dict[int, tuple[Direction, Part, _Copy]] = {}

    def add(self, direction: Direction, part: Part, copy: _Copy) -> None:
        self.waiting[direction].append(part)
        self.running[part.ticket] = (direction, part, copy)
        from_tier, to_tier = _TIERS[direction]
        self.pools[from_tier].hold(part.source)
        self.pools[to_tier].hold(part.target)

    def submit(self, direction: Direction) -> None:
        parts = self.waiting[direction]
        if parts:
            self.waiting[direction] = []
            self.mover.submit(direction, parts)

    def release(self, direction: Direction, part: Part) -> None:
        from_tier, to_tier = _TIERS[direction]
        self.pools[from_tier].release(part.source)
        self.pools[to_tier].release(part.target)

    def is_same(self, direction: Direction, part: Part) -> bool:
        """Whether the target has the bytes of the source; both are still held."""
        device, host = self.mover.device, self.mover.host
        to_host = direction is Direction.TO_HOST
        source, target = (device, host) if to_host else (host, device)
        return all(source.same_pages(part.source, target, part.target))


class CopyDesk:
    """One per rank; ``on_end(ok)`` of a node is called in :meth:`collect`, never from a thread.

    ``verifies``: compare the bytes of each copy at its end; what differs counts as failed.
    """

    def __init__(
        self,
        mover: Mover,
        pools: Mapping[Tier, PagePool],
        *,
        verifies: bool = False,
        side: Sequence[SidePool] = (),
    ) -> None:
        self.mover = mover
        self.num_wrong = 0
        self._verifies = verifies
        self._routes = {_KV: _Route(mover, pools)}
        self._routes |= {one.spec.name: _Route(one.mover, one.pools) for one in side}
        self._last_ticket = 0

    @property
    def room(self) -> int:
        """Parts that can still be taken in this step."""
        return min(
            route.mover.room - sum(len(parts) for parts in route.waiting.values())
            for route in self._routes.values()
        )

    def add(
        self,
        direction: Direction,
        source: Sequence[int],
        target: Sequence[int],
        on_end: Callable[[bool], None],
        side: Mapping[str, Pair] | None = None,
    ) -> int:
        """Queue one node's part for the copy of this step, with those of its side pools.

        Returns the ticket of its KV part.
        """
        pairs: dict[str, Pair] = {_KV: (source, target), **(side or {})}
        copy = _Copy(len(pairs), on_end)
        self._last_ticket += 1
        for name, (from_pages, to_pages) in pairs.items():
            part = Part(self._last_ticket, list(from_pages), list(to_pages))
            self._routes[name].add(direction, part, copy)
        return self._last_ticket

    def submit(self) -> None:
        """Start what was queued: one merged copy per direction and route, loads first."""
        for direction in (Direction.TO_DEVICE, Direction.TO_HOST):
            for route in self._routes.values():
                route.submit(direction)

    def collect(self) -> None:
        """Tell everyone concerned which of their copies have ended on this rank."""
        for route in self._routes.values():
            for ending in route.mover.collect():
                direction, part, copy = route.running.pop(ending.ticket)
                right = ending.ok and (not self._verifies or route.is_same(direction, part))
                self.num_wrong += ending.ok and not right
                copy.ok = copy.ok and right
                route.release(direction, part)
                copy.left -= 1
                if copy.left == 0:
                    copy.on_end(copy.ok)

    @property
    def num_running(self) -> int:
        """KV parts that have not ended on this rank."""
        return len(self._routes[_KV].running)
