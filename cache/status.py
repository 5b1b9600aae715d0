"""How one rank's cache stands, as a record: for logs, dashboards, tests and error reports.

Reading it changes nothing and needs no communication. Nothing in the cache decides with it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvpact.cache.core import CacheCore
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.tree.node import STORAGE, Tier
from kvpact.consensus.step.step import Stepper

__all__ = ["CacheStatus", "PoolStatus", "pools_of", "status_of"]


class PoolStatus(msgspec.Struct, frozen=True):
    """One pool, in pages. Facts of this rank: ``pages`` to ``orphaned``; the rest is agreed.

    ``limbo``: a copy that was quarantined, aborted, or is of an earlier epoch still reads or writes
    them, and nobody owns them. ``orphaned``: requests of an earlier epoch hold them. ``pinned`` and
    ``evictable`` are pages of the tree, of a tier. ``usable``: every rank can use so many.
    ``charged``: spoken for, ``cooling`` among them, which come back once every rank has told
    whether a quarantined copy still runs there.
    """

    pages: int
    free: int
    limbo: int
    orphaned: int
    pinned: int
    evictable: int
    usable: int
    charged: int
    cooling: int

    @property
    def in_use(self) -> int:
        """Pages that a node, a request or an open intent owns, or that are orphaned."""
        return self.pages - self.free - self.limbo


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank stands. After the same step all is equal on all ranks, but for ``rank``, the
    facts in ``pools``, and the copies in ``counters``.

    ``step`` is the last that was posted, ``settled_step`` the last whose verdict is applied,
    ``clock_ms`` the agreed time. ``stage`` says what the rank is doing. ``fingerprint`` digests all
    agreed decisions of the epoch, ``live_digest`` the names of the live requests.

    ``pools``: the tiers ``device`` and ``host``, side pools (``NAME.device``), and ``storage``,
    which counts the pages that its queue takes. ``storage`` is ``attached``, ``draining``,
    ``clearing`` or ``detached``; empty: there is none. ``is_detached``: by policy host and storage
    are off. ``open_intents`` are counted by kind, those who wait for a step by line.
    ``is_pending``: an idle engine keeps stepping. ``counters`` are those of ``metrics()``.
    """

    rank: int
    epoch: int
    step: int
    settled_step: int
    clock_ms: int
    stage: str
    weights: str
    fingerprint: int
    live_digest: int
    requests: int
    pools: dict[str, PoolStatus]
    storage: str
    is_detached: bool
    is_pending: bool
    open_intents: dict[str, int]
    waiting: dict[str, int]
    counters: dict[str, int]

    @property
    def num_open(self) -> int:
        """Open intents of every kind: those that hold a slot."""
        return sum(self.open_intents.values())


# Any thread may ask (Prometheus' does), so each value is read in one go: no loop in Python runs
# over what the scheduler's thread may be changing.


def status_of(core: CacheCore, stepper: Stepper, counters: dict[str, int]) -> CacheStatus:
    """The status of the rank that ``core`` and ``stepper`` make up, with ``counters``."""
    manager, storage = core.manager, core.storage
    return CacheStatus(
        rank=core.rank,
        epoch=manager.epoch,
        step=manager.step,
        settled_step=manager.settled_step,
        clock_ms=manager.clock_ms,
        stage=stepper.stage.value,
        weights=core.weights,
        fingerprint=core.journal.fingerprint,
        live_digest=core.requests.digest,
        requests=len(core.requests),
        pools=pools_of(core),
        storage=storage.state.value if storage is not None else "",
        is_detached=core.is_detached,
        is_pending=core.has_pending,
        open_intents=dict(Counter(intent.kind for intent in manager.open_intents)),
        waiting=_waiting(core),
        counters=counters,
    )


def pools_of(core: CacheCore) -> dict[str, PoolStatus]:
    """Every pool of the ballot by name, the tiers first."""
    orphans = core.orphans
    found = {
        tier.value: _pool(
            core, tier.value, pool, tier, orphaned=len(orphans.pages) if tier is Tier.DEVICE else 0
        )
        for tier, pool in core.tiers.pools.items()
    }
    for side in core.tiers.side:
        orphaned = sum(1 for name, _ in orphans.side_pages if name == side.spec.name)
        for tier, pool in side.pools.items():
            is_device = tier is Tier.DEVICE
            name = side.spec.pool(tier)
            found[name] = _pool(core, name, pool, None, orphaned=orphaned if is_device else 0)
    found[STORAGE] = _queue(core)
    return found


def _pool(
    core: CacheCore, name: str, pool: PagePool, tier: Tier | None, *, orphaned: int
) -> PoolStatus:
    """``name``: what the ballot calls it; a staging pool has another name of its own."""
    ledger, tree = core.manager.ledger, core.tree
    return PoolStatus(
        pages=pool.num_pages,
        free=pool.num_free,
        limbo=pool.num_limbo,
        orphaned=orphaned,
        pinned=0 if tier is None else tree.num_pinned[tier],
        evictable=0 if tier is None else tree.num_evictable[tier],
        usable=ledger.usable(name),
        charged=ledger.charged(name),
        cooling=ledger.cooling(name),
    )


def _queue(core: CacheCore) -> PoolStatus:
    """The storage's queue: its places are nobody's pages, so what is charged is what is used."""
    ledger, places = core.manager.ledger, core.usable(STORAGE)
    charged = ledger.charged(STORAGE)
    return PoolStatus(
        pages=places,
        free=max(0, places - charged),
        limbo=0,
        orphaned=0,
        pinned=0,
        evictable=0,
        usable=ledger.usable(STORAGE),
        charged=charged,
        cooling=ledger.cooling(STORAGE),
    )


def _waiting(core: CacheCore) -> dict[str, int]:
    """Count those who wait for a step and are no open intent yet, by line."""
    return {
        "admissions": core.admission.num_waiting,
        "back_ups": core.backup.num_queued,
        "inserts": core.insert_line.num_waiting,
        "load_backs": core.load_back.num_waiting,
        "page_tickets": core.engine_pages.num_waiting,
        "storage_writes": core.storage.storing.num_queued if core.storage is not None else 0,
    }
