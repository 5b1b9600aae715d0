"""``kvpact doctor``: what is installed, is this host fit, can the hosts meet."""

from __future__ import annotations

import json

import msgspec
from rich.table import Table

from kvpact.harness.operate.finding import Finding, Level
from kvpact.harness.operate.host import fit_host
from kvpact.harness.operate.installed import installed
from kvpact.harness.operate.meeting import meet
from kvpact.harness.text.console import PlainConsole

__all__ = ["doctor"]

_MARKS = {Level.GOOD: "[green]good[/]", Level.NOTE: "[yellow]note[/]", Level.WRONG: "[red]WRONG[/]"}


def doctor(address: str | None, num_ranks: int | None, *, wait_s: float, as_json: bool) -> int:
    """Print all findings and return the exit status: 1 where one is wrong."""
    findings = [*installed(), *fit_host(num_ranks)]
    if address is not None and num_ranks is not None:
        findings += meet(address, num_ranks, wait_s)
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings), indent=2))
    else:
        _show(findings)
    return int(any(finding.level is Level.WRONG for finding in findings))


def _show(findings: list[Finding]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = finding.text + (f"\n-> {finding.todo}" if finding.todo else "")
        table.add_row(_MARKS[finding.level], finding.subject, text)
    PlainConsole().print(table)
