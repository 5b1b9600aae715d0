"""One rank of a replay: in a process of its own over gloo, or simulated beside the others."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.cpu import CpuMover, DeferredMover
from kvpact.cache.hierarchical_cache import StepResult, schema_of
from kvpact.cache.join import join_replica, make_pools
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.storage import BackendBase, DeferredWorkers, StorageWorkers, open_backend
from kvpact.consensus.core.errors import KvpactError, PeerError
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.core.participant import OutcomeKind
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.rank.child import RankContext
from kvpact.harness.rank.rank import Rank, identity_of
from kvpact.harness.rank.sim import SimBeacon, SimClock, SimGroup, SimNet, run_programs
from kvpact.harness.rank.store import MemoryStore
from kvpact.harness.replay.config import ReplayConfig
from kvpact.harness.replay.engine import Engine, Totals
from kvpact.harness.trace.mooncake import TraceRequest, read_trace
from kvpact.harness.verify.agreement import Snapshot, snapshot
from kvpact.harness.verify.journals import journal_path

__all__ = [
    "Played",
    "RankSummary",
    "Recorder",
    "cache_config",
    "replay_sim",
    "run_rank",
]

#: A full walk of the tree, and of all pages, every so many steps; a fingerprint after each.
WALK_EVERY_STEPS = 256
_SEND_EVERY_STEPS = 64
_LEAVE_S = 30.0


class RankSummary(msgspec.Struct):
    """What one rank did and saw. Times in seconds."""

    rank: int
    totals: Totals
    steps: int
    collectives: int
    waited_s: float
    step_s: list[float]
    commits: dict[str, int]
    aborts: dict[str, int]
    metrics: dict[str, int]


class Recorder:
    """Takes down one rank's steps; ``take`` hands over the snapshots since the last time."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._snapshots: list[Snapshot] = []
        self._step_s: list[float] = []
        self._commits: Counter[str] = Counter()
        self._aborts: Counter[str] = Counter()
        self._entered = time.perf_counter()

    def enter(self) -> None:
        """A step begins."""
        self._entered = time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """A step is over: time it, count its verdicts, look at the agreed state."""
        self._step_s.append(time.perf_counter() - self._entered)
        for outcome in result.outcomes:
            kind = outcome.intent.kind
            if outcome.kind is OutcomeKind.COMMIT:
                self._commits[kind] += 1
            elif outcome.kind is OutcomeKind.ABORT:
                self._aborts[f"{kind}: {outcome.intent.cause}"] += 1
        cache = self._rank.cache
        walks = cache.core.manager.step % WALK_EVERY_STEPS == 0
        self._snapshots.append(snapshot(cache, walk=walks))

    def take(self) -> list[Snapshot]:
        """The snapshots that nobody has taken yet."""
        taken, self._snapshots = self._snapshots, []
        return taken

    @property
    def num_untaken(self) -> int:
        """How many snapshots wait."""
        return len(self._snapshots)

    def summary(self, totals: Totals) -> RankSummary:
        """The end: one last full check, then what the rank did."""
        cache = self._rank.cache
        cache.check_integrity()
        metrics = cache.metrics()
        no_room = metrics["backups_no_room"] + metrics["loads_no_room"]
        return RankSummary(
            rank=cache.rank,
            totals=totals,
            steps=cache.core.manager.step,
            collectives=cache.stepper.num_collectives,
            waited_s=cache.stepper.waited_s,
            step_s=self._step_s,
            commits=dict(self._commits),
            aborts=dict(self._aborts) | ({"no room": no_room} if no_room else {}),
            metrics=metrics,
        )


def cache_config(config: ReplayConfig, rank: int) -> CacheConfig:
    """The cache's configuration of one rank."""
    layers, heads, dim = config.kv_shape
    return CacheConfig(
        page_size=config.page_size,
        device_pages=config.device_pages[rank],
        host_pages=config.host_pages[rank],
        kv_shape=KVShape(layers, heads, dim),
        lag=config.lag,
        integrity_every_steps=WALK_EVERY_STEPS,
        mode=config.mode,
        eviction=config.eviction,
        low_water_pages=_low_water(config),
        headroom_pages=config.headroom_pages,
    )


