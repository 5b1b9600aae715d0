"""The hierarchical KV cache of one rank: tree, page pools, copies between the tiers.

The middle layer: it imports ``consensus``, whose first user it is, and never ``harness``.
:func:`join_cache` builds a rank's :class:`HierarchicalCache`, which a scheduler calls.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cache.assembly import join_cache
    from cache.config import CacheConfig
    from cache.hierarchical_cache import HierarchicalCache, InsertResult, Match, StepResult
    from cache.node import Tier
    from cache.requests import RequestReport
    from cache.tensors import KVShape, KVTensors
    from cache.ticket import Ticket, TicketState

__all__ = [
    "CacheConfig",
    "HierarchicalCache",
    "InsertResult",
    "KVShape",
    "KVTensors",
    "Match",
    "RequestReport",
    "StepResult",
    "Ticket",
    "TicketState",
    "Tier",
    "join_cache",
]

# Each comes from its module when it is first asked for: errors and a ballot need no torch.
_MODULES = {
    "assembly": ("join_cache",),
    "config": ("CacheConfig",),
    "hierarchical_cache": ("HierarchicalCache", "InsertResult", "Match", "StepResult"),
    "node": ("Tier",),
    "requests": ("RequestReport",),
    "tensors": ("KVShape", "KVTensors"),
    "ticket": ("Ticket", "TicketState"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
