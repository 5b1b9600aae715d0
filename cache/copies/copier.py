"""Collects the parts of one step and hands them over as one merged copy per direction and pool.

While a part is on its way its source and target pages are *held*: whoever frees them meanwhile,
nobody gets them before the copy has really ended on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvpact.cache.copies.mover import Direction, Mover, Part, joined
from kvpact.cache.copies.side_pools import SidePool
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.tree.node import Tier

__all__ = ["Copier"]

_TIERS = {
    Direction.TO_HOST: (Tier.DEVICE, Tier.HOST),
    Direction.TO_DEVICE: (Tier.HOST, Tier.DEVICE),
}
#: The name of the KV pages among the routes; side pools have names of their own.
_KV = ""

#: Source and target pages.
Pair = tuple[Sequence[int], Sequence[int]]
#: Which of the pairs has ended, and whether it went well.
OnEnd = Callable[[int, bool], None]


class _Copy:
    """The copy that one node asked for: done when its part on every route has ended."""

    __slots__ = ("index", "left", "ok", "on_end")

    def __init__(self, index: int, left: int, on_end: OnEnd) -> None:
        self.index = index
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

    def add(
        self, direction: Direction, ticket: int, pairs: Sequence[Pair], copies: list[_Copy]
    ) -> None:
        waiting, running = self.waiting[direction], self.running
        for number, ((source, target), copy) in enumerate(zip(pairs, copies, strict=True), ticket):
            part = Part(number, source, target)
            waiting.append(part)
            running[number] = (direction, part, copy)
        from_tier, to_tier = _TIERS[direction]
        self.pools[from_tier].hold(joined([source for source, _ in pairs]))
        self.pools[to_tier].hold(joined([target for _, target in pairs]))

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


class Copier:
    """One per rank. ``on_end(index, ok)`` is called in :meth:`collect`, never from a thread.

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
        pairs: Sequence[Pair],
        on_end: OnEnd,
        side: Mapping[str, Pair] | None = None,
    ) -> range:
        """Queue parts for the copy of this step, each with source and target pages of its own.

        ``side`` are pages of side pools that go with the last of them. Nobody may change the lists
        afterwards. Returns the tickets.
        """
        first = self._last_ticket + 1
        self._last_ticket += len(pairs)
        copies = [_Copy(index, 1, on_end) for index in range(len(pairs))]
        self._routes[_KV].add(direction, first, pairs, copies)
        for name, pair in (side or {}).items():
            copies[-1].left += 1
            self._routes[name].add(direction, self._last_ticket, [pair], copies[-1:])
        return range(first, self._last_ticket + 1)

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
                    copy.on_end(copy.index, copy.ok)

    @property
    def is_busy(self) -> bool:
        """A part of some route is queued, or has not ended on this rank."""
        return any(route.running for route in self._routes.values())

    @property
    def num_running(self) -> int:
        """KV parts that have not ended on this rank."""
        return len(self._routes[_KV].running)
