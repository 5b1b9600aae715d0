"""The protocol of a path: one list of them is all that the core knows."""

from __future__ import annotations

from kvpact.cache.tree.node import Carriage, Tier

__all__ = ["Path"]


class Path:
    """One way of pages, or of a wish for pages, through the tiers.

    A path overrides what it has something to say about. A new one is built in
    :class:`kvpact.cache.core.CacheCore` and stands in its list ``paths``, in the order in which a
    step plans: the step, the end of an epoch, ``has_pending``, the list of who waits and the audit
    follow from that list.
    """

    def plan(self) -> None:
        """Open what can begin, before the ballot: from agreed state alone."""

    def settled(self) -> None:
        """Hear that a ballot was settled and that all its endings were told."""

    def clear(self) -> None:
        """Drop all that is open or waits: the epoch is over."""

    def waits(self) -> dict[str, str]:
        """Return who waits in a line of this path, and what each lacks: agreed."""
        return {}

    @property
    def is_pending(self) -> bool:
        """Something of it waits for a step, and no open intent says so: agreed."""
        return False

    def held(self) -> list[Carriage]:
        """Return the open carriages whose pages no tree owns yet."""
        return []

    def held_pages(self, tier: Tier) -> list[int]:
        """Return this rank's pages of ``tier`` that the path owns: no node and no request does."""
        return []

    def charged_pages(self, tier: Tier) -> int:
        """Count pages of ``tier`` that the ledger has charged, though no node and no open intent
        accounts for them: agreed."""
        return 0
