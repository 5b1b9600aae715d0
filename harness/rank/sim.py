"""All ranks in one thread under a virtual clock: deterministic, replayable from a seed.

A rank is a generator that yields a :class:`Pause`: for so long, or until something has changed.
The network pairs collectives as raw gloo does: the k-th call of each rank belongs together,
whatever the ranks meant by it.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Generator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.core.errors import Misuse, PeerLost, ResourceError
from kvpact.consensus.epoch.report import LastSeen
from kvpact.consensus.step.wait import PAUSED
from kvpact.consensus.transport.collective import MAX_OUTSTANDING, ProcessGroup, Work

__all__ = ["Pause", "Program", "SimClock", "SimGroup", "SimNet", "run_programs"]

Vector = NDArray[np.int64]
#: Which collective: the epoch of its group, and how many that group had before.
Index = tuple[int, int]

#: How far the clock moves at most while everyone waits: a rank looks around as often as a real one.
SLICE_S = 0.05


class Pause(msgspec.Struct, frozen=True):
    """``seconds`` of virtual time; 0: until something else has changed."""

    seconds: float = 0.0


Program = Generator[Pause, None, None]


class SimClock:
    """Seconds since the world began."""

    def __init__(self) -> None:
        self.now_s = 0.0


class _Call:
    """One collective of the network: what has arrived, and the result once all have."""

    __slots__ = ("num_read", "result", "vectors")

    def __init__(self) -> None:
        self.vectors: dict[int, Vector] = {}
        self.result: Vector | None = None
        self.num_read = 0


class SimNet:
    """What connects ``size`` simulated ranks; ``dead`` ranks broke their connections."""

    def __init__(self, size: int, width: int, clock: SimClock) -> None:
        self.size = size
        self.width = width
        self.clock = clock
        self.changes = 0
        self.dead: list[int] = []
        self._left: dict[int, list[int]] = {}  # by epoch: who has closed its group
        self._calls: dict[Index, _Call] = {}
        self._places: dict[int, tuple[int, str, float]] = {}

    def put(self, rank: int, index: Index, vector: Vector) -> None:
        """The ``index``-th call of ``rank``."""
        call = self._calls.setdefault(index, _Call())
        call.vectors[rank] = vector
        self.changes += 1
        if len(call.vectors) == self.size and not self._left.get(index[0]):
            result: Vector = np.minimum.reduce([call.vectors[r] for r in sorted(call.vectors)])
            result.flags.writeable = False
            call.result = result

    def take(self, index: Index) -> Vector | None:
        """The result of the ``index``-th call. Raises :class:`PeerLost` where it cannot come."""
        call = self._calls[index]
        left = self._left.get(index[0], [])
        gone = [rank for rank in self.dead if rank not in call.vectors]
        if call.result is None and (left or gone):
            raise PeerLost("the connection was closed by a peer", ranks=(*left, *gone))
        return call.result

    def forget(self, index: Index) -> None:
        """One rank has read the result; the last one frees it."""
        call = self._calls[index]
        call.num_read += 1
        if call.num_read == self.size:
            del self._calls[index]

    def kill(self, rank: int) -> None:
        """The process of ``rank`` ends."""
        self.dead.append(rank)
        self.changes += 1

    def leave(self, rank: int, epoch: int) -> None:
        """``rank`` closes its group: who still waits for it there learns that."""
        left = self._left.setdefault(epoch, [])
        if rank not in left:
            left.append(rank)
            self.changes += 1

    def place(self, rank: int, step: int, phase: str) -> None:
        """Where ``rank`` says it is."""
        self._places[rank] = (step, phase, self.clock.now_s)

    # What the ranks ask out of band (consensus.epoch.Locator).

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended."""
        return rank in self.dead

    def is_paused(self, rank: int) -> bool:
        """Whether it said that it pauses."""
        return rank in self._places and self._places[rank][1].startswith(PAUSED)

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        """Where they were last."""
        return {rank: self._last_seen(rank) for rank in ranks}

    def _last_seen(self, rank: int) -> LastSeen | None:
        if rank not in self._places:
            return None
        step, phase, since = self._places[rank]
        return LastSeen(step, phase, self.clock.now_s - since, dead=rank in self.dead)


