"""The protocol: how the ranks of one replica agree, step by step, on what they do to their caches.

The lowest layer. It imports neither ``cache`` nor ``harness``, knows no tree and no tensor copy,
and only ``consensus.group`` talks to other ranks. An engine with a cache of its own needs this
package alone: :class:`Membership` to meet the other ranks, a :class:`Participant` for what it can
reserve, a :class:`TransactionManager` for what is open, a :class:`Stepper` for the steps.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consensus.ballot import Schema, Status
    from consensus.errors import (
        BadInput,
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
        StoreSilent,
    )
    from consensus.group import GlooGroup, Group, serve_tcp_store
    from consensus.journal import Entry, Journal, read_journal
    from consensus.manager import TransactionManager
    from consensus.membership import Membership
    from consensus.participant import Intent, Outcome, OutcomeKind, Participant
    from consensus.report import Policy
    from consensus.step import Carrier, StepLimits, Stepper
    from consensus.store import Store, TcpStore

__all__ = [
    "BadInput",
    "Carrier",
    "Divergence",
    "Entry",
    "GlooGroup",
    "Group",
    "Intent",
    "InternalError",
    "Journal",
    "KvpactError",
    "Membership",
    "Misuse",
    "Outcome",
    "OutcomeKind",
    "Participant",
    "PeerError",
    "PeerLeft",
    "PeerLost",
    "Policy",
    "ProgressLost",
    "RankStalled",
    "ResourceError",
    "Schema",
    "Status",
    "StepLimits",
    "Stepper",
    "Store",
    "StoreSilent",
    "TcpStore",
    "TransactionManager",
    "read_journal",
    "serve_tcp_store",
]

# Each comes from its module when it is first asked for: errors and a ballot need no torch.
_MODULES = {
    "ballot": ("Schema", "Status"),
    "errors": (
        "BadInput",
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
        "StoreSilent",
    ),
    "group": ("GlooGroup", "Group", "serve_tcp_store"),
    "journal": ("Entry", "Journal", "read_journal"),
    "manager": ("TransactionManager",),
    "membership": ("Membership",),
    "participant": ("Intent", "Outcome", "OutcomeKind", "Participant"),
    "report": ("Policy",),
    "step": ("Carrier", "StepLimits", "Stepper"),
    "store": ("Store", "TcpStore"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
