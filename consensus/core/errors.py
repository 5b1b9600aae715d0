"""Every error kvpact raises, split by who is to blame.

The caller misused the API (:class:`Misuse`), another rank misbehaved (:class:`PeerError`), a
resource ran out or fell silent (:class:`ResourceError`), or it is our bug (:class:`InternalError`).
Each says where it happened (``rank, epoch, step``), tells the story (the journal lines that lead
to it) and survives pickling, because errors cross process boundaries on their way to a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

__all__ = [
    "BadInput",
    "ConservationBroken",
    "Divergence",
    "InternalError",
    "KvpactError",
    "Misuse",
    "PeerError",
    "PeerLeft",
    "PeerLost",
    "ProgressLost",
    "RankStalled",
    "ResourceError",
    "StoreForged",
    "StoreSilent",
]


#: What to look at where ranks differ in a field of the ballot's header.
_BY_FIELD: Final = {
    "schema": "start all ranks with the same configuration and the same version of kvpact",
    "epoch": "one rank alone called reset(): such calls are made on every rank between the same two"
    " steps",
    "step": "a collective was skipped or made twice: find who else posts to this group",
    "iteration": "the named rank's scheduler skipped or repeated an iteration: step() belongs at"
    " one place of its loop, unconditionally, also when the engine is idle; or it alone called"
    " decide(): that must hang on agreed state",
    "round": "decide() was called on some ranks only: it must hang on agreed state",
    "fingerprint": "look at the first decision that differs: that call was made on some ranks only,"
    " in another order or with other arguments; find what made the named rank's scheduler choose"
    " differently (a clock, a set, an abort that reached one rank first)",
    "live": "an abort or an admission reached some ranks in another step than the others: hand them"
    " to all ranks with the same iteration",
}
_WHEN_DEAD: Final = (
    "its process has ended: look at its output, its exit code and the log of the kernel (out of"
    " memory?); the others cannot go on without it, start the replica again"
)


class KvpactError(Exception):
    """Base of all errors of kvpact.

    ``rank`` is the rank (or ranks) the error is about, not the one that raises it; ``None`` where
    no single rank is concerned. ``story`` holds readable lines, oldest first.
    """

    _advice: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        ranks: Sequence[int] = (),
        epoch: int | None = None,
        step: int | None = None,
        story: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.ranks: tuple[int, ...] = tuple(ranks) if ranks else (() if rank is None else (rank,))
        self.rank: int | None = (
            rank if rank is not None else (self.ranks[0] if self.ranks else None)
        )
        self.epoch = epoch
        self.step = step
        self.story: tuple[str, ...] = tuple(story)

    @property
    def advice(self) -> str:
        """Advice for the reader; may be empty."""
        return self._advice

    def __str__(self) -> str:
        place = [
            f"{name} {value}"
            for name, value in (("epoch", self.epoch), ("step", self.step))
            if value is not None
        ]
        lines = [self.message + (f" ({', '.join(place)})" if place else "")]
        lines += [f"    {line}" for line in self.story]
        if self.advice:
            lines.append(f"  what to do: {self.advice}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """All that it says, on one line: what a log or another library prints of an error."""
        given = {name: getattr(self, name) for name in ("ranks", "epoch", "step", "story")}
        inside = [f"{name}={value!r}" for name, value in given.items() if value not in (None, ())]
        return f"{type(self).__name__}({', '.join([repr(self.message), *inside])})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[KvpactError], state: dict[str, Any]) -> KvpactError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class Misuse(KvpactError):
    """The caller broke the contract of the API. Nothing was changed."""


class BadInput(Misuse):
    """A file, a flag or a configuration is not usable. The message says where and what."""


class PeerError(KvpactError):
    """Another rank did not do what every rank must do.

    ``raised`` is the class of the exception that it met, by name; empty where it met none.
    """

    _advice = "look at the log of the named rank: its exception stands there with its traceback"

    def __init__(self, message: str, *, raised: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.raised = raised


class Divergence(PeerError):
    """Ranks differ in a fact that must be equal everywhere.

    ``field`` is the first header field that differs, ``ours`` its value on the majority (or on
    the lowest rank, where there is none), ``theirs`` the value on the named ranks.
    """

    def __init__(
        self, message: str, *, field: str = "", ours: int = 0, theirs: int = 0, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.field = field
        self.ours = ours
        self.theirs = theirs

    @property
    def advice(self) -> str:
        """Advice by the field that differs."""
        where = _BY_FIELD.get(self.field, "find out who else posts to this group")
        return where if len(self.ranks) < 2 else f"{where}; without a majority ask all named ranks"


class RankStalled(PeerError):
    """A rank did not come to a step within its deadline."""

    _advice = (
        "look at the stack of the named rank: there its scheduler is; if it is away for good reason"
        " (graph capture, weight update), put that into paused(reason), or raise deadline_s"
    )

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        waited_s: float = 0.0,
        dead: bool = False,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.phase = phase
        self.waited_s = waited_s
        self.dead = dead

    @property
    def advice(self) -> str:
        """Advice for a process that has ended, or for a thread that does not come."""
        return _WHEN_DEAD if self.dead else self._advice


class PeerLost(PeerError):
    """The connection to another rank broke: its process ended or its network is gone."""

    _advice = (
        "look at why the process of the named rank ended (out of memory, killed, crashed), and"
        " where it lives, at the network"
    )


class PeerLeft(PeerError):
    """A rank has left in good order: nobody can step on without it."""

    _advice = "nothing is wrong: end this replica, or form a new one without that rank"


class ProgressLost(PeerError):
    """All ranks agree, but an intent or a ticket has outlived every bound: they wait together."""

    _advice = (
        "look at what it waits for: which copy has not ended on the named ranks, and who pins the"
        " pages of its pool"
    )


class ResourceError(KvpactError):
    """Something this rank needs ran out: a queue is full, a pool is too small."""

    _advice = "raise the limit that the message names, or ask for less at a time"


class StoreSilent(ResourceError):
    """The store did not answer within its bound."""

    _advice = "check the host that serves the store; kvpact cannot name ranks without it"


class StoreForged(StoreSilent):
    """A value in the store was not written by a rank of this run, so the store is of no use."""

    _advice = (
        "find out who else writes to this store; give the run a secret (KVPACT_SECRET, the same on"
        " every rank) and a port that only its hosts reach"
    )


class InternalError(KvpactError):
    """A bug in kvpact: an invariant does not hold."""

    _advice = "this is a bug in kvpact: please report it with the journals of all ranks"


class ConservationBroken(InternalError):
    """A bug in kvpact: a page has two owners or none, or an account of pages does not add up."""