class SimBeacon:
    """Says where a simulated rank is."""

    def __init__(self, net: SimNet, rank: int) -> None:
        self._net = net
        self._rank = rank

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        """See :class:`kvpact.consensus.step.step.Beacon`."""
        self._net.place(self._rank, step, phase)


class SimGroup(ProcessGroup):
    """One simulated rank's group, new in each ``epoch``.

    Whatever is checked before anything reaches torch is checked here by the same code.
    """

    def __init__(
        self, net: SimNet, rank: int, epoch: int = 0, ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(f"sim/{epoch}", ranks or range(net.size), rank, net.width)
        self._epoch = epoch
        self._net = net
        self._num_calls = 0
        self._group = net
        self._flying: collections.deque[_SimWork] = collections.deque()

    def min(self, vector: Vector) -> Work:
        """See :class:`kvpact.consensus.transport.gloo.Group`."""
        self._check(vector)
        while self._flying and self._flying[0].has_result:
            self._flying.popleft()
        if len(self._flying) >= MAX_OUTSTANDING:
            raise ResourceError(f"group {self.name}: {MAX_OUTSTANDING} collectives in flight")
        index = (self._epoch, self._num_calls)
        self._num_calls += 1
        self._net.put(self.rank, index, vector.copy())
        work = _SimWork(self._net, index)
        self._flying.append(work)
        return work

    def now(self) -> float:
        """Virtual seconds."""
        return self._net.clock.now_s

    def close(self) -> None:
        """Nobody may use it any more; peers that still wait see it."""
        if self._group is not None:
            self._group = None
            self._net.leave(self.rank, self._epoch)


class _SimWork:
    """One collective in flight."""

    __slots__ = ("_index", "_net", "_result")

    def __init__(self, net: SimNet, index: Index) -> None:
        self._net = net
        self._index = index
        self._result: Vector | None = None

    @property
    def has_result(self) -> bool:
        """Whether it was asked for and is here."""
        return self._result is not None

    def done(self) -> bool:
        """See :class:`kvpact.consensus.transport.gloo.Work`."""
        if self._result is None:
            self._result = self._net.take(self._index)
            if self._result is not None:
                self._net.forget(self._index)
        return self._result is not None

    def wait(self, timeout_s: float) -> bool:
        """Nothing happens while one rank of a simulation waits: as :meth:`done`."""
        return self.done()

    def result(self) -> Vector:
        """See :class:`kvpact.consensus.transport.gloo.Work`."""
        if not self.done() or self._result is None:
            raise Misuse("result() before the collective is done")
        return self._result


def run_programs(
    programs: Sequence[Program], net: SimNet, seed: int, *, limit_s: float = 1e6
) -> None:
    """Run all ranks until their programs have ended.

    In each turn the ranks that can go on do so, in an order drawn from ``seed``. When nobody can,
    the clock moves to the next wake-up, at most :data:`SLICE_S` while somebody waits for others.
    Raises :class:`Misuse` when ``limit_s`` of virtual time have passed.
    """
    order = random.Random(seed)
    wake_at = dict.fromkeys(range(len(programs)), 0.0)
    waits = dict.fromkeys(range(len(programs)), False)
    while wake_at:
        ready = [r for r in wake_at if waits[r] or wake_at[r] <= net.clock.now_s]
        order.shuffle(ready)
        before, moved = net.changes, False
        for rank in ready:
            try:
                pause = next(programs[rank])
            except StopIteration:
                del wake_at[rank], waits[rank]
                net.changes += 1
                continue
            waits[rank] = pause.seconds <= 0
            if not waits[rank]:
                wake_at[rank] = net.clock.now_s + pause.seconds
                moved = True
        if moved or net.changes != before or not wake_at:
            continue
        _move_clock(net.clock, wake_at, waits)
        if net.clock.now_s > limit_s:
            raise Misuse(f"the simulated world did not end within {limit_s:g} s of its time")


def _move_clock(clock: SimClock, wake_at: dict[int, float], waits: dict[int, bool]) -> None:
    wakes = [wake_at[rank] for rank in wake_at if not waits[rank]]
    if any(waits.values()):
        wakes.append(clock.now_s + SLICE_S)
    clock.now_s = max(clock.now_s, min(wakes))