def _low_water(config: ReplayConfig) -> int:
    """Write-back keeps a sixteenth of the device free, or what fills the headroom again."""
    if config.mode != "write_back":
        return 0
    return max(min(config.device_pages) // 16, config.headroom_pages)


def make_backend(config: ReplayConfig, rank: int) -> BackendBase | None:
    """The storage of one rank."""
    if config.storage == "none":
        return None
    identity = identity_of(cache_config(config, rank), rank, config.num_ranks)
    capacity = config.storage_mb << 20
    return open_backend(config.storage, identity, capacity_bytes=capacity, path=config.storage_dir)


def run_rank(context: RankContext, packed: bytes) -> None:
    """One rank over gloo: streams its snapshots to the launcher, the summary last."""
    config = msgspec.msgpack.decode(packed, type=ReplayConfig)
    cached = cache_config(config, context.rank)
    membership = join_replica(
        cached,
        context.store_host,
        context.store_port,
        name="replay",
        rank=context.rank,
        ranks=range(config.num_ranks),
    )
    backend = make_backend(config, context.rank)
    rank = Rank(
        cached,
        group=membership.group,
        store=membership.store,
        pools=make_pools(cached),
        usable=membership.usable,
        make_mover=lambda device, host, plan: CpuMover(device, host, plan_part=plan),
        locator=membership.locator,
        journal=Journal(context.rank, path=journal_path(config.journal, context.rank)),
        beacon=membership.watch,
        regroup=membership.regroup,
        workers=None if backend is None else StorageWorkers(backend),
    )
    recorder = Recorder(rank)

    def say(summary: RankSummary | None) -> None:
        context.send(
            {
                "snapshots": msgspec.to_builtins(recorder.take()),
                "requests": engine.totals.requests,
                "summary": msgspec.to_builtins(summary),
                "incident": msgspec.to_builtins(rank.cache.stepper.change.incident),
            }
        )

    def after_step(result: StepResult) -> None:
        recorder.after_step(result)
        if recorder.num_untaken >= _SEND_EVERY_STEPS:
            say(None)

    engine = Engine(
        rank,
        read_trace(config.trace, limit=config.limit),
        lanes=config.lanes,
        decides=config.decides,
        settle_copies=recorder.enter,
        after_step=after_step,
    )
    try:
        for _ in engine.program():
            rank.cache.stepper.pause()
        say(recorder.summary(engine.totals))
        membership.leave(_LEAVE_S)
    except KvpactError:
        say(None)
        raise
    finally:
        rank.close()
        membership.close()


class Played(msgspec.Struct):
    """All ranks of a replay; ``incidents`` by the rank that tells it, where an epoch was closed."""

    summaries: list[RankSummary] = []
    snapshots: list[Snapshot] = []
    failures: list[str] = []
    incidents: dict[int, Incident] = {}

    def told(self) -> list[Incident]:
        """The incident as the rank tells it that heard most reports."""
        tellers = sorted(
            self.incidents, key=lambda rank: (-len(self.incidents[rank].reports), rank)
        )
        return [self.incidents[rank] for rank in tellers[:1]]


def replay_sim(config: ReplayConfig, requests: list[TraceRequest]) -> Played:
    """All ranks in this process under the virtual clock; deterministic."""
    net = SimNet(config.num_ranks, schema_of(cache_config(config, 0)).width, SimClock())
    store = MemoryStore()
    ranks = [_sim_rank(config, rank, net, store) for rank in range(config.num_ranks)]
    recorders = [Recorder(rank) for rank in ranks]
    engines = [
        Engine(
            rank,
            requests,
            lanes=config.lanes,
            decides=config.decides,
            settle_copies=recorder.enter,
            after_step=recorder.after_step,
        )
        for rank, recorder in zip(ranks, recorders, strict=True)
    ]
    played = Played()
    try:
        run_programs([engine.program() for engine in engines], net, config.seed)
        played.summaries = [r.summary(e.totals) for r, e in zip(recorders, engines, strict=True)]
    except PeerError as error:
        played.failures.append(str(error))
    played.snapshots = [snap for recorder in recorders for snap in recorder.take()]
    for rank in ranks:
        incident = rank.cache.stepper.change.incident
        if incident is not None:
            played.incidents[rank.cache.rank] = incident
        rank.close()
    return played


def _sim_rank(config: ReplayConfig, rank: int, net: SimNet, store: MemoryStore) -> Rank:
    cached = cache_config(config, rank)
    backend = make_backend(config, rank)
    return Rank(
        cached,
        group=SimGroup(net, rank),
        store=store,
        pools=make_pools(cached),
        usable={"device": min(config.device_pages), "host": min(config.host_pages)},
        make_mover=lambda device, host, plan: DeferredMover(device, host, plan_part=plan),
        locator=net,
        journal=Journal(rank, path=journal_path(config.journal, rank)),
        beacon=SimBeacon(net, rank),
        workers=None if backend is None else DeferredWorkers(backend),
    )
