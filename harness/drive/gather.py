"""Puts together what the ranks of a soak tell: compares them, and keeps what the report shows.

Memory stays bounded however long a soak runs: series are made coarser, events are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from kvpact.consensus.epoch.report import Incident
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.feed import Bucket, End, FaultEvent, Latencies, Resources, Update
from kvpact.harness.verify.agreement import Snapshot, compare
from kvpact.harness.verify.journals import check_journals

__all__ = ["Gather", "RankView", "end_of"]

MAX_POINTS: Final = 360
MAX_EVENTS: Final = 4_000
MAX_FAILURES: Final = 200
MAX_INCIDENTS: Final = 20


class RankView:
    """One rank as the driver knows it; ``lost`` says why nothing more comes from it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.host = ""
        self.step = 0
        self.at_s = 0.0
        self.phase = "starting"
        self.series: list[Bucket] = []
        self.resources: list[Resources] = []
        self.covered: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.steps = Latencies()
        self.waits = Latencies()
        self.num_dropped = 0
        self.end: End | None = None
        self.lost = ""
        self.stack = ""
        self.moved_s = time.monotonic()
        self._resources_every_s = 0.0

    @property
    def is_over(self) -> bool:
        """Nothing more comes from it."""
        return self.end is not None or bool(self.lost)

    def take(self, update: Update) -> None:
        """What is new."""
        if update.step > self.step or update.phase != self.phase:
            self.moved_s = time.monotonic()
        self.pid, self.host = update.pid, update.host
        self.step, self.at_s, self.phase = update.step, update.at_s, update.phase
        for bucket in update.buckets:
            self._add(bucket)
        for one in update.resources:
            self._sample(one)
        self.covered, self.counts = update.covered, update.counts
        self.steps = Latencies(update.step_counts, update.step_max_s)
        self.waits = Latencies(update.wait_counts, update.wait_max_s)
        self.num_dropped = update.num_dropped
        self.end = update.end or self.end

    def _add(self, bucket: Bucket) -> None:
        """Keep the series short: where it is too long, two buckets become one."""
        series = self.series
        width_s = series[0].width_s if len(series) > 1 else bucket.width_s
        if series and series[-1].width_s + bucket.width_s <= width_s:
            series[-1].absorb(bucket)
        else:
            series.append(bucket)
        if len(series) > MAX_POINTS:
            for first, second in zip(series[0::2], series[1::2], strict=False):
                first.absorb(second)
            self.series = series[0::2]

    def _sample(self, one: Resources) -> None:
        """Likewise for resources: every second one goes."""
        if self.resources and one.at_s - self.resources[-1].at_s < self._resources_every_s:
            return
        self.resources.append(one)
        if len(self.resources) > MAX_POINTS:
            span_s = self.resources[-1].at_s - self.resources[0].at_s
            self._resources_every_s = span_s / (MAX_POINTS / 2)
            self.resources = self.resources[0::2]


