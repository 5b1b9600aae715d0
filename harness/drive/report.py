"""The report of a soak as a record: what ``report.json`` holds and ``report.html`` shows."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.epoch.report import Incident
from kvpact.consensus.membership import versions
from kvpact.harness.drive.gather import Gather, RankView, end_of
from kvpact.harness.drive.verdict import Conclusion
from kvpact.harness.faults.plan import FaultLine
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.coverage import POINTS
from kvpact.harness.soak.feed import Bucket, FaultEvent, Latencies, Resources
from kvpact.harness.soak.resources import Growth
from kvpact.harness.text.files import read_text, write_bytes

__all__ = [
    "FaultRow",
    "Percentiles",
    "PointRow",
    "RankReport",
    "SoakReport",
    "build_report",
    "read_report",
    "summary",
    "write_json",
]

MAX_SHOWN_EVENTS: Final = 400

#: Fault -> the counts (by cause) and points in which it shows.
_SHOWS_IN: Final[dict[str, tuple[str, ...]]] = {
    "host.reserve refuse": ("back_up abort (refused)",),
    "device.reserve refuse": ("pages abort (refused)", "load_back abort (refused)"),
    "device.reserve short": ("load-back shortened", "pages abort (refused)"),
    "write fail": ("back_up fail",),
    "write corrupt": ("back_up fail",),
    "write delay": ("ended out of order",),
    "write skew": ("ended out of order",),
    "write hang": ("back_up quarantine",),
    "load fail": ("load_back fail", "request must recompute"),
    "load corrupt": ("load_back fail", "request must recompute"),
    "load delay": ("ended out of order",),
    "load skew": ("ended out of order",),
    "load hang": ("load_back quarantine",),
    "scheduler slow": ("straggler within the deadline",),
    "process stop": ("straggler within the deadline",),
}


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p99: float
    p99_9: float
    max: float


class RankReport(msgspec.Struct, frozen=True):
    """One rank: how it ended, and its timelines."""

    rank: int
    stage: int
    pid: int
    host: str
    steps: int
    how: str
    error: str
    story: tuple[str, ...]
    traceback: str
    stack: str
    tail: tuple[tuple[int, str], ...]
    drain_steps: int
    step_ms: Percentiles
    wait_ms: Percentiles
    series: list[Bucket]
    resources: list[Resources]


class FaultRow(msgspec.Struct, frozen=True):
    """One kind of fault: what was planned, how often it struck on which rank, where it showed."""

    name: str
    planned: str
    struck: dict[int, int]
    shows: dict[str, int]
    skipped: str


class PointRow(msgspec.Struct, frozen=True):
    """One rare point."""

    name: str
    meaning: str
    times: int
    is_missing: bool


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. ``command`` runs the same again; ``series`` are in the ranks."""

    verdict: str
    status: int
    is_expected: bool
    is_stopped: bool
    why: tuple[str, ...]
    named_ranks: tuple[int, ...]
    detection_s: float | None
    launcher: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]
    config: SoakConfig
    duration_s: float
    steps: int
    steps_per_s: float
    requests: int
    hit_rate: float
    collectives_per_step: float
    compared_steps: int
    compared_trees: int
    dropped_snapshots: int
    step_ms: Percentiles
    wait_ms: Percentiles
    counts: dict[str, int]
    faults: list[FaultRow]
    events: list[FaultEvent]
    points: list[PointRow]
    growth: tuple[Growth, ...]
    ranks: list[RankReport]
    history: str = ""
    incidents: tuple[Incident, ...] = ()


def build_report(
    gather: Gather, conclusion: Conclusion, *, launcher: str, command: str, duration_s: float
) -> SoakReport:
    """Put the record together; pure."""
    config, first = gather.config, gather.views[0]
    counts = max((view.counts for view in gather.views), key=lambda one: sum(one.values()))
    steps = max(view.step for view in gather.views)
    loop_s = max(view.at_s for view in gather.views)
    return SoakReport(
        verdict=conclusion.verdict.title,
        status=conclusion.status,
        is_expected=conclusion.is_expected,
        is_stopped=conclusion.is_stopped,
        why=conclusion.why[:50],
        named_ranks=conclusion.named_ranks,
        detection_s=conclusion.detection_s,
        launcher=launcher,
        command=command,
        versions=versions(),
        machine={
            "system": f"{platform.system()} {platform.release()}",
            "cores": str(os.cpu_count()),
            "hosts": ", ".join(sorted({view.host for view in gather.views if view.host})),
        },
        config=config,
        duration_s=round(duration_s, 3),
        steps=steps,
        steps_per_s=round(steps / loop_s, 1) if loop_s else 0.0,
        requests=first.counts.get("requests finished", 0),
        hit_rate=round(gather.hit_rate(), 4),
        collectives_per_step=round(
            counts.get("collectives", 0) / max(1, counts.get("iterations", 0)), 3
        ),
        compared_steps=gather.num_compared,
        compared_trees=gather.num_walks,
        dropped_snapshots=sum(view.num_dropped for view in gather.views),
        step_ms=_percentiles(gather.steps()),
        wait_ms=_percentiles(gather.waits()),
        counts=dict(sorted(counts.items())),
        faults=_faults(gather, counts),
        events=gather.events[-MAX_SHOWN_EVENTS:],
        points=_points(gather, conclusion),
        growth=conclusion.growth,
        ranks=[_rank(view, config) for view in gather.views],
        history=gather.history,
        incidents=tuple(gather.incidents),
    )


