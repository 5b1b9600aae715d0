"""What a replay says at its end: a table for a person, a record for a program."""

from __future__ import annotations

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvpact.consensus.epoch.report import Incident
from kvpact.harness.replay.config import ReplayConfig
from kvpact.harness.replay.rank import RankSummary

__all__ = ["RankTimes", "ReplayReport", "print_report", "summarise"]


class RankTimes(msgspec.Struct, frozen=True):
    """One rank's times: of a step in milliseconds, and waiting for others in seconds."""

    rank: int
    step_ms_p50: float
    step_ms_p99: float
    step_ms_max: float
    waited_s: float


class ReplayReport(msgspec.Struct, frozen=True):
    """``blocks`` and ``hits`` count the trace's blocks, ``pages`` pages of ``page_size`` tokens.

    ``verdict`` is ``agree``, or ``failed`` with ``failures``. ``commits`` and ``aborts`` are
    verdicts on transactions by kind and cause, equal on all ranks. ``journal`` is the folder whose
    histories were checked.
    """

    verdict: str
    trace: str
    ranks: str
    num_ranks: int
    lag: int
    page_size: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    lanes: int
    mode: str
    storage: str
    requests: int
    blocks: int
    pages: int
    hits: dict[str, int]
    hit_rate: float
    steps: int
    collectives: int
    collectives_per_step: float
    commits: dict[str, int]
    aborts: dict[str, int]
    retries: int
    at_once: int
    asked: int
    rounds: int
    evicted: dict[str, int]
    times: list[RankTimes]
    duration_s: float
    failures: list[str]
    incidents: list[Incident] = []
    journal: str | None = None


def summarise(
    config: ReplayConfig, summaries: list[RankSummary], failures: list[str], duration_s: float
) -> ReplayReport:
    """Put the ranks' summaries together; what should be equal and is not is a failure."""
    failures = list(failures)
    if len(summaries) < config.num_ranks:
        failures.append(f"only {len(summaries)} of {config.num_ranks} ranks came to the end")
    for other in summaries[1:]:
        for name in ("totals", "steps", "collectives", "commits", "aborts"):
            if getattr(other, name) != getattr(summaries[0], name):
                failures.append(
                    f"{name}: {getattr(summaries[0], name)} on rank {summaries[0].rank},"
                    f" {getattr(other, name)} on rank {other.rank}"
                )
    first = summaries[0] if summaries else None
    totals = first.totals if first is not None else None
    per_block = 512 // config.page_size
    hits = {
        "device": totals.device_hits // per_block if totals is not None else 0,
        "host": totals.host_hits // per_block if totals is not None else 0,
        "storage": totals.storage_hits // per_block if totals is not None else 0,
    }
    blocks = totals.blocks if totals is not None else 0
    steps = first.steps if first is not None else 0
    collectives = first.collectives if first is not None else 0
    return ReplayReport(
        verdict="failed" if failures else "agree",
        trace=config.trace,
        ranks=config.ranks,
        num_ranks=config.num_ranks,
        lag=config.lag,
        page_size=config.page_size,
        device_pages=config.device_pages,
        host_pages=config.host_pages,
        lanes=config.lanes,
        mode=config.mode,
        storage=config.storage,
        requests=totals.requests if totals is not None else 0,
        blocks=blocks,
        pages=totals.pages if totals is not None else 0,
        hits=hits,
        hit_rate=round(sum(hits.values()) / blocks, 6) if blocks else 0.0,
        steps=steps,
        collectives=collectives,
        collectives_per_step=round(collectives / steps, 4) if steps else 0.0,
        commits=first.commits if first is not None else {},
        aborts=first.aborts if first is not None else {},
        retries=totals.retries if totals is not None else 0,
        at_once=totals.at_once if totals is not None else 0,
        asked=totals.asked if totals is not None else 0,
        rounds=totals.rounds if totals is not None else 0,
        evicted={
            "device": first.metrics["evicted_device"] if first is not None else 0,
            "host": first.metrics["evicted_host"] if first is not None else 0,
        },
        times=[_times(summary) for summary in summaries],
        duration_s=round(duration_s, 3),
        failures=failures[:100],
        journal=config.journal,
    )


def _times(summary: RankSummary) -> RankTimes:
    steps_ms = np.array(summary.step_s or [0.0]) * 1000
    return RankTimes(
        rank=summary.rank,
        step_ms_p50=round(float(np.percentile(steps_ms, 50)), 3),
        step_ms_p99=round(float(np.percentile(steps_ms, 99)), 3),
        step_ms_max=round(float(steps_ms.max()), 3),
        waited_s=round(summary.waited_s, 3),
    )


def print_report(report: ReplayReport, console: Console) -> None:
    """The table that a person reads."""
    colour = "green" if report.verdict == "agree" else "red"
    table = Table(title=f"{report.trace}: {report.num_ranks} ranks over {report.ranks}")
    table.add_column("what")
    table.add_column("how much", justify="right")
    rows: list[tuple[str, str]] = [
        ("requests", f"{report.requests:,}"),
        ("blocks of their prompts", f"{report.blocks:,}"),
    ]
    for tier, hits in report.hits.items():
        if hits or tier == "device":
            share = hits / report.blocks if report.blocks else 0.0
            rows.append((f"hits on {tier}", f"{hits:,} ({share:.4f})"))
    rows.append(("hit rate", f"{report.hit_rate:.4f}"))
    rows += [(f"commits, {kind}", f"{count:,}") for kind, count in sorted(report.commits.items())]
    rows += [(f"aborts, {cause}", f"{count:,}") for cause, count in sorted(report.aborts.items())]
    rows.append(("requests tried again for want of pages", f"{report.retries:,}"))
    if report.at_once or report.rounds:
        rows.append(
            ("calls for pages: had at once / voted", f"{report.at_once:,} / {report.asked:,}")
        )
        share = report.rounds / report.steps if report.steps else 0.0
        rows.append(("extra rounds", f"{report.rounds:,} ({share:.4f} of all)"))
    rows += [(f"pages evicted, {tier}", f"{count:,}") for tier, count in report.evicted.items()]
    rows.append(("steps", f"{report.steps:,}"))
    rows.append(("collectives per step", f"{report.collectives_per_step:.2f}"))
    for times in report.times:
        steps = f"{times.step_ms_p50:.2f} / {times.step_ms_p99:.2f} / {times.step_ms_max:.2f} ms"
        what = f"rank {times.rank}: step p50 / p99 / max; waited for others"
        rows.append((what, f"{steps}; {times.waited_s:.1f} s"))
    if report.journal is not None:
        is_broken = any(line.startswith("history:") for line in report.failures)
        rows.append(("history in the journals", "broken" if is_broken else "holds"))
    rows.append(("duration", f"{report.duration_s:.1f} s"))
    rows.append(("verdict", f"[{colour}]{report.verdict}[/{colour}]"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for failure in report.failures:
        console.print(f"  {failure}", markup=False)
