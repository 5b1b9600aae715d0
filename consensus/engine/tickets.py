"""Requests that wait for a vote: one line, the same on every rank.

    ask -> WAITING -> (vote) VOTING -> READY | REFUSED -> taken, aborted or expired

What a ticket pins is pinned from the asking until it is taken, refused, aborted or has expired; an
abort while the vote is open waits for the verdict with its pins.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

import xxhash

from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent

__all__ = ["Ticket", "TicketState", "Tickets"]

Wish = TypeVar("Wish")
_MASK62 = (1 << 62) - 1


class TicketState(enum.StrEnum):
    """The state of a ticket; the same on every rank after each step."""

    WAITING = "waiting"  # in line
    VOTING = "voting"  # its intent is open
    READY = "ready"  # decided: it may be taken
    REFUSED = "refused"  # decided against, or it waited for too long
    GONE = "gone"  # aborted while its vote was open: its verdict only frees its pins


class Ticket(Generic[Wish]):
    """A wait of one request. ``wish`` is the engine's; ``pages`` is what READY brought.

    ``born`` is the step of the asking, ``asks`` counts how often this request has asked.
    """

    def __init__(self, request: str, wish: Wish, priority: int, born: int, asks: int) -> None:
        self.request = request
        self.wish = wish
        self.priority = priority
        self.born = born
        self.asks = asks
        self.state = TicketState.WAITING
        self.pages = 0
        self.intent: Intent | None = None

    def __repr__(self) -> str:
        return f"<ticket of {self.request}: {self.state.value}>"

    @property
    def is_pending(self) -> bool:
        """Its request cannot go on yet."""
        return self.state in (TicketState.WAITING, TicketState.VOTING)


class Tickets(Generic[Wish]):
    """All tickets of one rank. Every call is agreed: the same order on every rank.

    ``release(wish)`` lets go of what the wish pins: called exactly once for each ticket. At most
    ``bound`` tickets exist; a request may ask ``asks_max`` times; one waits in line for at most
    ``wait_steps`` steps, and is kept for ``keep_steps`` once it is decided.
    """

    def __init__(
        self,
        manager: TransactionManager,
        release: Callable[[Wish], None],
        *,
        bound: int = 1024,
        asks_max: int = 2,
        wait_steps: int = 16,
        keep_steps: int = 64,
    ) -> None:
        if min(bound, asks_max, wait_steps, keep_steps) < 1:
            raise Misuse("the bounds of tickets must be at least 1")
        self._manager = manager
        self._release = release
        self._bound = bound
        self._asks_max = asks_max
        self._wait_steps = wait_steps
        self._keep_steps = keep_steps
        self._tickets: dict[str, Ticket[Wish]] = {}
        self._pinned: set[Ticket[Wish]] = set()  # membership only
        self.digest = 0

    # -- the request's side ----------------------------------------------------------------------

    def ask(
        self, request: str, pin: Callable[[], Wish], *, priority: int = 0
    ) -> Ticket[Wish] | None:
        """A ticket at the end of the line; lower ``priority`` goes first. ``None``: it may not.

        ``pin()`` makes the wish and pins what it needs; it is called only where the ticket is
        given. A request that has a ticket already gets that one back.
        """
        old = self._tickets.get(request)
        if old is not None and old.is_pending:
            return old
        asks = old.asks if old is not None else 0
        if asks >= self._asks_max or (old is None and len(self._tickets) >= self._bound):
            return None
        self._forget(request)
        ticket = Ticket(request, pin(), priority, self._manager.step, asks + 1)
        self._tickets[request] = ticket
        self._pinned.add(ticket)
        self.digest ^= _digest(request)
        self._manager.note("ask", request, priority)
        return ticket

    def of(self, request: str) -> Ticket[Wish] | None:
        """The ticket of ``request``."""
        return self._tickets.get(request)

    def drop(self, request: str) -> None:
        """The request has taken what it waited for, or is aborted; legal in every state."""
        ticket = self._tickets.get(request)
        if ticket is None:
            return
        self._manager.note("drop", request, ticket.state.value)
        self._forget(request)

    def _forget(self, request: str) -> None:
        ticket = self._tickets.pop(request, None)
        if ticket is None:
            return
        self.digest ^= _digest(request)
        if ticket.state is TicketState.VOTING and ticket.intent is not None:
            self._manager.withdraw(ticket.intent)
            ticket.state = TicketState.GONE  # its pins go with its verdict
        else:
            self._unpin(ticket)

    # -- the plan's side -------------------------------------------------------------------------

    def in_line(self) -> list[Ticket[Wish]]:
        """Return the tickets in the order to be served; refuse those that waited too long.

        Also lets go of tickets that were decided ``keep_steps`` ago and never taken.
        """
        step, line = self._manager.step, list[Ticket[Wish]]()
        for request, ticket in list(self._tickets.items()):
            if ticket.state is TicketState.WAITING:
                if step - ticket.born > self._wait_steps:
                    self.refuse(ticket)
                else:
                    line.append(ticket)
            elif not ticket.is_pending and step - ticket.born > self._keep_steps:
                self.drop(request)
        # The older ones come first among those of one priority; sorting is stable.
        line.sort(key=lambda ticket: ticket.priority)
        return line

    def voting(self, ticket: Ticket[Wish], intent: Intent) -> None:
        """Its intent is open: nobody else decides it now."""
        ticket.intent = intent
        ticket.state = TicketState.VOTING

    def ready(self, ticket: Ticket[Wish], pages: int) -> None:
        """Decided for it: ``pages`` are its. It stays pinned until it is taken."""
        if ticket.state is TicketState.GONE:
            self._unpin(ticket)
            return
        ticket.state, ticket.pages = TicketState.READY, pages

    def refuse(self, ticket: Ticket[Wish]) -> None:
        """Decided against it: its pins go now."""
        if ticket.state is not TicketState.GONE:
            ticket.state = TicketState.REFUSED
        self._unpin(ticket)

    def clear(self) -> None:
        """A new epoch with an empty tree: nothing is pinned, nobody waits."""
        self._tickets.clear()
        self._pinned.clear()
        self.digest = 0

    def waits(self) -> dict[str, str]:
        """Name the waiting requests, for a stepper's look at progress."""
        return {one.request: "its vote" for one in self._tickets.values() if one.is_pending}

    @property
    def has_pending(self) -> bool:
        """Somebody waits for a step."""
        return any(ticket.is_pending for ticket in self._tickets.values())

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_pinned(self) -> int:
        """Wishes that still pin something."""
        return len(self._pinned)

    def _unpin(self, ticket: Ticket[Wish]) -> None:
        if ticket in self._pinned:
            self._pinned.remove(ticket)
            self._release(ticket.wish)


def _digest(request: str) -> int:
    return xxhash.xxh3_64_intdigest(request.encode(errors="backslashreplace")) & _MASK62
