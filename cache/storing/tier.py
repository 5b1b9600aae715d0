"""The storage tier as the cache sees it: attached, draining or detached, and its two paths."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.storing.clear import Clearing
from kvpact.cache.storing.prefetch import Prefetch
from kvpact.cache.storing.put import STORAGE, Storing
from kvpact.cache.tree.events import EventLog
from kvpact.cache.tree.node import Node, Tier
from kvpact.consensus.core.errors import Misuse

if TYPE_CHECKING:
    from kvpact.cache.config import CacheConfig

__all__ = ["STORAGE", "StorageState", "StorageTier"]


class StorageState(enum.Enum):
    """Agreed: attach and detach are calls that every rank makes."""

    ATTACHED = "attached"
    DRAINING = "draining"  # what is open is completed, nothing new begins
    CLEARING = "clearing"  # emptied on all ranks; nothing begins before all have done it
    DETACHED = "detached"


class StorageEvent(enum.Enum):
    """An event in the life of the storage as a whole."""

    ATTACH = "attach"  # agreed calls
    DETACH = "detach"
    CLEAR = "clear"
    DRAINED = "drained"  # nothing is open any more
    CLEARED = "cleared"  # all ranks have done it, or it was given up


_ON, _DRAINING, _CLEARING, _OFF = StorageState
#: What may happen in which state, and what follows; a call that is not here is a Misuse.
_TABLE: dict[StorageState, dict[StorageEvent, StorageState]] = {
    _ON: {StorageEvent.DETACH: _DRAINING, StorageEvent.CLEAR: _CLEARING},
    _DRAINING: {StorageEvent.ATTACH: _ON, StorageEvent.DRAINED: _OFF},
    _CLEARING: {StorageEvent.CLEARED: _ON},
    _OFF: {StorageEvent.ATTACH: _ON},
}
_WHY = {
    _ON: "it is attached",
    _DRAINING: "it is being detached",
    _CLEARING: "it is being cleared: step until has_pending() says no",
    _OFF: "it is detached",
}


class StorageTier(Path):
    """Storage writes and prefetches, and whether there is a storage at all."""

    def __init__(self, tiers: Tiers, io: StorageIo, events: EventLog, config: CacheConfig) -> None:
        self.io = io
        self.state = StorageState.ATTACHED
        self.storing = Storing(tiers, io, events, queue_nodes_max=config.write_queue_nodes_max)
        self.prefetch = Prefetch(
            tiers,
            io,
            minimum_pages=config.prefetch_minimum_pages,
            policy=config.prefetch_policy,
            timeout_s=config.prefetch_timeout_s,
        )
        self.clearing = Clearing(tiers, io, events)
        self._tiers = tiers
        self._events = events
        self._queue_pages = config.storage_queue_pages

    @property
    def usable(self) -> int:
        """Places in this rank's queue, in pages."""
        return 0 if self.state is StorageState.DETACHED else self._queue_pages

    @property
    def is_attached(self) -> bool:
        """New writes and prefetches may begin."""
        return self.state is StorageState.ATTACHED

    @property
    def is_pending(self) -> bool:
        """Something of it is queued or open, or it is about to be detached: agreed."""
        return self._has_open or self.state in (StorageState.DRAINING, StorageState.CLEARING)

    @property
    def _has_open(self) -> bool:
        return self.storing.is_busy or self.prefetch.num_open > 0

    def backed_up(self, nodes: list[Node]) -> None:
        """These are backed up on every rank: write them out, pinned on HOST meanwhile."""
        if not self.is_attached:
            return
        for node in nodes:
            self._tiers.tree.pin(node, Tier.HOST)
            self.storing.add([node], list(node.host.pages), self._unpin)

    def _unpin(self, nodes: list[Node], stored: int) -> None:
        for node in nodes:
            self._tiers.tree.unpin(node, Tier.HOST)

    def plan(self) -> None:
        """Open what can begin; a storage that drains is detached once nothing is open."""
        self.storing.plan()
        self.prefetch.plan()
        if self.state is StorageState.DRAINING and not self._has_open:
            self.state = self._after(StorageEvent.DRAINED)
            self._tiers.manager.note("detached")
        if self.state is StorageState.DETACHED:
            self.storing.drop_queue()  # copies to staging that ended later

    def attach(self) -> None:
        """Agreed call: new writes and prefetches may begin.

        Raises :class:`Misuse` where they may already, or while storage is being cleared.
        """
        after = self._after(StorageEvent.ATTACH)
        self._tiers.manager.note("attach")
        self.state = after

    def detach(self, *, complete: bool) -> None:
        """Agreed call: nothing new begins; what is open is completed first.

        Raises :class:`Misuse` where something is open and ``complete`` is False, and where storage
        is not attached: nothing changed.
        """
        after = self._after(StorageEvent.DETACH)
        if self._has_open and not complete:
            raise Misuse(
                "storage has writes or prefetches open: let them end, or detach with complete=True"
            )
        self._tiers.manager.note("detach")
        self.state = after
        if not self._has_open:
            self.state = self._after(StorageEvent.DRAINED)

    def empty(self) -> None:
        """Agreed call: remove all that is stored, on every rank; attached again when all have.

        Raises :class:`Misuse` where something is open, or storage is not attached: nothing changed.
        """
        after = self._after(StorageEvent.CLEAR)
        if self._has_open:
            raise Misuse("storage has writes or prefetches open: let them end before it is cleared")
        if not self.clearing.begin(self._cleared):
            raise Misuse("storage cannot be cleared now: no slot is free, try again after a step")
        self._tiers.manager.note("clear")
        self.state = after

    def _cleared(self) -> None:
        self.state = self._after(StorageEvent.CLEARED)

    def _after(self, event: StorageEvent) -> StorageState:
        """The state that follows. Raises :class:`Misuse` where ``event`` cannot happen now."""
        after = _TABLE[self.state].get(event)
        if after is None:
            raise Misuse(f"{event.value}_storage() is not for now: {_WHY[self.state]}")
        return after

    def resume(self, *, attached: bool) -> None:
        """Begin an epoch in a state that all ranks agreed on: nothing is open in it."""
        self.state = StorageState.ATTACHED if attached else StorageState.DETACHED

    def held_pages(self, tier: Tier) -> list[int]:
        """Host pages of this rank that open prefetches own."""
        return self.prefetch.held_pages() if tier is Tier.HOST else []

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        self.storing.clear()
        self.prefetch.clear()
        self.clearing.clear()
