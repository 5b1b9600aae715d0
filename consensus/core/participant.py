"""Intents, and the protocol of those who own the pages that an intent reserves.

An engine that has its own tree, pools and copies implements :class:`Participant` and hands it to
:class:`kvpact.consensus.core.manager.TransactionManager`; kvpact's own cache does nothing else.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

from kvpact.consensus.core.journal import Value
from kvpact.consensus.core.transaction import OPEN_STATES, UNDECIDED_STATES, Event, State, advance

__all__ = ["Intent", "Outcome", "OutcomeKind", "Participant", "Reservation"]


class Reservation(msgspec.Struct):
    """Pages held on this rank for one undecided intent, by pool, in the order reserved."""

    num_pages: dict[str, int]


class Intent:
    """One wish that all ranks decide together. Made by ``TransactionManager.open`` only.

    ``need`` names pages per pool in canonical (sorted) order. ``minimum`` is the least number of
    pages of an *elastic* intent that is still a COMMIT; an intent over several pools is all or
    nothing. ``parents`` are intents that must commit in full, or this one aborts too; ``bound`` are
    those that commit only together with it. ``agreed`` is the number of pages of the verdict,
    ``cause`` says why it was an ABORT, ``result`` is the number of pages that the copy delivered on
    every rank. ``payload`` is whatever the caller of ``open`` wants to find here again; no decision
    looks at it. ``serial`` counts the intents of the epoch. ``decided_ms`` (agreed clock; -1:
    undecided) is when its timeout began.
    """

    __slots__ = (
        "agreed",
        "aliases",
        "bound",
        "cause",
        "decided_ms",
        "ends_on_commit",
        "epoch",
        "key",
        "kind",
        "local_ended",
        "local_result",
        "minimum",
        "need",
        "opened_ms",
        "opened_step",
        "parents",
        "participant",
        "payload",
        "posted_step",
        "reservation",
        "result",
        "serial",
        "slot",
        "state",
        "vote",
        "withdrawn",
    )

    def __init__(
        self,
        *,
        kind: str,
        key: Value,
        need: dict[str, int],
        minimum: int,
        parents: tuple[Intent, ...],
        participant: Participant,
        ends_on_commit: bool,
        slot: int,
        serial: int,
        epoch: int,
        step: int,
        clock_ms: int,
        payload: object = None,
    ) -> None:
        self.payload: Any = payload
        self.kind = kind
        self.key = key
        self.aliases: list[Value] = []
        self.need = need
        self.minimum = minimum
        self.parents = parents
        self.bound: tuple[Intent, ...] = ()
        self.participant = participant
        self.ends_on_commit = ends_on_commit
        self.slot = slot
        self.serial = serial
        self.epoch = epoch
        self.opened_step = step
        self.opened_ms = clock_ms
        self.decided_ms = -1
        self.posted_step = -1
        self.state = State.PROPOSED
        self.reservation = Reservation({})
        self.vote = 0
        self.cause = ""
        self.agreed = 0
        self.result = 0
        self.withdrawn = False
        self.local_ended = False
        self.local_result = 0

    def __repr__(self) -> str:
        return f"<{self.kind} {self.key} slot {self.slot} {self.state.value}>"

    @property
    def total(self) -> int:
        """Pages of the full vote: of the only pool, or the sum over all pools."""
        return sum(self.need.values())

    @property
    def is_open(self) -> bool:
        """The intent holds a slot."""
        return self.state in OPEN_STATES

    @property
    def is_undecided(self) -> bool:
        """Its verdict is not known yet."""
        return self.state in UNDECIDED_STATES

    @property
    def is_committed(self) -> bool:
        """The intent was committed, and neither failed nor was withdrawn since."""
        return self.state is State.COMMITTED or self.state is State.DONE

    @property
    def is_whole(self) -> bool:
        """The intent was committed with every page it asked for: another intent may build on it."""
        if self.state is State.COMMITTED:
            return self.agreed == self.total
        return self.state is State.DONE and self.result == self.total

    def advance(self, event: Event) -> None:
        """Walk the transition table; an illegal event raises and changes nothing."""
        self.state = advance(self.state, event)


class Participant(Protocol):
    """Owner of pools and copies on this rank.

    The manager calls it between ``post`` and ``settle`` in the same order on every rank. Only
    ``reserve`` may fail, and only by returning fewer pages.

    Methods that it may have besides, and that are called where it has them:

    ``opened(intent)``: it was proposed, on every rank: the place for pins and marks, since a rank
    that will be refused hears no more of it until the verdict. ``reserve_all(intent) -> bool``: all
    pools of the intent at once, or nothing, for engines that allocate them in one call; ``reserve``
    and ``unreserve`` are not called then. ``lost(intent)``: it was quarantined; called instead of
    ``ended``. A copy may still run here, so its pages stay out of use until it has really ended
    (:class:`kvpact.consensus.Limbo` keeps them).
    """

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """Take up to ``num_pages`` pages of ``pool``; how many were taken. A local fact."""
        ...

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Exactly undo ``reserve`` of this intent in ``pool``: nothing has used the pages yet."""
        ...

    def start(self, intent: Intent) -> None:
        """Every pool gave its pages: bytes may start to move, nothing may be published."""
        ...

    def commit(self, intent: Intent) -> None:
        """Publish ``intent.agreed`` pages. Must neither fail nor allocate."""
        ...

    def abort(self, intent: Intent) -> None:
        """Decided against. A copy may still run here: keep its pages until ``ended``."""
        ...

    def ended(self, intent: Intent) -> None:
        """Nothing of it runs anywhere, or it is quarantined: unpin, and free what is not kept."""
        ...


class OutcomeKind(enum.Enum):
    """The word of a settled step on one intent."""

    COMMIT = "commit"
    ABORT = "abort"
    END = "end"
    FAIL = "fail"
    QUARANTINE = "quarantine"


class Outcome(msgspec.Struct, frozen=True):
    """One line of a settled step, in the order in which it was applied on every rank."""

    kind: OutcomeKind
    intent: Intent
