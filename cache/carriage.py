"""What an open intent brings where: the nodes it is about and the pages it holds for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cache.node import Node, Tier

if TYPE_CHECKING:
    from consensus.participant import Intent

__all__ = ["Carriage"]


class Carriage:
    """Nodes that come into ``tier`` together, by one intent.

    ``nodes`` follow one another on a path; a split while the intent is open puts the new upper
    part before its lower one, so ``pages`` (this rank's, in the order of the path) always fit.
    ``anchor`` is the node whose path is pinned in ``tier`` until the intent has ended.
    ``num_copies`` counts copies of this rank that still read or write its pages; ``good`` says of
    those that have ended how many pages each had and whether it went well. ``readers`` are requests
    that have finished with it still open, and the node they held.
    """

    __slots__ = (
        "anchor",
        "copy_tickets",
        "fill",
        "good",
        "intent",
        "nodes",
        "num_copies",
        "on_refused",
        "pages",
        "readers",
        "side",
        "side_wanted",
        "tier",
    )

    def __init__(self, tier: Tier, nodes: list[Node], anchor: Node | None) -> None:
        self.tier = tier
        self.nodes = nodes
        self.anchor = anchor
        self.pages: list[int] = []
        # Side pools (cache.side_pools): positions that want a page, and the pages held for them.
        self.side_wanted: dict[str, list[int]] = {}
        self.side: dict[str, list[tuple[int, int]]] = {}
        self.num_copies = 0
        self.copy_tickets: list[int] = []
        self.good: list[tuple[int, bool]] = []
        self.intent: Intent | None = None
        self.fill: Callable[[list[Node], list[int]], None] | None = None
        self.readers: list[tuple[str, Node]] = []
        self.on_refused: list[Callable[[], None]] = []

    @property
    def num_pages(self) -> int:
        """Pages of all its nodes."""
        return sum(node.num_pages for node in self.nodes)

    def position_of(self, node: Node) -> int:
        """How many pages come before those of ``node``."""
        start = 0
        for other in self.nodes:
            if other is node:
                return start
            start += other.num_pages
        raise KeyError(node.node_id)

    def pages_of(self, node: Node) -> list[int]:
        """The part of ``pages`` that is for ``node``."""
        start = self.position_of(node)
        return self.pages[start : start + node.num_pages]

    def attach(self) -> None:
        """From now on the nodes know of it."""
        for node in self.nodes:
            node.at(self.tier).carriage = self
            node.carriages.append(self)

    def follow(self) -> None:
        """Only hear of splits: the nodes are in the tier already."""
        for node in self.nodes:
            node.carriages.append(self)

    def unfollow(self) -> None:
        """Hear of no more splits."""
        for node in self.nodes:
            node.carriages.remove(self)

    def follow_split(self, lower: Node, upper: Node) -> None:
        """``lower`` was cut and ``upper`` is its new first part."""
        self.nodes.insert(self.nodes.index(lower), upper)
        upper.carriages.append(self)

    def let_go(self) -> None:
        """It will not bring the nodes any more; another intent may. Its copy may still run."""
        for node in self.nodes:
            if node.at(self.tier).carriage is self:
                node.at(self.tier).carriage = None

    def detach(self) -> list[Node]:
        """It is over: the nodes forget it. Returns them."""
        self.let_go()
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            node.carriages.remove(self)
        return nodes
