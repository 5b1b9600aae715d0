"""Admission: all that a request needs from the device, as one wish.

A wish waits in line and holds nothing. When its turn has come its prompt is matched, and what has
to be loaded and the pages for what has to be computed are opened together, out of one room, bound
to one verdict: the request gets both or none.

    admit -> in line -> its turn: match, room for all of it, two intents bound -> verdict
          -> READY: path pinned, pages its own | back in line, at its place

Nobody overtakes who stands at the head: whatever comes free is for that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpact.cache.paths.engine_pages import EnginePages
from kvpact.cache.paths.load_back import LoadBack
from kvpact.cache.paths.match import Lookup
from kvpact.cache.requests.table import Request, RequestTable
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.residency.withdrawal import Withdrawal
from kvpact.cache.tree.node import Node, Tier, Tokens
from kvpact.consensus.core.participant import Intent

__all__ = ["OVERTAKEN_MAX", "TRIES_MAX", "Admission"]

#: After so many verdicts against it (some rank had no pages, a load failed) a wish is refused.
TRIES_MAX: Final = 16
#: A wish that was overtaken so often by those of higher priority goes before all of them.
OVERTAKEN_MAX: Final = 32


class _Wish:
    """One request in line. ``held_pages`` is what its path has if the open verdict is yes,
    ``num_taken`` what it got out of the headroom."""

    __slots__ = (
        "extra_pages",
        "held_pages",
        "is_lost",
        "load",
        "minimum_pages",
        "namespace",
        "num_taken",
        "number",
        "overtaken",
        "own",
        "priority",
        "ticket",
        "tokens",
        "tries",
    )

    def __init__(
        self,
        ticket: Ticket,
        tokens: Tokens,
        namespace: str,
        *,
        extra_pages: int,
        minimum_pages: int | None,
        priority: int,
        number: int,
    ) -> None:
        self.ticket = ticket
        self.tokens = tokens
        self.namespace = namespace
        self.extra_pages = extra_pages
        self.minimum_pages = minimum_pages
        self.priority = priority
        self.number = number
        self.tries = self.overtaken = self.held_pages = self.num_taken = 0
        self.load: Ticket | None = None
        self.own: Ticket | None = None
        self.is_lost = False  # what it holds turned out void before its verdict

    @property
    def order(self) -> tuple[bool, int, int]:
        """Its place in line: the least comes first."""
        return (self.overtaken < OVERTAKEN_MAX, -self.priority, self.number)


class Admission(Path):
    """The line of requests to be admitted. ``capacity_pages``: the smallest device of all ranks."""

    def __init__(
        self,
        tiers: Tiers,
        requests: RequestTable,
        lookup: Lookup,
        load_back: LoadBack,
        engine_pages: EnginePages,
        withdrawal: Withdrawal,
        *,
        is_fetching: Callable[[Request], bool],
        waiting_max: int,
    ) -> None:
        self._tiers = tiers
        self._requests = requests
        self._lookup = lookup
        self._load_back = load_back
        self._engine_pages = engine_pages
        self._withdrawal = withdrawal
        self._is_fetching = is_fetching
        self._waiting_max = waiting_max
        self._line: list[_Wish] = []
        self._open: list[_Wish] = []
        self._num_asked = 0
        self._room_lacked: int | None = None  # the room with which the head had to wait for pages
        self.capacity_pages = 0
        self.num_admitted = self.num_at_once = self.num_refused = self.num_tries = 0

    # -- calls -----------------------------------------------------------------------------------

    def request(
        self,
        request: Request,
        tokens: Tokens,
        namespace: str,
        *,
        extra_pages: int,
        minimum_pages: int | None,
        priority: int,
    ) -> Ticket:
        """Put a wish into the line. One that can never fit is refused at once."""
        ticket = Ticket(request, None, 0)
        wish = _Wish(
            ticket,
            tokens.copy(),  # the caller's array may become another prompt's
            namespace,
            extra_pages=extra_pages,
            minimum_pages=minimum_pages,
            priority=priority,
            number=self._num_asked,
        )
        self._num_asked += 1
        request.prompt_pages = len(tokens) // self._tiers.tree.page_size
        if why := self._never_fits(wish):
            self._refuse(wish, why)
        elif len(self._line) + len(self._open) >= self._waiting_max:
            self._refuse(wish, f"{self._waiting_max} requests wait for admission already")
        else:
            self._requests.hold(request, None)
            is_first = not self._line and not self._is_fetching(request)
            if not is_first or not self._try(wish, at_once=True):
                self._line.append(wish)
                self._room_lacked = None
        return ticket

    def is_wish(self, request: Request) -> bool:
        """Whether ``request`` is in line, or waits for its verdict."""
        return any(wish.ticket.request is request for wish in (*self._line, *self._open))

    def cancel(self, request: Request) -> None:
        """The request is over; its load and its pages are withdrawn by those who opened them."""
        for wish in (*self._line, *self._open):
            if wish.ticket.request is request:
                wish.ticket.refuse("the request was aborted")
                self._room_lacked = None
        self._line = [wish for wish in self._line if wish.ticket.request is not request]
        self._open = [wish for wish in self._open if wish.ticket.request is not request]

    # -- the step --------------------------------------------------------------------------------

    def plan(self) -> None:
        """Open what there is room for, in the order of the line; the first that lacks it stops."""
        self._room_lacked = None
        for wish in sorted(self._line, key=lambda one: one.order):
            if self._is_fetching(wish.ticket.request):
                continue  # what it fetches is still to be matched: it has no turn yet
            if why := self._never_fits(wish):
                self._line.remove(wish)
                self._refuse(wish, why)
            elif self._try(wish):
                self._line.remove(wish)
                for other in self._line:
                    other.overtaken += other.number < wish.number
            else:
                break
        if self._room_lacked is not None:  # who waits holds nothing, so there is as much as this
            self._room_lacked = self._tiers.room(Tier.DEVICE)

    def settled(self) -> None:
        """A step was settled, and so were the loads and the pages: tell the tickets."""
        void = set(self._withdrawal.must_recompute)  # membership only
        for wish in self._line:
            request = wish.ticket.request
            if request.held is not None and not self._is_fetching(request):
                self._requests.hold(request, None)  # it came for it while it waited
        for wish in tuple(self._open):
            name = wish.ticket.request.name
            if name in void:
                wish.is_lost = True
                self._withdrawal.must_recompute.remove(name)  # it has computed nothing yet
            halves = [half for half in (wish.load, wish.own) if half is not None]
            if not any(half.state is TicketState.PENDING for half in halves):
                self._open.remove(wish)
                self._decide(wish)

    def _decide(self, wish: _Wish) -> None:
        """Both halves have their verdict: the request is in, or goes back to its place in line."""
        ticket, request = wish.ticket, wish.ticket.request
        loaded = wish.load.num_pages if wish.load is not None else 0
        own = wish.num_taken + (wish.own.num_pages if wish.own is not None else 0)
        is_refused = wish.own is not None and wish.own.state is TicketState.REFUSED
        is_whole = request.held_pages == wish.held_pages and len(request.private) == own
        if is_whole and not is_refused and not wish.is_lost:
            self.num_admitted += 1
            ticket.num_pages = loaded + own
            ticket.grant()
            return
        self._give_back(request)
        request.host_hit_pages = 0
        wish.tries += 1
        self.num_tries += 1
        self._tiers.manager.note("admit again", request.name, wish.tries)
        if wish.tries == TRIES_MAX:
            self._refuse(wish, f"{TRIES_MAX} times some rank lacked pages, or a load failed")
        else:
            wish.load = wish.own = None
            wish.is_lost = False
            self._line.append(wish)

    # -- one turn --------------------------------------------------------------------------------

    def _try(self, wish: _Wish, *, at_once: bool = False) -> bool:
        """Match, and open the load and the pages where there is room for both; False: not now.

        With ``at_once`` the pages come out of the headroom, without a vote of their own, or not.
        """
        request = wish.ticket.request
        self._give_back(request)
        match = self._lookup.match(wish.tokens, wish.namespace, request.name)
        # What was fetched for it alone, and brought to DEVICE since, was not found there.
        request.host_hit_pages = min(request.host_hit_pages, match.device_pages)
        request.device_hit_pages -= request.host_hit_pages
        path = self._lookup.path_of(match)
        coming, wanted = self._load_back.survey(path)
        num_load = _count(wanted)
        on_device = [node for node in path if node.device.is_published]
        has_end = not self._tiers.side.lacking([*on_device, *coming])
        is_loading = bool(wanted or (coming and has_end))
        held = _count([*on_device, *coming]) if is_loading else match.device_pages
        own = self._total(wish) - held - num_load
        if wish.minimum_pages is not None:
            spare = self._tiers.room(Tier.DEVICE) - num_load
            own = max(min(own, wish.minimum_pages), min(own, spare))
        if at_once and own > self._engine_pages.headroom:
            self._requests.hold(request, None)
            return False
        if not self._has_room(wanted, num_load + (0 if at_once else own)):
            self._requests.hold(request, None)  # who waits holds nothing
            return False
        if at_once and own > 0:
            self._engine_pages.allocate(request, own)
            self.num_at_once += 1
            own = 0
        wish.num_taken = len(request.private)
        load: Intent | None = None
        if is_loading:
            wish.load, load = self._load_back.open_whole(request, path)
        if load is None:  # others bring all that comes, or a side pool is short: computed instead
            own, num_load = own + num_load, 0
            if is_loading and not has_end:
                own, held = own + held - match.device_pages, match.device_pages
                self._load_back.cancel(request, "it is of no use without what was to be loaded")
                wish.load = None
                if not self._has_room([], own):
                    self._give_back(request)
                    return False
        self._open_pages(wish, own, load)
        wish.held_pages = held + num_load
        if wish.load is None and wish.own is None:
            self._decide(wish)  # all of it is on DEVICE already
        else:
            self._open.append(wish)
        return True

    def _open_pages(self, wish: _Wish, num_pages: int, load: Intent | None) -> None:
        """Open the request's own pages, bound to its load: both, or none."""
        if num_pages == 0:
            return
        least = num_pages if wish.minimum_pages is None else wish.minimum_pages
        parents = [] if wish.load is None else wish.load.parents
        wish.own, pages = self._engine_pages.open_whole(
            wish.ticket.request,
            num_pages,
            minimum=min(least, num_pages),
            parents=[parent for parent in parents if parent is not load],
        )
        if load is not None:
            self._tiers.manager.bind([load, pages])

    def _has_room(self, wanted: list[Node], num_pages: int) -> bool:
        """Make room for all of it. Nothing else could be given what is made for this wish."""
        tiers = self._tiers
        if tiers.manager.num_free_slots < 2:
            return False
        if (room := tiers.room(Tier.DEVICE)) < num_pages:
            self._room_lacked = room
            return False
        for node in wanted:  # room is not made out of what is to be loaded
            tiers.tree.pin(node, Tier.HOST)
        has_room = num_pages == 0 or tiers.make_room(Tier.DEVICE, num_pages)
        for node in wanted:
            tiers.tree.unpin(node, Tier.HOST)
        return has_room

    def _total(self, wish: _Wish) -> int:
        """Pages of the whole request: its prompt, the last one maybe in part, and the extra."""
        return -(-len(wish.tokens) // self._tiers.tree.page_size) + wish.extra_pages

    def _never_fits(self, wish: _Wish) -> str:
        """Why no amount of waiting would help; empty: it may fit one day. Agreed."""
        most = self.capacity_pages - self._engine_pages.expected
        if (total := self._total(wish)) <= most:
            return ""
        return (
            f"request {wish.ticket.request.name!r} needs {total} device pages, and there are never"
            f" more than {most}: the smallest device has {self.capacity_pages},"
            f" {self._engine_pages.expected} are kept as headroom"
        )

    def _refuse(self, wish: _Wish, why: str) -> None:
        self.num_refused += 1
        self._tiers.manager.note("not admitted", wish.ticket.request.name)
        wish.ticket.refuse(why)

    def _give_back(self, request: Request) -> None:
        """The request holds nothing."""
        self._engine_pages.free(request, len(request.private))
        self._requests.hold(request, None)
        request.must_recompute = False

    # -- looking in ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def is_pending(self) -> bool:
        """A step may admit somebody: agreed. Not where the head waits for others to give pages."""
        if not self._line or self._room_lacked is None:
            return bool(self._line)
        return self._tiers.room(Tier.DEVICE) > self._room_lacked

    def waits(self) -> dict[str, str]:
        """Name the requests that wait for more than pages that other requests hold: agreed."""
        if not self._line or self._room_lacked is not None:
            return {}
        head = min(self._line, key=lambda one: one.order)
        return {f"admission of request {head.ticket.request.name}": "no slot or no room is free"}

    def clear(self) -> None:
        """The epoch is over: who waits need not wait."""
        for wish in (*self._line, *self._open):
            wish.ticket.give_up("the epoch was closed")
        self._line.clear()
        self._open.clear()
        self._room_lacked = None


def _count(nodes: list[Node]) -> int:
    return sum(node.num_pages for node in nodes)
