"""``kvpact verify``: is a run's history right? Told from the journals alone.

Each rank's journal is walked by :mod:`harness.history`; here they are laid beside one another.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.history import History, Line, Unreadable, Violation, read_lines

__all__ = ["check_folder", "verify"]


def verify(folder: str) -> int:
    """Check every run in ``folder`` and print what was checked; 1: a rule is broken, 2: no run."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        runs = _runs(Path(folder))
        for run in runs:
            console.print(check_folder(run), markup=False)
    except Unreadable as error:
        sys.stderr.write(f"kvpact: {error}\n")
        return 2
    except Violation as error:
        console.print(f"FAILS  {error}", markup=False)
        return 1
    return 0


def _runs(folder: Path) -> list[Path]:
    """``folder``, or the folders in it, that hold the journals of a run."""
    if not folder.is_dir():
        raise Unreadable(f"{folder}: there is no such folder")
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    runs = [path for path in (folder, *inside) if _journals(path)]
    if not runs:
        raise Unreadable(f"{folder}: no rank<N>.jsonl is in it, nor in a folder below it")
    return runs


def _journals(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.jsonl"), key=lambda path: (len(path.name), path.name))


def check_folder(folder: Path) -> str:
    """One line about the run in ``folder``; raises :class:`Violation` naming file and line."""
    first: dict[int, list[tuple[str, list[Any]]]] = {}
    histories: dict[Path, History] = {}
    for path in _journals(folder):
        history = histories[path] = History()
        decisions: dict[int, list[tuple[str, list[Any]]]] = {}
        for line in read_lines(path):
            try:
                history.add(line)
                if line.place >= 0:
                    decisions.setdefault(line.epoch, []).append((line.tag, line.values))
                    _compare(first, line)
            except Violation as error:
                raise Violation(f"{path} line {line.number}: {error}") from None
        for epoch, found in decisions.items():
            known = first.setdefault(epoch, [])
            known += found[len(known) :]
    sealed = {epoch for history in histories.values() for epoch in history.sealed}
    last = max((history.epoch for history in histories.values()), default=0)
    for path, history in histories.items():
        left = history.open_intents()
        if left and history.epoch == last and last not in sealed:
            raise Violation(f"{path}: closed: {left[0]} never ended, and the epoch was not closed")
    decided = sum(len(found) for found in first.values())
    intents = max((history.num_intents for history in histories.values()), default=0)
    return (
        f"{folder}: holds; {len(histories)} ranks, {decided} decisions, {intents} intents,"
        f" {len(first)} epochs"
    )


def _compare(first: dict[int, list[tuple[str, list[Any]]]], line: Line) -> None:
    """Logs are prefix-equal: what an earlier journal says at this place, this one says too."""
    known = first.get(line.epoch, [])
    if line.place < len(known) and known[line.place] != (line.tag, line.values):
        tag, values = known[line.place]
        raise Violation(
            f"prefix: decision {line.place} of epoch {line.epoch} is {line.tag} {line.values}, but"
            f" on an earlier rank {tag} {values}"
        )
