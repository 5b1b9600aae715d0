"""Load-back: what is on HOST but not on DEVICE comes back, the same length on all ranks.

A ticket is asked for at ingest or admission and decided by ``step``; nobody communicates in
between. The intent is elastic: the verdict is the least that any rank could reserve.

    propose -> reserve device pages, copy starts -> vote -> agreed length -> published on DEVICE
            -> ended on all ranks -> unpinned
"""

from __future__ import annotations

from functools import partial
from itertools import takewhile

from kvpact.cache.copies.mover import Direction
from kvpact.cache.requests.table import Request, RequestTable
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.residency.withdrawal import Withdrawal
from kvpact.cache.tree.node import Carriage, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

__all__ = ["LoadBack"]


class LoadBack(Path):
    """Participant for loads from HOST to DEVICE. ``minimum_pages``: shorter ones are recomputed."""

    kind = "load_back"

    def __init__(
        self,
        tiers: Tiers,
        requests: RequestTable,
        withdrawal: Withdrawal,
        *,
        minimum_pages: int,
        waiting_max: int,
    ) -> None:
        self._tiers = tiers
        self._requests = requests
        self._withdrawal = withdrawal
        self._minimum_pages = minimum_pages
        self._waiting_max = waiting_max
        self._carriages: dict[int, Carriage] = {}
        self._waiting: list[tuple[Ticket, int]] = []
        self._tickets: list[Ticket] = []
        self.num_commits = 0
        self.num_aborts = 0
        self.num_failed = 0  # committed, yet some of it did not arrive on some rank
        self.num_no_room = 0

    # -- the call --------------------------------------------------------------------------------

    def request(self, request: Request, path: list[Node], pages_max: int | None) -> Ticket:
        """Propose to load what of ``path`` is on HOST only, ``pages_max`` pages at the most.

        The request pins what is on DEVICE already; after the verdict also what came.
        """
        device = self._on_device(path)
        ticket = Ticket(request, path[-1] if path else None, self._count(device))
        self.hold(request, path)
        wanted = self._wanted(path)
        if not wanted and not any(node.device.state is Residency.RESERVED for node in path):
            ticket.refuse("nothing to load")
            return ticket
        limit = self._count(wanted)
        self._open(ticket, limit if pages_max is None else min(limit, pages_max))
        if ticket.state is TicketState.PENDING:
            self._tickets.append(ticket)
        return ticket

    def hold(self, request: Request, path: list[Node]) -> None:
        """``request`` pins what of ``path`` it can use on the device, and nothing else any more."""
        device = self._on_device(path)
        self._requests.hold(request, device[-1] if device else None)

    def survey(self, path: list[Node]) -> tuple[list[Node], list[Node]]:
        """Split ``path``: what others may bring, undecided, and what is still to be loaded."""
        coming = [node for node in path if node.device.state is Residency.RESERVED]
        wanted = self._wanted(path)
        return coming, wanted if self._count(wanted) >= self._minimum_pages else []

    def open_whole(self, request: Request, path: list[Node]) -> tuple[Ticket | None, Intent | None]:
        """Open a load of all that :meth:`survey` found, all or nothing, for the admission.

        It never waits: the ticket is ``None`` where nothing comes, the intent where others bring
        what comes. The request pins what is on DEVICE already; after the verdict also what came.
        """
        self.hold(request, path)
        ticket = Ticket(request, path[-1], self._count(self._on_device(path)))
        joined = self._joined(path)
        _, wanted = self.survey(path)
        intent = None
        if wanted:
            num_pages = self._count(wanted)
            intent, _ = self._propose(ticket, joined, wanted, num_pages, minimum=num_pages)
        if intent is None:
            ticket.carriages = joined
        if not ticket.carriages:
            return None, None
        self._tickets.append(ticket)
        return ticket, intent

    def plan(self) -> None:
        """Open what found no slot before, in the order of asking."""
        waiting, self._waiting = self._waiting, []
        for ticket, num_pages in waiting:
            if ticket.state is TicketState.PENDING:
                self._open(ticket, min(num_pages, self._count(self._wanted(ticket.path))))

    def cancel(self, request: Request, why: str = "the request was aborted") -> None:
        """The request waits no longer: what is undecided of its loads alone is withdrawn."""
        if not self._tickets:
            return
        mine: list[Carriage] = []
        for ticket in self._tickets:
            if ticket.request is request and ticket.state is TicketState.PENDING:
                ticket.refuse(why)
                mine += [carriage for carriage in ticket.carriages if carriage not in mine]
        self._tickets = [t for t in self._tickets if t.state is TicketState.PENDING]
        wanted = [carriage for ticket in self._tickets for carriage in ticket.carriages]
        for carriage in mine:
            intent = carriage.intent
            # What it waited for may also be the insert of another request: that is not its to end.
            is_ours = intent is not None and intent.kind == self.kind and carriage not in wanted
            if intent is not None and is_ours and intent.is_undecided:
                self._tiers.manager.withdraw(intent)

    def settled(self) -> None:
        """A step was settled: tell the tickets whose loads are all decided."""
        pending: list[Ticket] = []
        for ticket in self._tickets:
            if ticket.state is not TicketState.PENDING:
                continue
            if not ticket.carriages or any(_undecided(c) for c in ticket.carriages):
                pending.append(ticket)
                continue
            device = self._on_device(ticket.path)
            ticket.num_pages = self._count(device) - ticket.present_pages
            if ticket.num_pages > 0:
                ticket.grant()
                ticket.request.host_hit_pages = ticket.num_pages
                self._requests.hold(ticket.request, device[-1])
            else:
                ticket.num_pages = 0
                ticket.refuse("no rank loads it: some rank had no device pages")
        self._tickets = pending

    def is_asked(self, request: Request) -> bool:
        """Whether a load that ``request`` asked for is undecided: agreed."""
        return any(ticket.request is request for ticket in self._tickets)

    @property
    def num_waiting(self) -> int:
        """Tickets that wait for a slot."""
        return len(self._waiting)

    @property
    def is_pending(self) -> bool:
        """Some ticket waits for a slot."""
        return bool(self._waiting)

    def waits(self) -> dict[str, str]:
        """Name the waiting, and what each waits for: agreed."""
        return {
            f"load-back of request {ticket.request.name}": "no slot or no room is free"
            for ticket, _ in self._waiting
        }

    def _on_device(self, path: list[Node]) -> list[Node]:
        """The leading nodes that can be used on the device as they are."""
        device = list(takewhile(lambda node: node.device.is_published, path))
        side = self._tiers.side
        return device[: side.usable_end(device, [Tier.DEVICE])] if side else device

    def _wanted(self, path: list[Node]) -> list[Node]:
        """The run of nodes after what is on DEVICE, or on its way there, that HOST has."""
        wanted: list[Node] = []
        for node in path:
            if node.device.state is not Residency.ABSENT:
                continue
            if not node.host.is_published:
                break
            wanted.append(node)
        return wanted

    def _count(self, nodes: list[Node]) -> int:
        return sum(node.num_pages for node in nodes)

    def _open(self, ticket: Ticket, num_pages: int) -> None:
        """Join loads that are under way for the same path, and open one for the rest."""
        ticket.carriages = joined = self._joined(ticket.path)
        wanted = self._wanted(ticket.path)
        if not wanted or num_pages < 1:
            _do_without(ticket, "nothing to load")
            return
        if num_pages < self._minimum_pages:
            _do_without(ticket, "too short: recomputing is cheaper")
            return
        minimum = self._minimum_pages
        intent, may_wait = self._propose(ticket, joined, wanted, num_pages, minimum=minimum)
        if intent is None:
            self._wait_or_refuse(ticket, wanted[0], num_pages, is_coming=may_wait)

    def _joined(self, path: list[Node]) -> list[Carriage]:
        """Return the undecided carriages on ``path``, in its order."""
        joined: list[Carriage] = []
        for node in path:
            carriage = node.device.carriage
            if carriage is not None and _undecided(carriage) and carriage not in joined:
                joined.append(carriage)
        return joined

    def _propose(
        self,
        ticket: Ticket,
        joined: list[Carriage],
        wanted: list[Node],
        num_pages: int,
        *,
        minimum: int,
    ) -> tuple[Intent | None, bool]:
        """Open an intent for the first ``num_pages`` of ``wanted``, or as many as there is room.

        Where there is none, whether it is worth waiting for.
        """
        tiers = self._tiers
        anchor: Node | None = None
        for node in ticket.path:
            if not node.device.is_published:
                break
            anchor = node
        # Nobody's room is made out of what this load builds on or reads.
        tiers.tree.pin_path(anchor, Tier.DEVICE)
        for node in wanted:
            tiers.tree.pin(node, Tier.HOST)
        num_pages = self._usable(ticket.path, wanted, min(num_pages, tiers.room(Tier.DEVICE)))
        intent: Intent | None = None
        taken = self._cut(wanted, num_pages)
        pinned = [*wanted, *(node for node in taken if node not in wanted)]  # a cut pins both parts
        carriage = Carriage(Tier.DEVICE, taken, anchor)
        carriage.side_wanted = tiers.side.wanted(taken, Tier.HOST)
        side = tiers.side.need(carriage)
        is_enough = num_pages >= minimum
        has_room = is_enough and tiers.make_room(Tier.DEVICE, num_pages, side)
        if has_room:
            intent = tiers.manager.open(
                self.kind,
                wanted[0].node_id,
                {Tier.DEVICE.value: num_pages, **side},
                self,
                minimum=None if side else minimum,
                parents=[one.intent for one in joined if one.intent is not None],
            )
        if intent is None:
            tiers.tree.unpin_path(anchor, Tier.DEVICE)
            for node in pinned:
                tiers.tree.unpin(node, Tier.HOST)
            is_coming = has_room or (num_pages > 0 and tiers.is_coming(Tier.DEVICE, num_pages))
            return None, is_coming
        for node in pinned:
            if node not in taken:
                tiers.tree.unpin(node, Tier.HOST)
        self._carry(intent, carriage)
        ticket.carriages = [*joined, carriage]
        return intent, False

    def _wait_or_refuse(
        self, ticket: Ticket, first: Node, num_pages: int, *, is_coming: bool
    ) -> None:
        if is_coming and len(self._waiting) < self._waiting_max:
            self._waiting.append((ticket, num_pages))
            return
        self.num_no_room += 1
        self._tiers.manager.note("no room", Tier.DEVICE.value, first.node_id)
        _do_without(ticket, "no device pages can be had")

    def _usable(self, path: list[Node], wanted: list[Node], num_pages: int) -> int:
        """The most of ``num_pages`` of ``wanted`` after which all that a prefix needs is there.

        Beside side pools whole nodes are loaded: a part of one may lack the state at its end.
        """
        side = self._tiers.side
        if not side or num_pages >= self._count(wanted):
            return num_pages
        left, reached = num_pages, list[Node]()
        for node in path:
            left -= node.num_pages if node in wanted else 0
            if left < 0:
                break
            reached.append(node)
        reached = reached[: side.usable_end(reached, list(Tier))]
        return self._count([node for node in reached if node in wanted])

    def _carry(self, intent: Intent, carriage: Carriage) -> None:
        tiers = self._tiers
        carriage.intent = intent
        self._carriages[intent.serial] = carriage
        carriage.attach()
        for node in carriage.nodes:
            tiers.tree.place(node, Tier.DEVICE, Residency.RESERVED)
            tiers.tree.pin(node, Tier.DEVICE)

    def _cut(self, nodes: list[Node], num_pages: int) -> list[Node]:
        """The first ``num_pages`` pages of ``nodes`` as whole nodes, splitting one if need be."""
        taken: list[Node] = []
        left = num_pages
        for node in list(nodes):
            if left == 0:
                break
            if node.num_pages > left:
                taken.append(self._tiers.tree.split(node, left))
                break
            taken.append(node)
            left -= node.num_pages
        return taken

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """As many as there are."""
        carriage = self._carriages[intent.serial]
        if pool != Tier.DEVICE.value:
            return self._tiers.side.reserve(carriage, pool, num_pages)
        if self._tiers.copier.room < len(carriage.nodes):
            return 0
        if not all(node.host.is_published for node in carriage.nodes):
            return 0  # agreed: its backup failed after this was asked for
        carriage.pages = self._tiers.pools[Tier.DEVICE].reserve_up_to(num_pages)
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
        """Put its parts into the copy of this step: one part per node, as far as reserved."""
        carriage = self._carriages[intent.serial]
        position = 0
        parts: list[tuple[list[int], list[int]]] = []
        for node in carriage.nodes:
            target = carriage.pages[position : position + node.num_pages]
            position += node.num_pages
            if target:
                parts.append((list(node.host.pages[: len(target)]), target))
        carriage.expect_parts([len(target) for _, target in parts])
        side = self._tiers.side.copies(carriage.nodes, carriage, [])
        on_end = partial(self._part_ended, carriage)
        carriage.copy_tickets += self._tiers.copier.add(Direction.TO_DEVICE, parts, on_end, side)

    def _part_ended(self, carriage: Carriage, index: int, ok: bool) -> None:
        good = carriage.part_ended(index, ok)
        if good is None or carriage.intent is None:
            return
        if len(carriage.intent.need) > 1:  # over several pools it is all or nothing
            self._tiers.manager.mark_ended(
                carriage.intent, None if good == carriage.num_pages else 0
            )
        else:
            self._tiers.manager.mark_ended(carriage.intent, good)

    def commit(self, intent: Intent) -> None:
        """Publish the agreed length; what lies beyond it goes back to being on HOST only.

        What was proposed on top of that would leave a hole in the path, so it is withdrawn.
        """
        self.num_commits += 1
        carriage = self._carriages[intent.serial]
        agreed = self._cut(carriage.nodes, _kv_pages(intent, intent.agreed))
        for node in carriage.nodes:
            if node in agreed:
                pages = carriage.pages_of(node)
                self._tiers.side.publish(carriage, node)
                self._tiers.tree.place(node, Tier.DEVICE, Residency.COPYING, pages)
            else:
                self._tiers.tree.place(node, Tier.DEVICE, Residency.ABSENT)
                node.device.carriage = None
                self._tiers.hollow([node])
                self._withdrawal.nothing_builds_on(node, Tier.DEVICE)

    def abort(self, intent: Intent) -> None:
        """No rank loads it."""
        self.num_aborts += 1
        carriage = self._carriages[intent.serial]
        for node in carriage.nodes:
            self._tiers.tree.place(node, Tier.DEVICE, Residency.ABSENT)
        carriage.let_go()
        self._tiers.hollow(carriage.nodes)  # their copy on HOST may be gone meanwhile

    def ended(self, intent: Intent) -> None:
        """Unpin; what did not arrive everywhere is taken back, with its source on HOST."""
        carriage = self._carriages.pop(intent.serial)
        tiers = self._tiers
        good = _kv_pages(intent, intent.result) if intent.state is State.DONE else 0
        arrived = self._cut(carriage.nodes, good) if good else []
        failed = [n for n in carriage.nodes if n.device.carriage is carriage and n not in arrived]
        if failed:
            self.num_failed += 1
            self._withdrawal.retract_load(failed[0], carriage)
            given_up = intent.state is State.QUARANTINED
            self._withdrawal.retract_source(failed[0], is_read=given_up)
        tiers.tree.unpin_path(carriage.anchor, Tier.DEVICE)
        for node in carriage.detach():
            if node in arrived:
                tiers.tree.place(node, Tier.DEVICE, Residency.RESIDENT)
            tiers.tree.unpin(node, Tier.DEVICE)
            tiers.tree.unpin(node, Tier.HOST)
        tiers.pools[Tier.DEVICE].free(carriage.pages[good:])
        if not good:
            tiers.side.free_carriage(carriage)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open, and who waits need not wait."""
        for ticket in self._tickets:
            ticket.give_up("the epoch was closed")
        self._tickets.clear()
        self._waiting.clear()
        self._carriages.clear()

    def held(self) -> list[Carriage]:
        """Its open carriages, for the audit."""
        return list(self._carriages.values())

    def held_pages(self, tier: Tier) -> list[int]:
        """Device pages of this rank that open loads own."""
        if tier is not Tier.DEVICE:
            return []
        return [page for carriage in self._carriages.values() for page in carriage.pages]


def _do_without(ticket: Ticket, why: str) -> None:
    """Nothing is loaded for this ticket itself; others may bring something for its path."""
    if not ticket.carriages:
        ticket.refuse(why)


def _kv_pages(intent: Intent, num_pages: int) -> int:
    """The KV pages among ``num_pages`` of a verdict or result: over several pools it is whole."""
    return intent.need[Tier.DEVICE.value] if len(intent.need) > 1 and num_pages else num_pages


def _undecided(carriage: Carriage) -> bool:
    return carriage.intent is not None and carriage.intent.is_undecided
