"""``kvpact explain REPORT.json``: the story of a run that failed, for a person at night.

Reads what ``kvpact replay --json``, ``kvpact scenario --json`` and ``kvpact soak`` write, finds the
incidents in it (:class:`kvpact.consensus.epoch.report.Incident`: the seal that ended an epoch, and
what every rank reported), and prints for each: what was decided, who waited for whom, the journals
of all ranks side by side around the first difference, the pools at that moment, and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpact.consensus.core.ballot import HEADER_FIELDS
from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.journal import Entry
from kvpact.consensus.epoch.report import Incident, Report, SealedError
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.files import read_json

__all__ = ["explain", "incidents_in", "print_incident"]

_WHAT: Final = "a report of kvpact in JSON"
_KEYS: Final = {"rank", "epoch", "seal", "reports"}
#: Lines of output where it is not a terminal: wide enough for the journals of a few ranks.
_PLAIN_WIDTH: Final = 120
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


def explain(path: str, *, around: int = 6, console: Console | None = None) -> int:
    """Print the story of every incident in the report at ``path``; returns the exit status 0.

    ``around``: journal lines before and after the first difference. Raises :class:`BadInput` for
    what is no report.
    """
    incidents, failures = _read(path)
    out = console or _console()
    if not incidents:
        nothing = "no incident in it: no epoch was closed by an error"
        out.print(f"{os.path.basename(path)}: {nothing}", markup=False)
    for number, incident in enumerate(incidents, 1):
        if number > 1:
            out.print()
        out.rule(f"incident {number} of {len(incidents)}, told by rank {incident.rank}")
        print_incident(incident, out, around=around)
    if failures:
        out.print()
        _heading(out, "What the run says of itself")
        for line in failures:  # the rest of an error stands above already
            out.print(f"  {line.splitlines()[0] if incidents else line}", markup=False)
    return 0


def _console() -> Console:
    console = PlainConsole(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = PlainConsole(highlight=False, width=_PLAIN_WIDTH)
    return console


# -- reading -------------------------------------------------------------------------------------


def _read(path: str) -> tuple[list[Incident], list[str]]:
    data = read_json(path, what=_WHAT)
    try:
        found = incidents_in(data)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: an incident in it cannot be read: {error}") from None
    failures = list(dict.fromkeys(_failures(data)))
    if not found and not _is_report(data):
        raise BadInput(f"{path}: is JSON, but no report of kvpact: nothing in it has a verdict")
    return found, failures


def incidents_in(data: object) -> list[Incident]:
    """All incidents anywhere in a decoded report; of several tellings of one, the fullest."""
    fullest: dict[tuple[int, str], Incident] = {}
    for one in _walk(data):
        incident = msgspec.convert(one, Incident, strict=False)
        key = (incident.epoch, incident.seal.error.message)
        known = fullest.get(key)
        if known is None or len(incident.reports) > len(known.reports):
            fullest[key] = incident
    return list(fullest.values())


def _walk(data: object) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        if members.keys() >= _KEYS:
            yield members
            return
        for value in members.values():
            yield from _walk(value)
    elif isinstance(data, list):
        for value in cast("list[Any]", data):
            yield from _walk(value)


def _failures(data: object) -> Iterator[str]:
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        lines = members.get("failures")
        if isinstance(lines, list):
            yield from (str(line) for line in cast("list[Any]", lines))
        return
    if isinstance(data, list):
        for value in cast("list[object]", data):
            yield from _failures(value)


def _is_report(data: object) -> bool:
    if isinstance(data, list):
        return any(_is_report(one) for one in cast("list[object]", data))
    return isinstance(data, dict) and bool(
        {"failures", "verdict"} & cast("dict[str, Any]", data).keys()
    )


# -- printing ------------------------------------------------------------------------------------


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
    _heading(out, "What to do")
    out.print(f"  {error.build().advice}", markup=False)


def _heading(out: Console, text: str) -> None:
    out.print(Text(text, style="bold"))


def _table(out: Console, title: str, *columns: str) -> Table:
    out.print()
    _heading(out, title)
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
    _heading(out, "What is known about it")
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
    _heading(out, "Open intents")
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
