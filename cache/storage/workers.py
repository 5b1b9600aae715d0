"""Threads that carry out storage requests, and their stand-in for simulation.

A thread takes a request, calls the backend and appends the answer to a mailbox; it touches nothing
else. Only the caller's thread reads the mailbox, in `collect` and `abandon`; and what it
reads there is a local fact, which enters decisions through the ballot alone.

A call that outlives ``call_timeout_s`` is given up: its requests end as failed, its thread is
abandoned and another one takes its place, at most ``max_abandoned`` at a time. Beyond that,
requests fail at once until a call returns: a dead storage costs hits and a few threads.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Sequence

from kvpact.cache.storage.protocol import BackendBase, log
from kvpact.cache.storage.requests import (
    MAX_REQUESTS,
    NO_PAGE_FAULT,
    Answer,
    Kind,
    Open,
    PagePlan,
    PlanPage,
    StorageEnding,
    StorageRequest,
    Workers,
    WorkersBase,
    ask,
)
from kvpact.consensus.core.errors import Misuse

__all__ = [
    "NO_PAGE_FAULT",
    "DeferredWorkers",
    "Kind",
    "PagePlan",
    "PlanPage",
    "StorageEnding",
    "StorageRequest",
    "StorageWorkers",
    "Workers",
]

CALL_PAGES = 32
"""Pages of one call: a larger request is cut, and so many puts share a segment."""


class DeferredWorkers(WorkersBase):
    """For simulation: no thread; everything happens inside the `collect` at which it is due."""

    withholds_all = True


class _Call:
    """Pages of one or, for PUT, several requests that go to the backend together."""

    __slots__ = ("shares", "started")

    def __init__(self, opened: Open, indices: list[int]) -> None:
        self.shares = [(opened, indices)]
        self.started = 0.0

    def merge(self, other: _Call) -> bool:
        """Take ``other`` in, where both are puts and small enough together."""
        puts = all(call.shares[0][0].request.kind is Kind.PUT for call in (self, other))
        if not puts or self.num_pages + other.num_pages > CALL_PAGES:
            return False
        self.shares += other.shares
        return True

    @property
    def num_pages(self) -> int:
        return sum(len(indices) for _, indices in self.shares)

    @property
    def gone(self) -> bool:
        return all(opened.gone for opened, _ in self.shares)

    def carry(self, backend: BackendBase) -> list[Answer]:
        """Ask once for all shares; one answer a share."""
        request, indices = self.shares[0][0].request, self.shares[0][1]
        if len(self.shares) == 1:
            return [ask(backend, request, indices)]
        pages = tuple(opened.request.pages[i] for opened, chosen in self.shares for i in chosen)
        merged = StorageRequest(request.ticket, Kind.PUT, pages=pages)
        found, _, why = ask(backend, merged, range(len(pages)))
        answers: list[Answer] = []
        for _, chosen in self.shares:
            answers.append((found[: len(chosen)], [], why))
            found = found[len(chosen) :]
        return answers

    def failed(self, why: str) -> list[Answer]:
        return [([False] * len(indices), [None] * len(indices), why) for _, indices in self.shares]


class _Mailbox:
    """The mailbox of threads and caller: calls that wait, and answers; at most ``max_requests``."""

    def __init__(self, backend: BackendBase) -> None:
        self.backend = backend
        self.condition = threading.Condition()
        self.waiting: collections.deque[_Call] = collections.deque()
        self.mailbox: collections.deque[tuple[_Call, list[Answer]]] = collections.deque()
        self.closed = False

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self.condition.notify_all()

    def take(self, lane: _Lane) -> _Call | None:
        """The next call, for as long as it is asked for by a lane that is still in use."""
        with self.condition:
            while not self.waiting and not self.closed and not lane.abandoned:
                self.condition.wait()
            if lane.abandoned or not self.waiting:
                return None
            call = self.waiting.popleft()
            while self.waiting and call.merge(self.waiting[0]):
                self.waiting.popleft()
            call.started = time.monotonic()
            lane.call = call
            return call

    def post(self, lane: _Lane, call: _Call, answers: list[Answer]) -> None:
        with self.condition:
            lane.call = None
            if not lane.abandoned:
                self.mailbox.append((call, answers))
            self.condition.notify_all()


class _Lane:
    """One daemon thread. ``call``: what it is at; ``abandoned``: its answers are not wanted."""

    def __init__(self, desk: _Mailbox, number: int) -> None:
        self.abandoned = False
        self.call: _Call | None = None
        self.thread = threading.Thread(
            target=self._run, args=(desk,), name=f"kvpact-storage-{number}", daemon=True
        )
        self.thread.start()

    def _run(self, desk: _Mailbox) -> None:
        while (call := desk.take(self)) is not None:
            answers = call.failed("abandoned") if call.gone else call.carry(desk.backend)
            desk.post(self, call, answers)


class StorageWorkers(WorkersBase):
    """``num_threads`` daemon threads over one backend; see the module."""

    def __init__(
        self,
        backend: BackendBase,
        *,
        num_threads: int = 2,
        call_timeout_s: float = 30.0,
        max_abandoned: int = 4,
        plan_page: PlanPage | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        super().__init__(backend, plan_page=plan_page, max_requests=max_requests)
        if num_threads < 1 or max_abandoned < 0 or not call_timeout_s > 0:
            raise Misuse(
                f"num_threads must be at least 1, max_abandoned at least 0, call_timeout_s above 0,"
                f" not {num_threads}, {max_abandoned}, {call_timeout_s}"
            )
        self.num_abandoned_ever = 0
        self._call_timeout_s = call_timeout_s
        self._max_abandoned = max_abandoned
        self._num_lanes = num_threads
        self._desk = _Mailbox(backend)
        self._num_started = 0
        self._lanes: list[_Lane] = []
        self._abandoned: list[_Lane] = []
        # Workers that nobody closed end their threads.
        weakref.finalize(self, self._desk.close)
        self._fill_lanes()

    def abandon(self, ticket: int) -> StorageEnding:
        """See `Workers`. What no thread has taken yet is taken back."""
        ending = super().abandon(ticket)
        with self._desk.condition:
            waiting = [call for call in self._desk.waiting if not call.gone]
            self._desk.waiting = collections.deque(waiting)
        return ending

    def wait_all(self, timeout_s: float) -> bool:
        """See `Workers`. Pages that a fault withholds are not waited for, `collect` ends them."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._drain()
            with self._desk.condition:
                busy = self._desk.waiting or any(lane.call for lane in self._lanes)
                if not busy and not self._desk.mailbox:
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if busy and not self._desk.mailbox:
                    self._desk.condition.wait(min(left, self._call_timeout_s))

    def close(self, timeout_s: float = 1.0) -> bool:
        """See `Workers`; what waits is still carried out. The backend is the caller's to close."""
        deadline = time.monotonic() + timeout_s
        self._closed = True
        self._desk.close()
        lanes = self._lanes + self._abandoned
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(lane.thread.is_alive() for lane in lanes)

    def _has_room(self) -> bool:
        self._drain()
        return bool(self._lanes)

    def _start(self, opened: Open, indices: list[int]) -> None:
        starts = range(0, len(indices), CALL_PAGES) if indices else range(1)
        calls = [_Call(opened, indices[at : at + CALL_PAGES]) for at in starts]
        with self._desk.condition:
            self._desk.waiting.extend(calls)
            self._desk.condition.notify(len(calls))

    def _drain(self) -> None:
        while self._desk.mailbox:
            self._enter(*self._desk.mailbox.popleft())
        self._give_up_hung()

    def _enter(self, call: _Call, answers: Sequence[Answer]) -> None:
        for (opened, indices), answer in zip(call.shares, answers, strict=True):
            if not opened.gone:
                opened.answer(indices, answer)

    def _give_up_hung(self) -> None:
        late = time.monotonic() - self._call_timeout_s
        hung: list[_Call] = []
        with self._desk.condition:
            for lane in self._lanes:
                if lane.call is not None and lane.call.started < late:
                    lane.abandoned = True
                    hung.append(lane.call)
        why = f"no answer within {self._call_timeout_s} s"
        for call in hung:
            self.num_abandoned_ever += 1
            log.warning("storage %s: %s, the call is given up", self.backend.name, why)
            self._enter(call, call.failed(why))
        self._abandoned += [lane for lane in self._lanes if lane.abandoned]
        self._lanes = [lane for lane in self._lanes if not lane.abandoned]
        self._abandoned = [lane for lane in self._abandoned if lane.thread.is_alive()]
        self._fill_lanes()
        if not self._lanes:
            self._fail_waiting("every thread hangs in the storage")

    def _fill_lanes(self) -> None:
        while (
            not self._closed
            and len(self._lanes) < self._num_lanes
            and len(self._lanes) + len(self._abandoned) < self._num_lanes + self._max_abandoned
        ):
            self._lanes.append(_Lane(self._desk, self._num_started))
            self._num_started += 1

    def _fail_waiting(self, why: str) -> None:
        with self._desk.condition:
            waiting = list(self._desk.waiting)
            self._desk.waiting.clear()
        for call in waiting:
            self._enter(call, call.failed(why))
