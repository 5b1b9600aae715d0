"""Side state: what nodes keep beside their KV pages, and how a split divides it."""

from __future__ import annotations

import msgspec

from kvpact.cache.choices import SideNeed
from kvpact.cache.tree.node import SidePages, Tier
from kvpact.consensus.core.border import as_choice, as_count, as_text
from kvpact.consensus.core.errors import Misuse

__all__ = ["SidePages", "SideSpec", "split_side"]


class SideSpec(msgspec.Struct, frozen=True):
    """The need of nodes for a side pool, equal on all ranks; ``window_pages`` only for ``window``.

    ``need`` is a word of :class:`~kvpact.cache.choices.SideNeed`.
    """

    name: str
    need: str
    window_pages: int = 0

    def __post_init__(self) -> None:
        as_text("the name of a side pool", self.name)
        need = as_choice(f"side pool {self.name}: need", SideNeed, self.need)
        msgspec.structs.force_setattr(self, "need", need)
        as_count(f"side pool {self.name}: window_pages", self.window_pages)
        if (need is SideNeed.WINDOW) != (self.window_pages > 0):
            raise Misuse(f"side pool {self.name}: window_pages belongs to need 'window' only")

    def positions(self, num_pages: int) -> range:
        """The positions of a new node of ``num_pages`` that have a side page."""
        return range(max(0, num_pages - self.reach), num_pages)

    @property
    def reach(self) -> int:
        """How many of the last positions of a prefix must have a side page for it to be used."""
        if self.need is SideNeed.PER_PAGE:
            return 1 << 62
        return 1 if self.need is SideNeed.PER_NODE else self.window_pages

    def pool(self, tier: Tier) -> str:
        """The name of its pool in ``tier``."""
        return f"{self.name}.{tier.value}"


def split_side(lower: SidePages, cut: int) -> tuple[SidePages, SidePages]:
    """The side pages of the two parts of a node that is cut after ``cut`` pages."""
    upper = {name: [(p, g) for p, g in pages if p < cut] for name, pages in lower.items()}
    rest = {name: [(p - cut, g) for p, g in pages if p >= cut] for name, pages in lower.items()}
    return upper, rest
