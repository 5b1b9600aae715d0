"""Requests in line for a vote: each pin goes exactly once, in whatever state it is let go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus import Misuse, Tickets, TicketState, TransactionManager
from tests.foreign import Owner, make_manager


class World:
    """One rank: tickets whose wish is a number, and what is pinned."""

    def __init__(self, **bounds: int) -> None:
        self.owner = Owner({"a": 10})
        self.manager: TransactionManager = make_manager(0, self.owner)
        self.pinned: list[str] = []
        self.tickets: Tickets[str] = Tickets(self.manager, self.pinned.remove, **bounds)

    def ask(self, request: str, priority: int = 0) -> bool:
        def pin() -> str:
            self.pinned.append(request)
            return request

        return self.tickets.ask(request, pin, priority=priority) is not None

    def vote(self, request: str, *, need: int = 1) -> None:
        ticket = self.tickets.of(request)
        assert ticket is not None
        intent = self.manager.open("load", request, {"a": need}, self.owner, payload=ticket)
        assert intent is not None
        self.tickets.voting(ticket, intent)

    def step(self) -> None:
        self.manager.reserve_open()
        reduced = self.manager.post(self.manager.step + 1)
        for outcome in self.manager.settle(self.manager.read(reduced)):
            ticket = outcome.intent.payload
            if outcome.kind.value == "commit":
                self.tickets.ready(ticket, outcome.intent.agreed)
            elif outcome.kind.value == "abort":
                self.tickets.refuse(ticket)
        for intent in self.manager.open_intents:
            if not intent.local_ended:
                self.manager.mark_ended(intent)

    def state(self, request: str) -> TicketState | None:
        ticket = self.tickets.of(request)
        return ticket.state if ticket else None


def test_from_the_asking_to_the_taking() -> None:
    world = World()
    assert world.ask("r")
    assert world.state("r") is TicketState.WAITING
    assert world.tickets.waits() == {"r": "its vote"}
    world.vote("r")
    assert world.tickets.in_line() == [], "its vote is open"
    world.step()
    ticket = world.tickets.of("r")
    assert ticket is not None
    assert (ticket.state, ticket.pages, world.pinned) == (TicketState.READY, 1, ["r"])
    world.tickets.drop("r")
    assert (world.pinned, len(world.tickets), world.tickets.digest) == ([], 0, 0)


def test_refused_lets_go_at_once_and_may_ask_again_so_often() -> None:
    world = World(asks_max=2)
    for _ in range(2):
        assert world.ask("r")
        world.owner.refuse.add(("r", "a"))
        world.vote("r")
        world.step()
        assert (world.state("r"), world.pinned) == (TicketState.REFUSED, [])
        world.step()
    assert not world.ask("r"), "twice was the bound"


def test_an_abort_while_the_vote_is_open_keeps_the_pins_until_the_verdict() -> None:
    world = World()
    world.ask("r")
    world.vote("r")
    world.manager.reserve_open()
    world.tickets.drop("r")
    assert (world.tickets.of("r"), world.pinned, world.tickets.digest) == (None, ["r"], 0)
    world.step()
    assert world.pinned == [], "withdrawn: refused, and its pins are gone"
    assert world.tickets.num_pinned == 0


def test_who_waits_for_too_long_is_refused() -> None:
    world = World(wait_steps=3)
    world.ask("r")
    for _ in range(3):
        world.step()
        assert [ticket.request for ticket in world.tickets.in_line()] == ["r"]
    world.step()
    assert world.tickets.in_line() == []
    assert (world.state("r"), world.pinned) == (TicketState.REFUSED, [])


def test_what_is_never_taken_expires() -> None:
    world = World(keep_steps=2)
    world.ask("r")
    world.vote("r")
    for _ in range(4):
        world.step()
        world.tickets.in_line()
    assert (world.state("r"), world.pinned) == (None, [])


def test_the_line_goes_by_priority_then_by_age() -> None:
    world = World()
    for request, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0)]:
        world.ask(request, priority)
    assert [ticket.request for ticket in world.tickets.in_line()] == ["b", "d", "a", "c"]


def test_the_number_of_tickets_is_bounded_and_nothing_is_pinned_beyond() -> None:
    world = World(bound=2)
    assert [world.ask(request) for request in "abc"] == [True, True, False]
    assert world.pinned == ["a", "b"]


def test_asking_again_while_waiting_gives_the_same_ticket() -> None:
    world = World()
    world.ask("r")
    world.ask("r")
    assert world.pinned == ["r"]


def test_an_asking_enters_the_fingerprint() -> None:
    one, two = World(), World()
    one.ask("r")
    assert one.manager.journal.fingerprint != two.manager.journal.fingerprint


def test_bounds_of_nothing_are_refused() -> None:
    with pytest.raises(Misuse, match="at least 1"):
        World(bound=0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "drop", "vote", "step", "refuse"]), st.sampled_from("abcd")
        ),
        max_size=60,
    )
)
def test_each_pin_goes_exactly_once_and_two_ranks_agree(calls: list[tuple[str, str]]) -> None:
    worlds = [
        World(bound=3, wait_steps=4, keep_steps=3),
        World(bound=3, wait_steps=4, keep_steps=3),
    ]
    for call, request in calls:
        for world in worlds:
            if call == "ask":
                world.ask(request)
            elif call == "drop":
                world.tickets.drop(request)
            elif call == "refuse":
                world.owner.refuse.add((request, "a"))
            elif call == "step":
                world.step()
            elif (
                request in [ticket.request for ticket in world.tickets.in_line()]
                and world.manager.find("load", request) is None
                and world.manager.room("a")
            ):
                world.vote(request)
            # `remove` raises where a pin goes twice.
            assert len(world.pinned) == world.tickets.num_pinned
        assert worlds[0].pinned == worlds[1].pinned
        assert worlds[0].tickets.digest == worlds[1].tickets.digest
        assert worlds[0].manager.journal.fingerprint == worlds[1].manager.journal.fingerprint
    for world in worlds:
        for request in "abcd":
            world.tickets.drop(request)
        for _ in range(3):
            world.step()
        assert (world.pinned, world.tickets.digest) == ([], 0)
