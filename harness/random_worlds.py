"""Random scenarios: worlds, workloads and faults, all drawn from one seed.

Worlds are small on purpose: pools of a few pages, prompts that share prefixes, timeouts of a few
steps. So evictions, refusals, splits and quarantine happen all the time instead of once a day.

Every scenario ends with a tail that must bring everything back: faults healed, requests finished,
queues drained, everything evicted, and then each page is free again and nothing is pinned.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from harness.scenario_model import (
    Abort,
    Do,
    Drain,
    Evict,
    Expect,
    Fault,
    Finish,
    Heal,
    Insert,
    LoadBack,
    Raises,
    Ranges,
    Scenario,
    Step,
    World,
)

__all__ = ["BREAKING_ACTIONS", "draw_scenario", "numbered"]

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
_BRANCH_TOKENS: Final = 1000  # each branch of the prompts has token ids of its own
_RANKS: Final = ((2, 1), (2, 1), (2, 1), (3, 1), (4, 1), (4, 1), (2, 2), (1, 3), (4, 2), (8, 2))
_WEIGHTS: Final = {
    "insert": 9,
    "load_back": 6,
    "evict": 4,
    "finish": 4,
    "abort": 2,
    "step": 10,
    "fault": 3,
    "heal": 1,
    "drain": 1,
}


def draw_scenario(seed: int, *, breaks: bool = False, num_entries: int = 0) -> Scenario:
    """The scenario of ``seed``. ``breaks``: it ends with a fault that must end in a named error.

    ``num_entries`` is the length of the workload before the tail (0: drawn too).
    """
    draw = random.Random(f"kvpact world {seed} {breaks}")
    world = _draw_world(draw)
    workload = _Workload(draw, world)
    for _ in range(num_entries or draw.randint(5, 40)):
        workload.add_random()
    entries = workload.entries + (_breaking_tail(draw, world) if breaks else _draining_tail(world))
    return Scenario(
        path=f"seed {seed}",
        name=f"random world {seed}",
        world=world,
        do=numbered(entries),
    )


def numbered(entries: list[Do]) -> tuple[Do, ...]:
    """The entries with their places in the file, from 1."""
    return tuple(
        _replace(entry, number=number) for number, entry in enumerate(entries, 1)
    )


def _replace(entry: Do, **changes: Any) -> Do:
    import msgspec

    return msgspec.structs.replace(entry, **changes)


# -- the world -----------------------------------------------------------------------------------


def _draw_world(draw: random.Random) -> World:
    tp, pp = draw.choice(_RANKS)
    lag = draw.randint(pp, 4) if pp > 1 else draw.choice((0, 0, 0, 1, 1, 2, 3, 4))
    device = draw.choice((3, 4, 6, 8, 12, 24))
    host = draw.choice((0, 2, 4, 6, 8, 16, 32))
    return World(
        tp=tp,
        pp=pp,
        lag=lag,
        page_size=draw.choice((1, 2, 4)),
        device_pages=_unequal(draw, device, tp * pp),
        host_pages=_unequal(draw, host, tp * pp) if host else (0,) * (tp * pp),
        deadline_s=_DEADLINE_S,
        step_ms=_STEP_MS,
        copy_timeout_s=draw.choice((0.03, 0.1, 0.3, 30.0)),
    )


def _unequal(draw: random.Random, num_pages: int, num_ranks: int) -> tuple[int, ...]:
    if draw.random() < 0.5:
        return (num_pages,) * num_ranks
    return tuple(num_pages + draw.choice((0, 0, 1, 3)) for _ in range(num_ranks))


# -- the workload --------------------------------------------------------------------------------


class _Workload:
    """Draws entries one after another; remembers the prompts so that later ones share prefixes."""

    def __init__(self, draw: random.Random, world: World) -> None:
        self.entries: list[Do] = []
        self._draw = draw
        self._world = world
        self._prompts: list[Ranges] = []
        self._num_branches = 0
        self._has_faults = draw.random() < 0.8
        self._num_requests = draw.choice((2, 4, 8))
        self._makers: dict[str, Callable[[], Do]] = {
            "insert": self._insert,
            "load_back": self._load_back,
            "evict": self._evict,
            "finish": self._finish,
            "abort": self._abort,
            "step": self._step,
            "fault": self._fault,
            "heal": lambda: Heal(number=0),
            "drain": lambda: Drain(number=0, max_steps=200),
        }

    def add_random(self) -> None:
        """One more entry."""
        kinds = [kind for kind in self._makers if self._has_faults or kind != "fault"]
        weights = [_WEIGHTS[kind] for kind in kinds]
        kind = self._draw.choices(kinds, weights)[0]
        if kind == "drain":
            self.entries.append(Heal(number=0))
        self.entries.append(self._makers[kind]())

    def _request(self) -> str:
        return f"r{self._draw.randrange(self._num_requests)}"

    def _prompt(self) -> Ranges:
        """A new prompt: the start of an earlier one, and mostly something of its own behind it."""
        draw, size = self._draw, self._world.page_size
        start: Ranges = ()
        if self._prompts and draw.random() < 0.8:
            earlier = draw.choice(self._prompts)
            start = _first(earlier, size * draw.randint(0, _num_pages(earlier, size)))
            if start and draw.random() < 0.4:
                return start
        self._num_branches += 1
        first = self._num_branches * _BRANCH_TOKENS
        prompt = (*start, (first, first + size * draw.randint(1, 4)))
        self._prompts.append(prompt)
        return prompt

    def _known_prompt(self) -> Ranges:
        if not self._prompts:
            return self._prompt()
        size = self._world.page_size
        earlier = self._draw.choice(self._prompts)
        if self._draw.random() < 0.6:
            return earlier
        return _first(earlier, size * self._draw.randint(1, _num_pages(earlier, size)))

    def _insert(self) -> Do:
        hold = self._draw.random() < 0.3
        return Insert(number=0, request=self._request(), tokens=self._prompt(), hold=hold)

    def _load_back(self) -> Do:
        return LoadBack(number=0, request=self._request(), tokens=self._known_prompt())

    def _evict(self) -> Do:
        tier = self._draw.choice(("device", "device", "host"))
        return Evict(number=0, tier=tier, pages=self._draw.choice((1, 2, 4, 100)))

    def _finish(self) -> Do:
        return Finish(number=0, request=self._request())

    def _abort(self) -> Do:
        return Abort(number=0, request=self._request())

    def _step(self) -> Do:
        return Step(number=0, times=self._draw.choice((1, 1, 1, 2, 3, 8)))

    def _fault(self) -> Do:
        draw = self._draw
        site, action = draw.choice(
            (
                ("device.reserve", "refuse"),
                ("host.reserve", "refuse"),
                ("write", "delay"),
                ("write", "hang"),
                ("write", "fail"),
                ("write", "corrupt"),
                ("load", "delay"),
                ("load", "hang"),
                ("load", "fail"),
                ("load", "corrupt"),
                ("scheduler", "late"),
            )
        )
        late = action == "late"
        return Fault(
            number=0,
            rank=draw.randrange(self._world.num_ranks),
            site=site,
            action=action,
            times=1 if late else draw.choice((1, 1, 2, 5, -1)),
            after=draw.choice((0, 0, 1, 3)),
            steps=draw.choice((1, 2, 5, 20)) if action == "delay" else None,
            seconds=draw.choice((0.015, 0.05, 0.3)) if late else None,
        )


def _num_pages(ranges: Ranges, page_size: int) -> int:
    return sum(stop - start for start, stop in ranges) // page_size


def _first(ranges: Ranges, num_tokens: int) -> Ranges:
    kept: list[tuple[int, int]] = []
    for start, stop in ranges:
        if num_tokens <= 0:
            break
        kept.append((start, min(stop, start + num_tokens)))
        num_tokens -= stop - start
    return tuple(kept)


# -- the tails -----------------------------------------------------------------------------------


def _draining_tail(world: World) -> list[Do]:
    finish: list[Do] = [Finish(number=0, request=f"r{index}") for index in range(8)]
    return [
        Heal(number=0),
        *finish,
        Step(number=0),
        Drain(number=0, max_steps=6 * (world.lag + 2)),
        Step(number=0, times=world.lag + 1),
        Evict(number=0, tier="device", pages=max(world.device_pages)),
        Evict(number=0, tier="host", pages=max(*world.host_pages, 1)),
        Expect(
            number=0,
            free={"device": world.device_pages, "host": world.host_pages},
            pinned={"device": 0, "host": 0},
        ),
    ]


def _breaking_tail(draw: random.Random, world: World) -> list[Do]:
    rank = draw.randrange(world.num_ranks)
    action = draw.choice(list(BREAKING_ACTIONS))
    size = world.page_size
    return [
        Heal(number=0),
        Insert(number=0, request="last", tokens=((0, size),)),
        Drain(number=0, max_steps=200),
        Fault(number=0, rank=rank, site="scheduler", action=action),
        Step(
            number=0,
            times=world.lag + 2,
            raises=Raises(kind=BREAKING_ACTIONS[action], rank=rank),
        ),
    ]
