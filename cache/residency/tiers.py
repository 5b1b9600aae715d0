"""The tiers of one rank: tree, pools and ledger together, and the moves that touch all three.

Everything here is called in agreed order on every rank: who is evicted follows from the tree and
the ledger, never from what this rank's pool happens to have free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvpact.cache.copies.copier import Copier
from kvpact.cache.copies.side_pools import SidePools
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.tree.node import Node, Residency, Standing, Tier
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.manager import TransactionManager

__all__ = ["Tiers"]


class Demoter(Protocol):
    """Write-back: who moves victims of the device to the host before their pages are used again."""

    @property
    def is_held_up(self) -> bool:
        """In this step it found no slot: it can go on in a later one."""
        ...

    def underway(self, pool: str) -> int:
        """Pages of ``pool`` that come free when what it moves has ended."""
        ...

    def demote(self, node: Node) -> bool:
        """Begin; False: not in this step."""
        ...


class Tiers:
    """The tools that the paths share: room, eviction, publishing, pins.

    ``trims`` lets an eviction take only the last pages of a node; otherwise whole nodes go.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Mapping[Tier, PagePool],
        manager: TransactionManager,
        copier: Copier,
        *,
        trims: bool,
        side: SidePools | None = None,
    ) -> None:
        self.side = side or SidePools([])
        self.tree = tree
        self.pools = pools
        self.manager = manager
        self.copier = copier
        self.num_evicted = dict.fromkeys(Tier, 0)  # pages
        self.demoter: Demoter | None = None
        self._trims = trims
        self._hollow: list[Node] = []

    # -- room ------------------------------------------------------------------------------------

    def room(self, tier: Tier) -> int:
        """Pages that could be had, evicting what may go: agreed. Demoted ones take some steps."""
        free = self._balance(tier) + self._underway(tier.value)
        return max(0, free + self.tree.num_evictable[tier])

    def make_room(self, tier: Tier, num_pages: int, side: Mapping[str, int] | None = None) -> bool:
        """Evict until the ledger has ``num_pages`` of room, and as many as ``side`` says.

        False: not now. :meth:`is_coming` tells whether it is worth waiting; where it is not, nobody
        was evicted for KV pages.
        """
        if side and not self._make_side_room(tier, side):
            return False
        if self.room(tier) < num_pages:
            return False
        while (missing := num_pages - self._balance(tier)) > self._underway(tier.value):
            if self._evict_next(tier, missing - self._underway(tier.value)) == 0:
                return False
        return self._balance(tier) >= num_pages

    def _make_side_room(self, tier: Tier, side: Mapping[str, int]) -> bool:
        manager = self.manager
        if any(manager.ledger.usable(name) < needed for name, needed in side.items()):
            return False
        while any(manager.room(name) + self._underway(name) < side[name] for name in side):
            if self._evict_next(tier, 1) == 0:
                return False
        return all(manager.room(name) >= needed for name, needed in side.items())

    def is_coming(self, tier: Tier, num_pages: int) -> bool:
        """Demotions under way, or held up by a lack of slots, make room (write-back only).

        How much is seen when they have ended: then what lies above them may go, too.
        """
        demoter = self.demoter
        is_possible = self.manager.ledger.usable(tier.value) >= num_pages
        if demoter is None or tier is not Tier.DEVICE or not is_possible:
            return False
        return self._underway(tier.value) > 0 or demoter.is_held_up

    def _underway(self, pool: str) -> int:
        return self.demoter.underway(pool) if self.demoter is not None else 0

    def _balance(self, tier: Tier) -> int:
        """Room by the ledger; below 0 where copies that were given up hold more than is left."""
        ledger = self.manager.ledger
        return ledger.usable(tier.value) - ledger.charged(tier.value)

    def evict(self, tier: Tier, num_pages: int) -> int:
        """Evict at least ``num_pages`` where as many may go; how many went."""
        gone = 0
        while gone < num_pages and (went := self._evict_next(tier, num_pages - gone)):
            gone += went
        return gone

    def _evict_next(self, tier: Tier, missing: int) -> int:
        node = self.tree.order[tier].pop()
        if node is None:
            return 0
        if self._trims and missing < node.num_pages:
            self.tree.split(node, node.num_pages - missing)
        gone = node.num_pages
        if self.demoter is not None and tier is Tier.DEVICE and not node.host.is_published:
            return gone if self.demoter.demote(node) else 0
        self.evict_node(node, tier)
        self.prune()
        return gone

    def evict_namespace(self, namespace: str) -> None:
        """Nobody will ask for what is kept under this name: what may go of it goes at once."""
        for node in reversed(list(self.tree.nodes())):  # children before parents
            for tier in Tier:
                may_go = node.namespace == namespace and node.at(tier).standing is Standing.FREE
                # What is below it on HOST, for a copy that still reads it, is reached through it.
                is_way = tier is Tier.DEVICE and node.host.num_children > 0
                if may_go and (not is_way or node.host.is_published):
                    self.evict_node(node, tier)
        self.prune()

    def evict_node(self, node: Node, tier: Tier) -> None:
        """Take a published node out of ``tier`` to make room."""
        self.num_evicted[tier] += node.num_pages
        self.manager.note("evict", tier.value, node.node_id, node.num_pages)
        self.drop(node, tier)

    # -- pages -----------------------------------------------------------------------------------

    def free(self, tier: Tier, pages: Sequence[int], *, is_read: bool = False) -> None:
        """Pages that were charged as held come back, here and in the ledger.

        ``is_read``: a copy that was given up may still read them on some rank, so plans may count
        on them only after a ballot that every rank posts from now on.
        """
        self.pools[tier].free(pages)
        manager = self.manager
        if is_read:
            manager.ledger.cool(manager.settled_step + manager.lag + 1, tier.value, len(pages))
        else:
            manager.ledger.refund(tier.value, len(pages))

    def drop(self, node: Node, tier: Tier, *, is_read: bool = False) -> None:
        """Take a published node out of ``tier``; ``is_read`` as in :meth:`free`.

        Its pages are freed unless its carriage is still open: then they are freed with that.
        """
        presence = node.at(tier)
        pages, carriage = presence.pages, presence.carriage
        self.tree.place(node, tier, Residency.ABSENT)
        if carriage is None:
            self.free(tier, pages, is_read=is_read)
        if presence.side:
            self.side.drop(presence, tier, self.manager.ledger, owned=carriage is None)
        self._hollow.append(node)

    def hollow(self, nodes: Sequence[Node]) -> None:
        """These may be in no tier any more; :meth:`prune` looks."""
        self._hollow.extend(nodes)

    def prune(self) -> None:
        """Delete nodes that are in no tier, and what that leaves empty above them."""
        hollow, self._hollow = self._hollow, []
        for start in reversed(hollow):
            node = start
            while (
                node.is_alive
                and node.parent is not None
                and not node.children
                and node.device.state is Residency.ABSENT
                and node.host.state is Residency.ABSENT
            ):
                parent = node.parent
                self.tree.delete(node)
                node = parent
