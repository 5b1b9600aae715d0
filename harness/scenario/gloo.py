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
    world = scenario.world
    config = world_config(world, context.rank)
    membership = join_replica(
        config,
        context.store_host,
        context.store_port,
        name=name,
        rank=context.rank,
        ranks=range(world.num_ranks),
    )
    board = FaultBoard()
    workers: Workers | None = None
    backend: BackendBase | None = None
    directory = ""
    if world.storage != "none":
        directory = os.path.join(tempfile.gettempdir(), f"kvpact-{context.store_port}", name)
        backend = open_storage(world, config, context.rank, directory)
        workers = StorageWorkers(
            backend, plan_page=board.plan_page, max_requests=world.storage_requests_max
        )
    real = Rank(
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
        workers=workers,
        backend=backend,
        side_pools=make_side_pools(world, context.rank, board),
    )

    def settle_copies() -> None:
        ended = all(mover.wait_all(_COPIES_S) for mover in real.movers)
        if not ended or not (workers is None or workers.wait_all(_COPIES_S)):
            raise InternalError(f"copies did not end within {_COPIES_S:g} s", rank=context.rank)

    def exit_now() -> None:
        context.send(msgspec.to_builtins(agent.record))
        os._exit(0)

    agent = Agent(scenario, real, board, settle_copies=settle_copies, exit_now=exit_now)
    for pause in agent.program():
        if pause.seconds > 0:
            time.sleep(pause.seconds)
        else:
            real.cache.stepper.pause()
    context.send(msgspec.to_builtins(agent.record))
    membership.leave(4 * world.deadline_s + 5.0)
    real.close()
    if world.storage == "file":
        shutil.rmtree(directory, ignore_errors=True)


def _steps(scenario: Scenario) -> int:
    return sum(getattr(entry, "times", 0) + getattr(entry, "max_steps", 0) for entry in scenario.do)


def _ends_a_rank(scenario: Scenario) -> bool:
    return any(isinstance(entry, Fault) and entry.action == "exit" for entry in scenario.do)
