"""Pages whose copy was given up and still runs: out of use until it has really ended."""

from __future__ import annotations

from collections.abc import Callable

from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.journal import Value

__all__ = ["Limbo"]


class Limbo:
    """Pages of one rank that quarantined copies may still write or read. A local account.

    A participant puts them in from its ``lost``, and says :meth:`ended` when the copy has ended.
    What is in limbo lowers the usable pages of the next ballot (a :class:`Replica` sees to that),
    so that no rank plans with it.
    """

    def __init__(self) -> None:
        self._kept: dict[Value, tuple[dict[str, int], Callable[[], None]]] = {}

    def keep(self, key: Value, pages: dict[str, int], free: Callable[[], None]) -> None:
        """Keep ``pages`` (by pool) under ``key``; ``free()`` returns them to their pools.

        Raises :class:`Misuse` where something is kept under ``key`` already.
        """
        if key in self._kept:
            raise Misuse(f"limbo holds something under {key} already")
        self._kept[key] = dict(pages), free

    def ended(self, key: Value) -> bool:
        """The copy under ``key`` has ended: free its pages. ``False``: nothing is kept there."""
        found = self._kept.pop(key, None)
        if found is None:
            return False
        found[1]()
        return True

    def num_pages(self, pool: str) -> int:
        """Pages of ``pool`` that are in limbo."""
        return sum(pages.get(pool, 0) for pages, _ in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)
