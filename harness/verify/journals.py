"""Where the ranks of a run write their journals, and what the journals say in the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.verify.verify import complaint

__all__ = ["check_journals", "journal_path", "require_journals"]


def journal_path(folder: str | None, rank: int) -> Path | None:
    """The journal of ``rank``; ``None``: none is written."""
    return None if folder is None else Path(folder) / f"rank{rank}.jsonl"


def require_journals(folder: str | None, num_ranks: int) -> None:
    """Make empty journals: whether each can be written is found out here, not by a rank later on.

    Raises :class:`BadInput`, also for a folder with journals of a run with more ranks.
    """
    if folder is None:
        return
    place = Path(folder)
    ours = [place / f"rank{rank}.jsonl" for rank in range(num_ranks)]
    path = place
    try:
        place.mkdir(parents=True, exist_ok=True)
        others = sorted(set(place.glob("rank*.jsonl")) - set(ours))
        if others:
            raise BadInput(
                f"--journal: {others[0]} is of another run, with more ranks: give another folder"
            )
        for path in ours:
            path.open("wb").close()
    except OSError as error:
        raise BadInput(f"--journal: {path} cannot be written: {error.strerror}") from None


def check_journals(folder: str | None, ranks: Sequence[int], *, is_cut: bool = False) -> str:
    """What is wrong with the history in ``folder``; empty: it holds, or none was asked for.

    ``ranks`` must have written something: an empty journal would hold whatever happened.
    ``is_cut``: the ranks were ended on the way, so what was open then need not have ended.
    """
    if folder is None:
        return ""
    for rank in ranks:
        path = journal_path(folder, rank)
        if path is None or not path.is_file() or not path.stat().st_size:
            return (
                f"history: rank {rank} has written nothing to {path}: --journal must be a folder"
                " that all ranks see"
            )
    return complaint(folder, is_cut=is_cut)
