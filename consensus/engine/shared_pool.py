"""A pool that the engine allocates from without asking: the device's, in every engine.

The ledger cannot plan such a pool, since it hears of intents only. What can: the pool's own number
of free pages, *if it is the same on every rank*. Two things would part it, and are held back here:
a rank with a larger pool, and a rank whose reservation failed while the others hold theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.participant import Intent

__all__ = ["SharedPool"]

Pages = TypeVar("Pages")


class SharedPool(Generic[Pages]):
    """Keeps the number of free pages of ``name`` equal on all ranks.

    ``take(num_pages)`` allocates from the engine's pool or returns ``None``; ``free(pages)`` gives
    back what it returned; ``available()`` counts its free pages. :meth:`room` is what plans use:
    agreed, as long as the engine makes its own allocations in the same order on every rank.
    """

    def __init__(
        self,
        name: str,
        *,
        take: Callable[[int], Pages | None],
        free: Callable[[Pages], None],
        available: Callable[[], int],
    ) -> None:
        self.name = name
        self._take = take
        self._free = free
        self._available = available
        self._surplus = 0
        self._ballast: Pages | None = None
        self._held: dict[Intent, tuple[Pages | None, int]] = {}

    @property
    def surplus(self) -> int:
        """Pages that this rank has more than the smallest one: held for good."""
        return self._surplus

    def adopt(self, mine: int, agreed: int) -> None:
        """Hold what this rank has more than ``agreed`` pages. Call it on an empty pool.

        Raises :class:`Misuse` where the pool is too small, or not empty.
        """
        if agreed > mine:
            raise Misuse(f"pool {self.name} has {mine} pages, but {agreed} were agreed")
        self._surplus = mine - agreed
        self.cleared()

    def cleared(self) -> None:
        """The engine has emptied its pool, what was held included: hold the surplus again."""
        self._held.clear()
        self._ballast = self._take(self._surplus) if self._surplus else None
        if self._surplus and self._ballast is None:
            raise Misuse(f"pool {self.name} cannot spare the {self._surplus} pages of its surplus")

    def refused(self, intent: Intent) -> None:
        """Its reservation failed here: hold as many pages as the others do, until the verdict.

        Where even those cannot be had, they are owed: :meth:`room` counts them all the same.
        """
        num_pages = intent.need[self.name]
        self._held[intent] = self._take(num_pages), num_pages

    def decided(self, intent: Intent) -> None:
        """The verdict is there: give back what :meth:`refused` held. Anything else is ignored."""
        pages, _ = self._held.pop(intent, (None, 0))
        if pages is not None:
            self._free(pages)

    def room(self) -> int:
        """Free pages of every rank's pool; below 0 where more is owed than is free."""
        owed = sum(num_pages for pages, num_pages in self._held.values() if pages is None)
        return self._available() - owed
