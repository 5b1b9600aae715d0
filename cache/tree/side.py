"""What nodes keep in side pools, beside their KV pages, and how a split divides it."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse

__all__ = ["SidePages", "SideSpec", "split_side"]

#: Side pages of a node by pool: (position in the node, page index).
SidePages = dict[str, list[tuple[int, int]]]


class SideSpec(msgspec.Struct, frozen=True):
    """What nodes need of a side pool, equal on all ranks; ``window_pages`` only for ``window``."""

    name: str
    need: Literal["per_page", "per_node", "window"]
    window_pages: int = 0

    def __post_init__(self) -> None:
        if (self.need == "window") != (self.window_pages > 0):
            raise Misuse(f"side pool {self.name}: window_pages belongs to need 'window' only")

    def positions(self, num_pages: int) -> range:
        """The positions of a new node of ``num_pages`` that have a side page."""
        reach = {"per_page": num_pages, "per_node": 1, "window": self.window_pages}[self.need]
        return range(max(0, num_pages - reach), num_pages)

    def pool(self, tier: Tier) -> str:
        """The name of its pool in ``tier``."""
        return f"{self.name}.{tier.value}"


def split_side(lower: SidePages, cut: int) -> tuple[SidePages, SidePages]:
    """The side pages of the two parts of a node that is cut after ``cut`` pages."""
    upper = {name: [(p, g) for p, g in pages if p < cut] for name, pages in lower.items()}
    rest = {name: [(p - cut, g) for p, g in pages if p >= cut] for name, pages in lower.items()}
    return upper, rest
