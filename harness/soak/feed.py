"""What a rank of a soak tells about itself: records, and the box in which they wait to be taken.

The loop's thread adds, another thread takes: nothing here blocks, and what nobody takes is bounded.
"""

from __future__ import annotations

import collections
import math
import sys
import threading
import time
import traceback
from typing import Final, TypeVar

import msgspec

from kvpact.consensus.epoch.report import Incident
from kvpact.harness.verify.agreement import Snapshot

__all__ = ["Bucket", "End", "FaultEvent", "Feed", "Latencies", "Resources", "Update"]

Item = TypeVar("Item")

MAX_SNAPSHOTS: Final = 20_000
MAX_EVENTS: Final = 2_000
MAX_BUCKETS: Final = 4_000
MAX_INCIDENTS: Final = 20


class Resources(msgspec.Struct, frozen=True):
    """One sample of a process. ``at_s`` counts from the start of the loop."""

    at_s: float
    rss_bytes: int
    shared_bytes: int
    fds: int
    threads: int
    shm_segments: int


class FaultEvent(msgspec.Struct, frozen=True):
    """A fault that struck (or was skipped, with the reason), when and where."""

    rank: int
    step: int
    at_s: float
    name: str
    skipped: str = ""


class Bucket(msgspec.Struct):
    """What happened on one rank within ``width_s`` seconds from ``at_s`` on the agreed clock.

    Sums: ``steps``, ``step_s``, ``waited_s``, ``pages``, ``hit_pages``. Largest: ``step_max_s``.
    Last seen: used pages by tier, open intents, requests that wait.
    """

    at_s: float
    width_s: float
    steps: int = 0
    step_s: float = 0.0
    step_max_s: float = 0.0
    waited_s: float = 0.0
    pages: int = 0
    hit_pages: int = 0
    device_used: int = 0
    host_used: int = 0
    num_open: int = 0
    num_waiting: int = 0

    def absorb(self, later: Bucket) -> None:
        """Take in the bucket that follows."""
        self.width_s += later.width_s
        self.steps += later.steps
        self.step_s += later.step_s
        self.step_max_s = max(self.step_max_s, later.step_max_s)
        self.waited_s += later.waited_s
        self.pages += later.pages
        self.hit_pages += later.hit_pages
        self.device_used, self.host_used = later.device_used, later.host_used
        self.num_open, self.num_waiting = later.num_open, later.num_waiting


class Latencies:
    """A histogram of durations with 5 % wide classes from 1 µs to 100 s."""

    BASE: Final = 1.05
    _FIRST_S: Final = 1e-6

    def __init__(self, counts: dict[int, int] | None = None, max_s: float = 0.0) -> None:
        self.counts: dict[int, int] = dict(counts or {})
        self.max_s = max_s

    def add(self, seconds: float) -> None:
        """Count one duration."""
        place = max(0, math.ceil(math.log(max(seconds, self._FIRST_S) / self._FIRST_S, self.BASE)))
        self.counts[place] = self.counts.get(place, 0) + 1
        self.max_s = max(self.max_s, seconds)

    def merge(self, other: Latencies) -> None:
        """Add all of ``other``."""
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count
        self.max_s = max(self.max_s, other.max_s)

    @property
    def num(self) -> int:
        """How many durations were counted."""
        return sum(self.counts.values())

    def percentile_s(self, percent: float) -> float:
        """The upper end of the class in which ``percent`` % of the durations are reached."""
        wanted, seen = self.num * percent / 100, 0
        for place in sorted(self.counts):
            seen += self.counts[place]
            if seen >= wanted:
                return min(self._FIRST_S * self.BASE**place, self.max_s)
        return self.max_s


