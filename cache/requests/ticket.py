"""Tickets: what a scheduler gets for a wish that a step decides."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvpact.cache.tree.node import Carriage, Node
from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.participant import Intent

if TYPE_CHECKING:
    from kvpact.cache.requests.table import Request

__all__ = ["Ticket", "TicketState"]


class TicketState(enum.Enum):
    """The state of a ticket, the same on every rank."""

    PENDING = "pending"  # a step decides it
    READY = "ready"  # its pages are the request's to use (loads: start_loading waits for them)
    REFUSED = "refused"  # nothing came of it; ``why`` says so


#: A ticket is answered once.
MOVES: dict[TicketState, frozenset[TicketState]] = {
    TicketState.PENDING: frozenset({TicketState.READY, TicketState.REFUSED}),
    TicketState.READY: frozenset(),
    TicketState.REFUSED: frozenset(),
}


class Ticket:
    """A promise that ``step`` decides. ``num_pages`` is how many pages came of it."""

    __slots__ = ("carriages", "node", "num_pages", "present_pages", "request", "state", "why")

    def __init__(self, request: Request, node: Node | None, present_pages: int) -> None:
        self.request = request
        self.node = node
        self.present_pages = present_pages
        self.carriages: list[Carriage] = []
        self.state = TicketState.PENDING
        self.num_pages = 0
        self.why = ""

    @property
    def parents(self) -> list[Intent]:
        """The undecided intents that the ticket waits for."""
        intents = [carriage.intent for carriage in self.carriages]
        return [intent for intent in intents if intent is not None and intent.is_undecided]

    @property
    def path(self) -> list[Node]:
        """The prefix it is about, as the tree has it now."""
        return [] if self.node is None else self.node.path()

    def grant(self) -> None:
        """Answer READY. Raises :class:`InternalError` where the ticket is answered already."""
        self._answer(TicketState.READY)

    def refuse(self, why: str) -> None:
        """Nothing comes of it. Raises :class:`InternalError` where it is answered already."""
        self._answer(TicketState.REFUSED)
        self.why = why

    def give_up(self, why: str) -> None:
        """Refuse it, unless it has its answer already."""
        if self.state is TicketState.PENDING:
            self.refuse(why)

    def _answer(self, state: TicketState) -> None:
        if state not in MOVES[self.state]:
            name = self.request.name
            raise InternalError(f"the ticket of {name!r} is {self.state.value}, not {state.value}")
        self.state = state
