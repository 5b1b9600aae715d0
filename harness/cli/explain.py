"""``kvpact explain REPORT.json``: the story of a run that failed, for a person at night.

Reads what ``kvpact replay --json``, ``kvpact scenario --json`` and ``kvpact soak`` write, finds the
incidents in it (:class:`kvpact.consensus.epoch.report.Incident`: the seal that ended an epoch, and
what every rank reported), and prints for each: what was decided, who waited for whom, the journals
of all ranks side by side around the first difference, the pools at that moment, and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, cast

import msgspec
from rich.console import Console

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.files import read_json
from kvpact.harness.text.incident import heading, print_incidents

__all__ = ["explain", "incidents_in"]

_WHAT: Final = "a report of kvpact in JSON"
_KEYS: Final = {"rank", "epoch", "seal", "reports"}
#: Lines of output where it is not a terminal: wide enough for the journals of a few ranks.
_PLAIN_WIDTH: Final = 120


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
    print_incidents(incidents, out, around=around)
    if failures:
        out.print()
        heading(out, "What the run says of itself")
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
        elif members.get("status"):
            yield from _what_a_soak_says(members)
        return
    if isinstance(data, list):
        for value in cast("list[object]", data):
            yield from _failures(value)


def _what_a_soak_says(report: dict[str, Any]) -> Iterator[str]:
    """Why it failed, and with what story each rank ended."""
    lines = cast("list[object]", report.get("why") or [])
    yield from (str(line) for line in lines)
    for rank in cast("list[dict[str, Any]]", report.get("ranks") or []):
        story = cast("list[object]", rank.get("story") or [])
        yield from (f"rank {rank.get('rank')}: {line}" for line in story)


def _is_report(data: object) -> bool:
    if isinstance(data, list):
        return any(_is_report(one) for one in cast("list[object]", data))
    return isinstance(data, dict) and bool(
        {"failures", "verdict"} & cast("dict[str, Any]", data).keys()
    )
