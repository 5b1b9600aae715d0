"""Eviction: policies as total orders on agreed state, and the order they give to a tier."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from kvpact.cache.tree.node import Node, Residency, Tier

__all__ = [
    "POLICIES",
    "EvictionOrder",
    "EvictionPolicy",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "LowestPriority",
    "SegmentedLeastRecentlyUsed",
]

Key = tuple[int, ...]


class EvictionPolicy(Protocol):
    """A total order: the node with the smallest key is evicted first.

    The key follows from agreed state only, and ends with ``node_id`` so that no two are equal.
    """

    def key(self, node: Node) -> Key:
        """The rank of ``node`` among those that may go."""
        ...


class LeastRecentlyUsed:
    """The node whose last match or insert is longest ago, by the tree's logical clock."""

    def key(self, node: Node) -> Key:
        """Oldest access first."""
        return (node.last_access, node.node_id)


class LeastFrequentlyUsed:
    """The node with the fewest uses; among equals the one whose last use is longest ago."""

    def key(self, node: Node) -> Key:
        """Fewest uses first."""
        return (node.hits, node.last_access, node.node_id)


class SegmentedLeastRecentlyUsed:
    """Nodes used only once go before those used again, each group by its last use.

    Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994), with
    an unbounded protected segment: what was used again is protected until nothing else is left.
    """

    def key(self, node: Node) -> Key:
        """Probationary first, oldest access first."""
        return (int(node.hits > 1), node.last_access, node.node_id)


class LowestPriority:
    """The node of the lowest priority that any request gave it, by its last use among equals."""

    def key(self, node: Node) -> Key:
        """Lowest priority first."""
        return (node.priority, node.last_access, node.node_id)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
    "priority": LowestPriority,
}


class EvictionOrder:
    """The nodes of one tier that may go, cheapest first.

    What is queued for another tier goes last: its only copy would be lost before it was planned.
    A heap with stale entries: every change that can make a node a candidate, or move it, pushes it
    again; what no longer holds when it comes up is dropped. A rebuild bounds the stale ones.
    """

    _REBUILD_FACTOR = 4
    _REBUILD_FLOOR = 1024

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self._is_device = tier is Tier.DEVICE
        self._policy = policy
        self._heap: list[tuple[tuple[bool, Key], int, Node]] = []
        self._pushes = 0
        self._bound = self._REBUILD_FLOOR

    def is_candidate(self, node: Node) -> bool:
        """Resident here, unpinned, and nothing below it is in this tier."""
        presence = node.device if self._is_device else node.host
        return (
            presence.state is Residency.RESIDENT
            and presence.pins == 0
            and presence.num_children == 0
            and presence.carriage is None
            and node.is_alive
        )

    def offer(self, node: Node) -> None:
        """``node`` may have become a candidate, or has moved in the order."""
        if self.is_candidate(node):
            self._pushes += 1  # never compare nodes: an equal key is a stale duplicate
            heapq.heappush(self._heap, (self._key(node), self._pushes, node))
            if len(self._heap) > self._bound:
                self._rebuild()

    def pop(self) -> Node | None:
        """Take the first candidate out of the order; ``None``: nothing may go."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if self.is_candidate(node) and self._key(node) == key:
                return node
        return None

    def _key(self, node: Node) -> tuple[bool, Key]:
        return (node.is_queued, self._policy.key(node))

    def clear(self) -> None:
        """Forget everything."""
        self._heap.clear()

    def _rebuild(self) -> None:
        fresh: dict[int, Node] = {
            node.node_id: node
            for key, _, node in self._heap
            if self.is_candidate(node) and self._key(node) == key
        }
        self._heap.clear()
        self._bound = max(self._REBUILD_FLOOR, self._REBUILD_FACTOR * len(fresh))
        self._refill(fresh.values())

    def _refill(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._pushes += 1
            self._heap.append((self._key(node), self._pushes, node))
        heapq.heapify(self._heap)
