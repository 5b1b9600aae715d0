"""One incident on a terminal: what was decided, who waited for whom, where journals part.

An :class:`~kvpact.consensus.epoch.report.Incident` is the end of an epoch: the seal that ended it,
and what every rank reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpact.consensus.core.ballot import HEADER_FIELDS
from kvpact.consensus.core.journal import Entry
from kvpact.consensus.epoch.report import Incident, Report, SealedError

__all__ = ["heading", "print_incident", "print_incidents"]

_DIGESTS: Final = ("schema", "fingerprint", "live")
_CAUSES: Final = {
    "mismatch": "saw that ranks differ",
    "waited": "waited in vain",
    "late": "came too late",
    "lost": "lost the connection",
    "broken": "heard of an exception",
    "stuck": "saw no progress",
    "asked": "was asked by others",
}
_NEXT: Final = {
    "raise": "every rank raised this error",
    "reset": "all ranks dropped their caches and went on in a new epoch",
    "detach": "all ranks kept their device tiers only and went on in a new epoch",
    "observe": "nothing: the policy is to observe",
}


def print_incidents(incidents: Sequence[Incident], out: Console, *, around: int = 6) -> None:
    """Print all incidents of a run, the first one first. ``around``: see the command."""
    for number, incident in enumerate(incidents, 1):
        if number > 1:
            out.print()
        out.rule(f"incident {number} of {len(incidents)}, told by rank {incident.rank}")
        print_incident(incident, out, around=around)


def print_incident(incident: Incident, out: Console, *, around: int = 6) -> None:
    """Print one incident: see the module."""
    seal, error = incident.seal, incident.seal.error
    style = "bold red" if seal.then == "raise" else "bold yellow"
    out.print(Text(f"{error.kind}: {error.message}", style=style))
    named = ", ".join(map(str, error.ranks)) or "none"
    out.print(f"  epoch {error.epoch}, step {error.step}; named: {_ranks(error.ranks) or named}")
    out.print(f"  what followed: {_NEXT.get(seal.then, seal.then)}", markup=False)
    out.print(f"  settled on all ranks through step {seal.through}", markup=False)
    if seal.lost:
        out.print(f"  lost requests: {', '.join(seal.lost)}", markup=False)
    reports = sorted(incident.reports, key=lambda report: report.rank)
    _print_places(error, reports, out)
    _print_headers(error, reports, out)
    _print_journals(error, reports, out, around)
    _print_story(error, out)
    _print_pools(reports, out)
    _print_pending(reports, out)
    out.print()
    heading(out, "What to do")
    out.print(f"  {error.build().advice}", markup=False)


def heading(out: Console, text: str) -> None:
    """Print the title of a part."""
    out.print(Text(text, style="bold"))


def _table(out: Console, title: str, *columns: str) -> Table:
    out.print()
    heading(out, title)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")  # indents
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _print_places(error: SealedError, reports: Sequence[Report], out: Console) -> None:
    table = _table(out, "Who waited for whom", "rank", "it", "at step", "posted", "settled",
                   "waited", "while")  # fmt: skip
    for report in reports:
        table.add_row(
            "",
            _mark(str(report.rank), report.rank in error.ranks),
            _CAUSES.get(report.cause, report.cause),
            str(report.at_step),
            str(report.posted),
            str(report.settled),
            f"{report.waited_s:.1f} s",
            report.phase,
        )
    absent = [rank for rank in error.ranks if all(rank != one.rank for one in reports)]
    for rank in absent:
        table.add_row("", _mark(str(rank), True), "did not report", "", "", "", "", "")
    out.print(table)
    for report in reports:
        if report.detail:
            out.print(f"  rank {report.rank} says: {report.detail}", markup=False)


def _print_headers(error: SealedError, reports: Sequence[Report], out: Console) -> None:
    """The ballots that did not fit, field by field; only where ranks differ."""
    if error.kind != "Divergence":
        return
    steps = {r.rank: r.at_step if r.cause == "mismatch" else error.step for r in reports}
    having = [report for report in reports if steps[report.rank] in report.headers]
    if not having:
        return
    columns = [f"rank {report.rank}" for report in having]
    table = _table(out, "What each rank's ballot said", "field", *columns, "")
    for field in HEADER_FIELDS:
        values = [int(getattr(one.headers[steps[one.rank]], field)) for one in having]
        differs = len(set(values)) > 1
        cells = [_mark(_value(field, value), differs) for value in values]
        table.add_row("", field, *cells, "<- differs" if differs else "")
    out.print(table)


def _value(field: str, value: int) -> str:
    return f"{value:016x}"[-8:] if field in _DIGESTS else str(value)


def _print_journals(
    error: SealedError, reports: Sequence[Report], out: Console, around: int
) -> None:
    """Journals side by side; ranks that decided the same share a column."""
    tails = {one.rank: {entry.index: entry for entry in one.tail} for one in reports}
    indices = sorted({index for tail in tails.values() for index in tail})
    if not indices:
        return
    start = max((min(tail) for tail in tails.values() if tail), default=0)
    first = next((index for index in indices if index >= start and _differs(tails, index)), None)
    if error.kind != "Divergence":
        first = None  # ranks that were cut off in the middle have just not got as far
    centre = first if first is not None else indices[-1]
    shown = [index for index in indices if centre - around <= index <= centre + around]
    groups = _alike(tails, shown)
    title = "The last decisions of each rank"
    if first is not None:
        title = f"Journals of all ranks around the first difference (decision {first})"
    columns = [_ranks(group) for group in groups]
    table = _table(out, title, "", "decision", *columns)
    for index in shown:
        marks = first is not None and index >= first and _differs(tails, index)
        cells = [_mark(_entry(tails[group[0]].get(index)), marks) for group in groups]
        table.add_row("", ">" if index == first else "", f"#{index}", *cells)
    out.print(table)


def _differs(tails: dict[int, dict[int, Entry]], index: int) -> bool:
    return len({_key(tail.get(index)) for tail in tails.values()}) > 1


def _key(entry: Entry | None) -> str:
    return "" if entry is None else repr((entry.tag, entry.values))


def _alike(tails: dict[int, dict[int, Entry]], shown: Sequence[int]) -> list[list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(tails):
        lines = tuple(_key(tails[rank].get(index)) for index in shown)
        groups.setdefault(lines, []).append(rank)
    return list(groups.values())


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return "no such decision"
    return " ".join([f"step {entry.step}:", entry.tag, *map(str, entry.values)])


def _print_story(error: SealedError, out: Console) -> None:
    if not error.story:
        return
    out.print()
    heading(out, "What is known about it")
    for line in error.story:
        out.print(f"  {line}", markup=False)


def _print_pools(reports: Sequence[Report], out: Console) -> None:
    pools = sorted({pool for report in reports for pool in report.pools})
    if not pools:
        return
    counts: list[str] = []
    for report in reports:
        for pool in report.pools.values():
            counts += [name for name in pool if name not in counts]
    table = _table(out, "Pools at that moment (pages)", "pool", "rank", *counts)
    for pool in pools:
        rows = {one.rank: one.pools.get(pool, {}) for one in reports}
        for rank, row in rows.items():
            cells: list[Text | str] = []
            for name in counts:
                odd = len({other.get(name) for other in rows.values()}) > 1
                cells.append(_mark(str(row.get(name, "-")), odd))
            table.add_row("", pool, str(rank), *cells)
    out.print(table)


def _print_pending(reports: Sequence[Report], out: Console) -> None:
    if not any(report.pending for report in reports):
        return
    out.print()
    heading(out, "Open intents")
    groups: dict[tuple[str, ...], list[int]] = {}
    for report in reports:
        groups.setdefault(tuple(report.pending), []).append(report.rank)
    for lines, ranks in groups.items():
        for line in lines or ("none",):
            out.print(f"  {_ranks(ranks)}: {line}", markup=False)


def _mark(text: str, differs: bool) -> Text:
    return Text(text, style="bold red" if differs else "")


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
