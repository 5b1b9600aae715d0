"""Drives a soak from outside the ranks' loops: polls, shows, ends it in order, reports.

Who starts the ranks is a :class:`Ranks`: Ray (:mod:`kvpact.harness.drive.ray`), torchrun
(:mod:`kvpact.harness.torchrun`), or a test.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, Protocol

import msgspec
from rich.console import Console

from kvpact.harness.drive.gather import Gather
from kvpact.harness.drive.live import LiveView, Metrics
from kvpact.harness.drive.page import write_page
from kvpact.harness.drive.report import SoakReport, build_report, summary, write_json
from kvpact.harness.drive.verdict import Conclusion, conclude
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.feed import Update
from kvpact.harness.text.incident import print_incidents

__all__ = ["Options", "Ranks", "drive", "finish", "say"]

POLL_S: Final = 0.25
#: Once one rank has ended in any other way than the rest, the others have so long.
GRACE_S: Final = 15.0
SAME_S: Final = 1.5
#: Of each rank's own story; all of it is in the report.
STORY_LINES: Final = 20


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns the driver only. ``command`` is what a person types to run this again."""

    address: str = "local"
    out: str | None = None
    metrics_port: int | None = None
    spread: bool = False
    start_timeout_s: float = 60.0
    command: str = ""
    launcher: str = "Ray"


class Ranks(Protocol):
    """Ranks that run :func:`kvpact.harness.soak.loop.run_soak_rank` somewhere."""

    def poll(self) -> list[Update]:
        """What is new, from every rank that can still be asked. Bounded in time."""
        ...

    def lost(self) -> dict[int, str]:
        """Ranks from which nothing will come any more, and why."""
        ...

    def stop(self) -> None:
        """Ask them to end in good order."""
        ...

    def stacks(self) -> dict[int, str]:
        """Where the loops are that can still be asked. Bounded in time."""
        ...


def drive(
    ranks: Ranks, config: SoakConfig, options: Options, console: Console, metrics: Metrics | None
) -> tuple[Gather, Conclusion]:
    """Poll until all ranks have ended or nothing moves any more; what it comes to."""
    gather = Gather(config)
    # Joining, a stop and a full deadline may pass without a step.
    silence_s = options.start_timeout_s + 2 * config.deadline_s + 10.0
    with LiveView(gather, console) as live, _interrupts() as asked:
        was_asked, first_end_s = False, 0.0
        while not gather.is_over:
            for update in ranks.poll():
                gather.add(update)
            for rank, why in ranks.lost().items():
                gather.views[rank].lost = gather.views[rank].lost or why
            if asked() and not was_asked:
                was_asked, live.note = True, "stopping"
                ranks.stop()
            live.show()
            if metrics is not None:
                metrics.show(gather)
            now_s = time.monotonic()
            if any(view.is_over for view in gather.views) and not first_end_s:
                first_end_s = now_s
            grace_s = GRACE_S + 2 * config.deadline_s
            still = [view for view in gather.views if not view.is_over]
            stuck = [view for view in still if now_s - view.moved_s > silence_s]
            if asked() > 1 or stuck or (first_end_s and now_s - first_end_s > grace_s and still):
                stacks = ranks.stacks()
                for view in still:
                    view.stack = stacks.get(view.rank, "does not answer")
                    view.lost = f"was still {view.phase} at step {view.step} and did not end"
                break
            time.sleep(POLL_S)
    gather.check_history()
    return gather, conclude(gather, is_stopped=was_asked)


def finish(
    gather: Gather,
    conclusion: Conclusion,
    options: Options,
    console: Console,
) -> SoakReport:
    """Report: files where asked for, and a few lines. Raises BadInput where a file cannot be."""
    report = build_report(
        gather,
        conclusion,
        launcher=options.launcher,
        command=options.command,
        duration_s=time.monotonic() - gather.began_s,
    )
    if options.out is not None:
        folder = Path(options.out)
        write_json(report, folder / "report.json")
        write_page(report, folder / "report.html")
    for name, value in summary(report).items():
        say(console, f"{name}: {value}")
    for line in report.why[:10]:
        say(console, f"  {line}")
    if report.status and report.incidents:
        print_incidents(report.incidents, console)
    else:
        told: dict[tuple[str, ...], int] = {}
        for rank in report.ranks:
            if rank.story and told.setdefault(rank.story, rank.rank) == rank.rank:
                say(console, f"  rank {rank.rank}:")
                for line in rank.story[:STORY_LINES]:
                    say(console, f"    {line}")
    if report.detection_s is not None:
        say(console, f"named after: {report.detection_s:.2f} s")
    if gather.config.unsafe_no_votes and report.verdict == "divergence":
        say(console, "the control works: with votes ignored, this soak ends in divergence")
    elif report.is_expected and report.status:
        say(console, "this end was planned")
    if options.out is not None:
        say(console, f"report: {options.out}/report.html")
    ending = " (stopped early)" if report.is_stopped else ""
    say(console, f"verdict: {report.verdict}{ending}")
    return report


def say(console: Console, text: str) -> None:
    """One line as it stands, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _interrupts() -> Generator[Callable[[], int]]:
    """Counts SIGINT and SIGTERM instead of dying of them; the count, as a callable."""
    count, last_s = 0, -SAME_S

    def note(number: int, frame: object) -> None:
        nonlocal count, last_s
        # A terminal and a launcher may both pass the same one on.
        if time.monotonic() - last_s >= SAME_S:
            count += 1
        last_s = time.monotonic()

    before: dict[signal.Signals, object] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:
        pass  # not the main thread: whoever owns it decides
    try:
        yield lambda: count
    finally:
        for number, former in before.items():
            signal.signal(number, former)  # pyright: ignore[reportArgumentType]
