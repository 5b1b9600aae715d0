"""Runs scenario files, in the simulator or with real processes, and judges what the ranks saw."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.hierarchical_cache import schema_of
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.storage import BackendBase, DeferredWorkers, Workers, open_backend
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.report import Incident
from kvpact.consensus.step.step import RUN_KEY
from kvpact.consensus.transport.store import NamedStore
from kvpact.harness.faults.board import FaultBoard, FaultyPool
from kvpact.harness.rank.rank import Rank, identity_of
from kvpact.harness.rank.sim import SimBeacon, SimClock, SimGroup, SimNet, run_programs
from kvpact.harness.rank.store import MemoryStore
from kvpact.harness.scenario.agent import Agent, Observation, Raised, RankRecord
from kvpact.harness.scenario.model import Do, Expect, Fault, Scenario, World
from kvpact.harness.scenario.story import Story, StoryJournal
from kvpact.harness.verify.agreement import Snapshot, compare

__all__ = ["Result", "judge", "run_sim", "unsupported", "world_config"]

#: Large enough that two different pages never look alike, small enough for tiny worlds.
KV_SHAPE = KVShape(2, 1, 8)


#: Groups are told apart by their epoch, and those of the next run by one beyond these.
_EPOCHS_MAX = 1_000_000


class Result(msgspec.Struct):
    """One file: what failed, as lines (none: everything holds).

    ``incidents`` are the ends of epochs, each as told by the rank that knew most of it: the
    records do not repeat them.
    """

    path: str
    name: str
    ranks: str
    seed: int
    failures: list[str]
    records: list[RankRecord]
    incidents: list[Incident] = []


def unsupported(scenario: Scenario) -> str:
    """Why this version cannot run ``scenario`` yet; empty: it can."""
    world = scenario.world
    needs = {
        "side pools in buffer-only mode": bool(world.side_pools) and world.mode == "buffer_only"
    }
    return ", ".join(need for need, needed in needs.items() if needed)


def world_config(world: World, rank: int) -> CacheConfig:
    """The cache's configuration of one rank of a scenario's world."""
    return CacheConfig(
        page_size=world.page_size,
        device_pages=world.device_pages[rank],
        host_pages=world.host_pages[rank],
        kv_shape=KV_SHAPE,
        lag=world.lag,
        num_slots=world.num_slots,
        headroom_pages=min(world.headroom_pages, *world.device_pages),
        load_back_minimum_pages=world.load_back_minimum_pages,
        evicts_whole_nodes=world.evicts_whole_nodes,
        verifies_copies=True,
        copy_timeout_s=world.copy_timeout_s,
        deadline_s=world.deadline_s,
        warn_s=world.deadline_s / 2,
        grace_s=min(0.5, world.deadline_s / 2),
        policy=world.policy,
        mode=world.mode,
        eviction=world.eviction,
        low_water_pages=world.low_water_pages,
        prefetch_policy=world.prefetch_policy,
        prefetch_timeout_s=world.prefetch_timeout_s,
        prefetch_minimum_pages=world.prefetch_minimum_pages,
        storage_queue_pages=world.storage_queue_pages,
        write_queue_nodes_max=world.write_queue_nodes_max,
        waiting_tickets_max=world.waiting_tickets_max,
        side_pools=tuple(
            SideSpec(side.name, side.need, -(-(side.window or 0) // world.page_size))
            for side in world.side_pools
        ),
        side_pages={
            side.name: (side.device_pages[rank], side.host_pages[rank]) for side in world.side_pools
        },
        events_max=1 << 20,
    )


def make_pools(world: World, rank: int, board: FaultBoard) -> dict[Tier, FaultyPool]:
    """The pools of one rank, with the seam for refusals."""
    return {
        Tier.DEVICE: FaultyPool("device", world.device_pages[rank], board),
        Tier.HOST: FaultyPool(
            "staging" if world.mode == "buffer_only" else "host", world.host_pages[rank], board
        ),
    }


def make_side_pools(
    world: World, rank: int, board: FaultBoard
) -> dict[str, dict[Tier, FaultyPool]]:
    """The side pools of one rank, with the seam for refusals."""
    return {
        side.name: {
            Tier.DEVICE: FaultyPool(f"{side.name}.device", side.device_pages[rank], board),
            Tier.HOST: FaultyPool(f"{side.name}.host", side.host_pages[rank], board),
        }
        for side in world.side_pools
    }


def open_storage(world: World, config: CacheConfig, rank: int, directory: str) -> BackendBase:
    """The storage backend of one rank of a scenario's world."""
    identity = identity_of(config, rank, world.num_ranks)
    if world.storage == "file":
        return open_backend("file", identity, path=directory)
    return open_backend("memory", identity)


