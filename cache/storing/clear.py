"""Emptying the storage at run time: on all ranks, and nothing begins before all have done so."""

from __future__ import annotations

from collections.abc import Callable

from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.events import EventLog
from kvpact.cache.tree.node import STORAGE
from kvpact.consensus.core.participant import Intent

__all__ = ["Clearing"]


class Clearing:
    """Participant for one clearing at a time. A rank whose storage fails keeps its pages: they are
    not found everywhere any more, so no prefetch brings them."""

    kind = "clear"

    def __init__(self, tiers: Tiers, io: StorageIo, events: EventLog) -> None:
        self._tiers = tiers
        self._io = io
        self._events = events
        self._intent: Intent | None = None
        self._on_end: Callable[[], None] = _nothing

    def begin(self, on_end: Callable[[], None]) -> bool:
        """Propose it; ``on_end`` is called when all ranks have done it. False: no slot is free."""
        self._intent = self._tiers.manager.open(self.kind, STORAGE, {STORAGE: 1}, self)
        if self._intent is None:
            return False
        self._on_end = on_end
        for node in self._tiers.tree.nodes():
            node.is_stored = False
        return True

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """A place in the queue, where the workers have room."""
        return num_pages if self._io.room > 0 else 0

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Nothing was taken."""

    def start(self, intent: Intent) -> None:
        """Do nothing: clearing cannot be undone, so it begins once every rank has agreed."""

    def commit(self, intent: Intent) -> None:
        """Every rank clears."""

        def ended(_: int) -> None:
            self._tiers.manager.mark_ended(intent)

        if not self._io.clear(ended):
            ended(0)

    def abort(self, intent: Intent) -> None:
        """Some rank's workers were busy: nothing was cleared."""
        self._tiers.manager.mark_ended(intent)

    def ended(self, intent: Intent) -> None:
        """All ranks have done it, or it was given up."""
        self._intent = None
        if intent.is_committed:
            self._tiers.manager.ledger.refund(STORAGE, 1)
            self._events.cleared(STORAGE)
        self._on_end()

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        if self._intent is not None:
            self._intent = None
            self._on_end()


def _nothing() -> None:
    return
