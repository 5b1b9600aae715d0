"""Collects the parts of one step and hands them over as one merged copy per direction.

While a part is on its way its source and target pages are *held*: whoever frees them meanwhile,
nobody gets them before the copy has really ended on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cache.mover import Direction, Mover, Part
from cache.node import Tier
from cache.page_pool import PagePool

__all__ = ["CopyDesk"]

_TIERS = {
    Direction.TO_HOST: (Tier.DEVICE, Tier.HOST),
    Direction.TO_DEVICE: (Tier.HOST, Tier.DEVICE),
}


class CopyDesk:
    """One per rank; ``on_end(ok)`` of a part is called in :meth:`collect`, never from a thread."""

    def __init__(
        self, mover: Mover, pools: Mapping[Tier, PagePool], *, verifies: bool = False
    ) -> None:
        self.mover = mover
        self.num_wrong = 0
        self._verifies = verifies
        self._pools = pools
        self._waiting: dict[Direction, list[Part]] = {direction: [] for direction in Direction}
        self._running: dict[int, tuple[Direction, Part, Callable[[bool], None]]] = {}
        self._last_ticket = 0

    @property
    def room(self) -> int:
        """Parts that can still be taken in this step."""
        return self.mover.room - sum(len(parts) for parts in self._waiting.values())

    def add(
        self,
        direction: Direction,
        source: Sequence[int],
        target: Sequence[int],
        on_end: Callable[[bool], None],
    ) -> int:
        """Queue one node's part for the copy of this step; returns its ticket."""
        self._last_ticket += 1
        part = Part(self._last_ticket, list(source), list(target))
        self._waiting[direction].append(part)
        self._running[part.ticket] = (direction, part, on_end)
        from_tier, to_tier = _TIERS[direction]
        self._pools[from_tier].hold(part.source)
        self._pools[to_tier].hold(part.target)
        return part.ticket

    def submit(self) -> None:
        """Start what was queued: one merged copy per direction, loads first."""
        for direction in (Direction.TO_DEVICE, Direction.TO_HOST):
            parts = self._waiting[direction]
            if parts:
                self._waiting[direction] = []
                self.mover.submit(direction, parts)

    def collect(self) -> None:
        """Tell everyone concerned which of their parts have ended on this rank."""
        for ending in self.mover.collect():
            direction, part, on_end = self._running.pop(ending.ticket)
            ok = ending.ok and self._has_arrived(direction, part)
            from_tier, to_tier = _TIERS[direction]
            self._pools[from_tier].release(part.source)
            self._pools[to_tier].release(part.target)
            on_end(ok)

    def _has_arrived(self, direction: Direction, part: Part) -> bool:
        """Whether the target has the bytes of the source; both are still held."""
        if not self._verifies:
            return True
        device, host = self.mover.device, self.mover.host
        to_host = direction is Direction.TO_HOST
        source, target = (device, host) if to_host else (host, device)
        right = all(source.same_pages(part.source, target, part.target))
        self.num_wrong += not right
        return right

    @property
    def num_running(self) -> int:
        """Parts that have not ended on this rank."""
        return len(self._running)