def agreed_pages(world: World) -> dict[str, int]:
    """Pages per pool that all ranks have."""
    agreed = {"device": min(world.device_pages), "host": min(world.host_pages)}
    for side in world.side_pools:
        agreed[f"{side.name}.device"] = min(side.device_pages)
        agreed[f"{side.name}.host"] = min(side.host_pages)
    return agreed


def run_sim(
    scenario: Scenario, seed: int = 0, *, journals: Path | None = None, story: Story | None = None
) -> Result:
    """Run it in the simulator. Deterministic: the same file and seed give the same events.

    ``journals``: the folder where each rank's journal is written. ``story`` is told what all ranks
    decide, instead.
    """
    world = scenario.world
    clock = SimClock()
    net = SimNet(world.num_ranks, schema_of(world_config(world, 0)).width, clock)
    # The same file and seed give the same journals, byte for byte, so the run is not drawn.
    digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode([scenario.world, scenario.do]))
    name = f"simulated {digest} seed {seed}"
    store = MemoryStore()
    with tempfile.TemporaryDirectory(prefix="kvpact-") as directory:
        agents = [
            _SimRuns(scenario, rank, net, store, name, directory, journals, story).agent()
            for rank in range(world.num_ranks)
        ]
        try:
            run_programs([agent.program() for agent in agents], net, seed)
        finally:
            for agent in agents:
                agent.rank.close()
    records = [agent.record for agent in agents]
    if story is not None:
        for record in records:
            for one in record.raised:
                story.raised[one.number, record.rank] = (
                    f"{one.kinds[0]}: {one.text.splitlines()[0]}"
                )
    return conclude(scenario, "sim", seed, records)


def conclude(
    scenario: Scenario,
    ranks: str,
    seed: int,
    records: list[RankRecord],
    failures: Sequence[str] = (),
) -> Result:
    """Judge what the ranks saw; ``failures`` are what the runner itself has to say."""
    fullest: dict[tuple[int, str], Incident] = {}
    for record in records:
        for incident in record.incidents:
            key = (incident.epoch, incident.seal.error.message)
            if key not in fullest or len(incident.reports) > len(fullest[key].reports):
                fullest[key] = incident
        record.incidents = []
    found = [*failures, *judge(scenario, records)]
    return Result(scenario.path, scenario.name, ranks, seed, found, records, list(fullest.values()))


class _SimRuns:
    """The runs of one simulated rank: the next one has a store, a group and a journal of its own.

    Only its storage outlives a run; what is in a file is opened anew.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        net: SimNet,
        store: MemoryStore,
        name: str,
        directory: str,
        journals: Path | None,
        story: Story | None = None,
    ) -> None:
        self._story = story
        self._scenario = scenario
        self._rank = rank
        self._net = net
        self._store = store
        self._name = name
        self._directory = directory
        self._journals = journals
        self._board = FaultBoard()
        self._number = 0
        self._backend: BackendBase | None = None
        self._real = self._begin()

    def agent(self) -> Agent:
        """The rank's way through the file, from its first run on."""
        return Agent(
            self._scenario,
            self._real,
            self._board,
            settle_copies=lambda: None,
            exit_now=lambda: self._net.kill(self._rank),
            restart=self._again,
            at_entry=(lambda _: None) if self._story is None else self._story.goes_to(self._rank),
        )

    def _again(self) -> Rank:
        self._real.close()
        if self._backend is not None and self._scenario.world.storage == "file":
            self._backend.close()
            self._backend = None
        self._number += 1
        self._real = self._begin()
        return self._real

    def _begin(self) -> Rank:
        world, rank, number = self._scenario.world, self._rank, self._number
        config = world_config(world, rank)
        if world.storage != "none" and self._backend is None:
            self._backend = open_storage(world, config, rank, self._directory)
        workers: Workers | None = None
        if self._backend is not None:
            workers = DeferredWorkers(
                self._backend,
                plan_page=self._board.plan_page,
                max_requests=world.storage_requests_max,
            )
        store = NamedStore(self._store, f"run {number}")
        store.set(RUN_KEY, f"{self._name}{f', run {number}' if number else ''}".encode())
        return Rank(
            config,
            group=self._group(0),
            store=store,
            pools=make_pools(world, rank, self._board),
            usable=agreed_pages(world),
            make_mover=lambda device, host, plan: DeferredMover(
                device, host, plan_part=plan, max_parts=world.mover_parts_max
            ),
            locator=self._net,
            journal=self._journal(),
            beacon=SimBeacon(self._net, rank),
            regroup=self._group,
            plan_part=self._board.plan_part,
            workers=workers,
            backend=self._backend,
            side_pools=make_side_pools(world, rank, self._board),
            layout=world.layout,
        )

    def _group(self, epoch: int) -> SimGroup:
        return SimGroup(self._net, self._rank, self._number * _EPOCHS_MAX + epoch)

    def _journal(self) -> Journal:
        entries_max = self._scenario.world.journal_entries_max
        if self._story is not None:
            return StoryJournal(self._rank, self._story, entries_max)
        folder = self._journals
        if folder is not None and self._number:
            folder = folder / f"run{self._number}"
            folder.mkdir(exist_ok=True)
        path = None if folder is None else folder / f"rank{self._rank}.jsonl"
        return Journal(self._rank, tail_entries_max=entries_max, path=path)


