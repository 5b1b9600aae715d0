"""The life of one transaction, as one table: no I/O, no tensors, no time.

Every rank walks the same table for every intent. Events marked *agreed* happen on all ranks in
the same step; the others are facts of one rank. An event that the table does not hold raises and
changes nothing. ``scripts/draw_transitions`` prints the diagram of the documentation from it.
"""

from __future__ import annotations

import enum

from kvpact.consensus.core.errors import InternalError

__all__ = ["OPEN_STATES", "TRANSITIONS", "UNDECIDED_STATES", "Event", "State", "advance"]


# Strings, because they are hashed on the hot path and the hash of a plain Enum is Python code.
class State(enum.StrEnum):
    """The state of a transaction on this rank."""

    PROPOSED = "proposed"  # holds a slot and its charge in the ledger
    RESERVED = "reserved"  # holds pages in every pool it names; its copy may run
    REFUSED = "refused"  # holds no page here; will vote 0
    VOTED = "voted"  # posted with its pages
    VOTED_NO = "voted_no"  # posted with 0
    COMMITTED = "committed"  # published on all ranks; its copy may still run
    ABORTED = "aborted"  # decided against on all ranks; its copy may still run here
    WITHDRAWN = "withdrawn"  # was committed, is unpublished again; its copy may still run
    DONE = "done"  # committed, and ended well on all ranks
    FAILED = "failed"  # committed, and its copy failed on some rank: unpublished
    CLOSED = "closed"  # aborted or withdrawn, and ended on all ranks
    QUARANTINED = "quarantined"  # outlived its timeout: given up on all ranks in one step
    DROPPED = "dropped"  # its epoch was closed


class Event(enum.StrEnum):
    """An event in the life of a transaction."""

    RESERVE = "reserve"  # every pool gave its pages
    REFUSE = "refuse"  # a pool did not; what was reserved has been returned
    POST = "post"  # its vote rides a ballot
    COMMIT = "commit"  # agreed: every rank could
    ABORT = "abort"  # agreed: some rank could not, or what it builds on is gone
    WITHDRAW = "withdraw"  # agreed: what it builds on failed after the verdict
    END = "end"  # agreed: nothing of it runs on any rank, and it went well
    FAIL = "fail"  # agreed: nothing of it runs on any rank, and it failed on one
    QUARANTINE = "quarantine"  # agreed: it outlived its timeout
    DROP = "drop"  # agreed: its epoch is closed


_ENDINGS = {Event.QUARANTINE: State.QUARANTINED, Event.DROP: State.DROPPED}
_DROP = {Event.DROP: State.DROPPED}

TRANSITIONS: dict[State, dict[Event, State]] = {
    State.PROPOSED: {Event.RESERVE: State.RESERVED, Event.REFUSE: State.REFUSED, **_DROP},
    State.RESERVED: {Event.POST: State.VOTED, **_DROP},
    State.REFUSED: {Event.POST: State.VOTED_NO, **_DROP},
    State.VOTED: {Event.COMMIT: State.COMMITTED, Event.ABORT: State.ABORTED, **_DROP},
    State.VOTED_NO: {Event.ABORT: State.ABORTED, **_DROP},
    State.COMMITTED: {
        Event.END: State.DONE,
        Event.FAIL: State.FAILED,
        Event.WITHDRAW: State.WITHDRAWN,
        **_ENDINGS,
    },
    State.ABORTED: {Event.END: State.CLOSED, Event.FAIL: State.CLOSED, **_ENDINGS},
    State.WITHDRAWN: {Event.END: State.CLOSED, Event.FAIL: State.CLOSED, **_ENDINGS},
    State.DONE: {},
    State.FAILED: {},
    State.CLOSED: {},
    State.QUARANTINED: {},
    State.DROPPED: {},
}

#: The verdict is not known yet.
UNDECIDED_STATES = frozenset(
    {State.PROPOSED, State.RESERVED, State.REFUSED, State.VOTED, State.VOTED_NO}
)
#: The transaction holds its slot.
OPEN_STATES = frozenset(state for state, events in TRANSITIONS.items() if events)


def advance(state: State, event: Event) -> State:
    """The state after ``event``. Raises :class:`InternalError` where the table has no such step."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise InternalError(f"a transaction that is {state.value} cannot {event.value}")
    return after
