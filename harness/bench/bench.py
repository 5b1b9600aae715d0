"""What a step and an insert cost, as ratios from one run: two real gloo ranks, then one alone.

Every figure is a median over rounds that take turns, so that a busy machine slows all of them
alike. ``scripts/bench`` prints the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvpact.cache.config import CacheConfig
from kvpact.cache.hierarchical_cache import HierarchicalCache, StepResult
from kvpact.cache.join import join_cache
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.tree.node import Node, Tier
from kvpact.consensus.core.ballot import Schema
from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent, OutcomeKind
from kvpact.harness.rank.child import RankContext

__all__ = ["BATCHES", "OPEN", "BenchConfig", "RankFigures", "measure_manager", "run_rank"]

BATCHES = (0, 1, 8, 64)  # nodes in the batch of one step
OPEN = (0, 8, 64)  # open intents of one ballot
PAGES_PER_NODE = 4
_PAGE_SIZE = 16
_STEPS_MAX = 200
_WAIT_S = 10.0


class BenchConfig(msgspec.Struct, frozen=True):
    """``rounds`` of each batch size; the first ``warm_up`` are not counted."""

    rounds: int = 40
    warm_up: int = 5

    @property
    def pages(self) -> int:
        """Pages of a tier: nothing is ever evicted, or that would be measured too."""
        rounds = self.rounds + self.warm_up
        return 2 * rounds * sum(BATCHES) * PAGES_PER_NODE + 1024


class RankFigures(msgspec.Struct):
    """Medians of one rank, in µs. ``step_us`` and ``per_node_us`` (with one all_reduce for each
    node besides) by nodes in the batch; ``insert_us`` and ``add_us`` are of one node."""

    step_us: dict[int, float]
    per_node_us: dict[int, float]
    insert_us: float
    add_us: float
    all_reduce_us: float
    collectives_per_step: float
    commits: int


class _Rank:
    """One rank of the benchmark: the cache, and the calls of a scheduler around a batch."""

    def __init__(self, cache: HierarchicalCache) -> None:
        self.cache = cache
        self.insert_s: list[float] = []
        self.add_s: list[float] = []
        self.commits = 0
        self._iteration = 0
        self._next_token = 0
        add_path: Callable[[list[Node]], None] = cache.core.backup.add_path

        def timed(path: list[Node]) -> None:
            began = time.perf_counter()
            add_path(path)
            self.add_s.append(time.perf_counter() - began)

        cache.core.backup.add_path = timed

    def step(self) -> StepResult:
        self._iteration += 1
        result = self.cache.step(self._iteration)
        self.commits += sum(
            outcome.kind is OutcomeKind.COMMIT and outcome.intent.kind == "back_up"
            for outcome in result.outcomes
        )
        return result

    def settle(self, headroom_pages: int) -> None:
        """Steps until nothing is pending and so many pages can be had at once."""
        self.cache.expect_pages(headroom_pages)
        for _ in range(_STEPS_MAX):
            ready = self.cache.core.engine_pages.headroom >= headroom_pages
            if ready and not self.cache.has_pending():
                self.cache.expect_pages(0)  # or the next step would top it up again
                return
            self.step()
        raise InternalError(f"the benchmark is not idle after {_STEPS_MAX} steps")

    def insert(self, num_nodes: int) -> None:
        """So many requests end, each with a prompt of its own: one node each, queued for backup."""
        length = PAGES_PER_NODE * _PAGE_SIZE
        for index in range(num_nodes):
            name = f"{self._iteration}.{index}"
            self.cache.match_prefix(np.full(1, -1, dtype=np.int32), request=name)
            self.cache.allocate(name, PAGES_PER_NODE)
            tokens = np.arange(self._next_token, self._next_token + length, dtype=np.int32)
            self._next_token += length
            began = time.perf_counter()
            self.cache.insert(name, tokens)
            self.insert_s.append(time.perf_counter() - began)
            self.cache.finish_request(name)

    def all_reduce(self) -> float:
        """One collective alone, in seconds; what a design with one vote per node pays each time."""
        group = self.cache.stepper.group
        vector = np.zeros(group.width, dtype=np.int64)
        began = time.perf_counter()
        if not group.min(vector).wait(_WAIT_S):
            raise InternalError(f"an all_reduce took longer than {_WAIT_S:g} s")
        return time.perf_counter() - began


def run_rank(context: RankContext, packed: bytes) -> dict[str, Any]:
    """One of the gloo ranks; returns its :class:`RankFigures`."""
    config = msgspec.msgpack.decode(packed, type=BenchConfig)
    cached = CacheConfig(
        page_size=_PAGE_SIZE,
        device_pages=config.pages,
        host_pages=config.pages,
        kv_shape=KVShape(layers=2, heads=1, dim=8),
        verifies_copies=False,
    )
    cache = join_cache(
        cached,
        context.store_host,
        context.store_port,
        name="bench",
        rank=context.rank,
        ranks=range(context.num_ranks),
    )
    with cache:
        return msgspec.to_builtins(_measure(_Rank(cache), config), str_keys=True)


def _measure(rank: _Rank, config: BenchConfig) -> RankFigures:
    step_s: dict[int, list[float]] = {size: [] for size in BATCHES}
    per_node_s: dict[int, list[float]] = {size: [] for size in BATCHES}
    all_reduce_s: list[float] = []
    for number in range(config.rounds + config.warm_up):
        if number == config.warm_up:
            for taken in (*step_s.values(), *per_node_s.values(), all_reduce_s):
                taken.clear()
            rank.insert_s.clear()
            rank.add_s.clear()
        for size in BATCHES:
            for taken, has_vote_per_node in ((step_s, False), (per_node_s, True)):
                rank.settle(size * PAGES_PER_NODE)
                rank.insert(size)
                rank.all_reduce()  # nobody waits in the step for one who inserts more slowly
                began = time.perf_counter()
                if has_vote_per_node:
                    for _ in range(size):
                        rank.all_reduce()
                rank.step()
                taken[size].append(time.perf_counter() - began)
        rank.all_reduce()
        all_reduce_s += [rank.all_reduce() for _ in range(len(BATCHES))]
    rank.settle(0)
    cache = rank.cache
    return RankFigures(
        step_us={size: _us(taken) for size, taken in step_s.items()},
        per_node_us={size: _us(taken) for size, taken in per_node_s.items()},
        insert_us=_us(rank.insert_s),
        add_us=_us(rank.add_s),
        all_reduce_us=_us(all_reduce_s),
        collectives_per_step=cache.stepper.num_collectives / cache.core.manager.step,
        commits=rank.commits,
    )


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


# -- the manager alone: one rank, no cache, no communication -------------------------------------


class _Endless:
    """A participant whose pages are always there and whose copies never end."""

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        return num_pages

    def unreserve(self, intent: Intent, pool: str) -> None: ...

    def start(self, intent: Intent) -> None: ...

    def commit(self, intent: Intent) -> None: ...

    def abort(self, intent: Intent) -> None: ...

    def ended(self, intent: Intent) -> None: ...


def measure_manager(rounds: int = 400) -> dict[int, float]:
    """Post, read and settle one ballot, in µs, by open intents that are already decided."""
    found: dict[int, float] = {}
    pool = Tier.HOST.value
    for num_open in OPEN:
        manager = TransactionManager(
            rank=0,
            schema=Schema((pool,)),
            lag=0,
            copy_timeout_s=1e6,
            journal=Journal(0),
            usable={pool: lambda: 1 << 20},
        )
        manager.begin_epoch(0, {pool: 1 << 20})
        for key in range(num_open):
            if manager.open("back_up", key, {pool: 1}, _Endless()) is None:
                raise InternalError("a new manager has no slot")
        manager.reserve_open()
        taken: list[float] = []
        for iteration in range(rounds + 1):
            began = time.perf_counter()
            manager.settle(manager.read(manager.post(iteration)))
            taken.append(time.perf_counter() - began)
        found[num_open] = _us(taken[1:])
    return found