# -- judging -------------------------------------------------------------------------------------


def judge(scenario: Scenario, records: Sequence[RankRecord]) -> list[str]:
    """Everything that is not as it must be, as readable lines."""
    failures = [line for record in records for line in record.broken]
    failures += compare(_comparable(records))
    for entry in scenario.do:
        failures += _judge_raised(entry, records)
        if isinstance(entry, Expect):
            failures += _judge_expect(entry, records)
        if isinstance(entry, Fault) and not entry.may_miss:
            failures += _judge_struck(entry, records)
    return failures


def _judge_struck(entry: Fault, records: Sequence[RankRecord]) -> list[str]:
    """A fault that nothing gave occasion to shows nothing, whatever the rest of the file says."""
    return [
        f"entry {entry.number} (fault), rank {record.rank}: {entry.site} {entry.action} never"
        " struck; say may_miss = true where it need not"
        for record in records
        if record.rank == entry.rank
        and record.has_ended
        and (entry.ranks is None or record.rank in entry.ranks)
        and entry.number not in record.struck
    ]


def _comparable(records: Sequence[RankRecord]) -> list[Snapshot]:
    """Snapshots of steps in which all ranks must agree: not from a rank's own doing on, until that
    is reported, which ends the epoch."""
    until: dict[str, int] = {}
    for record in records:
        for place, step in record.suspended_from.items():
            until[place] = min(step, until.get(place, step))
    return [
        snap
        for record in records
        for snap in record.snapshots
        if snap.step < until.get(f"{snap.run}/{snap.epoch}", 1 << 62)
    ]


def _judge_raised(entry: Do, records: Sequence[RankRecord]) -> list[str]:
    failures: list[str] = []
    where = f"entry {entry.number} ({type(entry).__name__.lower()})"
    for record in records:
        runs = entry.ranks is None or record.rank in entry.ranks
        if not runs or (record.left_at and record.left_at <= entry.number):
            continue
        raised = next((one for one in record.raised if one.number == entry.number), None)
        wanted = entry.raises
        if wanted is None and raised is not None:
            failures.append(f"{where}, rank {record.rank}: raised without notice: {raised.text}")
        elif wanted is not None and not _is_as_wanted(wanted.kind, wanted.rank, raised):
            found = f"found {raised.kinds[0]}: {raised.text}" if raised else "nothing was raised"
            about = "" if wanted.rank is None else f" naming rank {wanted.rank}"
            failures.append(f"{where}, rank {record.rank}: expected {wanted.kind}{about}, {found}")
    return failures


def _is_as_wanted(kind: str, rank: int | None, raised: Raised | None) -> bool:
    return raised is not None and kind in raised.kinds and (rank is None or rank in raised.ranks)


def _judge_expect(entry: Expect, records: Sequence[RankRecord]) -> list[str]:
    failures: list[str] = []
    seen = {
        record.rank: observation
        for record in records
        for observation in record.observations
        if observation.number == entry.number
    }
    for rank, observation in seen.items():
        if not entry.may_miss:
            failures += [
                f"entry {entry.number} (expect), rank {rank}: right_bytes {text}: nothing of it is"
                " on the device; say may_miss = true where that is meant"
                for text, pages in observation.seen.get("covered", {}).items()
                if not pages
            ]
        for key, name, wanted in _wanted(entry, rank):
            found = observation.seen[key][name]
            if (key, name) == ("counters", "writes_submitted"):
                found = max(other.seen[key][name] for other in seen.values())
            if found != wanted:
                failures.append(_explain(entry, rank, f"{key} {name}", wanted, found, observation))
    return failures


def _wanted(entry: Expect, rank: int) -> list[tuple[str, str, int]]:
    wanted: list[tuple[str, str, int]] = []
    for key in (
        "device",
        "host",
        "storage",
        "usable",
        "pinned",
        "admitted",
        "loaded",
        "prefetched",
        "must_recompute",
        "counters",
    ):
        table: dict[str, int] | None = getattr(entry, key)
        wanted += [(key, name, value) for name, value in (table or {}).items()]
    wanted += [("free", name, pages[rank]) for name, pages in (entry.free or {}).items()]
    wanted += [("right_bytes", text, 1) for text in entry.right_bytes or ()]
    return wanted


def _explain(
    entry: Expect, rank: int, what: str, wanted: int, found: int, observation: Observation
) -> str:
    story = "".join(f"\n      {line}" for line in observation.story)
    return (
        f"entry {entry.number} (expect), rank {rank}: {what}: expected {wanted}, found {found};"
        f" the journal before it:{story}"
    )