class Gather:
    """All ranks. ``failures`` are promises that did not hold, ``differences`` between ranks.

    ``history`` says in a word what their journals come to; empty: none were written.
    """

    def __init__(self, config: SoakConfig) -> None:
        self.config = config
        self.views = [RankView(rank) for rank in range(config.num_ranks)]
        self.failures: list[str] = []
        self.incidents: list[Incident] = []
        self.differences: list[str] = []
        self.history = ""
        self.num_compared = 0
        self.num_walks = 0
        self.events: list[FaultEvent] = []
        self.struck: dict[str, dict[int, int]] = {}
        self.skipped: dict[str, str] = {}
        self.began_s = time.monotonic()
        self._waiting: dict[tuple[int, int], list[Snapshot]] = {}

    def add(self, update: Update) -> None:
        """Take in one update of one rank."""
        self.views[update.rank].take(update)
        for event in update.events:
            self._count(event)
        self._keep(self.failures, update.failures)
        for incident in update.incidents:
            self._hear_of(incident)
        for snap in update.snapshots:
            self._compare(snap)

    def check_history(self) -> None:
        """The run is over: judge its journals, without the code that wrote them."""
        if self.config.journal is None:
            return
        if self.config.unsafe_no_votes:
            self.history = "not checked: votes were ignored"
            return
        # Who has come to its end has written: nothing there means that it wrote elsewhere.
        ended = [view.rank for view in self.views if view.end is not None]
        wrong = check_journals(self.config.journal, ended)
        self.history = "broken" if wrong else "holds"
        self._keep(self.failures, [wrong] if wrong else [])

    @property
    def is_over(self) -> bool:
        """No rank has anything more to tell."""
        return all(view.is_over for view in self.views)

    @property
    def step(self) -> int:
        """The step that all ranks have reached."""
        return min(view.step for view in self.views)

    def covered(self) -> dict[str, int]:
        """How often each point was passed, by the rank that passed it most."""
        found: dict[str, int] = {}
        for view in self.views:
            for name, times in view.covered.items():
                found[name] = max(found.get(name, 0), times)
        return found

    def struck_in_all(self) -> dict[str, int]:
        """How often each fault struck, over all ranks."""
        return {name: sum(by_rank.values()) for name, by_rank in self.struck.items()}

    def steps(self) -> Latencies:
        """Durations of the steps of all ranks."""
        return _merged([view.steps for view in self.views])

    def waits(self) -> Latencies:
        """How long all ranks waited for others, a step."""
        return _merged([view.waits for view in self.views])

    def hit_rate(self) -> float:
        """Hit pages over all pages of finished requests."""
        counts: Mapping[str, int] = self.views[0].counts
        hits = sum(counts.get(f"pages hit {where}", 0) for where in ("on device", "on host"))
        hits += counts.get("pages hit in storage", 0)
        return hits / max(1, counts.get("pages of prompts", 0))

    def _hear_of(self, incident: Incident) -> None:
        """Keep each once, as the rank tells it that heard most reports."""
        for place, known in enumerate(self.incidents):
            if (known.epoch, known.seal.error) == (incident.epoch, incident.seal.error):
                if len(incident.reports) > len(known.reports):
                    self.incidents[place] = incident
                return
        if len(self.incidents) < MAX_INCIDENTS:
            self.incidents.append(incident)

    def _count(self, event: FaultEvent) -> None:
        if event.skipped:
            self.skipped[event.name] = event.skipped
        else:
            by_rank = self.struck.setdefault(event.name, {})
            by_rank[event.rank] = by_rank.get(event.rank, 0) + 1
        # Those that a person may want to find in a timeline come first.
        is_rare = event.name.partition(" ")[0] in ("process", "network", "scheduler")
        if is_rare or len(self.events) < MAX_EVENTS:
            self.events.append(event)

    def _compare(self, snap: Snapshot) -> None:
        place = (snap.epoch, snap.step)
        waiting = self._waiting.setdefault(place, [])
        waiting.append(snap)
        if len(waiting) < len(self.views):
            return
        del self._waiting[place]
        self.num_compared += 1
        self.num_walks += snap.tree != 0
        self._keep(self.differences, compare(waiting))
        # A step that one rank never reported would stay for ever.
        for old in [old for old in self._waiting if old < (snap.epoch, snap.step - 50_000)]:
            del self._waiting[old]

    def _keep(self, kept: list[str], new: list[str]) -> None:
        kept += new[: MAX_FAILURES - len(kept)]


def _merged(many: list[Latencies]) -> Latencies:
    merged = Latencies()
    for one in many:
        merged.merge(one)
    return merged


def end_of(view: RankView) -> str:
    """How a rank ended, in a few words."""
    if view.lost:
        return view.lost
    if view.end is None:
        return "never ended"
    if view.end.how == "raised":
        return f"raised {view.end.error}: {view.end.message}"
    return view.end.how
