"""One node of the radix tree: a run of whole pages, where its bytes are, and what brings them."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.core.participant import Intent

__all__ = [
    "STORAGE",
    "Carriage",
    "Fill",
    "FillSide",
    "Node",
    "Presence",
    "Residency",
    "SidePages",
    "Standing",
    "Tier",
    "Tokens",
]

Tokens = NDArray[np.int32]

#: Side pages by pool: (position, page index).
SidePages = dict[str, list[tuple[int, int]]]

#: The pool of places in the storage's queue, in pages: storage keeps its own books of pages.
STORAGE = "storage"


# A string, because it is hashed on the hot path and the hash of a plain Enum is Python code.
class Tier(enum.StrEnum):
    """A tier of pages. The value is the name of the pool."""

    DEVICE = "device"
    HOST = "host"


class Residency(enum.IntEnum):
    """How much of a node is in a tier. COPYING and RESIDENT are published: matches see them."""

    ABSENT = 0
    RESERVED = 1  # proposed; nobody may match it
    COPYING = 2  # committed; its bytes may still be on the way
    RESIDENT = 3


#: Where a node in a tier may go from each state. What is published goes back to ABSENT only.
MOVES: dict[Residency, frozenset[Residency]] = {
    # Its bytes may be there from the start: an engine computed them, or a storage had them.
    Residency.ABSENT: frozenset({Residency.RESERVED, Residency.RESIDENT}),
    Residency.RESERVED: frozenset({Residency.ABSENT, Residency.COPYING, Residency.RESIDENT}),
    Residency.COPYING: frozenset({Residency.ABSENT, Residency.RESIDENT}),
    Residency.RESIDENT: frozenset({Residency.ABSENT}),
}


class Standing(enum.IntEnum):
    """The meaning of a node for evictions from one tier."""

    NOWHERE = 0  # nothing of it is there
    FREE = 1  # it may go, after what is below it
    STUCK = 2  # it, or something below it, is pinned or not resident yet


class Presence:
    """A node in one tier.

    ``pages`` are page indices in this rank's pool, set while published. ``num_children`` counts
    children that are not ABSENT in this tier. ``carriage`` is the open intent that brings the node
    into this tier; one that was aborted and only drains is not. ``num_stuck`` counts children that
    are STUCK.
    """

    __slots__ = (
        "carriage",
        "num_children",
        "num_stuck",
        "pages",
        "pins",
        "side",
        "standing",
        "state",
    )

    def __init__(self) -> None:
        self.state = Residency.ABSENT
        self.pages: tuple[int, ...] = ()
        self.side: SidePages = {}  # see cache.copies.side_pools
        self.pins = 0
        self.num_children = 0
        self.num_stuck = 0
        self.standing = Standing.NOWHERE
        self.carriage: Carriage | None = None

    @property
    def is_published(self) -> bool:
        """Matches see it."""
        return self.state >= Residency.COPYING


class Node:
    """A run of pages below its parent. ``tokens`` has ``num_pages * page_size`` entries, int32.

    A cache has many: what is empty is one shared tuple, and tuples of numbers and arrays are
    nothing that Python's collector walks. So a leaf costs it three objects.

    ``node_id`` and ``last_access`` come from the tree's logical clock, so they are the same on
    every rank; page indices are not.
    """

    __slots__ = (
        "built_on",
        "carriages",
        "children",
        "device",
        "hashes",
        "hits",
        "host",
        "is_alive",
        "is_dropped",
        "is_queued",
        "is_stored",
        "keys",
        "last_access",
        "namespace",
        "node_id",
        "num_pages",
        "parent",
        "priority",
        "tokens",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        tokens: Tokens,
        num_pages: int,
        namespace: str,
        last_access: int,
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.tokens = tokens
        self.num_pages = num_pages
        self.namespace = namespace
        self.last_access = last_access
        self.hits = 0
        self.priority = 0
        self.children: dict[bytes, Node] = {}
        self.device = Presence()
        self.host = Presence()
        # Loads that were still running when the engine computed this node on top of them: if one
        # fails, what was computed is void.
        self.built_on: tuple[Carriage, ...] = ()
        # Every open intent about this node, draining ones too: a split must tell them all.
        self.carriages: tuple[Carriage, ...] = ()
        # Names of its pages, once somebody has asked for them: in storage (this rank's own), and
        # in events (equal on all ranks).
        self.keys: tuple[bytes, ...] = ()
        self.hashes: tuple[int, ...] = ()
        self.is_alive = True
        self.is_queued = False
        self.is_stored = False  # buffer-only: it came from storage, or was handed to it
        self.is_dropped = False  # buffer-only: it can never be staged, nor what lies below it

    def __repr__(self) -> str:
        return (
            f"<node {self.node_id} {self.num_pages} pages device {self.device.state.name}"
            f" host {self.host.state.name}>"
        )

    @property
    def is_root(self) -> bool:
        """The root of a namespace holds no page and is never evicted."""
        return self.parent is None

    def at(self, tier: Tier) -> Presence:
        """Its presence in ``tier``."""
        return self.device if tier is Tier.DEVICE else self.host

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


#: Writes what an engine computed for nodes into this rank's device pages of them, in their order.
Fill = Callable[[list[Node], list[int]], None]
#: Likewise into their side pages, whose positions count from the first page of the first node.
FillSide = Callable[[list[Node], SidePages], None]


class Carriage:
    """Nodes that come into ``tier`` together, by one intent.

    ``nodes`` follow one another on a path; a split while the intent is open puts the new upper
    part before its lower one, so ``pages`` (this rank's, in the order of the path) always fit.
    ``anchor`` is the node whose path is pinned in ``tier`` until the intent has ended.
    ``num_copies`` counts copies of this rank that still read or write its pages; ``good`` says of
    those that have ended how many pages each had and whether it went well. ``readers`` are requests
    that have finished with it still open, and the node they held. ``is_void``: what it brings was
    taken back at its source meanwhile, so nobody may come to rely on it. ``completes``: its nodes
    are in ``tier`` already, and it brings only what they lack of side pools.
    """

    __slots__ = (
        "anchor",
        "completes",
        "copy_tickets",
        "fill",
        "fill_side",
        "good",
        "intent",
        "is_void",
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
        self.side: SidePages = {}
        self.num_copies = 0
        self.copy_tickets: list[int] = []
        self.good: list[tuple[int, bool]] = []
        self.intent: Intent | None = None
        self.fill: Fill | None = None
        self.fill_side: FillSide | None = None
        self.is_void = False
        self.completes = False
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

    def first(self, num_pages: int) -> list[Node]:
        """The leading nodes that have whole ``num_pages`` together."""
        taken: list[Node] = []
        for node in self.nodes:
            num_pages -= node.num_pages
            if num_pages < 0:
                break
            taken.append(node)
        return taken

    def expect_parts(self, sizes: list[int]) -> None:
        """Its copy has a part of so many pages each; all are running."""
        self.num_copies = len(sizes)
        self.good = [(size, False) for size in sizes]

    def part_ended(self, index: int, ok: bool) -> int | None:
        """A part has ended on this rank; after the last one, how many leading pages are good."""
        self.num_copies -= 1
        self.good[index] = (self.good[index][0], ok)
        if self.num_copies:
            return None
        good = 0
        for num_pages, went_well in self.good:
            if not went_well:
                break
            good += num_pages
        return good

    def attach(self) -> None:
        """From now on the nodes know of it."""
        for node in self.nodes:
            node.at(self.tier).carriage = self
            node.carriages = (*node.carriages, self)

    def follow(self) -> None:
        """Only hear of splits: the nodes are in the tier already."""
        for node in self.nodes:
            node.carriages = (*node.carriages, self)

    def unfollow(self) -> None:
        """Hear of no more splits."""
        for node in self.nodes:
            node.carriages = tuple(one for one in node.carriages if one is not self)

    def follow_split(self, lower: Node, upper: Node) -> None:
        """``lower`` was cut and ``upper`` is its new first part."""
        self.nodes.insert(self.nodes.index(lower), upper)
        upper.carriages = (*upper.carriages, self)

    def let_go(self) -> None:
        """Bring the nodes no more; another intent may. The copy may still run."""
        for node in self.nodes:
            if node.at(self.tier).carriage is self:
                node.at(self.tier).carriage = None

    def detach(self) -> list[Node]:
        """Let the nodes forget this carriage, which is over. Returns them."""
        self.let_go()
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            node.carriages = tuple(one for one in node.carriages if one is not self)
        return nodes
