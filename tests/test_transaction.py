"""The transition table, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.transaction import (
    OPEN_STATES,
    TRANSITIONS,
    UNDECIDED_STATES,
    Event,
    State,
    advance,
)
from tests.foreign import Owner, make_manager

TERMINAL = {State.DONE, State.FAILED, State.CLOSED, State.QUARANTINED, State.DROPPED}

#: Written out once more by hand: (state, event) -> state. Whatever is not here must raise.
EXPECTED = {
    (State.PROPOSED, Event.RESERVE): State.RESERVED,
    (State.PROPOSED, Event.REFUSE): State.REFUSED,
    (State.RESERVED, Event.POST): State.VOTED,
    (State.REFUSED, Event.POST): State.VOTED_NO,
    (State.VOTED, Event.COMMIT): State.COMMITTED,
    (State.VOTED, Event.ABORT): State.ABORTED,
    (State.VOTED_NO, Event.ABORT): State.ABORTED,
    (State.COMMITTED, Event.END): State.DONE,
    (State.COMMITTED, Event.FAIL): State.FAILED,
    (State.COMMITTED, Event.WITHDRAW): State.WITHDRAWN,
    (State.COMMITTED, Event.QUARANTINE): State.QUARANTINED,
    (State.ABORTED, Event.END): State.CLOSED,
    (State.ABORTED, Event.FAIL): State.CLOSED,
    (State.ABORTED, Event.QUARANTINE): State.QUARANTINED,
    (State.WITHDRAWN, Event.END): State.CLOSED,
    (State.WITHDRAWN, Event.FAIL): State.CLOSED,
    (State.WITHDRAWN, Event.QUARANTINE): State.QUARANTINED,
    **{(state, Event.DROP): State.DROPPED for state in State if state not in TERMINAL},
}


@pytest.mark.parametrize("state,event", list(itertools.product(State, Event)))
def test_every_pair(state: State, event: Event) -> None:
    intent = make_manager(0).open("copy", 1, {"a": 1}, Owner({"a": 1}))
    assert intent is not None
    intent.state = state
    before = {name: getattr(intent, name) for name in type(intent).__slots__}
    if (state, event) in EXPECTED:
        assert advance(state, event) is EXPECTED[state, event]
        intent.advance(event)
        assert intent.state is EXPECTED[state, event]
        before["state"] = intent.state
    else:
        with pytest.raises(InternalError, match=f"{state.value} cannot {event.value}"):
            advance(state, event)
        with pytest.raises(InternalError):
            intent.advance(event)
    assert {name: getattr(intent, name) for name in type(intent).__slots__} == before


def test_states_are_sorted_into_open_undecided_and_over() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state in State if not TRANSITIONS[state]} == TERMINAL
    assert set(State) - TERMINAL == OPEN_STATES
    undecided = {State.PROPOSED, State.RESERVED, State.REFUSED, State.VOTED, State.VOTED_NO}
    assert undecided == UNDECIDED_STATES


def test_every_state_is_reached_and_every_life_ends() -> None:
    reached, frontier = {State.PROPOSED}, [State.PROPOSED]
    while frontier:
        for after in TRANSITIONS[frontier.pop()].values():
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(State)

    def longest(state: State) -> int:
        """Raises RecursionError where the table has a cycle."""
        return max((1 + longest(after) for after in TRANSITIONS[state].values()), default=0)

    assert longest(State.PROPOSED) == 5, "reserve, post, commit, withdraw, end"


def test_only_a_reserved_intent_can_commit() -> None:
    commits = [state for state in State if Event.COMMIT in TRANSITIONS[state]]
    assert commits == [State.VOTED]
