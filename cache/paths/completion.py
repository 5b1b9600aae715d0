"""Present means complete: what a node in a tier lacks of side pools comes by a vote of its own.

A split leaves the front half without the state after its last token; pages that an engine computed
itself enter the tree without any. Such a node is there, but nothing can be served that ends in it.
When the engine has computed exactly that prefix, it has the state, too:

    insert -> add -> plan -> side pages reserved, filled -> vote -> complete on DEVICE
           -> plan -> side pages reserved on HOST, copy -> ended on all -> complete on HOST

Nothing is given to the nodes before the end, so a match never sees half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpact.cache.copies.mover import Direction
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Carriage, FillSide, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

__all__ = ["Completion", "HostCompletion", "SideOnly"]

Decided = Callable[[list[Node]], None]


class SideOnly(Path):
    """The half of a participant that both tiers share: only side pages, all or nothing."""

    kind = ""
    pinned: tuple[Tier, ...] = ()  # where its nodes are pinned until it has ended

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: dict[int, Carriage] = {}
        self.num_commits = 0
        self.num_refused = 0

    def _propose(self, carriage: Carriage, *, ends_on_commit: bool) -> Intent | None:
        """Open an intent for ``carriage``; ``None``: there is no room."""
        tiers, last = self._tiers, carriage.nodes[-1]
        for tier in self.pinned:
            tiers.tree.pin_path(last, tier)
        need = tiers.side.need(carriage)
        intent: Intent | None = None
        if tiers.make_room(carriage.tier, 0, need):
            intent = tiers.manager.open(
                self.kind, last.node_id, need, self, ends_on_commit=ends_on_commit
            )
        if intent is None:
            for tier in self.pinned:
                tiers.tree.unpin_path(last, tier)
            return None
        carriage.anchor, carriage.intent = last, intent
        self._open[intent.serial] = carriage
        return intent

    def _has_slot(self) -> bool:
        return self._tiers.manager.num_free_slots > 0

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """All or nothing."""
        return self._tiers.side.reserve(self._open[intent.serial], pool, num_pages)

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Give the pages back; nothing has used them."""
        self._tiers.side.unreserve(self._open[intent.serial], pool)

    def start(self, intent: Intent) -> None:
        """This rank holds the pages: bring what belongs there."""
        raise NotImplementedError

    def commit(self, intent: Intent) -> None:
        """Every rank has the pages; the nodes get them at the end."""
        self.num_commits += 1

    def abort(self, intent: Intent) -> None:
        """Some rank has not: the nodes stay as they are. The next insert asks again."""
        self.num_refused += 1

    def ended(self, intent: Intent) -> None:
        """Give the nodes what they lack, where all went well; everything else is free."""
        tiers, carriage = self._tiers, self._open.pop(intent.serial)
        is_done = intent.state is State.DONE
        if is_done and not carriage.is_void:
            tiers.side.complete(carriage)
        if is_done:
            for name, pages in carriage.side.items():
                pool = f"{name}.{carriage.tier.value}"
                tiers.manager.ledger.refund(pool, len(pages))
        tiers.side.free_carriage(carriage)
        carriage.unfollow()
        for tier in self.pinned:
            tiers.tree.unpin_path(carriage.anchor, tier)

    def held(self) -> list[Carriage]:
        """Its open carriages, for the audit."""
        return list(self._open.values())

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        self._open.clear()


