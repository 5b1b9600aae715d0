"""The radix tree over whole pages: match, insert, split, delete, pin. No I/O, no wall time.

Every call that changes it is *agreed*: all ranks make it in the same order, it enters the journal
through ``note``, and node ids and recency follow from a logical clock. Page indices belong to the
rank; structure, residency and counts do not.

In each tier what is present is closed towards the root: a node is there only below a parent that
is there. So eviction takes leaves of the tier first, and a match is one walk down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from kvpact.cache.tree.eviction import EvictionOrder, EvictionPolicy
from kvpact.cache.tree.node import MOVES, Node, Presence, Residency, Standing, Tier, Tokens
from kvpact.cache.tree.side import split_side
from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.errors import InternalError, Misuse

__all__ = ["RadixTree"]

_INT32 = np.dtype(np.int32)


#: Called for every node of every path: a comparison here spares a call of `Node.at`.
_DEVICE = Tier.DEVICE


class RadixTree:
    """Prefixes of tokens, one tree per namespace.

    ``note(tag, *values)`` receives every change; its values are equal on all ranks. ``on_place``
    hears of each node that becomes published in a tier, or ceases to be.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy, note: Callable[..., None]) -> None:
        if page_size < 1:
            raise Misuse(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.order = {tier: EvictionOrder(tier, policy) for tier in Tier}
        self.num_pinned = dict.fromkeys(Tier, 0)  # pages
        self.num_evictable = dict.fromkeys(Tier, 0)  # pages that could all go, leaves first
        self.num_marked = 0  # nodes ever queued for another tier; a split one counts as two
        self.on_place: Callable[[Node, Tier], None] | None = None
        self._roots: dict[str, Node] = {}
        self._note = note
        self._ghosts: dict[int, Node] = {}  # deleted, but a copy or request still pins them
        self._clock = 0
        self._last_id = 0

    # -- walking ---------------------------------------------------------------------------------

    def walk(self, tokens: Tokens, namespace: str = "") -> tuple[list[Node], int]:
        """The nodes that ``tokens`` runs through, and how many pages of the last one it shares.

        Changes nothing. Only whole pages count. Nodes of every residency are walked.
        """
        nodes: list[Node] = []
        shared = 0
        node = self._roots.get(namespace)
        position, end = 0, self._whole(tokens)
        while node is not None and position < end:
            child = node.children.get(self._page_key(tokens, position))
            if child is None:
                break
            shared = self._shared_pages(child, tokens, position, end)
            nodes.append(child)
            if shared < child.num_pages:
                break
            position += shared * self.page_size
            node = child
        return nodes, shared

    def match(self, tokens: Tokens, namespace: str = "", priority: int = 0) -> list[Node]:
        """The path of whole nodes that ``tokens`` runs through; the last is split to fit.

        Touches the path: it is now the most recently used, and has at least ``priority``. Mutates
        structure and recency.
        """
        nodes, shared = self.walk(tokens, namespace)
        if nodes and shared < nodes[-1].num_pages:
            nodes[-1] = self.split(nodes[-1], shared)
        self._touch(nodes, priority)
        self._note("match", nodes[-1].node_id if nodes else 0, self._clock)
        return nodes

    def insert(self, tokens: Tokens, namespace: str = "", priority: int = 0) -> list[Node]:
        """The path for all whole pages of ``tokens``, with a new leaf for what was missing.

        The leaf is ABSENT in every tier: the caller says how its pages come. Touches the path.
        """
        nodes = self.match(tokens, namespace, priority)
        position = sum(node.num_pages for node in nodes) * self.page_size
        end = self._whole(tokens)
        if position == end:
            return nodes
        parent = nodes[-1] if nodes else self._root(namespace)
        rest = np.array(tokens[position:end], dtype=np.int32)
        leaf = self._new_node(parent, rest, namespace)
        leaf.last_access = self._clock
        leaf.hits, leaf.priority = 1, priority
        parent.children[self._page_key(rest, 0)] = leaf
        digest = xxhash.xxh3_64_intdigest(rest.tobytes()) & MASK62
        self._note("insert", leaf.node_id, parent.node_id, leaf.num_pages, digest)
        return [*nodes, leaf]

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut ``node`` after ``num_pages``; returns the new upper part, ``node`` stays the lower.

        Pins, residency and open carriages cover both parts afterwards.
        """
        if not 0 < num_pages < node.num_pages or node.parent is None:
            raise InternalError(f"cannot split {node!r} after {num_pages} pages")
        parent = node.parent
        cut = num_pages * self.page_size
        upper = self._new_node(parent, node.tokens[:cut], node.namespace)
        upper.last_access, upper.hits = node.last_access, node.hits
        upper.priority = node.priority
        upper.is_queued, upper.built_on = node.is_queued, node.built_on
        self.num_marked += upper.is_queued
        upper.is_stored, upper.is_dropped = node.is_stored, node.is_dropped
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        upper.hashes, node.hashes = node.hashes[:num_pages], node.hashes[num_pages:]
        parent.children[self._page_key(upper.tokens, 0)] = upper
        node.tokens = node.tokens[cut:]
        node.num_pages -= num_pages
        node.parent = upper
        upper.children[self._page_key(node.tokens, 0)] = node
        for tier in Tier:
            _split_presence(node.at(tier), upper.at(tier), num_pages)
        for carriage in node.carriages:
            carriage.follow_split(node, upper)
        self._note("split", node.node_id, upper.node_id, num_pages)
        return upper

    def delete(self, node: Node) -> None:
        """Remove a leaf. The caller has taken its pages out of every tier."""
        if node.children or node.parent is None or not node.is_alive:
            raise InternalError(f"cannot delete {node!r}: it has children or is not in the tree")
        for tier in Tier:
            if node.at(tier).state is not Residency.ABSENT:
                raise InternalError(f"cannot delete {node!r}: it is still in {tier.value}")
        parent = node.parent
        del parent.children[self._page_key(node.tokens, 0)]
        if parent.is_root and not parent.children:
            del self._roots[parent.namespace]
        node.is_alive = False
        if node.device.pins or node.host.pins:
            self._ghosts[node.node_id] = node
        self._note("delete", node.node_id)

    # -- residency -------------------------------------------------------------------------------

    def place(
        self, node: Node, tier: Tier, state: Residency, pages: Sequence[int] | None = None
    ) -> None:
        """Set the residency of ``node`` in ``tier``; published states take the pages with them.

        Raises :class:`InternalError`, and has changed nothing, where the number of pages is not
        that of the node, or the table of moves does not have this one.
        """
        presence = node.device if tier is _DEVICE else node.host
        if state not in MOVES[presence.state]:
            raise InternalError(
                f"{node!r} is {presence.state.name} in {tier.value}: it cannot be {state.name} next"
            )
        kept = presence.pages if pages is None else tuple(pages)
        if state < Residency.COPYING:
            kept = ()
            for carriage in node.carriages:  # what completes a node is of no use to another one
                carriage.is_void |= carriage.completes and carriage.tier is tier and not state
        elif len(kept) != node.num_pages:
            raise InternalError(f"{node!r} gets {len(kept)} pages in {tier.value}")
        presence.pages = kept
        before, presence.state = presence.state, state
        self._stand(node, tier)
        if (before is Residency.ABSENT) != (state is Residency.ABSENT) and node.parent is not None:
            node.parent.at(tier).num_children += 1 if before is Residency.ABSENT else -1
            self.order[tier].offer(node.parent)
        self.order[tier].offer(node)
        if self.on_place is not None and (before >= Residency.COPYING) != presence.is_published:
            self.on_place(node, tier)

    def _stand(self, node: Node, tier: Tier) -> None:
        """``node`` has changed: count anew what may go of it, and of its path where that changes.

        So ``num_evictable`` never counts a page that something below it keeps in the tier.
        """
        above = node
        while above.parent is not None:
            presence = above.device if tier is _DEVICE else above.host
            before, after = presence.standing, _standing(presence)
            if before is after:
                return
            presence.standing = after
            if before is Standing.FREE:
                self.num_evictable[tier] -= above.num_pages
            elif after is Standing.FREE:
                self.num_evictable[tier] += above.num_pages
            stuck = (after is Standing.STUCK) - (before is Standing.STUCK)
            if stuck == 0:
                return
            above = above.parent
            (above.device if tier is _DEVICE else above.host).num_stuck += stuck

    def mark_queued(self, node: Node, is_queued: bool) -> None:
        """``node`` waits to be copied to another tier, or no longer: its place among victims."""
        self.num_marked += is_queued and not node.is_queued
        node.is_queued = is_queued
        for order in self.order.values():
            order.offer(node)

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, node: Node, tier: Tier) -> None:
        """``node`` is not evicted from ``tier`` until it is unpinned as often."""
        presence = node.device if tier is _DEVICE else node.host
        if presence.pins == 0:
            self.num_pinned[tier] += node.num_pages
        presence.pins += 1
        if presence.pins == 1:
            self._stand(node, tier)

    def unpin(self, node: Node, tier: Tier) -> None:
        """Undo one :meth:`pin`. Raises :class:`InternalError` where there is none."""
        presence = node.device if tier is _DEVICE else node.host
        if presence.pins < 1:
            raise InternalError(f"{node!r} is not pinned in {tier.value}")
        presence.pins -= 1
        if presence.pins == 0:
            self.num_pinned[tier] -= node.num_pages
            self._stand(node, tier)
            self.order[tier].offer(node)
            if not node.is_alive and not node.device.pins and not node.host.pins:
                self._ghosts.pop(node.node_id, None)

    def pin_path(self, node: Node | None, tier: Tier) -> None:
        """Pin ``node`` and all its ancestors below the root."""
        while node is not None and node.parent is not None:
            self.pin(node, tier)
            node = node.parent

    def unpin_path(self, node: Node | None, tier: Tier) -> None:
        """Undo one :meth:`pin_path`. A node that was split meanwhile counts as both its parts."""
        while node is not None and node.parent is not None:
            self.unpin(node, tier)
            node = node.parent

    # -- looking in ------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children, in order of insertion."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(list(node.children.values())))

    def has(self, node: Node) -> bool:
        """Whether ``node`` is in this tree now: neither deleted, nor of a tree before it."""
        top = node
        while top.parent is not None:
            top = top.parent
        return node.is_alive and self._roots.get(top.namespace) is top

    @property
    def clock(self) -> int:
        """The logical clock: grows with every match and insert."""
        return self._clock

    def clear(self) -> None:
        """Forget everything; ids and clock begin anew. Agreed, like every change."""
        self.forget_presence()
        self._roots.clear()
        self._clock = self._last_id = 0

    def forget_presence(self) -> None:
        """Nothing is anywhere, nothing is pinned; the caller places again what is."""
        for tier in Tier:
            self.num_pinned[tier] = self.num_evictable[tier] = 0
            self.order[tier].clear()
        self._ghosts.clear()
        for root in self._roots.values():
            root.device, root.host = Presence(), Presence()

    def check_integrity(self) -> None:
        """Raise :class:`InternalError` unless counts, closure and links all hold."""
        pinned = dict.fromkeys(Tier, 0)
        evictable = dict.fromkeys(Tier, 0)
        for node in self._ghosts.values():
            for tier in Tier:
                pinned[tier] += node.num_pages if node.at(tier).pins else 0
        for node in self.nodes():
            if len(node.tokens) != node.num_pages * self.page_size or not node.is_alive:
                raise InternalError(f"{node!r} has {len(node.tokens)} tokens")
            if (
                node.parent is None
                or node.parent.children.get(self._page_key(node.tokens, 0)) is not node
            ):
                raise InternalError(f"{node!r} is not where its parent looks for it")
            for tier in Tier:
                presence = node.at(tier)
                self._check_presence(node, presence, tier)
                pinned[tier] += node.num_pages if presence.pins else 0
                if presence.standing is Standing.FREE:
                    evictable[tier] += node.num_pages
        if pinned != self.num_pinned or evictable != self.num_evictable:
            raise InternalError(
                f"the tree counts {self.num_pinned} pinned and {self.num_evictable} evictable"
                f" pages, it has {pinned} and {evictable}"
            )

    def _check_presence(self, node: Node, presence: Presence, tier: Tier) -> None:
        children = sum(bool(child.at(tier).state) for child in node.children.values())
        expected = node.num_pages if presence.is_published else 0
        if presence.num_children != children or len(presence.pages) != expected:
            raise InternalError(
                f"{node!r} in {tier.value}: {len(presence.pages)} pages, {children} children"
            )
        stuck = sum(child.at(tier).standing is Standing.STUCK for child in node.children.values())
        if presence.num_stuck != stuck or presence.standing is not _standing(presence):
            raise InternalError(
                f"{node!r} in {tier.value} counts as {presence.standing.name} with"
                f" {presence.num_stuck} stuck children, found {stuck}"
            )

    # -- inside ----------------------------------------------------------------------------------

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            empty = np.empty(0, dtype=np.int32)
            root = Node(0, None, empty, 0, namespace, 0)
            self._roots[namespace] = root
        return root

    def _new_node(self, parent: Node, tokens: Tokens, namespace: str) -> Node:
        self._last_id += 1
        num_pages = len(tokens) // self.page_size
        return Node(self._last_id, parent, tokens, num_pages, namespace, self._clock)

    def _touch(self, nodes: list[Node], priority: int) -> None:
        self._clock += 1
        for node in nodes:
            node.last_access = self._clock
            node.hits += 1
            node.priority = max(node.priority, priority)
            for order in self.order.values():
                order.offer(node)

    def _whole(self, tokens: Tokens) -> int:
        return len(tokens) - len(tokens) % self.page_size

    def _page_key(self, tokens: Tokens, position: int) -> bytes:
        return tokens[position : position + self.page_size].tobytes()

    def _shared_pages(self, child: Node, tokens: Tokens, position: int, end: int) -> int:
        length = min(len(child.tokens), end - position)
        differs = child.tokens[:length] != tokens[position : position + length]
        first = int(differs.argmax()) if differs.any() else length
        return first // self.page_size


def _standing(presence: Presence) -> Standing:
    if presence.state is Residency.ABSENT:
        return Standing.NOWHERE
    if presence.state is not Residency.RESIDENT or presence.pins or presence.num_stuck:
        return Standing.STUCK
    return Standing.FREE


def _split_presence(lower: Presence, upper: Presence, num_pages: int) -> None:
    upper.state = lower.state
    if lower.side:
        upper.side, lower.side = split_side(lower.side, num_pages)
    upper.pages, lower.pages = lower.pages[:num_pages], lower.pages[num_pages:]
    upper.pins = lower.pins
    upper.num_children = int(lower.state is not Residency.ABSENT)
    upper.num_stuck = int(lower.standing is Standing.STUCK)
    upper.standing = lower.standing
    upper.carriage = lower.carriage
