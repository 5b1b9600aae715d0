"""kvpact keeps the hierarchical KV caches of all ranks of one model replica identical, by protocol.

A scheduler without a hierarchical cache starts at :func:`join_cache`. An engine with a cache of its
own takes :mod:`kvpact.consensus` alone. :mod:`kvpact.harness` proves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.consensus.lazy import public

if TYPE_CHECKING:
    from kvpact.cache.config import CacheConfig
    from kvpact.cache.copies.side_pools import SidePool
    from kvpact.cache.hierarchical_cache import HierarchicalCache, InsertResult, Match, StepResult
    from kvpact.cache.join import join_cache
    from kvpact.cache.memory.engine_tensors import EngineTensors, TensorView
    from kvpact.cache.memory.shape import KVShape
    from kvpact.cache.memory.tensors import KVTensors
    from kvpact.cache.metrics import CacheMetrics, metrics
    from kvpact.cache.requests.table import RequestReport
    from kvpact.cache.requests.ticket import Ticket, TicketState
    from kvpact.cache.status import CacheStatus, PoolStatus
    from kvpact.cache.storage import open_backend
    from kvpact.cache.tree.events import CacheEvent
    from kvpact.cache.tree.node import Tier
    from kvpact.cache.tree.side import SideSpec
    from kvpact.consensus.core.errors import (
        BadInput,
        ConservationBroken,
        Divergence,
        InternalError,
        KvpactError,
        Misuse,
        PeerError,
        PeerLeft,
        PeerLost,
        ProgressLost,
        RankStalled,
        ResourceError,
        StoreForged,
        StoreSilent,
    )
    from kvpact.consensus.epoch.report import Policy
    from kvpact.consensus.transport.gloo import serve_tcp_store

__all__ = [
    "BadInput",
    "CacheConfig",
    "CacheEvent",
    "CacheMetrics",
    "CacheStatus",
    "ConservationBroken",
    "Divergence",
    "EngineTensors",
    "HierarchicalCache",
    "InsertResult",
    "InternalError",
    "KVShape",
    "KVTensors",
    "KvpactError",
    "Match",
    "Misuse",
    "PeerError",
    "PeerLeft",
    "PeerLost",
    "Policy",
    "PoolStatus",
    "ProgressLost",
    "RankStalled",
    "RequestReport",
    "ResourceError",
    "SidePool",
    "SideSpec",
    "StepResult",
    "StoreForged",
    "StoreSilent",
    "TensorView",
    "Ticket",
    "TicketState",
    "Tier",
    "__version__",
    "join_cache",
    "metrics",
    "open_backend",
    "serve_tcp_store",
]

__version__ = "0.2.0"

_HOMES = {
    "kvpact.cache.config": ("CacheConfig",),
    "kvpact.cache.copies.side_pools": ("SidePool",),
    "kvpact.cache.hierarchical_cache": ("HierarchicalCache", "InsertResult", "Match", "StepResult"),
    "kvpact.cache.join": ("join_cache",),
    "kvpact.cache.memory.engine_tensors": ("EngineTensors", "TensorView"),
    "kvpact.cache.memory.shape": ("KVShape",),
    "kvpact.cache.memory.tensors": ("KVTensors",),
    "kvpact.cache.metrics": ("CacheMetrics", "metrics"),
    "kvpact.cache.requests.table": ("RequestReport",),
    "kvpact.cache.requests.ticket": ("Ticket", "TicketState"),
    "kvpact.cache.status": ("CacheStatus", "PoolStatus"),
    "kvpact.cache.storage": ("open_backend",),
    "kvpact.cache.tree.events": ("CacheEvent",),
    "kvpact.cache.tree.node": ("Tier",),
    "kvpact.cache.tree.side": ("SideSpec",),
    "kvpact.consensus.core.errors": (
        "BadInput",
        "ConservationBroken",
        "Divergence",
        "InternalError",
        "KvpactError",
        "Misuse",
        "PeerError",
        "PeerLeft",
        "PeerLost",
        "ProgressLost",
        "RankStalled",
        "ResourceError",
        "StoreForged",
        "StoreSilent",
    ),
    "kvpact.consensus.epoch.report": ("Policy",),
    "kvpact.consensus.transport.gloo": ("serve_tcp_store",),
}

__getattr__, __dir__ = public(__name__, _HOMES)
