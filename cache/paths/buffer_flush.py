"""Buffer-only mode: the host is staging, never a cache. One merged copy per flush.

Nodes queue without pins. A flush stages every admitted node (host staging pages, a device pin; no
device page is allocated or freed), submits all of them as one copy, and is one intent in the
ballot. Where staging runs out, on any rank, the node at that place and all behind it stay in line
in their order, and the earlier ones go. The agreed end of the copy releases the device pins; the
staging pages go on to the storage write of each node and come back with *its* agreed end.

    add -> stage, copy -> vote -> ended on all: device unpinned -> storage write -> staging free
"""

from __future__ import annotations

from collections import deque
from functools import partial

from kvpact.cache.copies.mover import Direction
from kvpact.cache.paths.backup import Backup, queued_path
from kvpact.cache.paths.insert_voted import Insertion
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.storing.tier import StorageTier
from kvpact.cache.tree.node import Carriage, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

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
        self._deferred: dict[int, list[Node]] = {}  # by the serial of the intent
        self._staged: dict[int, list[int]] = {}  # storage writes' own staging pages
        self._num_written = 0
        self._newest: Intent | None = None  # of the runs that were opened

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
            self._tiers.tree.mark_queued(node, True)
            self._queue.append(node)

    @property
    def num_queued(self) -> int:
        """Nodes that wait for a flush."""
        return len(self._queue)

    def plan(self) -> None:
        """Open intents for what waits, in order, as far as staging goes.

        One intent carries a whole run of nodes and is elastic: the verdict is how many of them,
        from the first on, every rank could stage. Each run has the one before it as its parent: so
        the first node that is refused anywhere keeps all behind it in line, on every rank.
        """
        self.flush()
        self.num_deferred += sum(1 for node in self._queue if node.is_queued)

    def flush(self) -> None:
        """Open what staging has room for; the line behind it waits on."""
        if not self._storage.is_attached:
            self._forget_queue()
        previous = self._newest
        if previous is not None and (not previous.is_undecided or previous.posted_step >= 0):
            previous = None  # its ballot is on the way: what comes now rides another one
        while run := self._take_run():
            intent = self._open(run, previous)
            if intent is None:
                self._put_back(run)
                break
            previous = self._newest = intent

    def waiting_nodes(self) -> list[Node]:
        """Nodes that wait in the queue, in no order, for the audit."""
        found = {node.node_id: node for queued in self._queue for node in queued_path(queued)}
        return list(found.values())

    def _take_run(self) -> list[Node]:
        """Take from the head of the line what fits and one verdict can be about.

        A node whose insert is undecided comes alone: if that is refused, it is for this node only.
        """
        run: list[Node] = []
        if not self._queue:
            return run
        left = self._tiers.manager.room(Tier.HOST.value)
        while self._queue:
            for node in queued_path(self._queue[0]):
                if not node.is_alive or not self._insertion.is_readable(node):
                    self._leave_line(node, "lost")
                    continue
                if self._is_too_large(node):
                    self._leave_line(node, "no_room")
                    continue
                is_alone = node.device.state is Residency.RESERVED
                if node.num_pages > left or (run and is_alone):
                    return run
                self._leave_line(node, "planned")
                run.append(node)
                left -= node.num_pages
                if is_alone:
                    return run
            self._queue.popleft()
        return run

    def _put_back(self, nodes: list[Node]) -> None:
        """To the head of the line, in their order; what came last has no place any more."""
        for node in reversed(nodes):
            if node.is_alive and not node.is_queued:
                self._tiers.tree.mark_queued(node, True)
                self._queue.appendleft(node)
        while len(self._queue) > self._queue_nodes_max:
            self.num_dropped += 1
            self._forget(self._queue.pop())

    def _forget_queue(self) -> None:
        """Storage is off, or about to be: nothing new is written."""
        while self._queue:
            self._forget(self._queue.pop())

    def _forget(self, node: Node) -> None:
        for above in queued_path(node):
            self._leave_line(above, "dropped")

    def _is_too_large(self, node: Node) -> bool:
        """Drop a node that could never be staged, or follows one that was dropped: do not block."""
        above = node.parent
        is_orphan = above is not None and above.is_dropped
        if not is_orphan and node.num_pages <= self._tiers.manager.ledger.usable(Tier.HOST.value):
            return False
        node.is_dropped = True
        self.num_no_room += 1
        self._tiers.manager.note("no room", Tier.HOST.value, node.node_id)
        return True

    def _open(self, run: list[Node], previous: Intent | None) -> Intent | None:
        tiers = self._tiers
        parents = [previous] if previous is not None else []
        insert = run[0].device.carriage
        if run[0].device.state is Residency.RESERVED and insert is not None and insert.intent:
            parents.append(insert.intent)
        carriage = Carriage(Tier.HOST, run, None)
        intent = tiers.manager.open(
            self.kind,
            run[0].node_id,
            {Tier.HOST.value: carriage.num_pages},
            self,
            minimum=run[0].num_pages,
            parents=parents,
        )
        if intent is None:
            return None
        if len(run) > 1:
            tiers.manager.note("flush", intent.serial, *[node.node_id for node in run])
        carriage.intent = intent
        carriage.follow()
        self._carriages[intent.serial] = carriage
        for node in run:
            tiers.tree.pin(node, Tier.DEVICE)
        return intent

    def _is_staged(self, node: Node) -> bool:
        return any(carriage.tier is Tier.HOST for carriage in node.carriages)

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """Staging for whole nodes, from the first on, as far as it goes."""
        carriage = self._carriages[intent.serial]
        staging = self._tiers.pools[Tier.HOST]
        for node in carriage.nodes[: max(0, self._tiers.copier.room)]:
            pages = staging.reserve(node.num_pages)
            if pages is None:
                break
            carriage.pages += pages
        return len(carriage.pages)

    def start(self, intent: Intent) -> None:
        """Put a part per node into the merged copy of this step."""
        carriage = self._carriages[intent.serial]
        staged = carriage.first(len(carriage.pages))
        source, inserts = self._insertion.sources(staged)
        pairs: list[tuple[list[int], list[int]]] = []
        start = 0
        for node in staged:
            end = start + node.num_pages
            pairs.append((source[start:end], carriage.pages[start:end]))
            start = end
        carriage.expect_parts([node.num_pages for node in staged])
        on_end = partial(self._part_ended, carriage, inserts)
        self._tiers.copier.add(Direction.TO_HOST, pairs, on_end)

    def _part_ended(
        self, carriage: Carriage, inserts: list[Carriage], index: int, ok: bool
    ) -> None:
        good = carriage.part_ended(index, ok)
        if good is None or carriage.intent is None:
            return
        for insert in inserts:
            self._insertion.reader_ended(insert)
        self._tiers.manager.mark_ended(carriage.intent, good)

    def commit(self, intent: Intent) -> None:
        """Staged on every rank. Nothing is published on HOST: this is no cache."""
        carriage = self._carriages[intent.serial]
        agreed = carriage.first(intent.agreed)
        self.num_commits += len(agreed)
        self._defer(intent, carriage.nodes[len(agreed) :])

    def abort(self, intent: Intent) -> None:
        """Some rank had no staging for it, or for one before it: it keeps its place in line."""
        nodes = self._carriages[intent.serial].nodes
        alive = [node for node in nodes if node.is_alive]
        self.num_aborts += len(nodes) - len(alive)
        self._defer(intent, alive)

    def _defer(self, intent: Intent, nodes: list[Node]) -> None:
        self.num_deferred += len(nodes)
        self._deferred.setdefault(intent.serial, [])[:0] = nodes

    def settled(self) -> None:
        """A ballot was settled: what it deferred goes back to the head of the line, in order."""
        for serial in sorted(self._deferred, reverse=True):
            self._put_back(self._deferred[serial])
        self._deferred.clear()

    def ended(self, intent: Intent) -> None:
        """The copy has ended on all ranks: unpin the device, hand the staging to the writes.

        A node whose copy failed is not stored; those behind it are copied again. Of a copy that
        hung nobody knows: the next insert proposes its nodes again.
        """
        carriage = self._carriages.pop(intent.serial)
        for node in carriage.nodes:
            self._tiers.tree.unpin(node, Tier.DEVICE)
        carriage.unfollow()
        kept = intent.result if intent.state is State.DONE else 0
        agreed = carriage.first(intent.agreed)
        arrived = carriage.first(kept)
        if carriage.is_void:
            self._tiers.manager.ledger.refund(Tier.HOST.value, kept)
            kept, arrived = 0, []
            self._defer(intent, agreed)  # those that lost their source are not readable
        elif intent.state is not State.QUARANTINED:
            self._defer(intent, agreed[len(arrived) + 1 :])
        self._tiers.pools[Tier.HOST].free(carriage.pages[kept:])
        start = 0
        for node in arrived:
            self._hand_over(node, carriage.pages[start : start + node.num_pages])
            start += node.num_pages

    def _hand_over(self, node: Node, pages: list[int]) -> None:
        """The staging ``pages`` are those of the storage write of ``node`` from now on."""
        self._num_written += 1
        number = self._num_written
        node.is_stored = True

        def released(nodes: list[Node], stored: int) -> None:
            del self._staged[number]
            for node in nodes:
                stored -= node.num_pages
                node.is_stored = stored >= 0  # else the next insert proposes it again
            self._tiers.free(Tier.HOST, pages)

        self._staged[number] = pages
        self._storage.storing.add([node], pages, released)

    def held_pages(self, tier: Tier) -> list[int]:
        """Staging pages of this rank: of copies, and of storage writes."""
        return super().held_pages(tier) + (self._written_pages() if tier is Tier.HOST else [])

    def charged_pages(self, tier: Tier) -> int:
        """Staging pages that storage writes own: charged, though no intent holds them."""
        return len(self._written_pages()) if tier is Tier.HOST else 0

    def _written_pages(self) -> list[int]:
        return [page for pages in self._staged.values() for page in pages]

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or queued any more."""
        super().clear()
        while self._queue:
            for node in queued_path(self._queue.popleft()):
                self._leave_line(node, "lost")
        self._deferred.clear()
        self._staged.clear()
        self._newest = None
        self._num_written = 0
