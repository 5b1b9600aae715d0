"""The ballot: one fixed-shape int64 vector per step, reduced with MIN over all ranks.

Layout (``width`` numbers)::

    | header: 7 pairs [x, -x] | status | clock_ms | usable per pool | [vote, ended] x num_slots |

MIN is the only operation. A MAX is written as ``-x``, equality as the pair ``[x, -x]`` (equal on
all ranks iff ``min(x) == -min(-x)``), AND as a 0/1 per field. A packed bitmask is never reduced.
Whoever receives the reduced vector learns *that* ranks differ, and in which field; *who* differs is
found afterwards, off the normal path, by :mod:`kvpact.consensus.epoch.closing`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpact.consensus.core.errors import Misuse

__all__ = [
    "HEADER_FIELDS",
    "MASK62",
    "Header",
    "Schema",
    "Status",
    "Verdict",
    "repeated",
    "tally",
    "told_the_same",
]

Vector = NDArray[np.int64]

#: Header values stay below 2**62 so that their negation and any sum of two fit an int64.
MASK62 = (1 << 62) - 1

#: In the order in which a difference is reported: the first one that differs names the cause.
HEADER_FIELDS = ("schema", "epoch", "step", "iteration", "round", "fingerprint", "live")

_STEP = 2 * HEADER_FIELDS.index("step")
_ITERATION = 2 * HEADER_FIELDS.index("iteration")
_STATUS = 2 * len(HEADER_FIELDS)
_CLOCK = _STATUS + 1
_POOLS = _CLOCK + 1
_MAX_RANKS = 1 << 20


class Status(enum.IntEnum):
    """A rank's word on itself; the worst one of all ranks is the status of the step."""

    HEALTHY = 0
    LEAVING = 1  # ends in good order after this step
    BROKEN = 2  # an exception was raised on the way to this ballot: its votes are 0


class Header(msgspec.Struct, frozen=True):
    """The part of a ballot that must be equal on all ranks; every value is in ``0..MASK62``."""

    schema: int
    epoch: int
    step: int
    iteration: int
    round: int
    fingerprint: int
    live: int


class Schema(msgspec.Struct, frozen=True):
    """The shape of every ballot of a replica: fixed by configuration, equal on all ranks.

    ``pools`` are the pools whose usable pages are agreed, in canonical (sorted) order.
    """

    pools: tuple[str, ...]
    num_slots: int = 256

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.pools))) != self.pools:
            raise Misuse(f"pools must be sorted and distinct, got {self.pools}")
        if self.num_slots < 1:
            raise Misuse(f"num_slots must be at least 1, got {self.num_slots}")

    @property
    def width(self) -> int:
        """How many int64 numbers a ballot has."""
        return _POOLS + len(self.pools) + 2 * self.num_slots

    @property
    def first_slot(self) -> int:
        """Position of slot 0: its vote, followed by its ``ended``."""
        return _POOLS + len(self.pools)

    @property
    def digest(self) -> int:
        """A number below 2**62 that differs between different schemas."""
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(self)) & MASK62

    def ballot(
        self,
        rank: int,
        header: Header,
        status: Status,
        clock_ms: int,
        usable: Mapping[str, int],
    ) -> Vector:
        """A new ballot with all slots 0; the caller writes the slots of its open intents."""
        if not 0 <= rank < _MAX_RANKS:
            raise Misuse(f"rank must be in 0..{_MAX_RANKS - 1}, got {rank}")
        first_slot = _POOLS + len(self.pools)
        vector = np.zeros(first_slot + 2 * self.num_slots, dtype=np.int64)
        values = msgspec.structs.astuple(header)
        vector[0:_STATUS:2] = values
        vector[1:_STATUS:2] = [-value for value in values]
        # The worst status wins, and among equals the highest rank: so a broken rank is named.
        vector[_STATUS] = 0 if status is Status.HEALTHY else -(int(status) * _MAX_RANKS + rank)
        vector[_CLOCK] = clock_ms
        vector[_POOLS:first_slot] = [usable[pool] for pool in self.pools]
        return vector


class Verdict(msgspec.Struct, frozen=True):
    """A reduced ballot, read: the same for everyone.

    ``mismatch`` names the first header field in which ranks differ (empty: none). ``step`` is the
    step of the ballot. ``votes`` and ``ended`` are the reduced slot columns, indexed by slot.
    """

    step: int
    mismatch: str
    lowest: int
    highest: int
    status: Status
    status_rank: int
    clock_ms: int
    usable: dict[str, int]
    votes: list[int]
    ended: list[int]


def tally(schema: Schema, reduced: Vector, num_slots: int | None = None) -> Verdict:
    """Read a reduced ballot. Pure: the same vector gives the same verdict everywhere.

    ``num_slots``: only so many slots are read, from slot 0 on (``None``: all of them).

    Raises :class:`Misuse` for a vector of another shape.
    """
    first_slot = _POOLS + len(schema.pools)
    width = first_slot + 2 * schema.num_slots
    if reduced.shape != (width,):
        raise Misuse(f"a ballot has {width} numbers, got shape {reduced.shape}")
    head: list[int] = reduced[:first_slot].tolist()
    last = width if num_slots is None else first_slot + 2 * num_slots
    slots: list[int] = reduced[first_slot:last].tolist()
    mismatch, lowest, highest = "", 0, 0
    for position, name in enumerate(HEADER_FIELDS):
        low, high = head[2 * position], -head[2 * position + 1]
        if low != high:
            mismatch, lowest, highest = name, low, high
            break
    worst = -head[_STATUS]
    return Verdict(
        step=head[_STEP],
        mismatch=mismatch,
        lowest=lowest,
        highest=highest,
        status=Status(worst // _MAX_RANKS),
        status_rank=worst % _MAX_RANKS if worst else -1,
        clock_ms=head[_CLOCK],
        usable=dict(zip(schema.pools, head[_POOLS:], strict=True)),
        votes=slots[0::2],
        ended=slots[1::2],
    )


def repeated(ballot: Vector, step: int, iteration: int, clock_ms: int) -> Vector:
    """A new ballot that says what ``ballot`` says, of another step."""
    vector = ballot.copy()
    vector[_STEP : _STEP + 2] = step, -step
    vector[_ITERATION : _ITERATION + 2] = iteration, -iteration
    vector[_CLOCK] = clock_ms
    return vector


def told_the_same(reduced: Vector, posted: Vector, usable: list[int]) -> int:
    """The agreed clock, where all ranks said what ``posted`` says; -1 where they did not.

    ``usable`` are the pages by pool that were agreed before. For ballots that carry no intent.
    """
    head: list[int] = reduced[: _POOLS + len(usable)].tolist()
    is_same = head[:_CLOCK] == posted[:_CLOCK].tolist() and head[_POOLS:] == usable
    return head[_CLOCK] if is_same else -1
