"""Write-through: queued at insert, backed up in one merged copy per step.

``add`` is all that the request-finish path pays. In the step, ``plan`` turns the queue into
intents: duplicates and dead nodes dropped, halves of split nodes found again, ancestors first, room
made from agreed state. Each node is one intent, all of them share one copy and one ballot.

    add -> plan -> reserve, copy starts -> vote -> COMMIT: published on HOST, pins held
        -> ended here -> ended on all ranks -> unpinned
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvpact.cache.paths.backup import Backup, queued_path
from kvpact.cache.paths.insert_voted import Insertion
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.residency.withdrawal import Withdrawal
from kvpact.cache.tree.node import Carriage, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

__all__ = ["WriteThrough"]


class WriteThrough(Backup):
    """Participant for backups from DEVICE to HOST."""

    kind = "back_up"

    def __init__(
        self,
        tiers: Tiers,
        insertion: Insertion,
        withdrawal: Withdrawal,
        *,
        queue_nodes_max: int,
        hits_needed: int = 1,
        on_backed_up: Callable[[list[Node]], None] | None = None,
    ) -> None:
        super().__init__(tiers, insertion, on_backed_up)
        self._hits_needed = hits_needed
        self._withdrawal = withdrawal
        self._queue: deque[Node] = deque()
        self._queue_nodes_max = queue_nodes_max

    # -- the queue -------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Queue one node: it is the last to be evicted, but not pinned. Constant time."""
        if node.is_queued:
            return
        if len(self._queue) >= self._queue_nodes_max:
            self.num_dropped += 1
            return
        self._tiers.tree.mark_queued(node, True)
        self._queue.append(node)

    def add_path(self, path: list[Node]) -> None:
        """Queue what of ``path`` has no backup and none under way; nothing without a host tier."""
        if not self._tiers.manager.ledger.usable(Tier.HOST.value):
            return
        for node in path:
            if not node.host.state and node.hits >= self._hits_needed:
                self.add(node)

    @property
    def num_queued(self) -> int:
        """Nodes that wait for a step."""
        return len(self._queue)

    def plan(self) -> None:
        """Open an intent for each queued node that can be backed up, ancestors first.

        What finds no slot stays in line, and all behind it.
        """
        while self._queue:
            for node in queued_path(self._queue[0]):
                fate = self._plan(node)
                if not fate:
                    return
                self._leave_line(node, fate)
            self._queue.popleft()

    def flush(self) -> None:
        """Plan what is queued now."""
        self.plan()

    def _plan(self, node: Node) -> str:
        """Open its intent, or say why there will be none; empty: there is no slot."""
        if not node.is_alive or not self._insertion.is_readable(node):
            return "lost"
        if node.host.state:
            return "there"
        parents: list[Intent] = []
        above = node.parent
        if above is not None and above.parent is not None:
            if not above.host.state:
                return "orphaned"
            if above.host.state is Residency.RESERVED and above.host.carriage is not None:
                parents.append(_intent(above.host.carriage))
        if node.device.state is Residency.RESERVED and node.device.carriage is not None:
            parents.append(_intent(node.device.carriage))
        return self._open(node, parents)

    def _open(self, node: Node, parents: list[Intent]) -> str:
        tiers = self._tiers
        anchor = node.parent
        tiers.tree.pin_path(anchor, Tier.HOST)
        carriage = Carriage(Tier.HOST, [node], anchor)
        carriage.side_wanted = tiers.side.wanted([node], Tier.DEVICE)
        side = tiers.side.need(carriage)
        intent: Intent | None = None
        has_room = tiers.make_room(Tier.HOST, node.num_pages, side)
        if has_room:
            need = {Tier.HOST.value: node.num_pages, **side}
            intent = tiers.manager.open(self.kind, node.node_id, need, self, parents=parents)
        if intent is None:
            tiers.tree.unpin_path(anchor, Tier.HOST)
            if has_room:
                return ""
            self.num_no_room += 1
            tiers.manager.note("no room", Tier.HOST.value, node.node_id)
            return "no_room"
        self._carry(intent, carriage)
        return "planned"

    def waiting_nodes(self) -> list[Node]:
        """Nodes that wait in the queue, in no order, for the audit."""
        found = {node.node_id: node for queued in self._queue for node in queued_path(queued)}
        return list(found.values())

    # -- participant -----------------------------------------------------------------------------

    def abort(self, intent: Intent) -> None:
        """No rank believes that the nodes are backed up; they may be in no tier any more."""
        super().abort(intent)
        self._tiers.hollow(self._carriages[intent.serial].nodes)

    def ended(self, intent: Intent) -> None:
        """Unpin. What failed or was given up is unpublished, and what lies below it too."""
        carriage = self._carriages.pop(intent.serial)
        tiers = self._tiers
        if intent.state in (State.FAILED, State.QUARANTINED):
            for node in carriage.nodes:
                self._withdrawal.retract_host(node)
        tiers.tree.unpin_path(carriage.anchor, Tier.HOST)
        self._detach(carriage, has_arrived=intent.state is State.DONE)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or queued any more."""
        super().clear()
        while self._queue:
            for node in queued_path(self._queue.popleft()):
                self._leave_line(node, "lost")


def _intent(carriage: Carriage) -> Intent:
    assert carriage.intent is not None
    return carriage.intent
