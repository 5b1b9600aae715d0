"""One step on one rank: post the ballot, wait for its verdict, settle; close the epoch if need be.

``begin`` and ``poll`` never block, so a simulator can hold all ranks in one thread and an engine
can do something else meanwhile; ``run`` is the loop around them for everyone else.

    begin -> [lag >= 1: await and settle ballot s - lag] -> prepare, post ballot s
          -> [lag = 0: await and settle ballot s] -> outcomes
    at any point: deadline passed, transport lost, ranks differ -> closing -> the sealed error
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np

from consensus.ballot import Header, Status, Vector, Verdict
from consensus.epoch import Locator
from consensus.errors import (
    KvpactError,
    Misuse,
    PeerError,
    PeerLeft,
    PeerLost,
    RankStalled,
    StoreSilent,
)
from consensus.group import Group, Work
from consensus.manager import TransactionManager
from consensus.participant import Outcome
from consensus.report import Policy, Seal
from consensus.store import Store
from consensus.succession import Carrier, StepLimits, Succession

__all__ = ["PAUSED", "Beacon", "Carrier", "StepLimits", "Stepper"]

_log = logging.getLogger("kvpact")


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
    OPENING = "opening a new epoch"
    CLOSED = "closed"


_HEADERS_KEPT = 8
#: How the phase of a rank begins that pauses.
PAUSED = "paused"

#: Header fields that differ on a rank merely because an exception cut its preparation short.
_CUT_SHORT = ("", "fingerprint", "live")


class Stepper:
    """Drives one :class:`TransactionManager` over one :class:`Group`.

    ``prepare`` plans and reserves (it may raise: the rank then still posts, as broken, and all
    ranks raise the same error). ``settled`` gets the outcomes of each settled ballot. ``live``
    digests the live requests. ``locator`` tells where other ranks are. ``regroup(epoch)`` forms the
    group of a new epoch; without it the policy is to raise.
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
        carrier: Carrier,
        policy: Policy | None = None,
        regroup: Callable[[int], Group] | None = None,
        beacon: Beacon | None = None,
    ) -> None:
        self.manager = manager
        self.group = group
        self.limits = limits
        self.error: KvpactError | None = None
        self.num_steps = 0
        self.num_collectives = 0
        self.waited_s = 0.0
        self._prepare = prepare
        self._on_settled = settled
        self._live = live
        self._beacon = beacon
        self._locator = locator
        self.succession = Succession(
            manager,
            group,
            store,
            limits=limits,
            locator=locator,
            carrier=carrier,
            policy=policy or Policy(),
            regroup=regroup,
        )
        self._is_observing = False
        self._is_leaving = False
        self._works: deque[tuple[int, Work]] = deque()  # with the epoch in which each was posted
        self._headers: dict[int, Header] = {}
        self._held: dict[int, Vector] = {}
        self._posted_at: dict[int, float] = {}
        self._stage = Stage.IDLE
        self._iteration = 0
        self._outcomes: list[Outcome] = []
        self._started = group.now()
        self._waiting_since = 0.0
        self._looked_at = 0.0
        self._warned = False
        self._extended = False
        self._paused_s = 0.0
        self._closing_from = Stage.IDLE
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
        if self._stage is Stage.CLOSING:
            return  # attend() has found that the others end this epoch; poll() raises their error
        if self._stage is not Stage.IDLE:
            raise Misuse("step() was entered again before it had returned")
        if iteration < 0:
            raise Misuse(f"the scheduler's iteration must not be negative, got {iteration}")
        self._iteration = iteration
        self._outcomes = []
        self.num_steps += 1
        if self.manager.lag and len(self._works) >= self.manager.lag:
            self._await(Stage.AWAIT_LAGGED)
        else:
            self._enter(Stage.POST)

    def poll(self) -> list[Outcome] | None:
        """Go on as far as possible; the outcomes once the step is over, ``None`` before."""
        try:
            return self._go_on()
        except StoreSilent as error:
            # Nobody can be asked any more how this epoch ends.
            self._end(error)
            raise
        except (RankStalled, PeerLost) as error:
            if self._stage is Stage.OPENING:
                self._end(error)
            raise

    def _go_on(self) -> list[Outcome] | None:
        if self._stage is Stage.AWAIT_LAGGED and self._settled():
            self._enter(Stage.POST)
        if self._stage is Stage.POST:
            self._post()
        if self._stage is Stage.AWAIT and self._settled():
            self._enter(Stage.DONE)
        if self._stage is Stage.CLOSING:
            self._close()
        if self._stage is Stage.OPENING:
            self._open()
        if self._stage is Stage.POST:
            self._post()
        if self._stage is Stage.DONE:
            self._enter(Stage.IDLE)
            return self._outcomes
        if self.error is not None:
            raise self.error
        return None

    def pause(self) -> None:
        """Wait a little for what :meth:`poll` is waiting for."""
        if self._stage in (Stage.CLOSING, Stage.OPENING) or not self._works:
            time.sleep(0.005)
            return
        try:
            self._works[0][1].wait(self.limits.slice_s)
        except PeerLost:
            return  # poll meets it again and closes the epoch

    def attend(self) -> None:
        """Between steps: hear whether the others end this epoch; raise the error once it stands."""
        if self._stage is Stage.IDLE and self._are_others_closing():
            self._give_up("asked", self.manager.settled_step + 1)
        if self._stage is Stage.CLOSING:
            self.poll()
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Between steps: this rank will be away for longer (graph capture, weight update).

        The others wait for it beyond their deadline, and the agreed clock stands still.
        """
        began = self.group.now()
        if self._beacon is not None:
            manager = self.manager
            phase = f"{PAUSED}: {reason}"
            self._beacon.at(manager.epoch, manager.step, phase, self.num_collectives)
        try:
            yield
        finally:
            self._paused_s += self.group.now() - began
            self._enter(self._stage)

    def leave(self) -> None:
        """Go on stepping until :class:`PeerLeft` is raised: then all ranks have heard of it."""
        self._is_leaving = True

    def renew(self, usable: dict[str, int]) -> None:
        """An agreed call between two steps: begin a new epoch with the group as it is.

        What is in flight still arrives, and is not settled.
        """
        if self._stage is not Stage.IDLE:
            raise Misuse("a new epoch cannot begin inside a step")
        self.succession.restart(usable)
        self._forget_epoch()

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
        self._warned = self._extended = False
        self._enter(stage)

    def _post(self) -> None:
        """Post the ballot, whatever happens before: a rank that keeps silent stalls all others."""
        manager = self.manager
        try:
            self._prepare()
            healthy = Status.LEAVING if self._is_leaving else Status.HEALTHY
            vector = self._ballot(healthy, self._live())
        except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it
            self._cause = self._cause or error
            vector = self._ballot(Status.BROKEN, 0)
        posted = manager.step
        self._posted_at[posted] = self.group.now()
        self._posted_at.pop(posted - manager.lag - 2, None)
        self._headers[posted] = manager.newest_header
        self._headers.pop(posted - manager.lag - _HEADERS_KEPT, None)
        self.num_collectives += 1
        self._works.append((manager.epoch, self.group.min(vector)))
        if manager.lag:
            self._enter(Stage.DONE)
        else:
            self._await(Stage.AWAIT)

    def _ballot(self, status: Status, live: int) -> Vector:
        now_ms = int((self.group.now() - self._started - self._paused_s) * 1000)
        return self.manager.post(self._iteration, live=live, now_ms=now_ms, status=status)

    def _settled(self) -> bool:
        """Settle the oldest ballot if its verdict is there; start closing where that cannot be."""
        step = self.manager.settled_step + 1
        now = self.group.now()
        posted_in, work = self._works[0]
        try:
            done = work.done()
        except PeerLost as error:
            self._give_up("lost", step, detail=error.message)
            return False
        if not done:
            self._look_around(step, now)
            return False
        self.waited_s += now - self._waiting_since
        if posted_in != self.manager.epoch:
            self._works.popleft()
            return True
        reduced = work.result()
        verdict = self.manager.read(reduced)
        if verdict.status is Status.BROKEN and verdict.mismatch in _CUT_SHORT:
            self._give_up("broken", step, broken_rank=verdict.status_rank)
            return False
        if verdict.mismatch and not (self._is_observing and verdict.mismatch in _CUT_SHORT):
            self._give_up("mismatch", step)
            return False
        if self._is_late(step, now) and not self.succession.closer.claim_settled(step):
            self._give_up("late", step)
            return False
        self._works.popleft()
        try:
            self._apply(step, reduced, verdict)
        except Exception as error:  # noqa: BLE001 - the peers must hear of it, and they do not yet
            self._cause = self._cause or error
            self._give_up("broken", self.manager.settled_step + 1, broken_rank=self.group.rank)
            return False
        return True

    def _apply(self, step: int, reduced: Vector, verdict: Verdict) -> None:
        self._held[step] = reduced
        self._held.pop(step - self.manager.lag - 2, None)
        if self._is_observing:
            verdict = msgspec.structs.replace(verdict, mismatch="")
        if verdict.status is Status.LEAVING:
            rank = verdict.status_rank
            self.error = PeerLeft(f"rank {rank} has left in good order", rank=rank, step=step)
        outcomes = self.manager.settle(verdict)
        self._on_settled(outcomes)
        self._outcomes += outcomes

    def _is_late(self, step: int, now: float) -> bool:
        """Whether others may have given ``step`` up by now.

        They wait at least ``deadline_s`` after they posted it, which they did after this rank had
        posted the ballot before it. So a rank that is quick needs no word with the store, except in
        the first step: others may have waited for it since before this rank began to count.
        """
        before = self._posted_at.get(step - 1)
        return before is None or now - before >= 0.9 * self.limits.deadline_s

    def _are_others_closing(self) -> bool:
        self._looked_at = now = self.group.now()
        try:
            return self.succession.closer.is_closing()
        except StoreSilent:
            # Not needed as long as all ranks come. Each try may last, so the next one is far off.
            self._looked_at = now + self.limits.deadline_s / 4
            return False

    def _look_around(self, step: int, now: float) -> None:
        if now - self._looked_at >= self.limits.slice_s and self._are_others_closing():
            self._give_up("asked", step)
            return
        waited_s = now - self._waiting_since
        if waited_s >= self.limits.warn_s and not self._warned:
            self._warned = True
            self._warn(step, waited_s)
        if waited_s < self.limits.deadline_s * (2 if self._extended else 1):
            return
        if waited_s < self.limits.pause_s and any(map(self._locator.is_paused, self._others)):
            return
        if not self._extended and not self.succession.closer.claim_given_up(step):
            # A straggler has settled this step: its verdict is on the way to this rank too.
            self._extended = True
            return
        self._give_up("waited", step)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.group.ranks if rank != self.group.rank]

    def _warn(self, step: int, waited_s: float) -> None:
        """Say early whom this rank waits for; nothing follows from it."""
        for rank in self._others:
            seen = self._locator.last_seen(rank)
            if seen is None or seen.step < step:
                at = "never seen" if seen is None else f"{seen.phase} of step {seen.step}"
                _log.warning(
                    "rank %d waits for rank %d in step %d for %.1f s: %s",
                    self.group.rank, rank, step, waited_s, at,
                )  # fmt: skip

    def _give_up(self, cause: str, step: int, *, broken_rank: int = -1, detail: str = "") -> None:
        if broken_rank == self.group.rank and self._cause is not None:
            detail = f"{type(self._cause).__name__}: {self._cause}"
        self._closing_from = self._stage
        self.succession.file(
            cause,
            step,
            headers=self._headers,
            held=self._held,
            waited_s=self.group.now() - self._waiting_since,
            broken_rank=broken_rank,
            detail=detail,
        )
        self._enter(Stage.CLOSING)

    def _close(self) -> None:
        """Once the epoch is sealed: settle what was settled anywhere, then do what the seal says."""
        seal = self.succession.poll()
        if seal is None:
            return
        error = seal.error.build()
        if seal.then == "observe":
            _log.error("observed, not acted upon: %s", error)
            self._is_observing = True
            self._enter(self._closing_from)
            return
        try:
            self._settle_through(seal)
        except Exception as cause:  # noqa: BLE001 - the error that all ranks raise comes first
            self._cause = self._cause or cause
        if seal.then == "raise" or self._cause is not None:
            error.__cause__ = self._cause
            self._end(error)
            raise error
        self.succession.drop(seal)
        self._enter(Stage.OPENING)

    def _open(self) -> None:
        group = self.succession.open()
        if group is None:
            return
        self.group = group
        self._works.clear()
        self._forget_epoch()
        # A rank that had not posted in this step does so now: one collective a step, as ever.
        lagged = self._closing_from is Stage.AWAIT_LAGGED
        self._enter(Stage.POST if lagged else Stage.DONE)

    def _forget_epoch(self) -> None:
        self._headers.clear()
        self._held.clear()
        self._posted_at.clear()
        self._started = self.group.now()
        self._paused_s = 0.0

    def _end(self, error: KvpactError) -> None:
        self.error = error
        self._enter(Stage.CLOSED)
        self.group.close()

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
