"""The hierarchical KV cache of one rank: tree, page pools, copies between the tiers.

The middle layer: it imports ``consensus``, whose first user it is, and never ``harness``.
:func:`join_cache` builds a rank's :class:`HierarchicalCache`, which a scheduler calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.consensus.lazy import public

if TYPE_CHECKING:
    from kvpact.cache.config import CacheConfig
    from kvpact.cache.copies.mover import Direction, Ending, Mover, Part, PartPlan
    from kvpact.cache.copies.side_pools import SidePool
    from kvpact.cache.hierarchical_cache import HierarchicalCache, InsertResult, Match, StepResult
    from kvpact.cache.join import join_cache, make_mover
    from kvpact.cache.memory.engine_tensors import EngineTensors, TensorView
    from kvpact.cache.memory.page_pool import PagePool
    from kvpact.cache.memory.paged import PagedMemory
    from kvpact.cache.memory.shape import KVShape
    from kvpact.cache.memory.tensors import KVTensors
    from kvpact.cache.metrics import CacheMetrics, metrics
    from kvpact.cache.requests.table import RequestReport
    from kvpact.cache.requests.ticket import Ticket, TicketState
    from kvpact.cache.status import CacheStatus, PoolStatus
    from kvpact.cache.storage import BackendBase, Identity, open_backend
    from kvpact.cache.storage.checksum import SealedPage
    from kvpact.cache.tree.events import CacheEvent
    from kvpact.cache.tree.node import Node, Presence, Tier
    from kvpact.cache.tree.side import SideSpec

__all__ = [
    "BackendBase",
    "CacheConfig",
    "CacheEvent",
    "CacheMetrics",
    "CacheStatus",
    "Direction",
    "Ending",
    "EngineTensors",
    "HierarchicalCache",
    "Identity",
    "InsertResult",
    "KVShape",
    "KVTensors",
    "Match",
    "Mover",
    "Node",
    "PagePool",
    "PagedMemory",
    "Part",
    "PartPlan",
    "PoolStatus",
    "Presence",
    "RequestReport",
    "SealedPage",
    "SidePool",
    "SideSpec",
    "StepResult",
    "TensorView",
    "Ticket",
    "TicketState",
    "Tier",
    "join_cache",
    "make_mover",
    "metrics",
    "open_backend",
]

_HOMES = {
    "kvpact.cache.config": ("CacheConfig",),
    "kvpact.cache.copies.mover": ("Direction", "Ending", "Mover", "Part", "PartPlan"),
    "kvpact.cache.copies.side_pools": ("SidePool",),
    "kvpact.cache.hierarchical_cache": ("HierarchicalCache", "InsertResult", "Match", "StepResult"),
    "kvpact.cache.join": ("join_cache", "make_mover"),
    "kvpact.cache.memory.engine_tensors": ("EngineTensors", "TensorView"),
    "kvpact.cache.memory.page_pool": ("PagePool",),
    "kvpact.cache.memory.paged": ("PagedMemory",),
    "kvpact.cache.memory.shape": ("KVShape",),
    "kvpact.cache.memory.tensors": ("KVTensors",),
    "kvpact.cache.metrics": ("CacheMetrics", "metrics"),
    "kvpact.cache.requests.table": ("RequestReport",),
    "kvpact.cache.requests.ticket": ("Ticket", "TicketState"),
    "kvpact.cache.status": ("CacheStatus", "PoolStatus"),
    "kvpact.cache.storage": ("BackendBase", "Identity", "open_backend"),
    "kvpact.cache.storage.checksum": ("SealedPage",),
    "kvpact.cache.tree.events": ("CacheEvent",),
    "kvpact.cache.tree.node": ("Node", "Presence", "Tier"),
    "kvpact.cache.tree.side": ("SideSpec",),
}

__getattr__, __dir__ = public(__name__, _HOMES)
