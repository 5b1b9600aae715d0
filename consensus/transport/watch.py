"""The watch: every rank says out of band which step it is in, so that a stall has a name.

The scheduler's thread only assigns an attribute. A daemon thread publishes it through the store,
also while the scheduler's thread hangs in a collective or a forward pass, and answers with that
thread's stack when a peer asks for it. Nothing here enters a decision; a store that is silent is
noted, and no exception leaves the thread.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from kvpact.consensus.core.errors import Misuse, StoreSilent
from kvpact.consensus.transport.envelope import decode

if TYPE_CHECKING:  # it brings torch, which the watch itself does not need
    from kvpact.consensus.transport.store import Store

__all__ = [
    "LEFT",
    "Life",
    "Position",
    "Sighting",
    "Watch",
    "machine",
    "process_life",
    "process_start",
]

_log = logging.getLogger("kvpact")

#: The phase of a rank whose watch was stopped in good order.
LEFT = "left"

#: How much of a stack is sent: its innermost frames.
MAX_FRAMES = 50
#: Beats in which a living rank must be seen to move.
BEATS_TO_JUDGE = 4


class Life(enum.Enum):
    """The life of a rank's process, as far as it is known."""

    BEATING = "beating"  # its heartbeat goes on: if it is late, its scheduler's thread is stuck
    STOPPED = "stopped"  # suspended by a signal or a debugger (seen on the same host only)
    SILENT = "silent"  # its heartbeat stopped, for reasons that cannot be seen from here
    GONE = "gone"  # its process does not exist any more (seen on the same host only)
    LEFT = "left"  # its watch was stopped in good order
    UNSEEN = "unseen"  # it never published anything


class Position(msgspec.Struct, frozen=True):
    """The position that a rank has published.

    ``posted`` counts the collectives it has posted, ``since_s`` is how long it had been in
    ``phase`` when it said so, ``beat`` grows with each publication. ``started`` tells one process
    from a later one with the same ``pid``, and ``machine`` (boot and pid namespace) whether a
    ``pid`` means anything here.
    """

    rank: int
    epoch: int
    step: int
    phase: str
    posted: int
    since_s: float
    beat: int
    pid: int
    started: int
    host: str
    machine: str


class Sighting(msgspec.Struct, frozen=True):
    """A rank as seen from here: ``unseen_s`` is how long its heartbeat is known to stand still."""

    rank: int
    life: Life
    position: Position | None
    unseen_s: float

    def __str__(self) -> str:
        if self.position is None:
            return f"rank {self.rank}: {self.life.value}"
        at = self.position
        return (
            f"rank {self.rank}: {self.life.value}, in '{at.phase}' of step {at.step}"
            f" (epoch {at.epoch}) for {at.since_s + self.unseen_s:.1f} s,"
            f" {at.posted} collectives posted, pid {at.pid} on {at.host}"
        )


class _Stack(msgspec.Struct, frozen=True):
    """The answer to a question: the question itself, and the stack as text."""

    question: str
    text: str


def process_life(pid: int, started: int) -> Life:
    """BEATING, STOPPED or GONE: the state of process ``pid`` of this machine (Linux: /proc).

    A zombie is gone, and so is a process whose ``pid`` was given away again. Elsewhere than on
    Linux ``started`` is ignored.
    """
    state, begun = _process_stat(pid)
    if state:
        if state in "ZX" or (started and begun != started):
            return Life.GONE
        return Life.STOPPED if state in "Tt" else Life.BEATING
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Life.GONE
    except PermissionError:
        pass
    return Life.BEATING


