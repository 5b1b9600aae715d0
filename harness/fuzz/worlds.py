"""Random scenarios: worlds, workloads and faults, all drawn from one seed.

Worlds are small on purpose: pools of a few pages, prompts that share prefixes, timeouts of a few
steps. So evictions, refusals, splits and quarantine happen all the time instead of once a day.

Every scenario ends with a tail that must bring everything back: faults healed, requests finished,
queues drained, everything evicted, and then each page is free again and nothing is pinned.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from kvpact.harness.fuzz.workload import REQUESTS_MAX, Workload
from kvpact.harness.scenario.model import (
    Do,
    Drain,
    Evict,
    Expect,
    Fault,
    Finish,
    Headroom,
    Heal,
    Insert,
    Layout,
    Mode,
    Raises,
    Scenario,
    SidePool,
    Step,
    World,
)

__all__ = ["BREAKING_ACTIONS", "Draw", "draw_scenario", "numbered"]

#: Scheduler faults after which the ranks cannot go on, and the error that must name the rank.
BREAKING_ACTIONS: Final = {
    "skip_step": "Divergence",
    "extra_step": "Divergence",
    "diverge": "Divergence",
    "stall": "RankStalled",
    "exit": "RankStalled",
}

_STEP_MS: Final = 10.0
_DEADLINE_S: Final = 1.0
_DEPTH_MAX: Final = 30  # evictions, one after the other, until nothing can be left
_RANKS: Final = ((2, 1), (2, 1), (2, 1), (3, 1), (4, 1), (4, 1), (2, 2), (1, 3), (4, 2), (8, 2))
_MODES: Final[tuple[Mode, ...]] = (
    "write_through",
    "write_through",
    "write_through",
    "write_through_selective",
    "write_back",
    "write_back",
    "buffer_only",
)


_POLICIES: Final[tuple[Literal["raise", "reset", "detach", "observe"], ...]] = (
    "raise",
    "raise",
    "raise",
    "raise",
    "reset",
    "reset",
    "detach",
    "observe",
)


class Draw(msgspec.Struct, frozen=True):
    """A drawn scenario; its last ``num_tail`` entries are what the workload must lead to."""

    scenario: Scenario
    num_tail: int


def draw_scenario(seed: int, *, liveness: bool = False, weighted: bool = False) -> Draw:
    """The scenario of ``seed``; ``weighted`` towards what has failed before.

    Every fourth one ends with a fault that must end in a named error, unless ``liveness`` wants
    all of them to heal and drain.
    """
    draw = random.Random(f"kvpact world {seed} {liveness}{' weighted' * weighted}")
    world = _draw_world(draw)
    if weighted:
        world = _weighted(draw, world)
    workload = Workload(draw, world, weighted=weighted)
    for _ in range(draw.choice((10, 20, 40, 80))):
        workload.add_random()
    breaks = not liveness and draw.random() < 0.25
    tail = _breaking_tail(draw, world) if breaks else _draining_tail(world)
    scenario = Scenario(
        path=f"seed {seed}",
        name=f"random world {seed}",
        world=world,
        do=numbered(workload.entries + tail),
    )
    return Draw(scenario, len(tail))


def numbered(entries: Sequence[Do]) -> tuple[Do, ...]:
    """The entries with their places in the file, from 1."""
    return tuple(
        msgspec.structs.replace(entry, number=number) for number, entry in enumerate(entries, 1)
    )


# -- the world -----------------------------------------------------------------------------------


def _draw_world(draw: random.Random) -> World:
    tp, pp = draw.choice(_RANKS)
    lag = draw.randint(pp, 4) if pp > 1 else draw.choice((0, 0, 0, 1, 1, 2, 3, 4))
    device = draw.choice((3, 4, 6, 8, 12, 24))
    host = draw.choice((0, 2, 4, 8, 16, 16, 32, 32))
    mode = draw.choice(_MODES)
    stores = ("memory",) if mode == "buffer_only" else ("none", "none", "memory")
    has_side = mode != "buffer_only" and draw.random() < 0.25
    device_pages = _unequal(draw, device, tp * pp)
    return World(
        tp=tp,
        pp=pp,
        lag=lag,
        page_size=draw.choice((1, 2, 4)),
        device_pages=device_pages,
        host_pages=_unequal(draw, host, tp * pp) if host else (0,) * (tp * pp),
        mode=mode,
        storage="file" if draw.random() < 0.05 else draw.choice(stores),
        policy=draw.choice(_POLICIES),
        deadline_s=_DEADLINE_S,
        step_ms=_STEP_MS,
        copy_timeout_s=draw.choice((0.03, 0.1, 0.3, 30.0)),
        num_slots=draw.choice((16, 16, 64)),
        headroom_pages=draw.choice((0, 0, 1, 3)),
        load_back_minimum_pages=draw.choice((1, 1, 1, 2)),
        evicts_whole_nodes=draw.random() < 0.5,
        eviction=draw.choice(("lru", "lru", "lru", "lfu", "slru", "priority")),
        low_water_pages=min(draw.choice((0, 0, 1, 2, 4)), min(device_pages) // 2)
        if mode == "write_back"
        else 0,
        prefetch_policy=draw.choice(("wait_complete", "wait_complete", "best_effort", "timeout")),
        prefetch_timeout_s=draw.choice((0.01, 0.03, 0.1)),
        prefetch_minimum_pages=draw.choice((1, 1, 1, 2)),
        storage_queue_pages=draw.choice((2, 4, 4096, 4096)),
        write_queue_nodes_max=draw.choice((1, 3, 1 << 16, 1 << 16, 1 << 16)),
        waiting_tickets_max=draw.choice((1, 2, 4096, 4096)),
        mover_parts_max=draw.choice((1, 2, 4096, 4096)),
        storage_requests_max=draw.choice((1, 2, 256, 256)),
        journal_entries_max=draw.choice((1, 8, 2048)),
        side_pools=_draw_side_pools(draw, device, max(host, 1), tp * pp) if has_side else (),
        layout=draw.choice(get_args(Layout)) if draw.random() < 0.15 else "own",
    )


def _weighted(draw: random.Random, world: World) -> World:
    """Nearer to what has failed before: lag, headroom, side pools, epochs that end."""
    host = max(*world.host_pages, 1)
    may_have_side = world.mode != "buffer_only" and not world.side_pools and draw.random() < 0.4
    return msgspec.structs.replace(
        world,
        lag=max(world.pp, draw.choice((0, 1, 2, 3, 3, 4, 4))),
        headroom_pages=draw.choice((0, 1, 2, 3)),
        policy=draw.choice(("raise", "reset", "reset", "detach", "detach", "observe")),
        side_pools=_draw_side_pools(draw, min(world.device_pages), host, world.num_ranks)
        if may_have_side
        else world.side_pools,
    )


def _unequal(draw: random.Random, num_pages: int, num_ranks: int) -> tuple[int, ...]:
    if draw.random() < 0.5:
        return (num_pages,) * num_ranks
    return tuple(num_pages + draw.choice((0, 0, 1, 3)) for _ in range(num_ranks))


def _draw_side_pools(
    draw: random.Random, device: int, host: int, num_ranks: int
) -> tuple[SidePool, ...]:
    """One to three pools: as large as the KV pool, or so small that they run out first."""
    needs = draw.sample(("per_page", "per_node", "window"), draw.choice((1, 1, 2, 3)))
    pools: list[SidePool] = []
    for need in needs:
        share = 1.0 if need == "per_page" else draw.choice((0.5, 1.0))
        share *= draw.choice((0.5, 1.0, 1.0))
        pools.append(
            SidePool(
                name={"per_page": "indexer", "per_node": "mamba", "window": "swa"}[need],
                device_pages=_unequal(draw, max(1, int(device * share)), num_ranks),
                host_pages=_unequal(draw, max(1, int(host * share)), num_ranks),
                need=need,
                window=draw.choice((4, 8)) if need == "window" else None,
            )
        )
    return tuple(pools)


# -- the tails -----------------------------------------------------------------------------------


def _ended_requests() -> list[Do]:
    names = [f"{kind}{index}" for kind in "re" for index in range(REQUESTS_MAX)]
    return [Heal(number=0), *(Finish(number=0, request=name) for name in names)]


def _draining_tail(world: World) -> list[Do]:
    # A line of inserts may wait for one demotion after the other; what goes to storage through a
    # staging of few pages, for one write after the other.
    waits = {"write_back": 60, "buffer_only": 30}.get(world.mode, 10)
    drain = Drain(number=0, max_steps=waits * (world.lag + 2))
    evict = Evict(number=0, tier="device", pages=max(world.device_pages))
    # In write-back a device that is evicted goes to the host first, one level of the tree a time.
    is_deep = world.mode == "write_back"
    rest = Step(number=0, times=world.lag + 2)  # until slots can be used again
    return [
        *_ended_requests(),
        Headroom(number=0, pages=0),
        Step(number=0),
        drain,
        Step(number=0, times=world.lag + 1),
        *[evict, drain, rest] * (3 if is_deep else 0),
        *[evict, drain] * (_DEPTH_MAX if is_deep else 1),
        Evict(number=0, tier="host", pages=max(*world.host_pages, 1)),
        Expect(number=0, free=world.pools(), pinned={"device": 0, "host": 0}),
    ]


def _breaking_tail(draw: random.Random, world: World) -> list[Do]:
    """A fault that the ranks cannot get over; or, where the policy says so, they do."""
    rank = draw.randrange(world.num_ranks)
    action = draw.choice(list(BREAKING_ACTIONS))
    size = world.page_size
    begins: list[Do] = [
        *_ended_requests(),
        Headroom(number=0, pages=0),
        Step(number=0, times=world.lag + 2),
        Drain(number=0, max_steps=200),
        Insert(number=0, request="last", tokens=((0, size),)),
        Drain(number=0, max_steps=200),
        Fault(number=0, rank=rank, site="scheduler", action=action),
    ]
    if action == "diverge" and world.policy in ("reset", "detach"):
        return [*begins, Step(number=0, times=world.lag + 2), *_draining_tail(world)]
    if world.policy == "observe":  # whatever it is: it is told, and no rank's engine ends
        return [*begins, Step(number=0, times=world.lag + 6)]
    raises = Raises(kind=BREAKING_ACTIONS[action], rank=rank)
    return [*begins, Step(number=0, times=world.lag + 2, raises=raises)]
