"""The protocol: how the ranks of one replica agree, step by step, on what they do to their caches.

The lowest layer. It imports neither ``cache`` nor ``harness``, knows no tree and no tensor copy,
and only ``kvpact.consensus.transport.gloo`` talks to other ranks. An engine with a cache of its own
needs this package alone: :func:`join` to meet the other ranks, a :class:`Participant` for what it
can reserve, and of the room ``engine`` whatever saves it work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.consensus.lazy import public

if TYPE_CHECKING:
    from kvpact.consensus.core.ballot import Header, Schema, Status
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
    from kvpact.consensus.core.journal import Entry, Journal, read_journal
    from kvpact.consensus.core.manager import PostedBallot, TransactionManager, Verdict
    from kvpact.consensus.core.participant import Intent, Outcome, OutcomeKind, Participant
    from kvpact.consensus.core.transaction import Event
    from kvpact.consensus.engine.chains import ChainFate, ChainPlan, Link
    from kvpact.consensus.engine.limbo import Limbo
    from kvpact.consensus.engine.replica import CarriesNothing, Replica, join
    from kvpact.consensus.engine.shared_pool import SharedPool
    from kvpact.consensus.engine.tickets import Ticket, Tickets, TicketState
    from kvpact.consensus.epoch.closing import Locator
    from kvpact.consensus.epoch.incident_files import IncidentFiles
    from kvpact.consensus.epoch.report import Incident, LastSeen, Policy, Report, Seal, SealedError
    from kvpact.consensus.membership import Membership
    from kvpact.consensus.step.stage import Beacon, Stage
    from kvpact.consensus.step.step import Carrier, Machine, StepLimits, Stepper
    from kvpact.consensus.transport.collective import Group, RawStore, Work
    from kvpact.consensus.transport.gloo import (
        GlooGroup,
        SharedStore,
        serve_tcp_store,
        share_store,
    )
    from kvpact.consensus.transport.store import Store, TcpStore

__all__ = [
    "BadInput",
    "Beacon",
    "Carrier",
    "CarriesNothing",
    "ChainFate",
    "ChainPlan",
    "ConservationBroken",
    "Divergence",
    "Entry",
    "Event",
    "GlooGroup",
    "Group",
    "Header",
    "Incident",
    "IncidentFiles",
    "Intent",
    "InternalError",
    "Journal",
    "KvpactError",
    "LastSeen",
    "Limbo",
    "Link",
    "Locator",
    "Machine",
    "Membership",
    "Misuse",
    "Outcome",
    "OutcomeKind",
    "Participant",
    "PeerError",
    "PeerLeft",
    "PeerLost",
    "Policy",
    "PostedBallot",
    "ProgressLost",
    "RankStalled",
    "RawStore",
    "Replica",
    "Report",
    "ResourceError",
    "Schema",
    "Seal",
    "SealedError",
    "SharedPool",
    "SharedStore",
    "Stage",
    "Status",
    "StepLimits",
    "Stepper",
    "Store",
    "StoreForged",
    "StoreSilent",
    "TcpStore",
    "Ticket",
    "TicketState",
    "Tickets",
    "TransactionManager",
    "Verdict",
    "Work",
    "join",
    "read_journal",
    "serve_tcp_store",
    "share_store",
]

_HOMES = {
    "kvpact.consensus.core.ballot": ("Header", "Schema", "Status"),
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
    "kvpact.consensus.core.journal": ("Entry", "Journal", "read_journal"),
    "kvpact.consensus.core.manager": ("PostedBallot", "TransactionManager", "Verdict"),
    "kvpact.consensus.core.participant": ("Intent", "Outcome", "OutcomeKind", "Participant"),
    "kvpact.consensus.core.transaction": ("Event",),
    "kvpact.consensus.engine.chains": ("ChainFate", "ChainPlan", "Link"),
    "kvpact.consensus.engine.limbo": ("Limbo",),
    "kvpact.consensus.engine.replica": ("CarriesNothing", "Replica", "join"),
    "kvpact.consensus.engine.shared_pool": ("SharedPool",),
    "kvpact.consensus.engine.tickets": ("Ticket", "TicketState", "Tickets"),
    "kvpact.consensus.epoch.closing": ("Locator",),
    "kvpact.consensus.epoch.incident_files": ("IncidentFiles",),
    "kvpact.consensus.epoch.report": (
        "Incident",
        "LastSeen",
        "Policy",
        "Report",
        "Seal",
        "SealedError",
    ),
    "kvpact.consensus.membership": ("Membership",),
    "kvpact.consensus.step.stage": ("Beacon", "Stage"),
    "kvpact.consensus.step.step": ("Carrier", "Machine", "StepLimits", "Stepper"),
    "kvpact.consensus.transport.collective": ("Group", "RawStore", "Work"),
    "kvpact.consensus.transport.gloo": (
        "GlooGroup",
        "SharedStore",
        "serve_tcp_store",
        "share_store",
    ),
    "kvpact.consensus.transport.store": ("Store", "TcpStore"),
}

__getattr__, __dir__ = public(__name__, _HOMES)
