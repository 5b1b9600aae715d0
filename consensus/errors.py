"""Every error kvpact raises, split by who is to blame.

The caller misused the API (:class:`Misuse`), another rank misbehaved (:class:`PeerError`), a
resource ran out or fell silent (:class:`ResourceError`), or it is our bug (:class:`InternalError`).
Each says where it happened (``rank, epoch, step``), tells the story (the journal lines that lead
to it) and survives pickling, because errors cross process boundaries on their way to a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "BadInput",
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
    "StoreSilent",
]


class KvpactError(Exception):
    """Base of all errors of kvpact.

    ``rank`` is the rank (or ranks) the error is about, not the one that raises it; ``None`` where
    no single rank is concerned. ``story`` holds readable lines, oldest first.
    """

    advice: str = ""

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
    """Another rank did not do what every rank must do."""


class Divergence(PeerError):
    """Ranks differ in a fact that must be equal everywhere.

    ``field`` is the first header field that differs, ``ours`` its value on the majority (or on
    the lowest rank, where there is none), ``theirs`` the value on the named ranks.
    """

    advice = (
        "look at the first decision that differs, in the story above: a call that changes the"
        " cache was made on one rank only, or in another order"
    )

    def __init__(
        self, message: str, *, field: str = "", ours: int = 0, theirs: int = 0, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class RankStalled(PeerError):
    """A rank did not come to a step within its deadline."""

    advice = "look at the named rank: its last phase and its stack say where it is"

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


class PeerLost(PeerError):
    """The connection to another rank broke: its process ended or its network is gone."""

    advice = "look at why the process of the named rank ended (out of memory, killed, crashed)"


class PeerLeft(PeerError):
    """A rank has left in good order: nobody can step on without it."""


class ProgressLost(PeerError):
    """All ranks agree, but an open intent has outlived every bound: they wait together."""


class ResourceError(KvpactError):
    """Something this rank needs ran out: a queue is full, a pool is too small."""


class StoreSilent(ResourceError):
    """The store did not answer within its bound."""

    advice = "check the host that serves the store; kvpact cannot name ranks without it"


class InternalError(KvpactError):
    """A bug in kvpact: an invariant does not hold."""

    advice = "this is a bug in kvpact: please report it with the journals of all ranks"