class End(msgspec.Struct, frozen=True):
    """How a rank's loop ended. ``how``: ``done``, ``stopped`` (asked to) or ``raised``.

    ``error`` is the class of what it raised, ``raised`` the class of what another rank had met.

    ``leftovers`` are what should have come back to its baseline and did not; ``tail`` the last
    decisions of the journal, as ``(index, line)``. ``at_s`` counts from when the ranks had met.
    """

    how: str
    error: str = ""
    raised: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()
    error_step: int | None = None
    story: tuple[str, ...] = ()
    traceback: str = ""
    tail: tuple[tuple[int, str], ...] = ()
    leftovers: tuple[str, ...] = ()
    drain_steps: int = 0
    at_s: float = 0.0


class Update(msgspec.Struct, frozen=True):
    """What is new on one rank since the last update; counts and latencies are totals."""

    rank: int
    pid: int
    host: str
    step: int
    at_s: float
    phase: str
    buckets: list[Bucket]
    snapshots: list[Snapshot]
    resources: list[Resources]
    events: list[FaultEvent]
    failures: list[str]
    covered: dict[str, int]
    counts: dict[str, int]
    step_counts: dict[int, int]
    step_max_s: float
    wait_counts: dict[int, int]
    wait_max_s: float
    num_dropped: int
    end: End | None
    incidents: list[Incident] = []


class Feed:
    """The box of one rank. Public attributes are replaced or added to by the loop's thread."""

    def __init__(self, rank: int, host: str, pid: int) -> None:
        self.rank, self.host, self.pid = rank, host, pid
        self.step = 0
        self.at_s = 0.0
        self.phase = "starting"
        self.buckets: collections.deque[Bucket] = collections.deque(maxlen=MAX_BUCKETS)
        self.snapshots: collections.deque[Snapshot] = collections.deque()
        self.resources: collections.deque[Resources] = collections.deque(maxlen=MAX_BUCKETS)
        self.events: collections.deque[FaultEvent] = collections.deque(maxlen=MAX_EVENTS)
        self.failures: collections.deque[str] = collections.deque(maxlen=100)
        self.incidents: collections.deque[Incident] = collections.deque(maxlen=MAX_INCIDENTS)
        self.covered: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.steps = Latencies()
        self.waits = Latencies()
        self.num_dropped = 0
        self.end: End | None = None
        self.stop_asked = threading.Event()
        self._loop_thread = 0
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """The calling thread is the one whose stack is of interest."""
        self._loop_thread = threading.get_ident()

    def begin_clock(self) -> None:
        """The ranks have met: from here on time is counted."""
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the ranks have met."""
        return time.monotonic() - self._began_s

    def add_snapshot(self, snap: Snapshot) -> None:
        """Keep it until it is taken; the comparison misses what had to be dropped."""
        if len(self.snapshots) >= MAX_SNAPSHOTS:
            self.snapshots.popleft()
            self.num_dropped += 1
        self.snapshots.append(snap)

    def take(self) -> Update:
        """Everything since the last time; for one other thread."""
        # The end first: what comes with it was added before.
        end = self.end
        return Update(
            rank=self.rank,
            pid=self.pid,
            host=self.host,
            step=self.step,
            at_s=self.at_s,
            phase=self.phase,
            buckets=_drain(self.buckets),
            snapshots=_drain(self.snapshots),
            resources=_drain(self.resources),
            events=_drain(self.events),
            failures=_drain(self.failures),
            covered=dict(self.covered),
            counts=dict(self.counts),
            step_counts=self.steps.counts.copy(),
            step_max_s=self.steps.max_s,
            wait_counts=self.waits.counts.copy(),
            wait_max_s=self.waits.max_s,
            num_dropped=self.num_dropped,
            end=end,
            incidents=_drain(self.incidents),
        )

    def stack(self) -> str:
        """Where the loop's thread is now."""
        frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return "the loop's thread has ended"
        return "".join(traceback.format_stack(frame)[-30:])


def _drain(box: collections.deque[Item]) -> list[Item]:
    found: list[Item] = []
    while box:
        found.append(box.popleft())
    return found
