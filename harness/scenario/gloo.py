"""Scenario files with one real process per rank over gloo."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Self

import msgspec

from kvpact.cache.copies.cpu import CpuMover
from kvpact.cache.join import join_replica
from kvpact.cache.storage import BackendBase, StorageWorkers, Workers
from kvpact.consensus.core.errors import InternalError, KvpactError
from kvpact.consensus.core.journal import Journal
from kvpact.harness.faults.board import FaultBoard
from kvpact.harness.rank.child import RankContext
from kvpact.harness.rank.launch import Launch
from kvpact.harness.rank.rank import Rank
from kvpact.harness.scenario.agent import Agent, RankRecord
from kvpact.harness.scenario.model import Fault, Scenario
from kvpact.harness.scenario.world import (
    Result,
    conclude,
    make_pools,
    make_side_pools,
    open_storage,
    world_config,
)

__all__ = ["GlooRanks", "run_gloo", "run_rank", "serve"]

_TARGET = "kvpact.harness.scenario.gloo:serve"
#: Between two scenarios a rank waits at most so long for the next.
_IDLE_S = 3600.0
_COPIES_S = 10.0


def run_gloo(scenario: Scenario, seed: int = 0) -> Result:
    """Run it with real processes of its own; what they saw is judged like a simulated run."""
    with GlooRanks() as ranks:
        return ranks.run(scenario, seed)


class GlooRanks:
    """Rank processes that run one scenario after another: starting one takes seconds.

    Each scenario gets a store namespace, a group and a cache of its own. The processes start with
    the first scenario of their number, and anew after a scenario that ended one of them.
    """

    def __init__(self) -> None:
        self._launches: dict[int, Launch] = {}
        self._num_run = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for num_ranks in list(self._launches):
            self._end(num_ranks)

    def run(self, scenario: Scenario, seed: int = 0) -> Result:
        """Run one scenario and judge it; see :func:`run_gloo`."""
        world = scenario.world
        limit_s = 60.0 + 20 * world.deadline_s + _steps(scenario) * world.step_ms / 1000
        launch = self._launches.get(world.num_ranks)
        if launch is None:
            launch = self._launches[world.num_ranks] = Launch(_TARGET, world.num_ranks).__enter__()
        self._num_run += 1
        packed = msgspec.msgpack.encode(scenario)
        for rank in range(world.num_ranks):
            launch.send(rank, [f"scenario{self._num_run}", packed])
        records: list[RankRecord] = []
        failures: list[str] = []
        for rank in range(world.num_ranks):
            wait_s = limit_s if not failures else 4 * world.deadline_s + 10.0
            record = self._receive(launch, rank, wait_s, failures)
            if record is not None:
                records.append(record)
        if failures or _ends_a_rank(scenario):
            self._end(world.num_ranks)
        return conclude(scenario, "gloo", seed, records, failures)

    def _receive(
        self, launch: Launch, rank: int, limit_s: float, failures: list[str]
    ) -> RankRecord | None:
        """What ``rank`` saw; where it says nothing, or something else, a failure says so."""
        try:
            return msgspec.convert(launch.receive(rank, limit_s), RankRecord)
        except KvpactError as error:
            failures.append(f"rank {rank} did not report: {error}")
        except Exception as error:  # noqa: BLE001 - raised by the rank: whatever it is, it failed
            failures.append(f"rank {rank} raised {type(error).__name__}: {error}")
        return None

    def _end(self, num_ranks: int) -> None:
        self._launches.pop(num_ranks).__exit__(None, None, None)


def serve(context: RankContext, _: object) -> None:
    """One rank's process: runs what the launcher sends, until the launcher ends it."""
    while True:
        name, packed = context.receive(_IDLE_S)
        run_rank(context, name, msgspec.msgpack.decode(packed, type=Scenario))


def run_rank(context: RankContext, name: str, scenario: Scenario) -> None:
    """One scenario on one rank: the agent's program, blocking where it has to wait."""
    runs = _GlooRuns(context, name, scenario)

    def exit_now() -> None:
        context.send(msgspec.to_builtins(agent.record))
        os._exit(0)

    agent = Agent(
        scenario,
        runs.begin(),
        runs.board,
        settle_copies=runs.settle_copies,
        exit_now=exit_now,
        restart=runs.again,
    )
    for pause in agent.program():
        if pause.seconds > 0:
            time.sleep(pause.seconds)
        else:
            agent.cache.stepper.pause()
    context.send(msgspec.to_builtins(agent.record))
    runs.end()
    if scenario.world.storage == "file":
        shutil.rmtree(runs.directory, ignore_errors=True)


class _GlooRuns:
    """The runs of one real rank, one after the other, under one name in one store.

    Only its storage outlives a run; what is in a file is opened anew.
    """

    def __init__(self, context: RankContext, name: str, scenario: Scenario) -> None:
        self.board = FaultBoard()
        self.directory = os.path.join(tempfile.gettempdir(), f"kvpact-{context.store_port}", name)
        self._context = context
        self._name = name
        self._world = scenario.world
        self._backend: BackendBase | None = None
        self._workers: Workers | None = None

    def begin(self) -> Rank:
        """Join, and build what belongs to a run."""
        context, world, board = self._context, self._world, self.board
        config = world_config(world, context.rank)
        self._membership = membership = join_replica(
            config,
            context.store_host,
            context.store_port,
            name=self._name,
            rank=context.rank,
            ranks=range(world.num_ranks),
        )
        if world.storage != "none":
            if self._backend is None:
                self._backend = open_storage(world, config, context.rank, self.directory)
            self._workers = StorageWorkers(
                self._backend, plan_page=board.plan_page, max_requests=world.storage_requests_max
            )
        self._real = Rank(
            config,
            group=membership.group,
            store=membership.store,
            pools=make_pools(world, context.rank, board),
            usable=membership.usable,
            make_mover=lambda device, host, plan: CpuMover(
                device, host, plan_part=plan, max_parts=world.mover_parts_max
            ),
            locator=membership.locator,
            journal=Journal(context.rank, tail_entries_max=world.journal_entries_max),
            beacon=membership.watch,
            regroup=membership.regroup,
            plan_part=board.plan_part,
            workers=self._workers,
            backend=self._backend,
            side_pools=make_side_pools(world, context.rank, board),
            layout=world.layout,
        )
        return self._real

    def end(self) -> None:
        """Leave once all want to, and close."""
        self._membership.leave(4 * self._world.deadline_s + 5.0)
        self._real.close()

    def again(self) -> Rank:
        """End this run and begin another."""
        self.end()
        if self._backend is not None and self._world.storage == "file":
            self._backend.close()
            self._backend = None
        return self.begin()

    def settle_copies(self) -> None:
        """Wait for the copies that no fault delays."""
        ended = all(mover.wait_all(_COPIES_S) for mover in self._real.movers)
        if not ended or not (self._workers is None or self._workers.wait_all(_COPIES_S)):
            raise InternalError(
                f"copies did not end within {_COPIES_S:g} s", rank=self._context.rank
            )


def _steps(scenario: Scenario) -> int:
    return sum(getattr(entry, "times", 0) + getattr(entry, "max_steps", 0) for entry in scenario.do)


def _ends_a_rank(scenario: Scenario) -> bool:
    return any(isinstance(entry, Fault) and entry.action == "exit" for entry in scenario.do)
