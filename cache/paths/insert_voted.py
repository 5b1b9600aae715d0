"""Inserting tokens whose device pages ride the vote of the same step.

The nodes enter the tree at once, RESERVED: later inserts build on them, matches do not see them.
Their pages, and the backup of what they hold, are decided by the next ballot. Refused on one rank
is refused on all, and so is what builds on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Carriage, Fill, FillSide, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent

__all__ = ["Insertion", "Proposal", "open_loads"]


class Proposal(enum.Enum):
    """The fate of an insert at its call: agreed."""

    OPENED = "opened"  # the next ballot decides, or nothing had to be decided
    WAITS = "waits"  # its room is on its way, or no slot is free: ask again
    REFUSED = "refused"


class Insertion(Path):
    """Participant for the device pages of inserted nodes."""

    kind = "insert"

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._carriages: dict[int, Carriage] = {}
        self._unread: list[Carriage] = []
        self.num_refused = 0

    # -- the call --------------------------------------------------------------------------------

    def propose(
        self,
        path: list[Node],
        fill: Fill | None,
        on_refused: Callable[[], None],
        fill_side: FillSide | None = None,
    ) -> Proposal:
        """Ask for device pages for what of ``path`` has none.

        ``fill`` and ``fill_side`` are called once this rank holds the pages, before anything reads
        them. ``on_refused`` is called when the verdict is no; where other inserts bring all of the
        path, when theirs is.
        """
        missing = [node for node in path if node.device.state is Residency.ABSENT]
        if not missing:
            self._join(path, on_refused)
            return Proposal.OPENED
        tiers = self._tiers
        anchor: Node | None = None
        for node in path:
            if not node.device.is_published:
                break
            anchor = node
        tiers.tree.pin_path(anchor, Tier.DEVICE)
        carriage = Carriage(Tier.DEVICE, missing, anchor)
        carriage.side_wanted = tiers.side.wanted(missing, None)
        intent = self._open(path, carriage)
        if not isinstance(intent, Intent):
            tiers.tree.unpin_path(anchor, Tier.DEVICE)
            tiers.hollow(missing)
            tiers.prune()
            if intent is Proposal.REFUSED:
                self.refuse(path[-1].node_id)
            return intent
        carriage.intent = intent
        carriage.fill, carriage.fill_side = fill, fill_side
        carriage.on_refused.append(on_refused)
        self._carriages[intent.serial] = carriage
        built_on = open_loads(path)
        carriage.attach()
        for node in missing:
            tiers.tree.place(node, Tier.DEVICE, Residency.RESERVED)
            node.built_on = built_on
        return Proposal.OPENED

    def _join(self, path: list[Node], on_refused: Callable[[], None]) -> None:
        """The last undecided insert on ``path`` builds on those above: its verdict is theirs."""
        for node in reversed(path):
            carriage = node.device.carriage
            if node.device.state is Residency.RESERVED and carriage in self._carriages.values():
                assert carriage is not None
                carriage.on_refused.append(on_refused)
                return

    def _open(self, path: list[Node], wanted: Carriage) -> Intent | Proposal:
        parents: list[Intent] = []
        for node in path:
            carriage = node.device.carriage
            if carriage is None or carriage.intent is None:
                continue
            if carriage.intent.is_undecided and carriage.intent not in parents:
                parents.append(carriage.intent)
        num_pages = wanted.num_pages
        side = self._tiers.side.need(wanted)
        if any(parent.withdrawn for parent in parents):
            return Proposal.REFUSED
        if not self._tiers.make_room(Tier.DEVICE, num_pages, side):
            is_coming = self._tiers.is_coming(Tier.DEVICE, num_pages)
            return Proposal.WAITS if is_coming else Proposal.REFUSED
        opened = self._tiers.manager.open(
            self.kind,
            path[-1].node_id,
            {Tier.DEVICE.value: num_pages, **side},
            self,
            parents=parents,
            ends_on_commit=True,
        )
        return Proposal.WAITS if opened is None else opened

    def refuse(self, node_id: int) -> None:
        """Count and note a refusal: the same on every rank."""
        self.num_refused += 1
        self._tiers.manager.note("refused", node_id)

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """All or nothing."""
        carriage = self._carriages[intent.serial]
        if pool != Tier.DEVICE.value:
            return self._tiers.side.reserve(carriage, pool, num_pages)
        carriage.pages = self._tiers.pools[Tier.DEVICE].reserve(num_pages) or []
        return len(carriage.pages)

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Give the pages back; nothing has used them."""
        carriage = self._carriages[intent.serial]
        if pool != Tier.DEVICE.value:
            self._tiers.side.unreserve(carriage, pool)
            return
        self._tiers.pools[Tier.DEVICE].free(carriage.pages)
        carriage.pages = []

    def start(self, intent: Intent) -> None:
        """The engine computes into the pages; a backup may read them from now on."""
        carriage = self._carriages[intent.serial]
        if carriage.fill is not None:
            carriage.fill(carriage.nodes, carriage.pages)
        if carriage.fill_side is not None:
            carriage.fill_side(carriage.nodes, carriage.side)
        self._unread.append(carriage)

    def end_unread(self) -> None:
        """Reservations are over: what no copy of this rank reads has nothing left to end."""
        unread, self._unread = self._unread, []
        for carriage in unread:
            if carriage.num_copies == 0 and carriage.intent is not None:
                self._tiers.manager.mark_ended(carriage.intent)

    def is_readable(self, node: Node) -> bool:
        """A copy that starts now finds its bytes on the device: agreed. Not where they are still
        being loaded."""
        carriage = node.device.carriage
        if node.device.state is Residency.RESERVED and carriage is not None:
            return carriage.intent is not None and carriage.intent.kind == self.kind
        return node.device.state is Residency.RESIDENT

    def sources(self, nodes: list[Node]) -> tuple[list[int], list[Carriage]]:
        """Device pages of ``nodes`` for a copy to read, and the undecided inserts it reads.

        The caller says :meth:`reader_ended` of each of those at the end.
        """
        pages: list[int] = []
        inserts: list[Carriage] = []
        for node in nodes:
            insert = node.device.carriage
            if node.device.is_published:
                pages += node.device.pages
            elif insert is not None:
                pages += insert.pages_of(node)
                insert.num_copies += 1
                inserts.append(insert)
        return pages, inserts

    def reader_ended(self, carriage: Carriage) -> None:
        """A copy that read the pages of ``carriage`` has ended on this rank.

        Until the reservations of this ballot are over another one may come (:meth:`end_unread`).
        """
        carriage.num_copies -= 1
        if carriage in self._unread:
            return
        intent = carriage.intent
        if carriage.num_copies == 0 and intent is not None and not intent.local_ended:
            self._tiers.manager.mark_ended(intent)

    def commit(self, intent: Intent) -> None:
        """Publish the nodes."""
        carriage = self._carriages[intent.serial]
        for node in carriage.nodes:
            pages = carriage.pages_of(node)
            self._tiers.side.publish(carriage, node)
            self._tiers.tree.place(node, Tier.DEVICE, Residency.RESIDENT, pages)

    def abort(self, intent: Intent) -> None:
        """Nothing of it enters the tree; its pages wait for the copies that read them."""
        carriage = self._carriages[intent.serial]
        for node in carriage.nodes:
            self._tiers.tree.place(node, Tier.DEVICE, Residency.ABSENT)
        carriage.let_go()
        self._tiers.hollow(carriage.nodes)
        for on_refused in carriage.on_refused:
            self.refuse(carriage.nodes[-1].node_id)
            on_refused()

    def ended(self, intent: Intent) -> None:
        """Unpin; where it was refused, the pages are free."""
        carriage = self._carriages.pop(intent.serial)
        self._tiers.tree.unpin_path(carriage.anchor, Tier.DEVICE)
        nodes = carriage.detach()
        for node in nodes:
            self._tiers.tree.order[Tier.DEVICE].offer(node)
        if not intent.is_committed:
            self._tiers.pools[Tier.DEVICE].free(carriage.pages)
            self._tiers.side.free_carriage(carriage)
            self._tiers.hollow(nodes)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        self._carriages.clear()
        self._unread.clear()

    def held(self) -> list[Carriage]:
        """Its open carriages, for the audit."""
        return list(self._carriages.values())

    def held_pages(self, tier: Tier) -> list[int]:
        """Device pages of this rank that undecided or draining inserts own."""
        if tier is not Tier.DEVICE:
            return []
        return [page for carriage in self._carriages.values() for page in carriage.pages]


def open_loads(path: list[Node]) -> tuple[Carriage, ...]:
    """Return the loads still on their way to the device that ``path`` was computed on."""
    loads: list[Carriage] = []
    for node in path:
        carriage = node.device.carriage
        if node.device.state is not Residency.ABSENT and carriage and carriage not in loads:
            loads.append(carriage)
    return tuple(loads)
