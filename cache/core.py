"""The core of one rank's cache: tree, tiers, ledger, and one object per path.

What happens in a step, in order, is :meth:`CacheCore.prepare` and :meth:`CacheCore.settled`; the
facade (:mod:`kvpact.cache.hierarchical_cache`) is the calls around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvpact.cache.choices import Mode
from kvpact.cache.config import CacheConfig, schema_of
from kvpact.cache.copies.copier import Copier
from kvpact.cache.copies.mover import Direction, Mover
from kvpact.cache.copies.side_pools import SidePool, SidePools
from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.paths.admission import Admission
from kvpact.cache.paths.backup import Backup
from kvpact.cache.paths.buffer_flush import BufferFlush
from kvpact.cache.paths.completion import Completion, HostCompletion
from kvpact.cache.paths.engine_pages import EnginePages
from kvpact.cache.paths.insert_own import OwnInsert
from kvpact.cache.paths.insert_queue import InsertLine
from kvpact.cache.paths.insert_voted import Insertion
from kvpact.cache.paths.load_back import LoadBack
from kvpact.cache.paths.load_staged import StagedLoads
from kvpact.cache.paths.match import Lookup
from kvpact.cache.paths.write_back import WriteBack
from kvpact.cache.paths.write_through import WriteThrough
from kvpact.cache.requests.namespaces import Namespaces
from kvpact.cache.requests.orphans import Orphans
from kvpact.cache.requests.table import Request, RequestTable
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.residency.withdrawal import Withdrawal
from kvpact.cache.storing.tier import StorageTier
from kvpact.cache.tree.events import EventLog
from kvpact.cache.tree.eviction import POLICIES
from kvpact.cache.tree.node import STORAGE, Node, Tier
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Outcome

__all__ = ["CacheCore"]


class CacheCore:
    """The cache of one rank without communication: the :class:`Machine` that its stepper drives."""

    def __init__(
        self,
        config: CacheConfig,
        rank: int,
        journal: Journal,
        *,
        pools: Mapping[Tier, PagePool],
        mover: Mover,
        storage: StorageIo | None = None,
        side: Sequence[SidePool] = (),
    ) -> None:
        self.config = config
        self.rank = rank
        self.journal = journal
        self.is_detached = False  # by policy: only the device tier is used any more
        self.tree = RadixTree(config.page_size, POLICIES[config.eviction](), journal.note)
        self.tree.on_place = self._placed
        if journal.is_written:
            for pool in (*pools.values(), *(one for each in side for one in each.pools.values())):
                pool.fact = journal.fact
        schema = schema_of(config)
        self.manager = TransactionManager(
            rank=rank,
            schema=schema,
            lag=config.lag,
            copy_timeout_s=config.copy_timeout_s,
            journal=journal,
            usable={pool: partial(self.usable, pool) for pool in schema.pools},
        )
        self.weights = config.weights
        self.side = SidePools(side)
        copier = Copier(mover, pools, verifies=config.verifies_copies, side=side)
        whole = config.evicts_whole_nodes
        self.tiers = Tiers(self.tree, pools, self.manager, copier, trims=not whole, side=self.side)
        self.requests = RequestTable(self.tree)
        self.orphans = Orphans(pools, self.side)
        self.withdrawal = Withdrawal(self.tiers, self.requests)
        self.event_log = EventLog(
            config.page_size, events_max=config.events_max, enabled=config.events_max > 0
        )
        self.storage = (
            None if storage is None else StorageTier(self.tiers, storage, self.event_log, config)
        )
        self.insertion = Insertion(self.tiers)
        self.backup: WriteThrough | WriteBack | BufferFlush = self._make_backup()
        waiting_max = config.waiting_tickets_max
        self.host_completion = HostCompletion(self.tiers, waiting_max=waiting_max)
        self.completion = Completion(self.tiers, self.host_completion, waiting_max=waiting_max)
        self.insert_line = InsertLine(
            self.tree,
            self.requests,
            self.insertion,
            self.backup,
            self.completion,
            waiting_max=waiting_max,
        )
        self.load_back = LoadBack(
            self.tiers,
            self.requests,
            self.withdrawal,
            minimum_pages=config.load_back_minimum_pages,
            waiting_max=waiting_max,
        )
        self.namespaces = Namespaces(self.requests)
        self.lookup = Lookup(self.tiers, self.requests, self.namespaces, journal)
        self.own_insert = OwnInsert(
            self.tiers, self.requests, self.load_back, self.backup, self.completion
        )
        self.staged_loads: StagedLoads | None = None
        if config.mode is Mode.BUFFER_ONLY and self.storage is not None:
            self.staged_loads = StagedLoads(self.tiers, self.storage.prefetch, self.load_back)
        self.engine_pages = EnginePages(
            self.tiers, headroom_pages=config.headroom_pages, waiting_max=waiting_max
        )
        self.admission = Admission(
            self.tiers,
            self.requests,
            self.lookup,
            self.load_back,
            self.engine_pages,
            self.withdrawal,
            is_fetching=self._is_fetching,
            waiting_max=waiting_max,
        )

        every = (
            self.engine_pages,
            self.insert_line,
            self.insertion,
            self.completion if side else None,
            self.load_back,
            self.admission,
            self.backup,
            self.host_completion if side else None,
            self.storage,
            self.staged_loads,
        )
        #: Every path, in the order in which a step plans: the first finds slots and room.
        self.paths: tuple[Path, ...] = tuple(path for path in every if path is not None)
        # Only those that do something there: most steps of most engines have nothing to do.
        self._plan = [path.plan for path in self.paths if _overrides(path, "plan")]
        self._hear = [path.settled for path in self.paths if _overrides(path, "settled")]

    def _make_backup(self) -> WriteThrough | WriteBack | BufferFlush:
        """The path by which this mode brings nodes to the other tiers."""
        config, storage = self.config, self.storage
        if config.mode is Mode.BUFFER_ONLY:
            if storage is None:
                raise Misuse("mode buffer_only needs a storage: the host is staging only")
            queue_max = config.write_queue_nodes_max
            return BufferFlush(self.tiers, self.insertion, storage, queue_nodes_max=queue_max)
        on_backed_up = storage.backed_up if storage is not None else None
        if config.mode is Mode.WRITE_BACK:
            return WriteBack(
                self.tiers,
                self.insertion,
                self.withdrawal,
                low_water_pages=config.low_water_pages,
                on_backed_up=on_backed_up,
            )
        return WriteThrough(
            self.tiers,
            self.insertion,
            self.withdrawal,
            queue_nodes_max=config.write_queue_nodes_max,
            hits_needed=2 if config.mode is Mode.WRITE_THROUGH_SELECTIVE else 1,
            on_backed_up=on_backed_up,
        )

    # -- the step --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the ballot: hear of endings, plan everything, then reserve, then start copies."""
        self.tiers.copier.collect()
        if self.storage is not None:
            self.storage.io.collect()
        for plan in self._plan:
            plan()
        self.manager.reserve_open()
        self.insertion.end_unread()
        self.tiers.copier.submit()

    def flush(self) -> None:
        """Between two steps: plan, reserve and start the backups that are queued."""
        self.backup.flush()
        self.manager.reserve_open()
        self.tiers.copier.submit()

    def settled(self, outcomes: list[Outcome]) -> None:
        """After a verdict: tidy the tree, tell the tickets."""
        self.tiers.prune()
        for hear in self._hear:
            hear()

    def is_at_rest(self) -> bool:
        """Nothing is open, waits or runs: only a call can change that."""
        is_still = not self.has_pending and not self.tiers.copier.is_busy
        return is_still and (self.storage is None or not self.storage.io.is_busy)

    def live_digest(self) -> int:
        """Digest the live requests."""
        return self.requests.digest

    def waits(self) -> dict[str, str]:
        """Name who waits in a line, and what for; agreed."""
        return {name: lacks for path in self.paths for name, lacks in path.waits().items()}

    def _is_fetching(self, request: Request) -> bool:
        """Something of ``request`` is still on its way from elsewhere: agreed."""
        is_fetching = self.storage is not None and self.storage.prefetch.is_pending(request)
        return is_fetching or self.load_back.is_asked(request)

    # -- looking in ------------------------------------------------------------------------------

    def usable(self, pool: str) -> int:
        """Pages of ``pool`` that this rank can use: capacity less limbo and orphans."""
        if pool == STORAGE:
            return self.storage.usable if self.storage is not None else 0
        name, _, tier = pool.rpartition(".")
        if tier == Tier.HOST.value and self.is_detached:
            return 0
        if name:
            orphaned = len(self.orphans.side_pages_of(name)) if tier == Tier.DEVICE.value else 0
            return self.side.usable(pool) - orphaned
        orphaned = len(self.orphans.pages) if tier == Tier.DEVICE.value else 0
        return self.tiers.pools[Tier(tier)].usable - orphaned

    @property
    def has_pending(self) -> bool:
        """Something waits for a step: agreed."""
        return not self.manager.is_idle or any(path.is_pending for path in self.paths)

    def counts(self) -> dict[str, int]:
        """Counters since the start: intents, pages and copies."""
        write: Backup = self.backup
        load, storage = self.load_back, self.storage
        fetch = storage.prefetch if storage is not None else None
        submitted = self.tiers.copier.mover.submitted
        aborts = sum((write.num_aborts, write.num_no_room, load.num_aborts, load.num_no_room))
        return {
            "commits": write.num_commits + load.num_commits + (fetch.num_commits if fetch else 0),
            "aborts": aborts + (fetch.num_aborts + fetch.num_no_room if fetch else 0),
            "deferred": write.num_deferred,
            "prefetches": fetch.num_commits if fetch else 0,
            "prefetched_pages": fetch.num_pages if fetch else 0,
            "stored_pages": storage.storing.num_stored if storage is not None else 0,
            "backups": write.num_commits,
            "backups_aborted": write.num_aborts,
            "backups_no_room": write.num_no_room,
            "backups_lost": write.fates["lost"] + write.fates["orphaned"],
            "backups_dropped": write.num_dropped,
            "loads": load.num_commits,
            "loads_aborted": load.num_aborts,
            "loads_no_room": load.num_no_room,
            "loads_failed": load.num_failed,
            "refused": self.insertion.num_refused,
            "admitted": self.admission.num_admitted,
            "admissions_refused": self.admission.num_refused,
            "admissions_again": self.admission.num_tries,
            "pages_refused": self.engine_pages.num_refused,
            "writes_submitted": submitted[Direction.TO_HOST],
            "loads_submitted": submitted[Direction.TO_DEVICE],
            "copies_wrong": self.tiers.copier.num_wrong,
            "prompt_pages": self.requests.prompt_pages,
            "device_hit_pages": self.requests.device_hit_pages,
            "host_hit_pages": self.requests.host_hit_pages,
            "evicted_device": self.tiers.num_evicted[Tier.DEVICE],
            "evicted_host": self.tiers.num_evicted[Tier.HOST],
        }

    def _placed(self, node: Node, tier: Tier) -> None:
        is_there = node.at(tier).is_published
        (self.event_log.stored if is_there else self.event_log.removed)(node, tier.value)
        if not self.journal.is_written:
            return
        presence = node.at(tier)
        if is_there:
            intent = presence.carriage.intent if presence.carriage is not None else None
            serial = intent.serial if intent is not None else -1
            self.journal.fact("publish", tier.value, node.node_id, serial, *presence.pages)
        else:
            self.journal.fact("unpublish", tier.value, node.node_id)


def _overrides(path: Path, name: str) -> bool:
    return getattr(type(path), name) is not getattr(Path, name)
