"""The common part of all ways from DEVICE to HOST: pages reserved, one part of a merged copy."""

from __future__ import annotations

from collections.abc import Callable

from kvpact.cache.copies.mover import Direction
from kvpact.cache.paths.insert_voted import Insertion
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Carriage, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent

__all__ = ["FATES", "Backup", "queued_path"]

#: What becomes of a node that was queued: an intent is opened for it, no room can be planned, it
#: left the device first, it is in the other tier already, what it hangs from is not, the queue had
#: no place for it any more.
FATES = ("planned", "no_room", "lost", "there", "orphaned", "dropped")


class Backup(Path):
    """The half of a participant that write-through, write-back and buffer flush share.

    ``on_backed_up`` hears of nodes whose bytes are on HOST on every rank.
    ``num_commits`` and ``num_aborts`` count verdicts, ``num_no_room`` what no room could be planned
    for, ``num_dropped`` what a full queue did not take, ``num_deferred`` intents x steps that kept
    their place in line. ``fates`` says what became of each node that was queued (:data:`FATES`):
    with those that still wait they are all that the tree has marked.
    """

    def __init__(
        self,
        tiers: Tiers,
        insertion: Insertion,
        on_backed_up: Callable[[list[Node]], None] | None = None,
    ) -> None:
        self._tiers = tiers
        self._on_backed_up = on_backed_up
        self._insertion = insertion
        self._carriages: dict[int, Carriage] = {}
        self.num_commits = 0
        self.num_aborts = 0
        self.num_no_room = 0
        self.num_dropped = 0
        self.num_deferred = 0
        self.fates: dict[str, int] = dict.fromkeys(FATES, 0)

    def _carry(self, intent: Intent, carriage: Carriage) -> None:
        """``intent`` brings the nodes to HOST; until it has ended they are pinned in both tiers."""
        tree = self._tiers.tree
        carriage.intent = intent
        self._carriages[intent.serial] = carriage
        carriage.attach()
        for node in carriage.nodes:
            tree.place(node, Tier.HOST, Residency.RESERVED)
            tree.pin(node, Tier.DEVICE)
            tree.pin(node, Tier.HOST)

    def _leave_line(self, node: Node, fate: str) -> None:
        """``node`` does not wait any more; ``fate`` is one of :data:`FATES`."""
        if node.is_queued:
            self._tiers.tree.mark_queued(node, False)
            self.fates[fate] += 1

    def waiting_nodes(self) -> list[Node]:
        """Nodes that wait in the queue, in no order, for the audit."""
        return []

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """All or nothing."""
        carriage = self._carriages[intent.serial]
        if pool != Tier.HOST.value:
            return self._tiers.side.reserve(carriage, pool, num_pages)
        if self._tiers.copier.room < 1:
            return 0
        carriage.pages = self._tiers.pools[Tier.HOST].reserve(num_pages) or []
        return len(carriage.pages)

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Give the pages back; nothing has used them."""
        carriage = self._carriages[intent.serial]
        if pool != Tier.HOST.value:
            self._tiers.side.unreserve(carriage, pool)
            return
        self._tiers.pools[Tier.HOST].free(carriage.pages)
        carriage.pages = []

    def start(self, intent: Intent) -> None:
        """Put its part into the merged copy of this step, so that the copy hides the vote."""
        carriage = self._carriages[intent.serial]
        source, inserts = self._insertion.sources(carriage.nodes)

        def on_end(_: int, ok: bool) -> None:
            for insert in inserts:
                self._insertion.reader_ended(insert)
            self._tiers.manager.mark_ended(intent, None if ok else 0)

        side = self._tiers.side.copies(carriage.nodes, carriage, inserts)
        self._tiers.copier.add(Direction.TO_HOST, [(source, carriage.pages)], on_end, side)

    def commit(self, intent: Intent) -> None:
        """The nodes are on HOST now; their bytes may still be on the way, so the pins stay."""
        self.num_commits += 1
        carriage = self._carriages[intent.serial]
        for node in carriage.nodes:
            pages = carriage.pages_of(node)
            self._tiers.side.publish(carriage, node)
            self._tiers.tree.place(node, Tier.HOST, Residency.COPYING, pages)

    def abort(self, intent: Intent) -> None:
        """No rank believes that the nodes are on HOST; a copy may still write there."""
        self.num_aborts += 1
        carriage = self._carriages[intent.serial]
        for node in carriage.nodes:
            self._tiers.tree.place(node, Tier.HOST, Residency.ABSENT)
        carriage.let_go()

    def _detach(self, carriage: Carriage, *, has_arrived: bool) -> list[Node]:
        """Unpin the nodes of an intent that is over: they are on HOST, or have nothing there."""
        tree = self._tiers.tree
        nodes = carriage.detach()
        for node in nodes:
            if has_arrived:
                tree.place(node, Tier.HOST, Residency.RESIDENT)
                if self._on_backed_up is not None:
                    self._on_backed_up([node])
            tree.unpin(node, Tier.DEVICE)
            tree.unpin(node, Tier.HOST)
        if not has_arrived:
            self._free(carriage)
        return nodes

    def _free(self, carriage: Carriage) -> None:
        """Free what was reserved for the intent: nothing of it is kept."""
        self._tiers.pools[Tier.HOST].free(carriage.pages)
        self._tiers.side.free_carriage(carriage)

    def flush(self) -> None:
        """Plan what is queued now, before the step: see ``HierarchicalCache.flush``."""

    def held(self) -> list[Carriage]:
        """Its open carriages, for the audit."""
        return list(self._carriages.values())

    @property
    def num_queued(self) -> int:
        """Nodes that wait for their backup: agreed."""
        return 0

    @property
    def is_pending(self) -> bool:
        """Some node waits for its backup."""
        return self.num_queued > 0

    def add_path(self, path: list[Node]) -> None:
        """``path`` was inserted or used again: queue what of it should leave the device."""

    def held_pages(self, tier: Tier) -> list[int]:
        """Host pages of this rank that open intents own."""
        if tier is not Tier.HOST:
            return []
        return [page for carriage in self._carriages.values() for page in carriage.pages]

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        self._carriages.clear()


def queued_path(node: Node) -> list[Node]:
    """``node`` and what is queued right above it, from above: a split leaves the mark on both
    halves but only the lower one in the queue."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.is_queued:
        path.append(at)
        at = at.parent
    path.reverse()
    return path
