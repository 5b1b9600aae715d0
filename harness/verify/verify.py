"""``kvpact verify``: is a run's history right? Told from the journals alone.

Each rank's journal is walked by :mod:`kvpact.harness.verify.history`; here they are laid beside one
another.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import xxhash

from kvpact.harness.text.console import PlainConsole, complain
from kvpact.harness.verify.headers import require_one_run
from kvpact.harness.verify.history import History, Line, Unreadable, Violation, read_lines

__all__ = ["check_folder", "complaint", "verify"]


def verify(folder: str) -> int:
    """Check every run in ``folder`` and print what was checked; 1: a rule is broken, 2: no run."""
    console = PlainConsole(highlight=False, soft_wrap=True)
    try:
        runs = _runs(Path(folder))
        for run in runs:
            console.print(check_folder(run), markup=False)
    except Unreadable as error:
        complain(str(error))
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


def complaint(folder: str, *, is_cut: bool = False) -> str:
    """What is wrong with the history of the run in ``folder``; empty: it holds."""
    try:
        check_folder(Path(folder), is_cut=is_cut)
    except (Unreadable, Violation) as error:
        return f"history: {error}"
    return ""


def check_folder(folder: Path, *, is_cut: bool = False) -> str:
    """One line about the run in ``folder``; raises :class:`Violation` naming file and line.

    ``is_cut``: the ranks were ended on the way, so what was open then need not have ended.
    """
    logs = _Logs()
    histories: dict[Path, History] = {}
    paths = _journals(folder)
    require_one_run(paths)
    for path in paths:
        history = histories[path] = History()
        for line in read_lines(path):
            try:
                history.add(line)
                if line.place >= 0:
                    logs.add(path, line, history.part)
            except Violation as error:
                raise Violation(f"{path} line {line.number}: {error}") from None
    sealed: dict[int, str] = {}
    for history in histories.values():
        sealed |= history.sealed
    for epoch, told in logs.parted.items():
        if sealed.get(epoch) != "Divergence":
            raise Violation(told)
    last = max((history.epoch for history in histories.values()), default=0)
    for path, history in histories.items():
        left = history.open_intents()
        if left and not is_cut and history.epoch == last and last not in sealed:
            raise Violation(f"{path}: closed: {left[0]} never ended, and the epoch was not closed")
    intents = max((history.num_intents for history in histories.values()), default=0)
    parted = f"; of these {len(logs.parted)} parted, and ended as that" if logs.parted else ""
    return (
        f"{folder}: holds; {len(histories)} ranks, {logs.num_decisions} decisions, {intents}"
        f" intents, {len({epoch for epoch, _ in logs.parts})} epochs{parted}"
    )


class _Logs:
    """Logs are prefix-equal: what an earlier journal says at a place, a later one says too.

    Places count within a part of an epoch; a difference that was only observed begins a new part.
    ``parted`` has, by epoch, the first difference: where all ranks were told of it, in a seal, it
    is no broken rule. A digest a decision is kept, so that a whole night fits into memory.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], array[int]] = {}
        self.parted: dict[int, str] = {}
        # From which place on, and by whom.
        self._told_by: dict[tuple[int, int], list[tuple[int, Path]]] = {}

    @property
    def num_decisions(self) -> int:
        """Of all epochs."""
        return sum(len(found) for found in self.parts.values())

    def add(self, path: Path, line: Line, part: int) -> None:
        """The next decision of this journal, in a ``part`` of its epoch."""
        known = self.parts.setdefault((line.epoch, part), array("Q"))
        digest = xxhash.xxh3_64_intdigest(json.dumps([line.tag, line.values]).encode())
        if line.place >= len(known):
            told_by = self._told_by.setdefault((line.epoch, part), [])
            if not told_by or told_by[-1][1] != path:
                told_by.append((line.place, path))
            known.append(digest)
        elif known[line.place] != digest and line.epoch not in self.parted:
            self.parted[line.epoch] = (
                f"{path} line {line.number}: prefix: decision {line.place} of epoch {line.epoch} is"
                f" {line.tag} {line.values}, but on an earlier rank {self._look_up(line, part)}"
            )

    def _look_up(self, line: Line, part: int) -> str:
        told_by = [path for place, path in self._told_by[line.epoch, part] if place <= line.place]
        for other in read_lines(told_by[-1]):
            if (other.epoch, other.place) == (line.epoch, line.place):
                return f"{other.tag} {other.values}"
        return "something else"
