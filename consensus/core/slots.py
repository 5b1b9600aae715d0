"""The fixed table of slots: an open intent's place in the ballot."""

from __future__ import annotations

import heapq
from collections import deque

from kvpact.consensus.core.errors import InternalError

__all__ = ["SlotTable"]


class SlotTable:
    """Hands out slots ``0..num_slots-1``, the lowest free one first: the same on every rank.

    A slot that is freed while settling is used again no earlier than ``lag + 1`` steps later, so
    that ballots still in flight cannot be read for its next user.
    """

    def __init__(self, num_slots: int, lag: int) -> None:
        self.num_slots = num_slots
        self._rest_steps = lag + 1
        self._free = list(range(num_slots))
        self._resting: deque[tuple[int, int]] = deque()
        self._taken: set[int] = set()  # membership only, never iterated

    def take(self, step: int) -> int | None:
        """The lowest free slot at ``step``; ``None`` where all are taken or resting."""
        while self._resting and self._resting[0][0] <= step:
            heapq.heappush(self._free, self._resting.popleft()[1])
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int, step: int) -> None:
        """``slot`` is free again; raises :class:`InternalError` where it was not taken."""
        if slot not in self._taken:
            raise InternalError(f"slot {slot} is given back but nobody holds it")
        self._taken.remove(slot)
        self._resting.append((step + self._rest_steps, slot))

    def num_free(self, step: int) -> int:
        """Slots that can be taken at ``step``."""
        return len(self._free) + sum(1 for free_at, _ in self._resting if free_at <= step)

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return len(self._taken)
