"""One step on one rank: post the ballot, wait for its verdict, settle; close the epoch if need be.

``begin`` and ``poll`` never block, so a simulator can hold all ranks in one thread and an engine
can do something else meanwhile; ``run`` is the loop around them for everyone else.

    begin -> [lag >= 1: await and settle ballot s - lag] -> prepare, post ballot s
          -> [lag = 0: await and settle ballot s] -> outcomes
    at any point: deadline passed, transport lost, ranks differ -> closing -> the sealed error
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from consensus.ballot import Header, Status, Vector, Verdict
from consensus.epoch import Closer, Locator, Report, Seal
from consensus.errors import KvpactError, Misuse, PeerError, PeerLost
from consensus.group import Group, Work
from consensus.manager import TransactionManager
from consensus.participant import Outcome
from consensus.store import Store

__all__ = ["Beacon", "StepLimits", "Stepper"]


class StepLimits(msgspec.Struct, frozen=True):
    """Bounds of one step, in seconds.

    A rank gives up after ``deadline_s`` and then waits ``grace_s`` for what the others know. While
    it waits it looks every ``slice_s`` whether others have given up.
    """

    deadline_s: float = 30.0
    grace_s: float = 0.5
    slice_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("deadline_s", "grace_s", "slice_s"):
            if not getattr(self, name) > 0:
                raise Misuse(f"{name} must be positive, got {getattr(self, name)}")


class Beacon(Protocol):
    """Where this rank says out of band what it does; assigning, never communicating."""

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        """This rank is now in ``phase`` of ``step``."""
        ...


class Stage(enum.Enum):
    """What the stepper does next."""

    IDLE = "idle"
    AWAIT_LAGGED = "waiting for the verdict of an earlier step"
    POST = "preparing its ballot"
    AWAIT = "waiting for the verdict"
    DONE = "settled"
    CLOSING = "closing the epoch"
    CLOSED = "closed"


_HEADERS_KEPT = 8


class Stepper:
    """Drives one :class:`TransactionManager` over one :class:`Group`.

    ``prepare`` plans and reserves (it may raise: the rank then still posts, as broken, and all
    ranks raise the same error). ``settled`` gets the outcomes of each settled ballot. ``live`` digests the live requests. ``locator`` tells where
    other ranks are.
    """

    def __init__(
        self,
        manager: TransactionManager,
        group: Group,
        store: Store,
        *,
        limits: StepLimits,
        prepare: Callable[[], None],
        settled: Callable[[list[Outcome]], None],
        live: Callable[[], int],
        locator: Locator,
        beacon: Beacon | None = None,
    ) -> None:
        self.manager = manager
        self.group = group
        self.limits = limits
        self.error: KvpactError | None = None
        self.num_collectives = 0
        self.waited_s = 0.0
        self._prepare = prepare
        self._on_settled = settled
        self._live = live
        self._beacon = beacon
        self._closer = Closer(
            store=store, rank=group.rank, size=group.size, epoch=manager.epoch, locator=locator
        )
        self._works: deque[Work] = deque()
        self._headers: dict[int, Header] = {}
        self._held: dict[int, Vector] = {}
        self._posted_at: dict[int, float] = {}
        self._stage = Stage.IDLE
        self._iteration = 0
        self._outcomes: list[Outcome] = []
        self._started = group.now()
        self._waiting_since = 0.0
        self._looked_at = 0.0
        self._extended = False
        self._cause: Exception | None = None

    # -- the caller's side -----------------------------------------------------------------------

    def run(self, iteration: int) -> list[Outcome]:
        """One whole step; returns its outcomes. Raises the sealed error of a closed epoch."""
        self.begin(iteration)
        while (outcomes := self.poll()) is None:
            self.pause()
        return outcomes

    def begin(self, iteration: int) -> None:
        """Enter the step of the scheduler's ``iteration``. Raises :class:`Misuse` inside one."""
        if self.error is not None:
            raise self.error
        if self._stage is not Stage.IDLE:
            raise Misuse("step() was entered again before it had returned")
        if iteration < 0:
            raise Misuse(f"the scheduler's iteration must not be negative, got {iteration}")
        self._iteration = iteration
        self._outcomes = []
        if self.manager.lag and len(self._works) >= self.manager.lag:
            self._await(Stage.AWAIT_LAGGED)
        else:
            self._enter(Stage.POST)

    def poll(self) -> list[Outcome] | None:
        """Go on as far as possible; the outcomes once the step is over, ``None`` before."""
        if self._stage is Stage.AWAIT_LAGGED and self._settled():
            self._enter(Stage.POST)
        if self._stage is Stage.POST:
            self._post()
        if self._stage is Stage.AWAIT and self._settled():
            self._enter(Stage.DONE)
        if self._stage is Stage.CLOSING:
            self._close()
        if self._stage is Stage.DONE:
            self._enter(Stage.IDLE)
            return self._outcomes
        if self.error is not None:
            raise self.error
        return None

    def pause(self) -> None:
        """Wait a little for what :meth:`poll` is waiting for."""
        if self._stage is Stage.CLOSING or not self._works:
            time.sleep(0.005)
            return
        try:
            self._works[0].wait(self.limits.slice_s)
        except PeerLost:
            return  # poll meets it again and closes the epoch

    def attend(self) -> None:
        """Between steps: raise the error if the others have closed this epoch meanwhile."""
        if self.error is None and self._closer.is_sealed():
            self._give_up("asked", self.manager.settled_step + 1)
            self._close()
        if self.error is not None:
            raise self.error

    @property
    def stage(self) -> str:
        """What this rank is doing, in words."""
        return self._stage.value

    @property
    def num_in_flight(self) -> int:
        """Ballots posted and not settled."""
        return len(self._works)

    # -- inside ----------------------------------------------------------------------------------

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        if self._beacon is not None:
            manager = self.manager
            self._beacon.at(manager.epoch, manager.step, stage.value, self.num_collectives)

    def _await(self, stage: Stage) -> None:
        self._waiting_since = self._looked_at = self.group.now()
        self._extended = False
        self._enter(stage)

    def _post(self) -> None:
        """Post the ballot, whatever happens before: a rank that keeps silent stalls all others."""
        status = Status.HEALTHY
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it
            self._cause = error
            status = Status.BROKEN
        manager = self.manager
        now = self.group.now()
        vector = manager.post(
            self._iteration,
            live=self._live(),
            now_ms=int((now - self._started) * 1000),
            status=status,
        )
        posted = manager.step
        self._posted_at[posted] = now
        self._posted_at.pop(posted - manager.lag - 2, None)
        self._headers[posted] = manager.newest_header
        self._headers.pop(posted - manager.lag - _HEADERS_KEPT, None)
        self.num_collectives += 1
        self._works.append(self.group.min(vector))
        if manager.lag:
            self._enter(Stage.DONE)
        else:
            self._await(Stage.AWAIT)

    def _settled(self) -> bool:
        """Settle the oldest ballot if its verdict is there; start closing where that cannot be."""
        step = self.manager.settled_step + 1
        now = self.group.now()
        try:
            done = self._works[0].done()
        except PeerLost as error:
            self._give_up("lost", step, detail=error.message)
            return False
        if not done:
            self._look_around(step, now)
            return False
        self.waited_s += now - self._waiting_since
        reduced = self._works[0].result()
        verdict = self.manager.read(reduced)
        if verdict.mismatch:
            self._give_up("mismatch", step)
            return False
        if verdict.status is Status.BROKEN:
            self._give_up("broken", step, broken_rank=verdict.status_rank)
            return False
        if self._is_late(step, now) and not self._closer.claim_settled(step):
            self._give_up("late", step)
            return False
        self._works.popleft()
        self._apply(step, reduced, verdict)
        return True

    def _apply(self, step: int, reduced: Vector, verdict: Verdict) -> None:
        self._held[step] = reduced
        self._held.pop(step - self.manager.lag - 2, None)
        outcomes = self.manager.settle(verdict)
        self._on_settled(outcomes)
        self._outcomes += outcomes

    def _is_late(self, step: int, now: float) -> bool:
        """Whether others may have given ``step`` up by now.

        They wait at least ``deadline_s`` after they posted it, which they did after this rank had
        posted the ballot before it. So a rank that is quick needs no word with the store.
        """
        before = self._posted_at.get(step - 1, self._started)
        return now - before >= 0.9 * self.limits.deadline_s

    def _look_around(self, step: int, now: float) -> None:
        if now - self._looked_at >= self.limits.slice_s:
            self._looked_at = now
            if self._closer.is_sealed():
                self._give_up("asked", step)
                return
        patience = self.limits.deadline_s * (2 if self._extended else 1)
        if now - self._waiting_since < patience:
            return
        if not self._extended and not self._closer.claim_given_up(step):
            # A straggler has settled this step: its verdict is on the way to this rank too.
            self._extended = True
            return
        self._give_up("waited", step)

    def _give_up(self, cause: str, step: int, *, broken_rank: int = -1, detail: str = "") -> None:
        manager = self.manager
        if broken_rank == self.group.rank and self._cause is not None:
            detail = f"{type(self._cause).__name__}: {self._cause}"
        grace_s = self.limits.grace_s
        if cause not in ("waited", "late"):
            grace_s += self.limits.deadline_s  # the others have not waited yet
        manager.journal.flush()
        self._closer.file(
            Report(
                rank=self.group.rank,
                cause=cause,
                at_step=step,
                posted=manager.step,
                settled=manager.settled_step,
                headers=dict(self._headers),
                tail=manager.journal.tail(),
                held={key: vector.tolist() for key, vector in self._held.items()},
                broken_rank=broken_rank,
                detail=detail,
            ),
            self.group.now(),
            grace_s,
        )
        self._enter(Stage.CLOSING)

    def _close(self) -> None:
        seal = self._closer.poll(self.group.now())
        if seal is None:
            return
        self._settle_through(seal)
        self.error = seal.error.build()
        self.error.__cause__ = self._cause
        self._enter(Stage.CLOSED)
        self.group.close()
        raise self.error

    def _settle_through(self, seal: Seal) -> None:
        """Settle what any rank has settled, so that a step is settled on all ranks or on none."""
        while (step := self.manager.settled_step + 1) <= min(seal.through, self.manager.step):
            vector = seal.verdicts.get(step)
            if vector is None:
                raise PeerError(
                    f"step {step} was settled elsewhere but its verdict is lost", step=step
                )
            reduced = np.array(vector, dtype=np.int64)
            self._apply(step, reduced, self.manager.read(reduced))
