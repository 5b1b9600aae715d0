"""Tables of states: what a table does not have raises, and has changed nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from kvpact.cache.requests import ticket as tickets
from kvpact.cache.requests.table import Request
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree import node as nodes
from kvpact.cache.tree.node import Residency, Tier
from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.step import stage as stages
from kvpact.consensus.step.stage import Stage
from tests.test_radix_tree import make_tree, prompt
from tests.test_step import World

ABSENT, RESERVED, COPYING, RESIDENT = Residency
#: How a node in a tier comes to each state, move by move.
WAYS = {
    ABSENT: (),
    RESERVED: (RESERVED,),
    COPYING: (RESERVED, COPYING),
    RESIDENT: (RESERVED, COPYING, RESIDENT),
}


def illegal(moves: Mapping[Any, frozenset[Any]]) -> list[tuple[Any, Any]]:
    return [(one, two) for one in moves for two in moves if two not in moves[one]]


@pytest.mark.parametrize(
    "moves, start",
    [
        (stages.MOVES, Stage.IDLE),
        (nodes.MOVES, ABSENT),
        (tickets.MOVES, TicketState.PENDING),
    ],
    ids=["stages", "residencies", "tickets"],
)
def test_every_state_is_in_the_table_and_can_be_reached(
    moves: dict[Hashable, frozenset[Hashable]], start: Hashable
):
    assert set(moves) == set(type(start))  # pyright: ignore[reportArgumentType]
    reached, todo = {start}, [start]
    while todo:
        for state in moves[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(moves)


@pytest.mark.parametrize("before, after", illegal(stages.MOVES))
def test_a_stage_follows_its_table(before: Stage, after: Stage):
    stepper = World(size=2, lag=0).ranks[0].stepper
    stepper._stage = before
    with pytest.raises(InternalError, match=f"is {before} cannot be {after} next"):
        stepper._enter(after)
    assert stepper.stage is before


@pytest.mark.parametrize("before, after", illegal(nodes.MOVES))
@pytest.mark.parametrize("tier", Tier)
def test_a_node_in_a_tier_follows_its_table(before: Residency, after: Residency, tier: Tier):
    tree = make_tree()
    (node,) = tree.insert(prompt("ab"), "")
    for state in WAYS[before]:
        tree.place(node, tier, state, [4, 5] if state >= COPYING else None)
    presence = node.at(tier)
    pages, evictable = presence.pages, dict(tree.num_evictable)
    with pytest.raises(InternalError, match=f"is {before.name} in {tier.value}: it cannot be"):
        tree.place(node, tier, after, [6, 7] if after >= COPYING else None)
    assert (presence.state, presence.pages) == (before, pages)
    assert tree.num_evictable == evictable
    tree.check_integrity()


@pytest.mark.parametrize("answer", ["grant", "refuse"])
@pytest.mark.parametrize("again", ["grant", "refuse"])
def test_a_ticket_is_answered_once(answer: str, again: str):
    ticket = Ticket(Request("r", 1), None, 0)
    calls = {"grant": ticket.grant, "refuse": lambda: ticket.refuse("there is no room")}
    calls[answer]()
    state, why = ticket.state, ticket.why
    with pytest.raises(InternalError, match=f"the ticket of 'r' is {state.value}"):
        calls[again]()
    ticket.give_up("the epoch was closed")
    assert (ticket.state, ticket.why) == (state, why)


def test_who_has_no_answer_can_be_given_up():
    ticket = Ticket(Request("r", 1), None, 0)
    ticket.give_up("the epoch was closed")
    assert (ticket.state, ticket.why) == (TicketState.REFUSED, "the epoch was closed")
