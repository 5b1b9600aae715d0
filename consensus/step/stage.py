"""Where a rank is in its step: for itself, for the watch, and for the sentinel."""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from kvpact.consensus.core.ballot import Header, Vector
from kvpact.consensus.transport.gloo import Work

__all__ = ["Beacon", "InFlight", "Stage"]


class Stage(enum.Enum):
    """What the stepper does next."""

    IDLE = "idle"
    BEGUN = "entering a step"
    AWAIT_LAGGED = "waiting for the verdict of an earlier step"
    POST = "preparing its ballot"
    AWAIT = "waiting for the verdict"
    DONE = "settled"
    CLOSING = "closing the epoch"
    OPENING = "opening a new epoch"
    CLOSED = "closed"


class InFlight(msgspec.Struct, frozen=True):
    """A ballot that was posted and is not settled yet; ``vector`` is what this rank posted."""

    epoch: int
    header: Header
    num_slots: int
    work: Work
    vector: Vector


class Beacon(Protocol):
    """Where this rank says out of band what it does; assigning, never communicating."""

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        """This rank is now in ``phase`` of ``step``."""
        ...
