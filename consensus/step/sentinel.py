"""Tells at once what ends an epoch, whatever the scheduler's thread does.

With lag a verdict is settled steps later, and a scheduler may meanwhile hang in a forward pass over
trees that differ. The sentinel is a daemon thread that looks at the works in flight, files what
this rank posted, reads what the others filed, and logs who differs and where. It also reads what
others report who give this epoch up: one of them met an exception, say, and the forward pass of
this rank waits for it. It settles nothing, seals nothing and takes part in no collective: the
scheduler's thread does that when it comes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvpact.consensus.core.ballot import Status, Verdict, tally
from kvpact.consensus.core.errors import KvpactError, StoreSilent
from kvpact.consensus.core.journal import Entry, Journal
from kvpact.consensus.epoch.report import Report, Seal, SealedError
from kvpact.consensus.step.stage import InFlight, Stage
from kvpact.consensus.step.step import Stepper
from kvpact.consensus.transport.bounded import inside
from kvpact.consensus.transport.envelope import decode
from kvpact.consensus.transport.store import Store

__all__ = ["Sentinel"]

_log = logging.getLogger("kvpact")

_REACTING = (Stage.CLOSING, Stage.OPENING, Stage.CLOSED)
_TRIES = 8
#: How long it waits for what the others file before it says what it knows.
GATHER_S = 2.0
#: How often it asks the store whether others report.
HEAR_S = 0.25
#: How long it leaves a store alone that did not answer: each try may last.
SILENT_S = 5.0


class Sentinel:
    """Looks at the works in flight of ``stepper``; ``alarm`` is what it has found, once.

    ``start`` runs it on a thread of its own; a simulator calls ``look`` instead. ``store`` should
    bound its calls. What is found stands under ``epoch/<group's epoch>/alarm/<epoch>/<rank>``.
    ``on_alarm`` is called, from that thread, where the scheduler does not react to it yet and will
    have to raise it: not where the policy lets all ranks go on. What it raises is logged.
    """

    def __init__(
        self,
        stepper: Stepper,
        store: Store,
        *,
        interval_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        on_alarm: Callable[[KvpactError], None] | None = None,
    ) -> None:
        self.alarm: SealedError | None = None
        self._on_alarm = on_alarm
        self._alarm_in: tuple[int, int] = (-1, -1)
        self._listen_at = 0.0
        self._heard_at: float | None = None
        self._stepper = stepper
        self._store = store
        self._interval_s = interval_s
        self._clock = clock
        self._looked_at: tuple[int, int] = (-1, -1)  # epoch and step
        self._filed: Report | None = None
        self._filed_epoch = 0
        self._filed_round = 0
        self._filed_at = 0.0
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start looking."""
        self._thread = threading.Thread(
            target=self._run, name=f"kvpact-sentinel {self._stepper.group.rank}", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End the thread within ``timeout_s``; ``False``: it still hangs."""
        self._leaving.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._leaving.wait(self._interval_s):
            try:
                self.look()
            except StoreSilent:
                continue  # it will be tried again; at the end of the interpreter the event is set
            except Exception:  # noqa: BLE001  nothing may leave this thread
                _log.debug("the sentinel could not look", exc_info=True)

    def look(self) -> None:
        """Look once at what is in flight. Never blocks, but for the store. Raises StoreSilent."""
        change = self._stepper.change
        now_in = (self._stepper.manager.epoch, change.closer.round_number)
        if now_in != self._alarm_in:
            self.alarm = self._heard_at = None  # that is over, or was only observed
            self._alarm_in = now_in
        if self._filed is not None and (self._filed_epoch, self._filed_round) != now_in:
            self._filed = None
        if self._filed is not None:
            if self.alarm is None:
                self._gather(self._filed)
            return
        self._listen()
        for ballot in self._stepper.in_flight:
            place = (ballot.epoch, ballot.header.step)
            is_known = ballot.header.step <= self._stepper.observation.through
            if place > self._looked_at and not (is_known and ballot.epoch == now_in[0]):
                verdict = self._verdict(ballot)
                if verdict is None:
                    return
                if verdict.mismatch and verdict.status is not Status.BROKEN:
                    self._file(ballot)
                self._looked_at = place
                if self._filed is not None:
                    return

    def _verdict(self, ballot: InFlight) -> Verdict | None:
        try:
            with inside():
                if not ballot.work.done():
                    return None
                reduced = ballot.work.result()
        except StoreSilent:
            return None  # the interpreter is ending
        except KvpactError:
            return None  # it is lost: the scheduler's thread will say so
        return tally(self._stepper.manager.schema, reduced, 0)

    def _file(self, ballot: InFlight) -> None:
        manager, step = self._stepper.manager, ballot.header.step
        report = Report(
            rank=self._stepper.group.rank,
            cause="mismatch",
            at_step=step,
            posted=step,
            settled=step - 1,
            headers={one.header.step: one.header for one in self._stepper.in_flight}
            | {step: ballot.header},
            tail=_tail(manager.journal),
            held={},
            phase=self._stepper.stage,
        )
        self._filed_round = self._stepper.change.closer.round_number
        self._store.set(self._key(ballot.epoch, report.rank), msgspec.msgpack.encode(report))
        self._filed, self._filed_epoch, self._filed_at = report, ballot.epoch, self._clock()

    def _gather(self, mine: Report) -> None:
        ranks: Sequence[int] = self._stepper.group.ranks
        reports = {mine.rank: mine}
        for rank in ranks:
            found = self._store.get(self._key(self._filed_epoch, rank))
            if found is not None:
                reports[rank] = decode(self._key(self._filed_epoch, rank), found, Report)
        missing = [rank for rank in ranks if rank not in reports]
        if missing and self._clock() - self._filed_at < GATHER_S:
            return
        self._raise_alarm(self._stepper.change.closer.judged(reports, missing))

    def _listen(self) -> None:
        """Hear what others report who have given this epoch up."""
        now = self._clock()
        is_known = self.alarm is not None or self._stepper.stage in _REACTING
        if is_known or now < self._listen_at or self._stepper.observation.is_off:
            return
        self._listen_at = now + HEAR_S
        try:
            found = self._stepper.change.closer.overheard(is_enough=partial(self._is_enough, now))
        except StoreSilent:
            self._listen_at = self._clock() + SILENT_S
            raise
        if found is not None:
            self._raise_alarm(found)

    def _is_enough(self, now: float, reports: dict[int, Report]) -> bool:
        """An exception says all; for whatever else the others' reports are waited for."""
        self._heard_at = now if self._heard_at is None else self._heard_at
        group = self._stepper.group
        is_told = any(report.broken_rank >= 0 for report in reports.values())
        are_all = all(rank in reports for rank in group.ranks if rank != group.rank)
        return is_told or are_all or now - self._heard_at >= GATHER_S

    def _raise_alarm(self, seal: Seal) -> None:
        self.alarm = seal.error
        rank, stage = self._stepper.group.rank, self._stepper.stage
        if stage in _REACTING:
            return
        told = seal.error.build()
        _log.error("rank %d has not reacted yet, it is %s: %s", rank, stage, told)
        if self._on_alarm is not None and seal.then == "raise":
            try:
                self._on_alarm(told)
            except Exception:  # noqa: BLE001 - the sentinel must go on
                _log.exception("on_alarm failed")

    def _key(self, epoch: int, rank: int) -> str:
        rounds = f"round/{self._filed_round}/" if self._filed_round else ""
        return f"epoch/{self._stepper.change.group_epoch}/{rounds}alarm/{epoch}/{rank}"


def _tail(journal: Journal) -> list[Entry]:
    """The journal's last decisions, read while another thread may be writing."""
    for _ in range(_TRIES):
        try:
            return journal.tail()
        except RuntimeError:  # it grew while it was copied
            continue
    return []
