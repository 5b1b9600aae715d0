"""Scenario files with one real process per rank over gloo."""

from __future__ import annotations

import os
import time

import msgspec

from cache.hierarchical_cache import config_facts, schema_of
from cache.transfer import CpuMover
from consensus.errors import InternalError
from consensus.journal import Journal
from consensus.membership import Membership
from consensus.store import Store
from harness.agent import Agent, RankRecord
from harness.child import RankContext
from harness.faults import FaultBoard
from harness.launch import Launch
from harness.rank import Rank
from harness.scenario import Result, judge, make_pools, world_config
from harness.scenario_model import Scenario

__all__ = ["run_gloo", "run_rank"]

_TARGET = "harness.scenario_gloo:run_rank"
_COPIES_S = 10.0


def run_gloo(scenario: Scenario, seed: int = 0) -> Result:
    """Run it with real processes; what they saw is judged like a simulated run."""
    world = scenario.world
    num_ranks = world.num_ranks
    limit_s = 60.0 + 20 * world.deadline_s + _steps(scenario) * world.step_ms / 1000
    args = [msgspec.msgpack.encode(scenario)] * num_ranks
    with Launch(_TARGET, num_ranks, args, deadline_s=limit_s, grace_s=limit_s / 2) as launch:
        report = launch.join()
    records: list[RankRecord] = []
    failures: list[str] = []
    for rank in report.ranks:
        if rank.messages:
            records.append(msgspec.convert(rank.messages[-1], RankRecord))
        if rank.error is not None:
            failures.append(f"rank {rank.rank} raised {rank.error}")
        elif rank.ended != "returned" and not (records and records[-1].left_at):
            failures.append(f"rank {rank.rank} {rank.ended} (exit code {rank.exit_code})")
            failures += rank.output.splitlines()[-20:]
    failures += judge(scenario, records)
    return Result(scenario.path, scenario.name, "gloo", seed, failures, records)


def run_rank(context: RankContext, packed: bytes) -> None:
    """One rank: the agent's program, blocking where it has to wait."""
    scenario = msgspec.msgpack.decode(packed, type=Scenario)
    world = scenario.world
    config = world_config(world, context.rank)
    membership = Membership.join(
        context.store_host,
        context.store_port,
        name="scenario",
        rank=context.rank,
        ranks=range(world.num_ranks),
        width=schema_of(config).width,
        facts=config_facts(config),
        usable={"device": config.device_pages, "host": config.host_pages},
        deadline_s=world.deadline_s,
    )
    board = FaultBoard()
    real = Rank(
        config,
        group=membership.group,
        store=membership.store,
        pools=make_pools(world, context.rank, board),
        usable=membership.usable,
        make_mover=lambda device, host, plan: CpuMover(device, host, plan_part=plan),
        locator=membership.locator,
        journal=Journal(context.rank),
        beacon=membership.watch,
        plan_part=board.plan_part,
    )

    def settle_copies() -> None:
        if not real.mover.wait_all(_COPIES_S):
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
    _wait_for_all(membership.store, context.rank, scenario)
    real.cache.close()
    membership.close()


def _wait_for_all(store: Store, rank: int, scenario: Scenario) -> None:
    """Nobody leaves before all have ended, or their connections break under those who still step."""
    store.set(f"ended/{rank}", b"1")
    end_s = time.monotonic() + 4 * scenario.world.deadline_s + 5.0
    ranks = range(scenario.world.num_ranks)
    while time.monotonic() < end_s and not all(store.get(f"ended/{r}") for r in ranks):
        time.sleep(0.02)


def _steps(scenario: Scenario) -> int:
    return sum(getattr(entry, "times", 0) + getattr(entry, "max_steps", 0) for entry in scenario.do)
