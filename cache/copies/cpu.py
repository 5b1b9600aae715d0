"""Copies of pages between the device and the host tier of one pool, merged.

`kvpact.cache.copies.mover` says what a mover is. Two kinds stand here, `cache.cuda.CudaMover` is
the third:

- `CpuMover`: a daemon thread copies; it posts what ended to a mailbox and touches nothing else.
- `DeferredMover`: no thread, for simulation. A copy reads *and* writes at its end, which is a
  call of `collect`; so a page that is reused too early spoils bytes, and a checker sees it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from kvpact.cache.copies.mover import (
    MAX_PARTS,
    NO_FAULT,
    Batch,
    Direction,
    Ending,
    Mover,
    MoverBase,
    Part,
    PartPlan,
    PlanPart,
)
from kvpact.cache.copies.pages import HostCopier
from kvpact.cache.memory.paged import PagedMemory

__all__ = [
    "NO_FAULT",
    "CpuMover",
    "DeferredMover",
    "Direction",
    "Ending",
    "Lane",
    "Mover",
    "Part",
    "PartPlan",
    "PlanPart",
    "ThreadMover",
]


class _Copier:
    """Carries out batches between two host memories. One thread each."""

    __slots__ = ("_copier", "_ends")

    def __init__(self, device: PagedMemory, host: PagedMemory) -> None:
        self._copier = HostCopier(device, host)
        self._ends = {Direction.TO_HOST: host, Direction.TO_DEVICE: device}

    def copy(self, batch: Batch, invert: bool = False) -> None:
        """One merged copy. ``invert`` writes wrong bytes: the complement of every bit."""
        source, target = batch.pages()
        self._copier.copy(batch.direction is Direction.TO_DEVICE, source, target)
        if invert:
            memory, pages = self._ends[batch.direction], target.tolist()
            memory.scatter(pages, np.invert(memory.gather(pages)))


class DeferredMover(MoverBase):
    """For simulation: no thread; every copy happens inside the `collect` at which it is due."""

    withholds_all = True

    def __init__(
        self,
        device: PagedMemory,
        host: PagedMemory,
        *,
        plan_part: PlanPart | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        super().__init__(device, host, plan_part=plan_part, max_parts=max_parts)
        self._copier = _Copier(device, host)

    def wait_layer(
        self, layer: int, timeout_s: float, tickets: Collection[int] | None = None
    ) -> bool:
        """Carries the loads out now: that a copy ends by itself is simulated by `collect`."""
        self._require_layer(layer)
        return self._bring_loads(tickets)

    def wait_all(self, timeout_s: float) -> bool:
        """Nothing ends by itself here: there is nothing to wait for."""
        return True

    def _carry(self, batch: Batch, invert: bool) -> None:
        self._copier.copy(batch, invert)


class Lane:
    """One daemon thread that carries out batches in order.

    It posts ``(batch, why)`` when a batch has ended, ``why`` empty where it went well, and touches
    nothing else. Its inbox is bounded by the mover's ``max_parts``.
    """

    def __init__(
        self, name: str, carry: Callable[[Batch], None], mailbox: queue.SimpleQueue[Any]
    ) -> None:
        self.inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._carry = carry
        self._mailbox = mailbox
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (batch := self.inbox.get()) is not None:
            why = ""
            try:
                self._carry(batch)
            except BaseException as error:  # noqa: BLE001 - the thread must outlive any copy
                why = f"{type(error).__name__}: {error}"
            self._mailbox.put((batch, why))


class ThreadMover(MoverBase):
    """A mover whose batches are carried out by lanes; see `Lane`."""

    def __init__(
        self,
        device: PagedMemory,
        host: PagedMemory,
        *,
        plan_part: PlanPart | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        super().__init__(device, host, plan_part=plan_part, max_parts=max_parts)
        self._mailbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: list[Batch] = []
        self._lanes: dict[Direction, Lane] = {}

    def wait_layer(
        self, layer: int, timeout_s: float, tickets: Collection[int] | None = None
    ) -> bool:
        """See `Mover`."""
        self._require_layer(layer)
        if not self._wait(lambda: not self._loads(tickets), timeout_s):
            return False
        return self._bring_loads(tickets)

    def wait_all(self, timeout_s: float) -> bool:
        """See `Mover`."""
        return self._wait(lambda: not self._running, timeout_s)

    def close(self, timeout_s: float = 1.0) -> bool:
        """See `Mover`; what was submitted before is still carried out. May be called again."""
        deadline = time.monotonic() + timeout_s
        lanes = list(dict.fromkeys(self._lanes.values()))
        if not self._closed:
            self._closed = True
            for lane in lanes:
                lane.inbox.put(None)
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(lane.thread.is_alive() for lane in lanes)

    def _batches(self) -> Sequence[Batch]:
        return self._running

    def _start(self, batch: Batch) -> None:
        self._running.append(batch)
        self._lanes[batch.direction].inbox.put(batch)

    def _drain(self) -> None:
        while self._running:
            try:
                self._post(self._mailbox.get_nowait())
            except queue.Empty:
                return

    def _post(self, report: tuple[Batch, str]) -> None:
        batch, why = report
        self._running.remove(batch)
        self._finish(batch.parts, why)

    def _loads(self, tickets: Collection[int] | None) -> list[Batch]:
        """Running loads with at least one part among ``tickets``."""
        return [
            batch
            for batch in self._running
            if batch.direction is Direction.TO_DEVICE
            and (tickets is None or any(part.ticket in tickets for part in batch.parts))
        ]

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self._drain()
        while not done():
            try:
                self._post(self._mailbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return False
        return True


class CpuMover(ThreadMover):
    """Copies between CPU tensors on one daemon thread, both directions in order of submission.

    All layers of a merged copy become readable together, so `wait_layer` waits for whole loads.
    """

    def __init__(
        self,
        device: PagedMemory,
        host: PagedMemory,
        *,
        plan_part: PlanPart | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        super().__init__(device, host, plan_part=plan_part, max_parts=max_parts)
        # Two copiers, because withheld parts are carried out on the caller's thread.
        self._copier = _Copier(device, host)
        lane = Lane("kvpact-copies", _Copier(device, host).copy, self._mailbox)
        weakref.finalize(self, lane.inbox.put, None)  # a mover that nobody closed ends its thread
        self._lanes = dict.fromkeys(Direction, lane)

    def _carry(self, batch: Batch, invert: bool) -> None:
        self._copier.copy(batch, invert)
