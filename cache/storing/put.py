"""From HOST to STORAGE: each node that is backed up is written out, its pages pinned meanwhile.

One intent per node. It holds no pages of a pool, but a place in the storage's queue, which is a
pool of the ballot like any other: when storage is slow, everybody's queue is full together.

    add -> plan -> vote -> written -> acknowledged by all ranks: so many leading pages are stored
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.events import EventLog
from kvpact.cache.tree.node import STORAGE, Carriage, Node, Tier
from kvpact.consensus.core.participant import Intent

__all__ = ["STORAGE", "Storing"]

Released = Callable[[list[Node], int], None]


class Storing:
    """Participant for storage writes.

    ``plan`` opens nothing while storage is detached; what waits then is let go.
    """

    kind = "store"

    def __init__(
        self, tiers: Tiers, io: StorageIo, events: EventLog, *, queue_nodes_max: int
    ) -> None:
        self._tiers = tiers
        self._io = io
        self._events = events
        self._queue: deque[tuple[Carriage, Released]] = deque()
        self._queue_nodes_max = queue_nodes_max
        self._open: dict[int, tuple[Carriage, Released]] = {}
        self.num_stored = 0  # pages, agreed
        self.num_failed = 0
        self.num_dropped = 0

    def add(self, nodes: list[Node], pages: list[int], released: Released) -> None:
        """Queue ``nodes``, whose bytes are in host ``pages``; ``released`` is called at the end,
        with the nodes as they are then (one that was split counts as both its parts) and how many
        of their leading pages are stored.

        The caller keeps the pages pinned until then.
        """
        carriage = Carriage(Tier.HOST, list(nodes), None)
        carriage.pages = list(pages)
        carriage.follow()
        if len(self._queue) >= self._queue_nodes_max:
            self.num_dropped += 1
            self._let_go(carriage, released)
            return
        self._queue.append((carriage, released))

    @property
    def num_queued(self) -> int:
        """Writes that wait for a place."""
        return len(self._queue)

    @property
    def is_busy(self) -> bool:
        """Something is queued or open."""
        return bool(self._queue or self._open)

    def plan(self) -> None:
        """Open what finds a slot and a place, in the order of queueing.

        What was computed on top of a load that has not ended stays in line, others pass it: if the
        load fails it is void, and what is in storage cannot be taken back.
        """
        unsure: deque[tuple[Carriage, Released]] = deque()
        while self._queue:
            if not self._queue[0][0].is_void and _may_be_void(self._queue[0][0]):
                unsure.append(self._queue.popleft())
            elif not self._plan(*self._queue[0]):
                break
            else:
                self._queue.popleft()
        self._queue.extendleft(reversed(unsure))

    def _plan(self, carriage: Carriage, released: Released) -> bool:
        """Open its write, or let it go; False: it has to wait."""
        manager = self._tiers.manager
        num_pages = carriage.num_pages
        if carriage.is_void or num_pages > manager.ledger.usable(STORAGE):
            self._drop(carriage, released)
            return True
        if manager.room(STORAGE) < num_pages:
            return False
        intent = manager.open(
            self.kind, carriage.nodes[-1].node_id, {STORAGE: num_pages}, self, minimum=1
        )
        if intent is None:
            return False
        carriage.intent = intent
        self._open[intent.serial] = (carriage, released)
        return True

    def drop_queue(self) -> None:
        """Storage is off: what waits is not stored."""
        while self._queue:
            self._drop(*self._queue.popleft())

    def _drop(self, carriage: Carriage, released: Released) -> None:
        self.num_dropped += 1
        self._tiers.manager.note("not stored", carriage.nodes[-1].node_id)
        self._let_go(carriage, released)

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """All of it, where the workers have room."""
        return num_pages if self._io.room > 0 else 0

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Nothing was taken."""

    def start(self, intent: Intent) -> None:
        """Hand the pages to the workers."""
        carriage, _ = self._open[intent.serial]
        keys = [key for node in carriage.nodes for key in self._io.keys_of(node)]

        def on_end(leading: int) -> None:
            self._tiers.manager.mark_ended(intent, leading)

        if not self._io.put(keys, carriage.pages, on_end):
            on_end(0)

    def commit(self, intent: Intent) -> None:
        """Do nothing: what is stored is known at the end."""

    def abort(self, intent: Intent) -> None:
        """Some rank's workers were busy: not stored, anywhere."""
        self.num_failed += 1

    def ended(self, intent: Intent) -> None:
        """So many leading pages are stored on every rank; the host pages are let go."""
        carriage, released = self._open.pop(intent.serial)
        stored = intent.result if intent.is_committed else 0
        if stored:
            # The place in the queue is free again; what is stored takes none.
            self._tiers.manager.ledger.refund(STORAGE, stored)
            self.num_stored += stored
            left = stored
            for node in carriage.nodes:
                if left > 0:
                    self._events.stored(node, STORAGE, min(left, node.num_pages))
                left -= node.num_pages
        self._let_go(carriage, released, stored)

    def _let_go(self, carriage: Carriage, released: Released, stored: int = 0) -> None:
        carriage.unfollow()
        released(carriage.nodes, stored)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or queued any more."""
        self._queue.clear()
        self._open.clear()


def _may_be_void(carriage: Carriage) -> bool:
    """Some load that its nodes were computed on has not ended: agreed."""
    loads = [load for node in carriage.nodes for load in node.built_on]
    return any(load.intent is not None and load.intent.is_open for load in loads)
