"""The first lines of the journals of a run: are these all, and all of one run?

Without them a journal that is empty, missing or another rank's would prove whatever one likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpact.harness.verify.history import Violation, read_lines

__all__ = ["Header", "read_header", "require_one_run"]

_TAG = "journal"


class Header(NamedTuple):
    """Whose journal it is. All but ``rank`` are the same in the journals of one run."""

    run: str
    rank: int
    version: str
    configuration: str
    ranks: tuple[int, ...]


def read_header(path: Path) -> Header:
    """The header of one journal. Raises :class:`Violation` where there is none."""
    line = next(read_lines(path), None)
    if line is None:
        raise Violation(f"{path}: header: the journal is empty: this rank has proved nothing")
    if line.tag != _TAG:
        raise Violation(f"{path} line 1: header: a journal begins with one, not with {line.tag}")
    try:
        run, rank, version, configuration, *ranks = line.values
        header = Header(str(run), _int(rank), str(version), str(configuration), _ints(ranks))
    except ValueError:
        raise Violation(f"{path} line 1: header: {line.values} makes no sense") from None
    if header.rank not in header.ranks or len(set(header.ranks)) != len(header.ranks):
        raise Violation(f"{path} line 1: header: rank {rank} of the ranks {ranks} makes no sense")
    return header


def require_one_run(paths: Sequence[Path]) -> None:
    """Every rank of one run has its journal among ``paths``. Raises :class:`Violation`."""
    headers = {path: read_header(path) for path in paths}
    first_path, first = next(iter(headers.items()))
    for path, header in headers.items():
        if path.name != f"rank{header.rank}.jsonl":
            raise Violation(f"{path}: header: it is the journal of rank {header.rank}")
        for name in ("run", "version", "configuration", "ranks"):
            ours, theirs = getattr(first, name), getattr(header, name)
            if ours != theirs:
                raise Violation(
                    f"{path}: header: {name} is {theirs}, but {ours} in {first_path.name}: they are"
                    " not of one run"
                )
    absent = sorted(set(first.ranks) - {header.rank for header in headers.values()})
    if absent:
        folder = first_path.parent
        raise Violation(f"{folder / f'rank{absent[0]}.jsonl'}: header: there is no such journal")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(value)
    return value


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)
