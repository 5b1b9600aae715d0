"""Reports that ranks file when an epoch ends, and the seal that ends it for all."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from kvpact.consensus.core.ballot import Header
from kvpact.consensus.core.border import as_choice, as_count, as_seconds
from kvpact.consensus.core.errors import (
    Divergence,
    KvpactError,
    PeerError,
    PeerLost,
    ProgressLost,
    RankStalled,
    StoreForged,
)
from kvpact.consensus.core.journal import Entry

__all__ = [
    "Closing",
    "Incident",
    "LastSeen",
    "Policy",
    "PolicyKind",
    "Report",
    "Seal",
    "SealedError",
    "packed_report",
]

#: What may follow the end of an epoch.
Closing = str


class PolicyKind(enum.StrEnum):
    """The consequence of a divergence; anything else always raises."""

    RAISE = "raise"  # every rank raises the sealed error
    RESET = "reset"  # all ranks drop to an empty cache in a new epoch, and go on
    DETACH = "detach"  # likewise, but what all have on the device is kept; the other tiers stay off
    OBSERVE = "observe"  # report, change nothing, never raise


class Policy(msgspec.Struct, frozen=True):
    """The caller's choice for a divergence; anything else always raises.

    ``kind`` is a word of :class:`PolicyKind`. At most ``max_resets`` within ``window_s`` (by the
    clock of the rank that seals), then raise.
    """

    kind: str = PolicyKind.RAISE
    max_resets: int = 3
    window_s: float = 600.0

    def __post_init__(self) -> None:
        kind = as_choice("policy", PolicyKind, self.kind)
        msgspec.structs.force_setattr(self, "kind", kind)
        as_count("max_resets", self.max_resets)
        as_seconds("window_s", self.window_s)


class LastSeen(msgspec.Struct, frozen=True):
    """A rank as it was last seen, out of band. ``life`` says how its process is, where known."""

    step: int
    phase: str
    since_s: float
    dead: bool = False
    stack: str = ""
    life: str = ""


class Report(msgspec.Struct, frozen=True):
    """One rank's knowledge at the moment when it gives up.

    ``cause``: ``mismatch`` (it saw headers differ at ballot ``at_step``), ``waited`` (its deadline
    passed), ``late`` (it came after others had given up), ``lost`` (the transport broke),
    ``broken`` (a rank said so), ``stuck`` (something outlived its bound), ``asked`` (others are
    closing). ``broken_rank`` is the rank that said so, or this one, where an exception of class
    ``raised`` cut short what it did; ``pending`` are its oldest open intents, as lines for a
    person; ``owes_ending``: the oldest of them has not ended on this rank. Of what is ``stuck``
    ``waiting`` has who waits in a line, longest first, and what each lacks: agreed lines.

    ``held`` are the last verdicts it settled. ``live`` gives the pages of each live request and
    ``kept`` names what a ``detach`` could keep here (sorted numbers): what a new epoch may carry
    over.
    """

    rank: int
    cause: str
    at_step: int  # of ``epoch``, like all steps here; 0: a ballot of the epoch before
    posted: int
    settled: int
    headers: dict[int, Header]
    tail: list[Entry]
    held: dict[int, list[int]]
    broken_rank: int = -1
    raised: str = ""
    detail: str = ""
    live: dict[str, int] = {}
    kept: list[int] = []
    pools: dict[str, dict[str, int]] = {}
    epoch: int = -1  # after an agreed call on some ranks only not all are in the same
    pending: list[str] = []
    owes_ending: bool = False
    waiting: list[str] = []
    phase: str = ""
    waited_s: float = 0.0
    num_resets: int = 0


def packed_report(report: Report) -> bytes:
    """``report`` for the store. What cannot be written of it is told as well as it can be: nothing
    that an engine put into a decision takes the place of the error that is being reported."""
    try:
        return msgspec.msgpack.encode(report)
    except (ValueError, TypeError, OverflowError):
        return msgspec.msgpack.encode(_writable(msgspec.to_builtins(report)))


def _writable(value: object) -> object:
    """``value`` with what msgpack cannot take in another form."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return max(-(1 << 63), min(value, (1 << 63) - 1))
    if isinstance(value, dict):
        members = cast("dict[object, object]", value).items()
        return {_writable(key): _writable(one) for key, one in members}
    if isinstance(value, list | tuple):
        return [_writable(one) for one in cast("Sequence[object]", value)]
    return value


class SealedError(msgspec.Struct, frozen=True):
    """The error of a seal, in a form that crosses processes and is rebuilt on each rank."""

    kind: str
    message: str
    ranks: tuple[int, ...]
    epoch: int
    step: int
    story: tuple[str, ...] = ()
    field: str = ""
    ours: int = 0
    theirs: int = 0
    phase: str = ""
    waited_s: float = 0.0
    dead: bool = False
    raised: str = ""

    def build(self) -> KvpactError:
        """A new exception with this content."""
        where: dict[str, Any] = {
            "ranks": self.ranks,
            "epoch": self.epoch,
            "step": self.step,
            "story": self.story,
        }
        match self.kind:
            case "Divergence":
                return Divergence(
                    self.message, field=self.field, ours=self.ours, theirs=self.theirs, **where
                )
            case "RankStalled":
                return RankStalled(
                    self.message,
                    phase=self.phase,
                    waited_s=self.waited_s,
                    dead=self.dead,
                    **where,
                )
            case "PeerLost":
                return PeerLost(self.message, **where)
            case "ProgressLost":
                return ProgressLost(self.message, **where)
            case "StoreForged":
                return StoreForged(self.message, **where)
            case _:
                return PeerError(self.message, raised=self.raised, **where)


class Seal(msgspec.Struct, frozen=True):
    """The end of an epoch: settle through ``through`` with ``verdicts``, then do ``then``.

    Whoever is not in the epoch of the error has nothing to settle.

    ``then`` is ``raise``, ``reset``, ``detach``, ``observe`` or ``off`` (all ranks stop observing:
    they cannot be compared any further). ``lost`` are live requests that are
    not the same everywhere: a new epoch does not carry them over. ``kept`` is what a ``detach``
    keeps: what every rank has.
    """

    error: SealedError
    through: int
    verdicts: dict[int, list[int]]
    then: Closing = "raise"
    lost: tuple[str, ...] = ()
    kept: list[int] = []


class Incident(msgspec.Struct, frozen=True):
    """The end of an epoch as one rank saw it: what a person reads at night."""

    rank: int
    epoch: int
    seal: Seal
    reports: list[Report]
