"""The protocol: how the ranks of one replica agree, step by step, on what they do to their caches.

The lowest layer. It imports neither ``cache`` nor ``harness``, knows no tree and no tensor copy,
and only ``kvpact.consensus.transport.gloo`` talks to other ranks. An engine with a cache of its own
needs this package alone: :class:`Membership` to meet the other ranks, a :class:`Participant` for
what it can reserve, a :class:`TransactionManager` for what is open, a :class:`Stepper` for the
steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.consensus.lazy import public

if TYPE_CHECKING:
    from kvpact.consensus.core.ballot import Schema, Status
    from kvpact.consensus.core.errors import (
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
    from kvpact.consensus.core.journal import Entry, Journal, read_journal
    from kvpact.consensus.core.manager import TransactionManager, Verdict
    from kvpact.consensus.core.participant import Intent, Outcome, OutcomeKind, Participant
    from kvpact.consensus.epoch.report import Policy, Seal
    from kvpact.consensus.membership import Membership
    from kvpact.consensus.step.step import Carrier, StepLimits, Stepper
    from kvpact.consensus.transport.collective import Group, Work
    from kvpact.consensus.transport.gloo import GlooGroup, serve_tcp_store
    from kvpact.consensus.transport.store import Store, TcpStore

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
    "Seal",
    "Status",
    "StepLimits",
    "Stepper",
    "Store",
    "StoreSilent",
    "TcpStore",
    "TransactionManager",
    "Verdict",
    "Work",
    "read_journal",
    "serve_tcp_store",
]

_HOMES = {
    "kvpact.consensus.core.ballot": ("Schema", "Status"),
    "kvpact.consensus.core.errors": (
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
    "kvpact.consensus.core.journal": ("Entry", "Journal", "read_journal"),
    "kvpact.consensus.core.manager": ("TransactionManager", "Verdict"),
    "kvpact.consensus.core.participant": ("Intent", "Outcome", "OutcomeKind", "Participant"),
    "kvpact.consensus.epoch.report": ("Policy", "Seal"),
    "kvpact.consensus.membership": ("Membership",),
    "kvpact.consensus.step.step": ("Carrier", "StepLimits", "Stepper"),
    "kvpact.consensus.transport.collective": ("Group", "Work"),
    "kvpact.consensus.transport.gloo": ("GlooGroup", "serve_tcp_store"),
    "kvpact.consensus.transport.store": ("Store", "TcpStore"),
}

__getattr__, __dir__ = public(__name__, _HOMES)