class Completion(SideOnly):
    """Participant for side pages on DEVICE of nodes that are there without them."""

    kind = "complete"
    pinned = (Tier.DEVICE,)

    def __init__(self, tiers: Tiers, host: HostCompletion, *, waiting_max: int) -> None:
        super().__init__(tiers)
        self._host = host
        self._waiting_max = waiting_max
        self._waiting: list[tuple[Carriage, Decided]] = []
        self._decided: dict[int, Decided] = {}

    def add(self, path: list[Node], fill_side: FillSide | None, decided: Decided) -> None:
        """The engine has computed all of ``path``: bring what it lacks at its end.

        ``fill_side`` is called in a later step, once this rank holds the side pages.
        ``decided(path)`` is called when it is known what of it is complete: at once where nothing
        is lacking, or nobody can fill it.
        """
        side = self._tiers.side
        lacking = side.lacking(path) if side and path and fill_side is not None else {}
        if not lacking or len(self._waiting) >= self._waiting_max:
            self._complete_host(path)
            decided(path)
            return
        carriage = _reduced(path, lacking)
        carriage.fill_side, carriage.completes = fill_side, True
        carriage.follow()
        self._waiting.append((carriage, decided))

    def plan(self) -> None:
        """Open what can be opened; what builds on a load or an insert that is open waits for it."""
        waiting, self._waiting = self._waiting, []
        for place, (carriage, decided) in enumerate(waiting):
            path = carriage.nodes[-1].path()
            if carriage.is_void or not all(node.device.state for node in path):
                self._let_go(carriage, decided)
            elif any(node.device.carriage is not None for node in path) or self._is_asked(path):
                self._waiting.append((carriage, decided))
            elif not self._has_slot():
                self._waiting += waiting[place:]
                return
            else:
                self._begin(carriage, decided)

    def _begin(self, carriage: Carriage, decided: Decided) -> None:
        """Others may have brought some of it meanwhile: only what is lacking now is voted."""
        path = carriage.nodes[-1].path()
        lacking = self._tiers.side.lacking(path)
        start = sum(node.num_pages for node in path) - carriage.num_pages
        carriage.side_wanted = {
            name: [position - start for position in positions if position >= start]
            for name, positions in lacking.items()
        }
        if not any(carriage.side_wanted.values()):
            self._let_go(carriage, decided)
            return
        intent = self._propose(carriage, ends_on_commit=True)
        if intent is None and self._tiers.is_coming(Tier.DEVICE, 0):
            self._waiting.append((carriage, decided))
        elif intent is None:
            self.num_refused += 1
            self._tiers.manager.note("no room", "side pools", path[-1].node_id)
            self._let_go(carriage, decided)
        else:
            self._decided[intent.serial] = decided

    def _is_asked(self, path: list[Node]) -> bool:
        """Another intent brings the state at the end of ``path``."""
        return any(one.nodes[-1] is path[-1] for one in self._open.values())

    def _let_go(self, carriage: Carriage, decided: Decided) -> None:
        carriage.unfollow()
        self._go_on(carriage.nodes[-1], decided)

    def _go_on(self, last: Node, decided: Decided) -> None:
        path = last.path() if self._tiers.tree.has(last) else []
        self._complete_host(path)
        decided(path)

    def _complete_host(self, path: list[Node]) -> None:
        if self._tiers.side:
            self._host.add(path)

    @property
    def is_pending(self) -> bool:
        """Something waits for a step."""
        return bool(self._waiting)

    def waits(self) -> dict[str, str]:
        """Name the waiting, and what each waits for: agreed."""
        return {
            f"side state of node {one.nodes[-1].node_id}": "what it builds on is still undecided"
            for one, _ in self._waiting
        }

    # -- participant -----------------------------------------------------------------------------

    def start(self, intent: Intent) -> None:
        """The engine writes its state into the pages: nothing runs, so nothing has to end."""
        carriage = self._open[intent.serial]
        assert carriage.fill_side is not None
        carriage.fill_side(carriage.nodes, carriage.side)
        self._tiers.manager.mark_ended(intent)

    def ended(self, intent: Intent) -> None:
        """Complete on DEVICE, or as before; now the copies to other tiers may begin."""
        last = self._open[intent.serial].nodes[-1]
        super().ended(intent)
        self._go_on(last, self._decided.pop(intent.serial))

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or waits any more."""
        super().clear()
        self._waiting.clear()
        self._decided.clear()


class HostCompletion(SideOnly):
    """Participant for the copies of such side pages to nodes that are on HOST without them."""

    kind = "back_up_side"
    pinned = (Tier.DEVICE, Tier.HOST)

    def __init__(self, tiers: Tiers, *, waiting_max: int) -> None:
        super().__init__(tiers)
        self._waiting_max = waiting_max
        self._waiting: list[Carriage] = []

    def add(self, path: list[Node]) -> None:
        """Look at these nodes in the next step, when it is known what they have on DEVICE."""
        for node in path:
            is_known = any(one.completes and one.tier is Tier.HOST for one in node.carriages)
            may_lack = node.host.state and (
                node.device.state is Residency.RESERVED or self._tiers.side.not_on_host(node)
            )
            if may_lack and not is_known and len(self._waiting) < self._waiting_max:
                carriage = Carriage(Tier.HOST, [node], None)
                carriage.completes = True
                carriage.follow()
                self._waiting.append(carriage)

    def plan(self) -> None:
        """Open copies for nodes that lack on HOST what they have on DEVICE."""
        waiting, self._waiting = self._waiting, []
        for place, carriage in enumerate(waiting):
            if not self._has_slot():
                self._waiting += waiting[place:]
                return
            self._plan(carriage)

    def _plan(self, carriage: Carriage) -> None:
        node = carriage.nodes[-1]
        path = node.path()
        is_there = all(one.device.state and one.host.state for one in path)
        if carriage.is_void or not is_there or not self._tiers.tree.has(node):
            carriage.unfollow()
        elif any(one.device.carriage or one.host.carriage for one in path):
            self._waiting.append(carriage)  # what it builds on may still fail
        else:
            carriage.side_wanted = self._wanted(carriage.nodes)
            if not carriage.side_wanted or self._propose(carriage, ends_on_commit=False) is None:
                carriage.unfollow()

    def _wanted(self, nodes: list[Node]) -> dict[str, list[int]]:
        wanted: dict[str, list[int]] = {}
        start = 0
        for node in nodes:
            for name, positions in self._tiers.side.not_on_host(node).items():
                wanted.setdefault(name, []).extend(start + position for position in positions)
            start += node.num_pages
        return wanted

    @property
    def is_pending(self) -> bool:
        """Something waits for a step."""
        return bool(self._waiting)

    def waits(self) -> dict[str, str]:
        """Name the waiting, and what each waits for: agreed."""
        return {
            f"host copy of the side state of node {one.nodes[-1].node_id}": "copies are under way"
            for one in self._waiting
        }

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """All or nothing, where the movers have room."""
        return super().reserve(intent, pool, num_pages) if self._tiers.copier.room > 0 else 0

    def start(self, intent: Intent) -> None:
        """A part of this step's merged copy, without KV pages."""
        carriage = self._open[intent.serial]
        side = self._tiers.side.copies(carriage.nodes, carriage, [])
        self._tiers.copier.add(Direction.TO_HOST, [((), ())], partial(self._copied, intent), side)

    def _copied(self, intent: Intent, _: int, ok: bool) -> None:
        self._tiers.manager.mark_ended(intent, None if ok else 0)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open or waits any more."""
        super().clear()
        self._waiting.clear()


def _reduced(path: list[Node], lacking: dict[str, list[int]]) -> Carriage:
    """A carriage of the part of ``path`` from the first node that lacks something on."""
    first = min(min(positions) for positions in lacking.values())
    start = 0
    nodes = list(path)
    while start + nodes[0].num_pages <= first:
        start += nodes.pop(0).num_pages
    return Carriage(Tier.DEVICE, nodes, None)
