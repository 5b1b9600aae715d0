"""Random workloads: what an engine asks of the cache, and what goes wrong meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from kvpact.harness.scenario.model import (
    STORAGE_ACTIONS,
    Abort,
    Admit,
    AttachStorage,
    Compute,
    Decide,
    DetachStorage,
    Do,
    Drain,
    DropNamespace,
    Evict,
    Fault,
    Finish,
    Flush,
    Free,
    Headroom,
    Heal,
    Idle,
    Insert,
    LoadBack,
    LoadMatch,
    NewWeights,
    Pause,
    Prefetch,
    Ranges,
    Reset,
    Restart,
    Settle,
    Step,
    Take,
    TakeMatch,
    World,
)

__all__ = ["REQUESTS_MAX", "Workload"]

REQUESTS_MAX: Final = 8  # of each way into the cache, at the same time

_BRANCH_TOKENS: Final = 1000  # each branch of the prompts has token ids of its own
_DIVERGENCES_MAX: Final = 2  # fewer than the resets that a policy allows
_UPTIMES_S: Final = (0.05, 2.0, 700.0, 10_000.0, 100_000.0)  # up to a day
_WEIGHTS: Final[dict[str, float]] = {
    "insert": 9,
    "load_back": 6,
    "evict": 4,
    "match": 2,
    "load_match": 2,
    "finish": 4,
    "flush": 2,
    "abort": 2,
    "admit": 5,
    "take": 7,
    "compute": 8,
    "free": 2,
    "headroom": 1,
    "prefetch": 4,
    "settle": 1,
    "detach": 0.5,
    "attach": 1,
    "reset": 0.6,
    "new_weights": 0.5,
    "restart": 0.5,
    "pause": 0.2,
    "idle": 0.2,
    "drop_namespace": 0.5,
    "diverge": 0.5,
    "step": 10,
    "decide": 1,
    "fault": 4,
    "heal": 1,
    "drain": 1,
    "reload": 3,
    "refetch": 4,
    "burst": 0.5,
}


class Workload:
    """Draws entries one after another; remembers the prompts so that later ones share prefixes."""

    def __init__(self, draw: random.Random, world: World, *, weighted: bool = False) -> None:
        self.entries: list[Do] = []
        self._draw = draw
        self._world = world
        self._prompts: list[Ranges] = []
        self._matched: list[str] = []
        self._num_branches = self._num_divergences = 0
        self._faults: dict[str, tuple[str, ...]] = {}
        self._kinds = dict.fromkeys(_WEIGHTS, True)
        self._kinds["fault"] = draw.random() < 0.8
        uses = draw.choice(("both", "both", "inserts", "engine"))
        for kind in ("admit", "take", "compute", "free", "headroom"):
            self._kinds[kind] = uses != "inserts"
        for kind in ("insert", "load_back", "match", "load_match"):
            self._kinds[kind] = uses != "engine"
        self._allow(world)
        # Each world has its own habits: uniform weights everywhere would make all worlds alike.
        self._weights = {kind: w * draw.choice((0.2, 1, 1, 3)) for kind, w in _WEIGHTS.items()}
        if weighted:  # an epoch ends while much is in hand
            for kind in ("reset", "new_weights", "restart", "diverge", "detach", "attach"):
                self._kinds[kind] = self._could[kind]
                self._weights[kind] *= 5
        self._namespaces = draw.choice((("",), ("",), ("", "tenant")))
        self._whole = draw.choice((0, 0.5, 1))  # how many ask for all they need as one wish
        self._num_requests = draw.choice((2, 4, REQUESTS_MAX))
        self._makers: dict[str, Callable[[], Do]] = {
            "insert": self._insert,
            "load_back": self._load_back,
            "evict": self._evict,
            "match": self._match,
            "load_match": self._load_match,
            "finish": self._finish,
            "flush": lambda: Flush(number=0),
            "abort": self._abort,
            "admit": self._admit,
            "take": self._take,
            "compute": lambda: Compute(number=0, request=self._running()),
            "free": lambda: Free(number=0, request=self._running(), pages=draw.randint(1, 3)),
            "headroom": lambda: Headroom(
                number=0, pages=draw.randint(0, min(4, *world.device_pages))
            ),
            "step": self._step,
            "decide": lambda: Decide(number=0),
            "fault": self._fault,
            "heal": lambda: Heal(number=0),
            "drain": lambda: Drain(number=0, max_steps=200),
            "prefetch": self._prefetch,
            "settle": lambda: Settle(number=0, request=self._request()),
            "attach": lambda: AttachStorage(number=0),
            "detach": lambda: DetachStorage(number=0),
            "reset": lambda: Reset(number=0),
            "new_weights": lambda: NewWeights(number=0, version=str(draw.randint(1, 3))),
            "restart": lambda: Restart(number=0),
            "idle": lambda: Idle(number=0, seconds=draw.choice(_UPTIMES_S)),
            "pause": lambda: Pause(number=0, seconds=draw.choice((0.01, 0.5, 3.0))),
            "drop_namespace": lambda: DropNamespace(number=0, namespace=self._namespace()),
            "diverge": self._diverge,
        }

    def _allow(self, world: World) -> None:
        """What this world cannot have is not drawn."""
        kinds, draw = self._kinds, self._draw
        for kind in ("prefetch", "settle", "refetch", "attach", "detach"):
            kinds[kind] = world.storage != "none"
        if draw.random() < 0.7:  # most worlds with a storage keep it
            kinds["attach"] = kinds["detach"] = False
        kinds["decide"] = world.pp == 1
        kinds["diverge"] = world.policy in ("reset", "detach") and kinds["fault"]
        if kinds["diverge"]:
            # An ordered end of the epoch may come before the ballot that tells of a difference;
            # then no seal does, and the journals part without one.
            kinds["reset"] = kinds["new_weights"] = kinds["restart"] = False
        self._could = {**kinds, "attach": kinds["prefetch"], "detach": kinds["prefetch"]}
        kinds["reset"] = draw.random() < 0.3
        kinds["new_weights"] = draw.random() < 0.3
        kinds["restart"] = draw.random() < 0.3 and not kinds["diverge"]
        self._faults = {
            **{f"{pool}.reserve": ("refuse", "short") for pool in world.pools()},
            "write": ("delay", "hang", "fail", "corrupt"),
            "load": ("delay", "hang", "fail", "corrupt"),
            "scheduler": ("late",),
        }
        if world.storage != "none":
            self._faults |= STORAGE_ACTIONS

    def add_random(self) -> None:
        """One more entry."""
        kinds = [kind for kind, allowed in self._kinds.items() if allowed]
        kind = self._draw.choices(kinds, [self._weights[kind] for kind in kinds])[0]
        groups = {"reload": self._reload, "refetch": self._refetch, "burst": self._burst}
        if kind in groups:
            self.entries += groups[kind]()
            return
        if kind in ("drain", "idle"):
            self.entries.append(Heal(number=0))
        if kind == "idle":  # has_pending() keeps an engine stepping until then
            self.entries.append(self._makers["drain"]())
        self.entries.append(self._makers[kind]())
        if kind == "diverge":
            # Until all ranks are told, one of them may leave a drain sooner than the others: then
            # their engines are at different places, for which nothing is promised.
            self.entries.append(Step(number=0, times=self._world.lag + 2))

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
        # Some end within a page: no tier keeps what is beyond the last whole one.
        partial = draw.choice((0, 0, 0, draw.randrange(size)))
        prompt = (*start, (first, first + size * draw.randint(1, 4) + partial))
        self._prompts.append(prompt)
        return prompt

    def _known_prompt(self) -> Ranges:
        if not self._prompts:
            return self._prompt()
        size = self._world.page_size
        earlier = self._draw.choice(self._prompts)
        if self._draw.random() < 0.6:
            return earlier
        if self._draw.random() < 0.1:
            return _first(earlier, self._draw.randrange(size))  # less than a page, or nothing
        return _first(earlier, size * self._draw.randint(1, _num_pages(earlier, size)))

    def _insert(self) -> Do:
        hold = self._draw.random() < 0.3
        return Insert(
            number=0,
            request=self._request(),
            tokens=self._prompt(),
            hold=hold,
            namespace=self._namespace(),
            priority=self._draw.choice((0, 0, 1, 2)) if self._world.eviction == "priority" else 0,
        )

    def _prefetch(self) -> Do:
        return Prefetch(
            number=0,
            request=self._request(),
            tokens=self._known_prompt(),
            namespace=self._namespace(),
        )

    def _diverge(self) -> Do:
        self._num_divergences += 1
        if self._num_divergences == _DIVERGENCES_MAX:
            self._kinds["diverge"] = False
        rank = self._draw.randrange(self._world.num_ranks)
        return Fault(number=0, rank=rank, site="scheduler", action="diverge", may_miss=True)

    def _load_back(self) -> Do:
        return LoadBack(
            number=0,
            request=self._request(),
            tokens=self._known_prompt(),
            namespace=self._namespace(),
            pages_max=self._draw.choice((None, None, None, 1, 2)),
        )

    def _match(self) -> Do:
        """A handle that is used later: over steps, evictions, resets, detaches."""
        name = self._request()
        self._matched.append(name)
        return TakeMatch(
            number=0,
            request=name,
            tokens=self._known_prompt(),
            pin=self._draw.random() < 0.3,
            namespace=self._namespace(),
        )

    def _load_match(self) -> Do:
        name = self._draw.choice(self._matched) if self._matched else ""
        return LoadMatch(number=0, request=name) if name else self._match()

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
            ]
            if self._kinds["compute"]:
                entries.append(Compute(number=0, request=name))
        if draw.random() < 0.5:
            entries.append(Step(number=0))
        return entries

    def _refetch(self) -> list[Do]:
        """What was stored is gone from the other tiers and wanted back, maybe with a fault."""
        draw = self._draw
        entries: list[Do] = [
            Step(number=0, times=draw.randint(1, self._world.lag + 4)),
            Evict(number=0, tier="device", pages=draw.choice((1, 3, 100))),
            Evict(number=0, tier="host", pages=draw.choice((1, 3, 100))),
        ]
        sites = ["storage.get", "storage.get", "storage.exists", "host.reserve", "load"]
        if self._kinds["fault"] and draw.random() < 0.6:
            site = draw.choice(sites)
            entries.append(self._fault(site if site in self._faults else "staging.reserve"))
        entries += [self._prefetch() for _ in range(draw.choice((1, 1, 2)))]
        entries.append(Step(number=0, times=draw.randint(1, self._world.lag + 3)))
        if draw.random() < 0.7:
            entries.append(draw.choice((self._abort, self._finish, self._load_back))())
        if self._kinds["admit"] and draw.random() < 0.5:
            entries.append(self._admit(tokens=self._known_prompt()))
        return entries

    def _burst(self) -> list[Do]:
        """More wishes than there are slots."""
        draw, size = self._draw, self._world.page_size
        entries: list[Do] = []
        for _ in range(draw.choice((8, 18, 24))):
            wishes = ("insert", "take", "load_back", "prefetch")
            kinds = [kind for kind in wishes if self._kinds[kind]]
            kind = draw.choice(kinds)
            if kind == "insert":
                self._num_branches += 1
                first = self._num_branches * _BRANCH_TOKENS
                prompt = ((first, first + size),)
                self._prompts.append(prompt)
                entries.append(Insert(number=0, request="burst", tokens=prompt))
            else:
                entries.append(self._makers[kind]())
        return entries

    def _admit(self, name: str = "", tokens: Ranges | None = None) -> Do:
        draw = self._draw
        prompt = self._prompt() if tokens is None else tokens
        if draw.random() < self._whole:
            return Admit(
                number=0,
                request=name or self._running(),
                tokens=prompt,
                whole=True,
                extra=draw.choice((0, 0, 1, 3)) if prompt else 1,
                least=draw.choice((None, None, 1, 2)),
                priority=draw.choice((0, 0, 1)),
                namespace=self._namespace(),
            )
        return Admit(
            number=0,
            request=name or self._running(),
            tokens=prompt,
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
        site = site or draw.choice(list(self._faults))
        action = draw.choice(self._faults[site])
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
            may_miss=True,
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
