"""One step on one rank: post the ballot, wait for its verdict, settle; close the epoch if need be.

``begin`` and ``poll`` never block, so a simulator can hold all ranks in one thread and an engine
can do something else meanwhile; ``run`` is the loop around them for everyone else.

    begin -> [lag >= 1: await and settle ballot s - lag] -> prepare, post ballot s
          -> [lag = 0: await and settle ballot s] -> outcomes
    at any point: deadline passed, transport lost, ranks differ -> closing -> the sealed error
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Generator
from importlib import metadata

import msgspec
import numpy as np

from kvpact.consensus.core.ballot import Header, Status, Vector, Verdict
from kvpact.consensus.core.errors import (
    KvpactError,
    Misuse,
    PeerError,
    PeerLeft,
    PeerLost,
    StoreSilent,
)
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Outcome
from kvpact.consensus.epoch.closing import Locator
from kvpact.consensus.epoch.report import Incident, Policy, Seal
from kvpact.consensus.step.change import Carrier, EpochChange
from kvpact.consensus.step.machine import Machine
from kvpact.consensus.step.observe import Alone, Observation, OwnVote
from kvpact.consensus.step.progress import Progress
from kvpact.consensus.step.stage import MOVES, Beacon, InFlight, Stage, no_move
from kvpact.consensus.step.wait import PAUSED, StepLimits, VerdictWait
from kvpact.consensus.transport.collective import LostWork
from kvpact.consensus.transport.gloo import Group
from kvpact.consensus.transport.store import Store

__all__ = ["PAUSED", "RUN_KEY", "Beacon", "Carrier", "InFlight", "Machine", "StepLimits", "Stepper"]

_log = logging.getLogger("kvpact")


#: Where in the store the run has its name, for the header of journals.
RUN_KEY = "journal/run"
_HEADERS_KEPT = 8

#: Header fields that differ on a rank merely because an exception cut its preparation short.
_CUT_SHORT = ("", "fingerprint", "live")


class Stepper:
    """Drives one :class:`TransactionManager` over one :class:`Group`.

    ``machine`` is what it steps: where its ``prepare`` raises, the rank still posts, as broken, and
    all ranks raise the same error. ``carrier`` says what of it survives the end of an epoch.
    ``locator`` tells where other ranks are. ``regroup(epoch)`` forms the group of a new epoch;
    without it the policy is to raise. ``on_incident`` is called, in ``step``, with each end of an
    epoch and each observed finding.
    """

    def __init__(
        self,
        manager: TransactionManager,
        group: Group,
        store: Store,
        machine: Machine,
        *,
        carrier: Carrier,
        limits: StepLimits,
        locator: Locator,
        policy: Policy | None = None,
        regroup: Callable[[int], Group] | None = None,
        beacon: Beacon | None = None,
        on_incident: Callable[[Incident], None] | None = None,
    ) -> None:
        self.manager = manager
        self.group = group
        self.limits = limits
        self.error: KvpactError | None = None
        self.num_steps = 0
        self.num_collectives = 0
        self.waited_s = 0.0
        self.in_flight: tuple[InFlight, ...] = ()  # replaced, never changed: any thread may look
        self._machine = machine
        self._beacon = beacon
        self._verdict_wait = VerdictWait(group.rank, group.ranks, limits, locator, group.now)
        self._progress = Progress(manager, bound_s=limits.progress_s, waits=machine.waits)
        policy = policy or Policy()
        self.observation = Observation(manager, is_on=policy.kind == "observe")
        self.change = EpochChange(
            manager,
            group,
            store,
            limits=limits,
            locator=locator,
            carrier=carrier,
            policy=policy,
            regroup=regroup,
            on_incident=on_incident,
        )
        self._is_leaving = False
        self._headers: dict[int, Header] = {}
        self._held: dict[int, Vector] = {}
        self._posted_at: dict[int, float] = {}
        self._stage = Stage.IDLE
        self._iteration = 0
        self._round = 0
        self._rests_with: tuple[int, int] | None = None  # decisions and live requests, at rest
        self._waiting_since = 0.0
        self._has_to_wait = False
        self._outcomes: list[Outcome] = []
        self._started = group.now()
        if manager.journal.is_written:
            _begin_journal(manager, group, store)
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
        # Between steps, attend() may have found that the others end this epoch: then this step
        # begins when that is done.
        is_ending = self._stage in (Stage.CLOSING, Stage.OPENING)
        if (self._closing_from if is_ending else self._stage) is not Stage.IDLE:
            raise Misuse("step() was entered again before it had returned")
        if iteration < 0:
            raise Misuse(f"the scheduler's iteration must not be negative, got {iteration}")
        self._iteration = iteration
        self._round = 0
        self._outcomes = []
        self.num_steps += 1
        if is_ending:
            self._closing_from = Stage.BEGUN
        else:
            self._start()

    def begin_round(self) -> None:
        """Between two steps: an extra round of the same iteration, settled at once (agreed call).

        With lag what is in flight is settled first. Every rank must come to it: the ballot carries
        the number of the round.
        """
        if self.error is not None:
            raise self.error
        if self._stage is not Stage.IDLE:
            raise Misuse("an extra round is for between two steps")
        self._round += 1
        self._outcomes = []
        self.num_steps += 1
        self._start()

    def poll(self) -> list[Outcome] | None:
        """Go on as far as possible; the outcomes once the step is over, ``None`` before."""
        try:
            return self._go_on()
        except KvpactError as error:
            if error is self.error:
                raise
            # Without the store nobody can be asked any more how this epoch ends, and without a
            # new group there is no new one.
            if isinstance(error, StoreSilent):
                self._tell_what_is_known(error)
            if self.observation.is_on:
                self.change.tell(error)
                self._go_alone(error)
                return self._go_on()
            if isinstance(error, StoreSilent) or self._stage is Stage.OPENING:
                self._end(error)
            raise

    def _go_on(self) -> list[Outcome] | None:
        before: Stage | None = None
        while before is None or self._stage is not before:
            before = self._stage
            match before:
                case Stage.BEGUN:
                    self._start()
                case Stage.AWAIT_LAGGED if self._settled():
                    self._start()
                case Stage.POST:
                    self._post()
                case Stage.AWAIT if self._settled():
                    if self.in_flight:
                        self._await(Stage.AWAIT)  # until its ballot has said that it is broken
                    else:
                        self._stage = Stage.DONE
                case Stage.CLOSING:
                    self._close()
                case Stage.OPENING:
                    self._open()
                case Stage.DONE:
                    self._enter(Stage.IDLE)
                    return self._outcomes
                case _:
                    pass  # it waits, or it is over
        if self.error is not None:
            raise self.error
        return None

    def pause(self) -> None:
        """Wait a little for what :meth:`poll` is waiting for."""
        if self._stage in (Stage.CLOSING, Stage.OPENING) or not self.in_flight:
            time.sleep(0.005)
            return
        try:
            self.in_flight[0].work.wait(self.limits.slice_s)
        except PeerLost:
            return  # poll meets it again and closes the epoch

    def attend(self) -> None:
        """Between steps: hear whether the others end this epoch; raise the error once it stands."""
        step, now, closer = self.manager.settled_step + 1, self.group.now(), self.change.closer
        is_asked = self._stage is Stage.IDLE and not self.observation.is_off
        if is_asked and self._verdict_wait.are_others_closing(step, now, closer):
            self._waiting_since = now
            self._give_up("asked", step)
        if self._stage in (Stage.CLOSING, Stage.OPENING):
            self.poll()
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def paused(self, reason: str) -> Generator[None, None, None]:
        """Between steps: this rank will be away for longer (graph capture, weight update).

        The others wait for it beyond their deadline, and the agreed clock stands still.
        """
        began, manager = self.group.now(), self.manager
        if self._beacon is not None:
            phase = f"{PAUSED}: {reason}"
            self._beacon.at(manager.epoch, manager.step, phase, self.num_collectives)
        try:
            yield
        finally:
            self._paused_s += self.group.now() - began
            if self._beacon is not None:
                self._beacon.at(manager.epoch, manager.step, self._stage, self.num_collectives)

    def attempt(self, part: Callable[[], None]) -> None:
        """Between steps: do a part of the next step's preparation now.

        What it raises does not stop this rank alone: the next ballot says that it is broken.
        """
        if self._stage in (Stage.CLOSING, Stage.OPENING) or self._cause or self.error:
            return  # there will be no such step
        if self._stage is not Stage.IDLE:
            raise Misuse("what belongs to the next step cannot begin inside one")
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it
            self._cause = error

    def leave(self) -> None:
        """Go on stepping until :class:`PeerLeft` is raised: then all ranks have heard of it."""
        self._is_leaving = True

    def require_idle(self) -> None:
        """Raise :class:`Misuse` inside a step: a new epoch begins between two."""
        if self._stage is not Stage.IDLE:
            raise Misuse("a new epoch cannot begin inside a step")

    def renew(self, usable: dict[str, int]) -> None:
        """An agreed call between two steps: begin a new epoch with the group as it is.

        What is in flight still arrives, and is not settled.
        """
        self.require_idle()
        self.change.restart(usable)
        self._forget_epoch()

    @property
    def stage(self) -> Stage:
        """The stage of this rank; as a text it reads in words."""
        return self._stage

    @property
    def rests(self) -> bool:
        """The next ballot of this rank says the same as the last, unless something is called."""
        mark = (self.manager.journal.fingerprint, self._machine.live_digest())
        return self._rests_with == mark and self.manager.said is not None

    @property
    def num_in_flight(self) -> int:
        """Ballots posted and not settled."""
        return len(self.in_flight)

    # -- inside ----------------------------------------------------------------------------------

    def _enter(self, stage: Stage) -> None:
        if stage not in MOVES[self._stage]:
            raise no_move(self._stage, stage)
        self._stage = stage
        if self._beacon is not None:
            manager = self.manager
            self._beacon.at(manager.epoch, manager.step, stage.value, self.num_collectives)

    def _await(self, stage: Stage, now: float | None = None) -> None:
        self._waiting_since = self.group.now() if now is None else now
        self._has_to_wait = False
        self._enter(stage)

    def _start(self) -> None:
        if self.observation.is_on:
            self.observation.entered_step()
        # An extra round is settled at once, so it waits for all that is in flight before it.
        allowed = 0 if self._round else max(0, self.manager.lag - 1)
        if len(self.in_flight) > allowed:
            self._await(Stage.AWAIT_LAGGED)
        else:
            self._enter(Stage.POST)

    def _post(self) -> None:
        """Post the ballot, whatever happens before: a rank that keeps silent stalls all others."""
        manager = self.manager
        vector = self._ballot()
        now, posted = self.group.now(), manager.step
        self._posted_at[posted] = now
        self._posted_at.pop(posted - manager.lag - 2, None)
        newest = manager.newest
        self._headers[posted] = newest.header
        self._headers.pop(posted - manager.lag - _HEADERS_KEPT, None)
        self.num_collectives += 1
        try:
            work = self.group.min(vector)
        except PeerLost as error:
            work = LostWork(error)  # found where all others find theirs: while they wait for it
        posted_now = InFlight(manager.epoch, newest.header, newest.num_slots, work, vector)
        self.in_flight = (*self.in_flight, posted_now)
        if manager.lag and not self._round and self._cause is None:
            self._stage = Stage.DONE
        else:
            self._await(Stage.AWAIT, now)

    def _ballot(self) -> Vector:
        now_ms = int((self.group.now() - self._started - self._paused_s) * 1000)
        if self._cause is None:
            try:
                if self._has_nothing_new():
                    return self.manager.post_again(self._iteration, now_ms)
                return self._new_ballot(now_ms)
            except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it
                self._caught(error, "preparing its ballot")
        return self.manager.post(
            self._iteration, now_ms=now_ms, status=Status.BROKEN, round_number=self._round
        )

    def _has_nothing_new(self) -> bool:
        """Nothing was called or ended since a step in which this rank decided nothing, at rest."""
        if self._rests_with is None or self.manager.said is None or self._round or self._is_leaving:
            return False
        live = self._machine.live_digest()
        return self._rests_with == (self.manager.journal.fingerprint, live)

    def _new_ballot(self, now_ms: int) -> Vector:
        manager, machine = self.manager, self._machine
        before = manager.journal.fingerprint
        machine.prepare()
        live = machine.live_digest()
        # Who only observes compares anew after a finding: there every ballot is looked into.
        is_new = before != manager.journal.fingerprint or self.observation.is_on
        rests = not is_new and machine.is_at_rest()
        vector = manager.post(
            self._iteration,
            live=live,
            now_ms=now_ms,
            status=Status.LEAVING if self._is_leaving else Status.HEALTHY,
            round_number=self._round,
        )
        self._rests_with = (before, live) if rests and manager.can_repeat else None
        return vector

    def _settled(self) -> bool:
        """Settle the oldest ballot if its verdict is there; start closing where that cannot be."""
        now = self.group.now()
        oldest = self.in_flight[0]
        is_old = oldest.epoch != self.manager.epoch
        # Of an epoch that was ended by an agreed call all ballots were posted: nobody is late.
        step = 0 if is_old else self.manager.settled_step + 1
        try:
            done = oldest.work.done()
        except PeerLost as error:
            self._give_up("lost", step, detail=error.message)
            return False
        if not done:
            if not self._has_to_wait:
                self._has_to_wait = True
                self._verdict_wait.begin(self._waiting_since)
            if why := self._verdict_wait.look_around(step, now, self.change.closer):
                self._give_up(why, step)
            return False
        self.waited_s += now - self._waiting_since
        if self.observation.is_off and not is_old:
            return self._settle_alone(step, oldest.work.result())
        if not is_old:
            return self._settle(step, now, oldest.work.result())
        self.in_flight = self.in_flight[1:]
        return True

    def _settle(self, step: int, now: float, reduced: Vector) -> bool:
        clock_ms = self.manager.told_again(reduced)
        verdict = None if clock_ms >= 0 else self.manager.read(reduced)
        if verdict is not None and not self._is_sound(step, verdict):
            return False
        if self._is_late(step, now) and not self.change.closer.claim_settled(step):
            self._give_up("late", step)
            return False
        self.in_flight = self.in_flight[1:]
        # For ranks that have not heard of it when the epoch ends.
        self._held[step] = reduced
        self._held.pop(step - self.manager.lag - 2, None)
        if verdict is None:
            self.manager.settle_again(clock_ms)
        elif not self._applied(step, reduced, verdict):
            return False
        is_look_due = self.manager.clock_ms >= self._progress.look_at_ms
        if is_look_due and (stuck := self._progress.overdue()):
            self._give_up("stuck", step, detail=stuck)
            return False
        return True

    def _is_sound(self, step: int, verdict: Verdict) -> bool:
        """Whether the ranks agree, and none is broken; else the epoch is being closed."""
        if verdict.status is Status.BROKEN and verdict.mismatch in _CUT_SHORT:
            self._give_up("broken", step, broken_rank=verdict.status_rank)
            return False
        if verdict.mismatch and not self._looks_over(verdict):
            self._give_up("mismatch", step)
            return False
        return True

    def _applied(self, step: int, reduced: Vector, verdict: Verdict) -> bool:
        try:
            self._apply(step, reduced, verdict)
        except Exception as error:  # noqa: BLE001 - the peers must hear of it, and they do not yet
            self._caught(error, "settling")
            self._give_up("broken", self.manager.settled_step + 1, broken_rank=self.group.rank)
            return False
        return True

    def _looks_over(self, verdict: Verdict) -> bool:
        if self.observation.is_known(verdict):
            return True
        if self.observation.is_too_soon(verdict):
            self.change.endings["Divergence"] += 1
            return True
        return False

    def _settle_alone(self, step: int, own: Vector) -> bool:
        """Nobody is asked any more; what goes wrong is told, and is for nobody else to hear."""
        self.in_flight = self.in_flight[1:]
        verdict = self.manager.read(own)
        if verdict.status is Status.BROKEN:
            verdict = msgspec.structs.replace(verdict, status=Status.HEALTHY)
        try:
            self._apply(step, own, verdict)
        except Exception as error:  # noqa: BLE001 - to observe must not end an engine
            self._caught(error, "settling")
        self._cause = None
        return True

    def _caught(self, error: Exception, doing: str) -> None:
        """An exception of this rank itself: in its log at once, whatever becomes of the epoch."""
        rank, step = self.group.rank, self.manager.step
        _log.error("rank %d met an exception while %s, step %d", rank, doing, step, exc_info=error)
        self._cause = self._cause or error

    def _apply(self, step: int, reduced: Vector, verdict: Verdict) -> None:
        if self.observation.is_on:
            if not verdict.mismatch:
                self.observation.saw_equal()
            verdict = msgspec.structs.replace(verdict, mismatch="")
        if verdict.status is Status.LEAVING:
            rank = verdict.status_rank
            self.error = PeerLeft(f"rank {rank} has left in good order", rank=rank, step=step)
        outcomes = self.manager.settle(verdict)
        self._machine.settled(outcomes)
        self._outcomes += outcomes

    def _is_late(self, step: int, now: float) -> bool:
        """Whether others may have given ``step`` up by now.

        They wait at least ``deadline_s`` after they posted it, which they did after this rank had
        posted the ballot before it. So a rank that is quick needs no word with the store, except in
        the first step: others may have waited for it since before this rank began to count.
        """
        before = self._posted_at.get(step - 1)
        return before is None or now - before >= 0.9 * self.limits.deadline_s

    def _give_up(self, cause: str, step: int, *, broken_rank: int = -1, detail: str = "") -> None:
        raised = ""
        if self._cause is not None and broken_rank in (-1, self.group.rank):
            broken_rank, raised = self.group.rank, type(self._cause).__name__
            detail = f"{raised}: {self._cause}"
        self._closing_from = self._stage
        self.change.file(
            cause,
            step,
            headers=self._headers,
            held=self._held,
            waited_s=self.group.now() - self._waiting_since,
            broken_rank=broken_rank,
            raised=raised,
            detail=detail,
            phase=self._stage.value,
            waiting=self._progress.waiting() if cause == "stuck" else [],
        )
        self._enter(Stage.CLOSING)

    def _close(self) -> None:
        """Once the epoch is sealed: settle what was settled anywhere, then do what it says."""
        seal = self.change.poll()
        if seal is None:
            return
        error = seal.error.build()
        if seal.then == "observe":
            _log.error("observed, not acted upon: %s", error)
            is_between_steps = self._closing_from is Stage.IDLE
            self.observation.told(seal.error.field, is_between_steps=is_between_steps)
            self.change.look_on()
            self._await(self._closing_from)
            return
        if seal.then == "off":
            self._go_alone(error, seal)
            return
        try:
            self._settle_through(seal)
            if seal.then != "raise" and self._cause is None:
                self.change.drop(seal)
        except StoreSilent:
            raise
        except Exception as cause:  # noqa: BLE001 - the error that all ranks raise comes first
            self._caught(cause, "closing the epoch")
        if seal.then == "raise" or self._cause is not None:
            error.__cause__ = self._cause
            self._end(error)
            raise error
        self._enter(Stage.OPENING)

    def _go_alone(self, error: KvpactError, seal: Seal | None = None) -> None:
        """Go on alone, since observing must not end an engine: each rank is its own group now."""
        _log.error("observing is off from here on, nothing is compared any more: %s", error)
        try:
            if seal is not None:
                self._settle_through(seal)
        except Exception as cause:  # noqa: BLE001 - told; there is nobody to hear of it
            self._caught(cause, "closing the epoch")
        self.observation.is_off = True
        self._cause = None
        group, self.group = self.group, Alone(self.group)
        own = [msgspec.structs.replace(one, work=OwnVote(one.vector)) for one in self.in_flight]
        settled = self.manager.settled_step
        epoch = self.manager.epoch
        self.in_flight = tuple(x for x in own if x.epoch != epoch or x.header.step > settled)
        group.close()
        stage = self._closing_from if self._stage is Stage.CLOSING else self._stage
        if stage is Stage.AWAIT_LAGGED:
            self._enter(Stage.BEGUN)
        elif stage is Stage.AWAIT and not self.in_flight:
            self._enter(Stage.DONE)
        elif stage is Stage.AWAIT:
            self._await(stage)
        elif stage is not self._stage:
            self._enter(stage)

    def _tell_what_is_known(self, error: StoreSilent) -> None:
        """The store is silent, so nobody can be asked: what this rank knows is all there is."""
        error.__cause__ = error.__cause__ or self._cause
        error.story = (*error.story, *self.change.known())

    def _open(self) -> None:
        group = self.change.open()
        if group is None:
            return
        self.group = group
        self.in_flight = ()
        self._forget_epoch()
        # A rank that had not posted in this step does so now: one collective a step, as ever.
        resume = {Stage.AWAIT_LAGGED: Stage.BEGUN, Stage.AWAIT: Stage.DONE}
        self._enter(resume.get(self._closing_from, self._closing_from))

    def _forget_epoch(self) -> None:
        self._rests_with = None
        self._headers.clear()
        self._held.clear()
        self._posted_at.clear()
        self._progress.restart()
        self.observation.forget()
        self._started = self.group.now()
        self._paused_s = 0.0

    def _end(self, error: KvpactError) -> None:
        self.error = error
        self._enter(Stage.CLOSED)
        self.group.close()

    def _settle_through(self, seal: Seal) -> None:
        """Settle what any rank has settled, so that a step is settled on all ranks or on none."""
        if seal.error.epoch != self.manager.epoch:
            return
        while (step := self.manager.settled_step + 1) <= min(seal.through, self.manager.step):
            vector = seal.verdicts.get(step)
            if vector is None:
                raise PeerError(
                    f"step {step} was settled elsewhere but its verdict is lost", step=step
                )
            reduced = np.array(vector, dtype=np.int64)
            self._apply(step, reduced, self.manager.read(reduced))


def _begin_journal(manager: TransactionManager, group: Group, store: Store) -> None:
    """Name the run, by whichever rank comes first; the name says nothing and repeats never."""
    mine = secrets.token_hex(8).encode()
    run = store.compare_set(RUN_KEY, None, mine).decode()
    schema = manager.schema
    configuration = f"lag {manager.lag}, {schema.num_slots} slots, {' '.join(schema.pools)}"
    manager.journal.begin(run, _version(), configuration, group.ranks)


def _version() -> str:
    try:
        return metadata.version("kvpact")
    except metadata.PackageNotFoundError:
        return "not installed as a package"
