"""Random scenarios: worlds, workloads and faults, all drawn from one seed.

Worlds are small on purpose: pools of a few pages, prompts that share prefixes, timeouts of a few
steps. So evictions, refusals, splits and quarantine happen all the time instead of once a day.

Every scenario ends with a tail that must bring everything back: faults healed, requests finished,
queues drained, everything evicted, and then each page is free again and nothing is pinned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from harness.scenario_model import (
    Abort,
    Admit,
    Compute,
    Do,
    Drain,
    Evict,
    Expect,
    Fault,
    Finish,
    Free,
    Headroom,
    Heal,
    Insert,
    LoadBack,
    Raises,
    Ranges,
    Scenario,
    Step,
    Take,
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

_FAULTS: Final = {
    "device.reserve": ("refuse", "short"),
    "host.reserve": ("refuse",),
    "write": ("delay", "hang", "fail", "corrupt"),
    "load": ("delay", "hang", "fail", "corrupt"),
    "scheduler": ("late",),
}
_STEP_MS: Final = 10.0
_DEADLINE_S: Final = 1.0
_REQUESTS_MAX: Final = 8  # of each way into the cache, at the same time
_BRANCH_TOKENS: Final = 1000  # each branch of the prompts has token ids of its own
_RANKS: Final = ((2, 1), (2, 1), (2, 1), (3, 1), (4, 1), (4, 1), (2, 2), (1, 3), (4, 2), (8, 2))
_WEIGHTS: Final[dict[str, float]] = {
    "insert": 9,
    "load_back": 6,
    "evict": 4,
    "finish": 4,
    "abort": 2,
    "admit": 5,
    "take": 7,
    "compute": 8,
    "free": 2,
    "headroom": 1,
    "step": 10,
    "fault": 4,
    "heal": 1,
    "drain": 1,
    "reload": 3,
    "burst": 0.5,
}


class Draw(msgspec.Struct, frozen=True):
    """A drawn scenario; its last ``num_tail`` entries are what the workload must lead to."""

    scenario: Scenario
    num_tail: int


def draw_scenario(seed: int, *, liveness: bool = False) -> Draw:
    """The scenario of ``seed``.

    Every fourth one ends with a fault that must end in a named error, unless ``liveness`` wants
    all of them to heal and drain.
    """
    draw = random.Random(f"kvpact world {seed} {liveness}")
    world = _draw_world(draw)
    workload = _Workload(draw, world)
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
        num_slots=draw.choice((16, 16, 64)),
        headroom_pages=draw.choice((0, 0, 1, 3)),
        load_back_minimum_pages=draw.choice((1, 1, 1, 2)),
        evicts_whole_nodes=draw.random() < 0.5,
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
        self._kinds = dict.fromkeys(_WEIGHTS, True)
        self._kinds["fault"] = draw.random() < 0.8
        uses = draw.choice(("both", "both", "inserts", "engine"))
        for kind in ("admit", "take", "compute", "free", "headroom"):
            self._kinds[kind] = uses != "inserts"
        for kind in ("insert", "load_back"):
            self._kinds[kind] = uses != "engine"
        # Each world has its own habits: uniform weights everywhere would make all worlds alike.
        self._weights = {kind: w * draw.choice((0.2, 1, 1, 3)) for kind, w in _WEIGHTS.items()}
        self._namespaces = draw.choice((("",), ("",), ("", "tenant")))
        self._num_requests = draw.choice((2, 4, _REQUESTS_MAX))
        self._makers: dict[str, Callable[[], Do]] = {
            "insert": self._insert,
            "load_back": self._load_back,
            "evict": self._evict,
            "finish": self._finish,
            "abort": self._abort,
            "admit": self._admit,
            "take": self._take,
            "compute": lambda: Compute(number=0, request=self._running()),
            "free": lambda: Free(number=0, request=self._running(), pages=draw.randint(1, 3)),
            "headroom": lambda: Headroom(number=0, pages=draw.randint(0, 4)),
            "step": self._step,
            "fault": self._fault,
            "heal": lambda: Heal(number=0),
            "drain": lambda: Drain(number=0, max_steps=200),
        }

    def add_random(self) -> None:
        """One more entry."""
        kinds = [kind for kind, allowed in self._kinds.items() if allowed]
        kind = self._draw.choices(kinds, [self._weights[kind] for kind in kinds])[0]
        if kind in ("reload", "burst"):
            self.entries += self._reload() if kind == "reload" else self._burst()
            return
        if kind == "drain":
            self.entries.append(Heal(number=0))
        self.entries.append(self._makers[kind]())

    def _request(self) -> str:
        return f"r{self._draw.randrange(self._num_requests)}"

    def _running(self) -> str:
        return f"e{self._draw.randrange(self._num_requests)}"

    def _ending(self) -> str:
        return self._request() if self._draw.random() < 0.5 else self._running()

    def _namespace(self) -> str:
        return self._draw.choice(self._namespaces)

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
        return Insert(
            number=0,
            request=self._request(),
            tokens=self._prompt(),
            hold=hold,
            namespace=self._namespace(),
        )

    def _load_back(self) -> Do:
        return LoadBack(
            number=0,
            request=self._request(),
            tokens=self._known_prompt(),
            namespace=self._namespace(),
        )

    def _reload(self) -> list[Do]:
        """What was backed up is evicted from the device and wanted back, maybe with a fault."""
        draw = self._draw
        entries: list[Do] = [
            Step(number=0, times=draw.randint(1, self._world.lag + 3)),
            Evict(number=0, tier="device", pages=draw.choice((1, 3, 100))),
        ]
        if self._kinds["fault"] and draw.random() < 0.6:
            entries.append(self._fault(draw.choice(("load", "load", "device.reserve"))))
        asks = [kind for kind in ("load_back", "admit") if self._kinds[kind]]
        for _ in range(draw.choice((1, 1, 2))):
            if draw.choice(asks) == "load_back":
                entries.append(self._load_back())
                continue
            name = self._running()
            entries += [
                Finish(number=0, request=name),
                self._admit(name, self._known_prompt()),
                Take(number=0, request=name, pages=draw.randint(1, 3)),
                Step(number=0, times=self._world.lag + draw.randint(1, 2)),
                Compute(number=0, request=name),
            ]
        if draw.random() < 0.5:
            entries.append(Step(number=0))
        return entries

    def _burst(self) -> list[Do]:
        """More wishes than there are slots."""
        draw, size = self._draw, self._world.page_size
        entries: list[Do] = []
        for _ in range(draw.choice((8, 18, 24))):
            kinds = [kind for kind in ("insert", "take", "load_back") if self._kinds[kind]]
            kind = draw.choice(kinds)
            if kind == "insert":
                self._num_branches += 1
                first = self._num_branches * _BRANCH_TOKENS
                prompt = ((first, first + size),)
                self._prompts.append(prompt)
                entries.append(Insert(number=0, request="burst", tokens=prompt))
            else:
                entries.append(self._take() if kind == "take" else self._load_back())
        return entries

    def _admit(self, name: str = "", tokens: Ranges | None = None) -> Do:
        return Admit(
            number=0,
            request=name or self._running(),
            tokens=self._prompt() if tokens is None else tokens,
            load=self._draw.random() < 0.6 or tokens is not None,
            namespace=self._namespace(),
        )

    def _take(self) -> Do:
        return Take(number=0, request=self._running(), pages=self._draw.randint(1, 4))

    def _evict(self) -> Do:
        tier = self._draw.choice(("device", "device", "host"))
        return Evict(number=0, tier=tier, pages=self._draw.choice((1, 2, 4, 100)))

    def _finish(self) -> Do:
        return Finish(number=0, request=self._ending())

    def _abort(self) -> Do:
        return Abort(number=0, request=self._ending())

    def _step(self) -> Do:
        return Step(number=0, times=self._draw.choice((1, 1, 1, 2, 3, 8)))

    def _fault(self, site: str = "") -> Do:
        draw = self._draw
        site = site or draw.choice(list(_FAULTS))
        action = draw.choice(_FAULTS[site])
        late = action == "late"
        return Fault(
            number=0,
            rank=draw.randrange(self._world.num_ranks),
            site=site,
            action=action,
            times=1 if late else draw.choice((1, 1, 2, 5, -1)),
            after=draw.choice((0, 0, 0, 1, 3)),
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


def _ended_requests() -> list[Do]:
    names = [f"{kind}{index}" for kind in "re" for index in range(_REQUESTS_MAX)]
    return [Heal(number=0), *(Finish(number=0, request=name) for name in names)]


def _draining_tail(world: World) -> list[Do]:
    return [
        *_ended_requests(),
        Headroom(number=0, pages=0),
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
        *_ended_requests(),
        Step(number=0, times=world.lag + 1),
        Insert(number=0, request="last", tokens=((0, size),)),
        Drain(number=0, max_steps=200),
        Fault(number=0, rank=rank, site="scheduler", action=action),
        Step(
            number=0,
            times=world.lag + 2,
            raises=Raises(kind=BREAKING_ACTIONS[action], rank=rank),
        ),
    ]
