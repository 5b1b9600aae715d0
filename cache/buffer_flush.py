"""Buffer-only mode: the host is staging, never a cache. One merged copy per flush.

Intents queue without pins. A flush stages every admitted intent (host staging pages, a device pin;
no device page is allocated or freed), submits all of them as one copy, and posts one ballot. Where
staging runs out, on any rank, the intent at that place and all behind it stay in line in their
order, and the earlier ones go. The agreed end of the copy releases the device pins; the staging
pages go on to the storage write and come back with *its* agreed end.

    add -> stage, copy -> vote -> ended on all: device unpinned -> storage write -> staging free
"""

from __future__ import annotations

from collections import deque

from cache.backup import Backup
from cache.insertion import Insertion
from cache.node import Carriage, Node, Residency, Tier
from cache.storage_tier import StorageTier
from cache.tiers import Tiers
from consensus.participant import Intent

__all__ = ["BufferFlush"]


class BufferFlush(Backup):
    """Participant for device pages on their way through staging to storage."""

    kind = "stage"

    def __init__(
        self,
        tiers: Tiers,
        insertion: Insertion,
        storage: StorageTier,
        *,
        queue_nodes_max: int,
    ) -> None:
        super().__init__(tiers, insertion)
        self._storage = storage
        self._queue: deque[Node] = deque()
        self._queue_nodes_max = queue_nodes_max
        self._deferred: list[Node] = []
        self._staged: dict[int, list[int]] = {}  # storage writes' own staging pages, by serial

    # -- the queue -------------------------------------------------------------------------------

    def add_path(self, path: list[Node]) -> None:
        """Queue what of ``path`` is neither stored nor on its way; nothing is pinned."""
        if not self._storage.is_attached:
            return
        for node in path:
            if node.is_queued or node.is_stored or self._is_staged(node):
                continue
            if len(self._queue) >= self._queue_nodes_max:
                self.num_dropped += 1
                return
            node.is_queued = True
            self._queue.append(node)

    @property
    def num_queued(self) -> int:
        """Nodes that wait for a flush."""
        return len(self._queue)

    def plan(self) -> None:
        """Open an intent for each queued node, in order, as far as staging goes.

        Each has the one before it as its parent: so the first that is refused anywhere keeps all
        behind it in line, on every rank.
        """
        if not self._storage.is_attached:
            self._forget_queue()
        previous: Intent | None = None
        while self._queue:
            # A split leaves the mark on both halves but only the lower one in the queue.
            chain: list[Node] = []
            node: Node | None = self._queue[0]
            while node is not None and node.is_queued:
                chain.append(node)
                node = node.parent
            for node in reversed(chain):
                is_there = node.is_alive and self._insertion.is_readable(node)
                if not is_there or self._is_too_large(node):
                    node.is_queued = False
                    continue
                intent = self._open(node, previous)
                if intent is None:
                    self.num_deferred += sum(1 for other in self._queue if other.is_queued)
                    return
                node.is_queued = False
                previous = intent
            self._queue.popleft()

    def _forget_queue(self) -> None:
        """Storage is off, or about to be: nothing new is written."""
        for node in self._queue:
            above: Node | None = node
            while above is not None and above.is_queued:
                above.is_queued = False
                above = above.parent
        self._queue.clear()

    def _is_too_large(self, node: Node) -> bool:
        """It could never be staged, or follows one that was dropped: drop it, do not block."""
        above = node.parent
        is_orphan = above is not None and above.is_dropped
        if not is_orphan and node.num_pages <= self._tiers.manager.ledger.usable(Tier.HOST.value):
            return False
        node.is_dropped = True
        self.num_no_room += 1
        self._tiers.manager.note("no room", Tier.HOST.value, node.node_id)
        return True

    def _open(self, node: Node, previous: Intent | None) -> Intent | None:
        tiers = self._tiers
        if tiers.manager.room(Tier.HOST.value) < node.num_pages:
            return None
        parents = [previous] if previous is not None else []
        if node.device.state is Residency.RESERVED and node.device.carriage is not None:
            inserted = node.device.carriage.intent
            if inserted is not None:
                parents.append(inserted)
        intent = tiers.manager.open(
            self.kind, node.node_id, {Tier.HOST.value: node.num_pages}, self, parents=parents
        )
        if intent is None:
            return None
        carriage = Carriage(Tier.HOST, [node], None)
        carriage.intent = intent
        carriage.follow()
        self._carriages[intent.serial] = carriage
        tiers.tree.pin(node, Tier.DEVICE)
        return intent

    def _is_staged(self, node: Node) -> bool:
        return any(carriage.tier is Tier.HOST for carriage in node.carriages)

    # -- participant -----------------------------------------------------------------------------

    def commit(self, intent: Intent) -> None:
        """Staged on every rank. Nothing is published on HOST: this is no cache."""
        self.num_commits += 1

    def abort(self, intent: Intent) -> None:
        """Some rank had no staging for it, or for one before it: it keeps its place in line."""
        carriage = self._carriages[intent.serial]
        if intent.cause == "withdrawn" or not all(node.is_alive for node in carriage.nodes):
            self.num_aborts += 1
            return
        self.num_deferred += 1
        self._deferred += carriage.nodes

    def requeue(self) -> None:
        """A ballot was settled: what it deferred goes back to the head of the line, in order."""
        for node in reversed(self._deferred):
            if node.is_alive and not node.is_queued:
                node.is_queued = True
                self._queue.appendleft(node)
        self._deferred.clear()

    def ended(self, intent: Intent) -> None:
        """The copy has ended on all ranks: unpin the device, hand the staging to the write."""
        carriage = self._carriages.pop(intent.serial)
        for node in carriage.nodes:
            self._tiers.tree.unpin(node, Tier.DEVICE)
        carriage.unfollow()
        if not intent.is_committed or carriage.is_void:
            if intent.is_committed:
                self._tiers.manager.ledger.refund(Tier.HOST.value, len(carriage.pages))
            self._tiers.pools[Tier.HOST].free(carriage.pages)
            return
        pages = carriage.pages
        for node in carriage.nodes:
            node.is_stored = True

        def released(nodes: list[Node], stored: int) -> None:
            del self._staged[intent.serial]
            for node in nodes:
                stored -= node.num_pages
                node.is_stored = stored >= 0  # else the next insert proposes it again
            self._tiers.free(Tier.HOST, pages)

        self._staged[intent.serial] = pages
        self._storage.storing.add(carriage.nodes, pages, released)

    def held_pages(self) -> list[int]:
        """Staging pages of this rank: of copies, and of storage writes."""
        return super().held_pages() + self.written_pages()

    def written_pages(self) -> list[int]:
        """Staging pages that storage writes own: charged, though no intent holds them."""
        return [page for pages in self._staged.values() for page in pages]

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or queued any more."""
        super().clear()
        self._queue.clear()
        self._deferred.clear()
        self._staged.clear()
