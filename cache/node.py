"""One node of the radix tree: a run of whole pages, and where its bytes are."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cache.carriage import Carriage

__all__ = ["Node", "Presence", "Residency", "Standing", "Tier", "Tokens"]

Tokens = NDArray[np.int32]


class Tier(enum.Enum):
    """Where pages live. The value is the name of the pool."""

    DEVICE = "device"
    HOST = "host"


class Residency(enum.IntEnum):
    """How much of a node is in a tier. COPYING and RESIDENT are published: matches see them."""

    ABSENT = 0
    RESERVED = 1  # proposed; nobody may match it
    COPYING = 2  # committed; its bytes may still be on the way
    RESIDENT = 3


class Standing(enum.IntEnum):
    """What a node means to evictions from one tier."""

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
        self.pages: list[int] = []
        self.side: dict[str, list[tuple[int, int]]] = {}  # see cache.side_pools
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
        self.carriages: list[Carriage] = []
        # Names of its pages, once somebody has asked for them: in storage (this rank's own), and
        # in events (equal on all ranks).
        self.keys: list[bytes] = []
        self.hashes: list[int] = []
        self.is_alive = True
        self.is_queued = False
        self.is_stored = False  # buffer-only: it has been handed to storage
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
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes
