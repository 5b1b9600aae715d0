"""The stage of a rank in its step: for itself, for the watch, and for the sentinel."""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from kvpact.consensus.core.ballot import Header, Vector
from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.transport.gloo import Work

__all__ = ["MOVES", "Beacon", "InFlight", "Stage", "no_move"]


class Stage(enum.StrEnum):
    """The next thing that the stepper does."""

    IDLE = "idle"  # between two steps
    BEGUN = "entering a step"  # it was begun while the epoch before it ended
    AWAIT_LAGGED = "waiting for the verdict of an earlier step"  # before it may post its own
    POST = "preparing its ballot"
    AWAIT = "waiting for the verdict"  # of its own ballot, or of one that it must hear out
    DONE = "settled"  # what this step had to settle is settled
    CLOSING = "closing the epoch"  # it has given up, and waits for the seal
    OPENING = "opening a new epoch"  # the ranks meet in a new group
    CLOSED = "closed"  # it has raised the sealed error, and raises it again


#: Where each stage leads to. CLOSED follows from all: nobody can be asked any more.
MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.IDLE: frozenset({Stage.AWAIT_LAGGED, Stage.POST, Stage.CLOSING, Stage.CLOSED}),
    Stage.BEGUN: frozenset({Stage.AWAIT_LAGGED, Stage.POST, Stage.CLOSED}),
    Stage.AWAIT_LAGGED: frozenset(
        # The next of several ballots; or it goes on alone, from the beginning of the step.
        {Stage.AWAIT_LAGGED, Stage.BEGUN, Stage.POST, Stage.CLOSING, Stage.CLOSED}
    ),
    Stage.POST: frozenset({Stage.AWAIT, Stage.DONE, Stage.CLOSED}),
    Stage.AWAIT: frozenset({Stage.AWAIT, Stage.DONE, Stage.CLOSING, Stage.CLOSED}),
    Stage.DONE: frozenset({Stage.IDLE, Stage.CLOSED}),
    Stage.CLOSING: frozenset(
        # Who only observes goes back to where it was.
        {Stage.OPENING, Stage.CLOSED, Stage.IDLE, Stage.BEGUN, Stage.AWAIT_LAGGED, Stage.AWAIT,
         Stage.DONE}
    ),
    Stage.OPENING: frozenset({Stage.BEGUN, Stage.DONE, Stage.IDLE, Stage.CLOSED}),
    Stage.CLOSED: frozenset(),
}  # fmt: skip


def no_move(before: Stage, after: Stage) -> InternalError:
    """The error for a move that the table does not have."""
    return InternalError(f"a rank that is {before.value} cannot be {after.value} next")


class InFlight(msgspec.Struct, frozen=True):
    """A ballot that was posted and is not settled yet; ``vector`` is what this rank posted."""

    epoch: int
    header: Header
    num_slots: int
    work: Work
    vector: Vector


class Beacon(Protocol):
    """The place where this rank says out of band what it does; assigning, never communicating."""

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        """This rank is now in ``phase`` of ``step``."""
        ...
