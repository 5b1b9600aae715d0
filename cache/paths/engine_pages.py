"""The engine's own device pages: out of a voted headroom at once, or by ticket.

Pages that a rank takes alone are pages that another rank may not have. So each step tops up a
*headroom* by an ordinary vote, and :meth:`EnginePages.allocate` takes from it without a word to
anybody; what is larger waits for its own vote.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.cache.requests.table import Request
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.participant import Intent

__all__ = ["EnginePages"]

_POOL = Tier.DEVICE.value


class EnginePages(Path):
    """Participant for pages that requests own themselves."""

    kind = "pages"

    def __init__(self, tiers: Tiers, *, headroom_pages: int, waiting_max: int) -> None:
        self._tiers = tiers
        self._target = headroom_pages
        self._waiting_max = waiting_max
        self._stock: list[int] = []
        self._reserved: dict[int, list[int]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._waiting: list[tuple[Ticket, int]] = []
        self._num_asked = 0
        self._top_up: Intent | None = None
        self.num_refused = 0

    # -- calls -----------------------------------------------------------------------------------

    @property
    def expected(self) -> int:
        """Pages of headroom that the engine wants: agreed."""
        return self._target

    def expect(self, num_pages: int) -> None:
        """The engine will take at most so many pages at once until lag + 1 steps from now."""
        self._target = num_pages

    def allocate(self, request: Request, num_pages: int) -> list[int] | None:
        """Pages out of the headroom, now; ``None``: it has not as many (ask by ticket)."""
        if num_pages > len(self._stock):
            return None
        pages = self._stock[-num_pages:]  # off the end: the headroom may be large
        del self._stock[-num_pages:]
        request.private += pages
        self._tiers.manager.note("allocate", request.name, num_pages)
        return pages

    def request(self, request: Request, num_pages: int) -> Ticket:
        """Ask for pages; the next step decides, the same on all ranks."""
        ticket = Ticket(request, None, 0)
        self._open(ticket, num_pages)
        return ticket

    def open_whole(
        self, request: Request, num_pages: int, *, minimum: int, parents: Sequence[Intent]
    ) -> tuple[Ticket, Intent]:
        """Open pages for the admission, which has made room and seen a free slot."""
        ticket = Ticket(request, None, 0)
        intent = self._tiers.manager.open(
            self.kind,
            self._next_key(),
            {_POOL: num_pages},
            self,
            minimum=minimum,
            parents=parents,
            ends_on_commit=True,
        )
        if intent is None:
            raise InternalError(f"no slot for {num_pages} pages of request {request.name!r}")
        self._tickets[intent.serial] = ticket
        return ticket, intent

    def cancel(self, request: Request) -> None:
        """The request is over: what it still waits for is withdrawn."""
        for serial, ticket in self._tickets.items():
            if ticket.request is request and ticket.state is TicketState.PENDING:
                ticket.refuse("the request was aborted")
                self._withdraw(serial)
        for ticket, _ in self._waiting:
            if ticket.request is request:
                ticket.give_up("the request was aborted")

    def free(self, request: Request, num_pages: int) -> None:
        """The request gives its last ``num_pages`` private pages back."""
        if num_pages:
            pages = request.private[len(request.private) - num_pages :]
            del request.private[len(request.private) - num_pages :]
            self._tiers.manager.note("free", request.name, num_pages)
            self._tiers.free(Tier.DEVICE, pages)

    def plan(self) -> None:
        """Open what found no slot before, then bring the headroom to its size."""
        waiting, self._waiting = self._waiting, []
        for ticket, num_pages in waiting:
            if ticket.state is TicketState.PENDING:
                self._open(ticket, num_pages)
        missing = self._target - len(self._stock)
        if self._top_up is None and missing > 0:
            self._open_top_up(missing)
        elif missing < 0:
            self._give_back(-missing)

    @property
    def num_waiting(self) -> int:
        """Tickets that wait for a slot."""
        return len(self._waiting)

    @property
    def is_pending(self) -> bool:
        """A ticket waits for a slot, or the headroom has another size than it shall have and a step
        can mend that."""
        missing = self._target - len(self._stock)
        is_short = missing > 0 and self._tiers.room(Tier.DEVICE) > 0
        return bool(self._waiting) or missing < 0 or is_short

    def waits(self) -> dict[str, str]:
        """Name the waiting, and what each waits for: agreed."""
        return {
            f"{num_pages} pages for request {ticket.request.name}": "no slot or no room is free"
            for ticket, num_pages in self._waiting
        }

    @property
    def headroom(self) -> int:
        """Pages that :meth:`allocate` can give now: agreed."""
        return len(self._stock)

    def _open(self, ticket: Ticket, num_pages: int) -> None:
        intent: Intent | None = None
        if self._tiers.make_room(Tier.DEVICE, num_pages):
            intent = self._tiers.manager.open(
                self.kind, self._next_key(), {_POOL: num_pages}, self, ends_on_commit=True
            )
        elif not self._tiers.is_coming(Tier.DEVICE, num_pages):
            self._refuse(ticket, "no device pages can be had")
            return
        if intent is not None:
            self._tickets[intent.serial] = ticket
        elif len(self._waiting) < self._waiting_max:
            self._waiting.append((ticket, num_pages))
        else:
            self._refuse(ticket, "too many requests wait for pages")

    def _open_top_up(self, missing: int) -> None:
        missing = min(missing, self._tiers.room(Tier.DEVICE))
        if missing > 0 and self._tiers.make_room(Tier.DEVICE, missing):
            self._top_up = self._tiers.manager.open(
                self.kind, self._next_key(), {_POOL: missing}, self, minimum=1, ends_on_commit=True
            )

    def _give_back(self, num_pages: int) -> None:
        """The engine expects to need less than what is kept for it."""
        kept = len(self._stock) - num_pages
        surplus, self._stock = self._stock[kept:], self._stock[:kept]
        self._tiers.manager.note("give back", num_pages)
        self._tiers.free(Tier.DEVICE, surplus)

    def _next_key(self) -> int:
        self._num_asked += 1
        return self._num_asked

    def _refuse(self, ticket: Ticket, why: str) -> None:
        self.num_refused += 1
        self._tiers.manager.note("no pages", ticket.request.name)
        ticket.refuse(why)

    def _withdraw(self, serial: int) -> None:
        for intent in self._tiers.manager.open_intents:
            if intent.serial == serial and intent.is_undecided:
                self._tiers.manager.withdraw(intent)

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """As many as there are; whether fewer than all is of use, the intent's minimum says."""
        pages = self._tiers.pools[Tier.DEVICE].reserve_up_to(num_pages)
        self._reserved[intent.serial] = pages
        return len(pages)

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Give the pages back; nothing has used them."""
        self._tiers.pools[Tier.DEVICE].free(self._reserved.pop(intent.serial))

    def start(self, intent: Intent) -> None:
        """Pages without a copy: nothing runs, so nothing has to end."""
        self._tiers.manager.mark_ended(intent)

    def commit(self, intent: Intent) -> None:
        """Give the pages to the request, or to the headroom."""
        pages = self._reserved[intent.serial]
        kept, self._reserved[intent.serial] = pages[: intent.agreed], pages[intent.agreed :]
        ticket = self._tickets.pop(intent.serial, None)
        if ticket is None:
            self._stock += kept
        else:
            ticket.num_pages = len(kept)
            ticket.grant()
            ticket.request.private += kept

    def abort(self, intent: Intent) -> None:
        """Nobody gets them."""
        ticket = self._tickets.pop(intent.serial, None)
        if ticket is not None and ticket.state is TicketState.PENDING:
            self._refuse(ticket, "some rank had no device pages")

    def ended(self, intent: Intent) -> None:
        """Free the pages that are not kept."""
        self._tiers.pools[Tier.DEVICE].free(self._reserved.pop(intent.serial, []))
        if self._top_up is intent:
            self._top_up = None

    def clear(self) -> None:
        """The epoch is over: who waits need not wait, and the headroom is filled anew."""
        for ticket in [*self._tickets.values(), *(ticket for ticket, _ in self._waiting)]:
            ticket.num_pages = 0
            ticket.give_up("the epoch was closed")
        self._tickets.clear()
        self._waiting.clear()
        self._reserved.clear()
        self._top_up = None
        self._stock.clear()
        self._num_asked = 0

    def held_pages(self, tier: Tier) -> list[int]:
        """Device pages of this rank in the headroom and in open intents."""
        if tier is not Tier.DEVICE:
            return []
        return self._stock + [page for pages in self._reserved.values() for page in pages]

    def charged_pages(self, tier: Tier) -> int:
        """The headroom: voted, and nobody's yet."""
        return len(self._stock) if tier is Tier.DEVICE else 0