def _process_stat(pid: int) -> tuple[str, int]:
    """State letter and start time (clock ticks since boot); ``("", 0)`` where unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def process_start(pid: int) -> int:
    """When a process of this machine started (clock ticks since boot); 0 where unknown."""
    return _process_stat(pid)[1]


@functools.cache
def machine() -> str:
    """Equal where a pid means the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Watch:
    """Publishes where this rank is, and reads where the others are.

    ``store`` should be a client of its own: a call of its thread may hang. ``clock`` (monotonic
    seconds), ``sleep`` and ``probe`` (life of a process of this machine) can be replaced in tests;
    then ``beat`` is called instead of ``start``.

    ``silent_since_s`` is the clock at which the store fell silent (``None``: it answers), and
    ``num_silences`` counts how often it did;
    ``trouble`` is the last unexpected error of the thread, as text.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        name: str = "watch",
        interval_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        probe: Callable[[int, int], Life] = process_life,
    ) -> None:
        if interval_s <= 0:
            raise Misuse(f"interval_s must be above 0, got {interval_s}")
        self.rank = rank
        self.interval_s = interval_s
        self.silent_since_s: float | None = None
        self.num_silences = 0
        self.trouble = ""
        self._store = store
        self._name = name
        self._clock = clock
        self._sleep = sleep
        self._probe = probe
        self._pid = os.getpid()
        self._started = _process_stat(self._pid)[1]
        self._host = socket.gethostname()
        self._machine = machine()
        self._beat = 0
        self._num_questions = 0
        self._answered = ""
        # rank -> (process start, beat, clock at which this beat was first seen here)
        self._seen: dict[int, tuple[int, int, float]] = {}
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self.at(0, 0, "starting", 0)

    # ---------------------------------------------------------------------- saying where we are

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        """Say where the calling thread is. One assignment: no lock, no communication."""
        # One tuple, so that the other thread never sees half of a change.
        self._here = (epoch, step, phase, posted, self._clock(), threading.get_ident())

    def start(self) -> None:
        """Start the heartbeat thread. Only once."""
        if self._thread is not None:
            raise Misuse(f"the watch of rank {self.rank} was started already")
        self._thread = threading.Thread(
            target=self._run, name=f"kvpact-watch {self.rank}", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Publish LEFT and end the thread, within ``timeout_s``; ``False``: it still hangs."""
        epoch, step, _, posted, *_ = self._here
        self.at(epoch, step, LEFT, posted)
        self._leaving.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def beat(self) -> None:
        """Publish the position once and answer who asks. Raises :class:`StoreSilent`."""
        epoch, step, phase, posted, since_s, thread_id = self._here
        self._beat += 1
        position = Position(
            rank=self.rank,
            epoch=epoch,
            step=step,
            phase=phase,
            posted=posted,
            since_s=max(0.0, self._clock() - since_s),
            beat=self._beat,
            pid=self._pid,
            started=self._started,
            host=self._host,
            machine=self._machine,
        )
        self._store.set(self._key("at", self.rank), msgspec.msgpack.encode(position))
        question = (self._store.get(self._key("ask", self.rank)) or b"").decode()
        if question != self._answered:
            answer = _Stack(question, _stack_of(thread_id))
            self._store.set(self._key("stack", self.rank), msgspec.msgpack.encode(answer))
            self._answered = question

    def _run(self) -> None:
        while True:
            leaving = self._leaving.is_set()
            try:
                self.beat()
                self._heard()
            except StoreSilent as error:
                self._unheard(error, leaving)
            except Exception as error:  # noqa: BLE001  nothing may leave this thread
                self.trouble = repr(error)
            if leaving:
                return
            self._leaving.wait(self.interval_s)

    def _heard(self) -> None:
        if self.silent_since_s is not None:
            silent_s = self._clock() - self.silent_since_s
            _log.warning("rank %d: the store answers again, after %.1f s", self.rank, silent_s)
        self.silent_since_s = None

    def _unheard(self, error: StoreSilent, leaving: bool) -> None:
        """Say once that the store is lost, not at every beat; a rank that leaves does not care."""
        if self.silent_since_s is None:
            self.silent_since_s = self._clock()
            self.num_silences += 1
            if not leaving:
                _log.warning("rank %d: %s; steps go on without it", self.rank, error.message)

    # -------------------------------------------------------------------- seeing where others are

    def positions(self, ranks: Iterable[int]) -> dict[int, Position | None]:
        """Return each rank's newest position (``None``: none). Raises :class:`StoreSilent`."""
        now_s = self._clock()
        found: dict[int, Position | None] = {}
        for rank in ranks:
            value = self._store.get(self._key("at", rank))
            found[rank] = position = self._position(rank, value)
            if position is not None:
                mark = (position.started, position.beat)
                if self._seen.get(rank, (0, 0, 0.0))[:2] != mark:
                    self._seen[rank] = (*mark, now_s)
        return found

    def judge(self, ranks: Iterable[int], within_s: float | None = None) -> dict[int, Sighting]:
        """Tell dead, stopped, silent and living ranks apart; takes at most about ``within_s``.

        Waits until each heartbeat has been seen to move, or ``within_s`` (default: 4 beats) have
        passed. Not for the normal path. Raises :class:`StoreSilent`.
        """
        limit_s = self.interval_s * BEATS_TO_JUDGE if within_s is None else within_s
        began_s = self._clock()
        first = self.positions(ranks)
        judged: dict[int, Sighting] = {}
        latest = first
        while True:
            waited_s = self._clock() - began_s
            for rank, position in latest.items():
                before = first[rank]
                moved = position is not None and (before is None or position.beat != before.beat)
                life = self._life(rank, position, moved, limit_s, waited_s)
                if life is not None:
                    judged[rank] = self._sighting(rank, life, position)
            if len(judged) == len(first):
                return {rank: judged[rank] for rank in first}
            self._sleep(min(self.interval_s / 2, max(0.0, limit_s - waited_s)))
            latest = self.positions(rank for rank in first if rank not in judged)

    def stacks(self, ranks: Iterable[int], timeout_s: float = 1.0) -> dict[int, str]:
        """Ask ranks for the stack of their scheduler's thread; has only those that answered.

        Waits at most about ``timeout_s``. Raises :class:`StoreSilent`.
        """
        end_s = self._clock() + timeout_s
        self._num_questions += 1
        question = f"{self.rank}.{self._pid}.{self._num_questions}"
        waiting = list(ranks)
        earlier = {rank: self._answer(rank) for rank in waiting}
        for rank in waiting:
            self._store.set(self._key("ask", rank), question.encode())
        found: dict[int, str] = {}
        while True:
            for rank in waiting:
                answer = self._answer(rank)
                # An answer to someone who asked meanwhile is as good.
                if answer is not None and answer != earlier[rank]:
                    found[rank] = answer.text
            waiting = [rank for rank in waiting if rank not in found]
            left_s = end_s - self._clock()
            if not waiting or left_s <= 0:
                return found
            self._sleep(min(self.interval_s / 2, left_s))

    def _life(
        self, rank: int, position: Position | None, moved: bool, limit_s: float, waited_s: float
    ) -> Life | None:
        """The life of a rank, or ``None``: wait and look again."""
        if position is None:
            return Life.UNSEEN if waited_s >= limit_s else None
        if position.phase == LEFT:
            return Life.LEFT
        if position.machine == self._machine:
            life = self._probe(position.pid, position.started)
            if life is not Life.BEATING:
                return life
        if moved:
            return Life.BEATING
        is_still = max(waited_s, self._unseen_s(rank)) >= limit_s
        return Life.SILENT if is_still else None

    def _sighting(self, rank: int, life: Life, position: Position | None) -> Sighting:
        unseen_s = 0.0 if life is Life.BEATING or position is None else self._unseen_s(rank)
        return Sighting(rank=rank, life=life, position=position, unseen_s=unseen_s)

    def _unseen_s(self, rank: int) -> float:
        return self._clock() - self._seen[rank][2]

    def _answer(self, rank: int) -> _Stack | None:
        value = self._store.get(self._key("stack", rank))
        return None if value is None else decode(self._key("stack", rank), value, _Stack)

    def _position(self, rank: int, value: bytes | None) -> Position | None:
        return None if value is None else decode(self._key("at", rank), value, Position)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"


def _stack_of(thread_id: int) -> str:
    """The Python stack of a thread of this process, innermost frame last."""
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "the thread has ended"
    return "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