def write_json(report: SoakReport, path: Path) -> None:
    """Write ``report.json``. Raises BadInput where it cannot."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def read_report(folder: str) -> SoakReport:
    """The report of an earlier soak in ``folder``. Raises BadInput."""
    path = Path(folder) / "report.json"
    try:
        return msgspec.json.decode(read_text(path, what="the report of a soak"), type=SoakReport)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path}: is not the report of a soak: {error}") from None


def _rank(view: RankView, config: SoakConfig) -> RankReport:
    end = view.end
    return RankReport(
        rank=view.rank,
        stage=view.rank // config.tp,
        pid=view.pid,
        host=view.host,
        steps=view.step,
        how=end_of(view),
        error=end.error if end else "",
        story=end.story if end else (),
        traceback=end.traceback if end else "",
        stack=view.stack,
        tail=end.tail if end and end.how == "raised" else (),
        drain_steps=end.drain_steps if end else 0,
        step_ms=_percentiles(view.steps),
        wait_ms=_percentiles(view.waits),
        series=view.series,
        resources=view.resources,
    )


def _percentiles(found: Latencies) -> Percentiles:
    return Percentiles(
        p50=round(found.percentile_s(50) * 1000, 3),
        p99=round(found.percentile_s(99) * 1000, 3),
        p99_9=round(found.percentile_s(99.9) * 1000, 3),
        max=round(found.max_s * 1000, 3),
    )


def _faults(gather: Gather, counts: dict[str, int]) -> list[FaultRow]:
    covered = gather.covered()
    lines: dict[str, list[FaultLine]] = {}
    for line in gather.config.plan.fault:
        lines.setdefault(line.name, []).append(line)
    rows: list[FaultRow] = []
    for name, planned in lines.items():
        where = _SHOWS_IN.get(name, ())
        rows.append(
            FaultRow(
                name=name,
                planned="; ".join(_in_words(line) for line in planned),
                struck=dict(sorted(gather.struck.get(name, {}).items())),
                shows={key: counts.get(key, covered.get(key, 0)) for key in where},
                skipped=gather.skipped.get(name, ""),
            )
        )
    return rows


def _in_words(line: FaultLine) -> str:
    who = f"rank {', '.join(map(str, line.ranks))}" if line.ranks else "every rank"
    if line.action == "skew":
        return f"{who}, {line.share:.0%} of the copies, by up to {line.steps} steps"
    when = f"at step {line.at_step}" if line.at_step else f"about every {line.every_steps} steps"
    size = f", {line.seconds:g} s" if line.seconds else ""
    size += f", by {line.steps} steps" if line.steps else ""
    return f"{who}, {when}{size}"


def _points(gather: Gather, conclusion: Conclusion) -> list[PointRow]:
    covered = gather.covered()
    lacking = {line.partition(":")[0] for line in conclusion.missing}
    return [
        PointRow(name, meaning, covered.get(name, 0), name in lacking)
        for name, meaning in POINTS.items()
    ]


def summary(report: SoakReport) -> dict[str, Any]:
    """A few numbers, for the last lines on a terminal."""
    return {
        "steps": f"{report.steps:,} ({report.steps_per_s:,.0f} a second)",
        "requests": f"{report.requests:,}",
        "hit rate": f"{report.hit_rate:.3f}",
        "step p50 / p99 / p99.9 / max": (
            f"{report.step_ms.p50:.2f} / {report.step_ms.p99:.2f} /"
            f" {report.step_ms.p99_9:.2f} / {report.step_ms.max:.2f} ms"
        ),
        "compared": f"{report.compared_steps:,} steps, {report.compared_trees:,} whole trees",
        "faults": f"{sum(sum(row.struck.values()) for row in report.faults):,}",
        "rare points": f"{sum(row.times > 0 for row in report.points)} of {len(report.points)}",
        **({"history": report.history} if report.history else {}),
    }
