"""``kvpact soak --replay DIR``: a reported soak again.

First in the simulator, where the recorded inputs (seed, plan, workload) decide everything: what
comes from them comes again, in seconds and the same every time. Where the cause lay in the timing
of real processes it does not, and the same soak runs again for real.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import msgspec
from rich.console import Console

from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.hierarchical_cache import schema_of
from kvpact.cache.storage import DeferredWorkers
from kvpact.consensus.transport.gloo import Group
from kvpact.harness.drive.drive import Options, finish, say
from kvpact.harness.drive.gather import Gather
from kvpact.harness.drive.report import read_report
from kvpact.harness.drive.verdict import conclude
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import (
    Pause,
    Program,
    SimBeacon,
    SimClock,
    SimGroup,
    SimNet,
    run_programs,
)
from kvpact.harness.rank.store import MemoryStore
from kvpact.harness.soak.config import SoakConfig, cache_config, load_requests
from kvpact.harness.soak.coverage import Coverage, CoveringJournal
from kvpact.harness.soak.feed import Feed
from kvpact.harness.soak.join import Joined, faulty_pools, make_backend
from kvpact.harness.soak.loop import SoakLoop
from kvpact.harness.soak.own_votes import OwnVotes
from kvpact.harness.soak.process_faults import ProcessFaults
from kvpact.harness.trace.mooncake import TraceRequest
from kvpact.harness.verify.journals import journal_path

__all__ = ["replay_soak", "simulate"]

#: Steps that a simulation goes beyond the one where the soak failed.
BEYOND_STEPS = 200
MAX_STEPS = 200_000
#: What one step takes on the clock of the simulation.
STEP_S = 0.005


def replay_soak(folder: str, options: Options, console: Console) -> int:
    """Run the soak reported in ``folder`` again; its exit status. Raises BadInput."""
    report = read_report(folder)
    # The journals of the first run stay as they are.
    was, config = report.verdict, msgspec.structs.replace(report.config, journal=None)
    say(console, f"{folder}: {was}, after {report.steps:,} steps")
    steps = min(report.steps + BEYOND_STEPS, MAX_STEPS)
    if report.status:
        say(console, f"simulating {steps:,} steps with the same seed and plan")
        gather = simulate(msgspec.structs.replace(config, minutes=None, steps=steps))
        found = conclude(gather, is_stopped=False)
        if found.verdict.title == was:
            say(console, "the simulator comes to the same end: it can be debugged there")
            told = msgspec.structs.replace(options, launcher="the simulator")
            return finish(gather, found, told, console).status
        say(console, f"the simulator ends with: {found.verdict.title}")
    say(console, "running it again with the same seed and plan")
    from kvpact.harness.drive.ray import run_soak

    return run_soak(config, options, console)


def simulate(config: SoakConfig) -> Gather:
    """All ranks in this process under the virtual clock; deterministic."""
    requests = load_requests(config)
    net = SimNet(config.num_ranks, schema_of(cache_config(config, 0)).width, SimClock())
    store = MemoryStore()
    gather = Gather(config)
    feeds = [Feed(rank, socket.gethostname(), os.getpid()) for rank in range(config.num_ranks)]
    loops = [_loop(config, requests, feed, net, store) for feed in feeds]

    def take() -> None:
        for feed in feeds:
            gather.add(feed.take())

    run_programs([_program(loop, net, take) for loop in loops], net, config.seed)
    take()
    for loop in loops:
        loop.process_faults.close()
        loop.rank.close()
    gather.check_history()
    return gather


def _program(loop: SoakLoop, net: SimNet, take: Callable[[], None]) -> Program:
    rank = loop.rank.cache.rank
    loop.feed.phase = "running"
    taken_at = stepped = 0
    try:
        for pause in loop.engine.program():
            if loop.feed.step > stepped:
                stepped = loop.feed.step
                yield Pause(STEP_S)
            yield pause
            if rank == 0 and loop.feed.step >= taken_at + 100:
                taken_at = loop.feed.step
                take()
        loop.close()
        loop.end()
    except Exception as error:  # noqa: BLE001 - as for a real rank: its end is what it raised
        loop.close()
        loop.fail(error)
        net.kill(rank)
    loop.feed.phase = "ended"


def _loop(
    config: SoakConfig,
    requests: list[TraceRequest],
    feed: Feed,
    net: SimNet,
    store: MemoryStore,
) -> SoakLoop:
    coverage = Coverage()
    rank = feed.rank
    process_faults = ProcessFaults(
        config.plan,
        rank,
        config.fault_seed,
        feed.events.append,
        lambda: net.clock.now_s,
        is_simulated=True,
    )
    cached = cache_config(config, rank)
    backend = make_backend(config, rank)
    first_slot = schema_of(cached).first_slot

    def make_group(epoch: int) -> Group:
        group = SimGroup(net, rank, epoch)
        return OwnVotes(group, first_slot) if config.unsafe_no_votes else group

    real = Rank(
        cached,
        group=make_group(0),
        regroup=make_group,
        store=store,
        pools=faulty_pools(config, rank, process_faults),
        usable={"device": min(config.device_pages), "host": min(config.host_pages)},
        make_mover=lambda device, host, plan: DeferredMover(device, host, plan_part=plan),
        locator=net,
        journal=CoveringJournal(rank, coverage, journal_path(config.journal, rank)),
        beacon=SimBeacon(net, rank),
        plan_part=process_faults.board.plan_part,
        workers=None
        if backend is None
        else DeferredWorkers(backend, plan_page=process_faults.board.plan_page),
        backend=backend,
    )
    return SoakLoop(config, Joined(real, process_faults, coverage, None), requests, feed)
