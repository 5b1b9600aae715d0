"""Makes a failing scenario small: fewer entries, ranks, steps, faults; smaller worlds.

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)
over the entries, then one simplification after another, until nothing smaller fails. Bounded by
the number of runs, not by the clock, so that the same failure shrinks to the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvpact.harness.fuzz.worlds import numbered
from kvpact.harness.scenario.model import Do, Expect, Fault, Ranges, Scenario, World

__all__ = ["shrink"]

Fails = Callable[[Scenario], bool]


def shrink(
    scenario: Scenario, fails: Fails, *, keep_last: int = 0, runs_max: int = 1500
) -> Scenario:
    """The smallest scenario found for which ``fails`` is true within ``runs_max`` runs.

    ``scenario`` itself must fail. The last ``keep_last`` entries are what the others must lead to:
    they stay, all or none.
    """
    bare = _with_entries(scenario, scenario.do[: len(scenario.do) - keep_last])
    if keep_last and bare.do and fails(bare):
        scenario, keep_last = bare, 0
    return _Shrinker(scenario, fails, keep_last, runs_max).run()


class _Shrinker:
    def __init__(self, scenario: Scenario, fails: Fails, keep_last: int, runs_max: int) -> None:
        self._best = scenario
        self._fails = fails
        self._keep_last = keep_last
        self._runs_left = runs_max

    def run(self) -> Scenario:
        """Round after round, until one changes nothing."""
        before = None
        while before != self._best and self._runs_left > 0:
            before = self._best
            self._drop_entries()
            self._take_any(_smaller_worlds)
            self._take_any(self._smaller_entries)
        return self._best

    @property
    def _num_free(self) -> int:
        """Entries that may change."""
        return len(self._best.do) - self._keep_last

    def _smaller_entries(self, scenario: Scenario) -> Iterator[Scenario]:
        for index, entry in enumerate(scenario.do[: self._num_free]):
            for changes in _simpler(entry, scenario.world.page_size):
                entries = list(scenario.do)
                entries[index] = msgspec.structs.replace(entry, **changes)
                yield _with_entries(scenario, entries)

    def _try(self, candidate: Scenario | None) -> bool:
        if candidate is None or self._runs_left <= 0:
            return False
        self._runs_left -= 1
        if not self._fails(candidate):
            return False
        self._best = candidate
        return True

    def _drop_entries(self) -> None:
        size = max(1, self._num_free // 2)
        while self._runs_left > 0:
            start = 0
            while start < self._num_free and self._runs_left > 0:
                end = min(start + size, self._num_free)
                kept = [*self._best.do[:start], *self._best.do[end:]]
                if not (kept and self._try(_with_entries(self._best, kept))):
                    start += size
            if size == 1:
                return
            size //= 2

    def _take_any(self, candidates: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Follow the first candidate that still fails, and look again from there."""
        found = True
        while found and self._runs_left > 0:
            found = any(self._try(candidate) for candidate in candidates(self._best))


def _with_entries(scenario: Scenario, entries: Sequence[Do]) -> Scenario:
    return msgspec.structs.replace(scenario, do=numbered(entries))


def _with_world(scenario: Scenario, **changes: Any) -> Scenario:
    return msgspec.structs.replace(
        scenario, world=msgspec.structs.replace(scenario.world, **changes)
    )


# -- smaller worlds ------------------------------------------------------------------------------

_PLAIN = {
    "pp": 1,
    "headroom_pages": 0,
    "load_back_minimum_pages": 1,
    "evicts_whole_nodes": True,
    "num_slots": 256,
    "copy_timeout_s": 30.0,
    "eviction": "lru",
    "layout": "own",
    "low_water_pages": 0,
    "prefetch_policy": "wait_complete",
    "prefetch_timeout_s": 1.0,
    "prefetch_minimum_pages": 1,
    "storage_queue_pages": 4096,
    "write_queue_nodes_max": 1 << 16,
    "storage": "memory",
}


def _smaller_worlds(scenario: Scenario) -> Iterator[Scenario]:
    world = scenario.world
    if world.num_ranks > 1:
        for rank in reversed(range(world.num_ranks)):
            yield _without_rank(scenario, rank)
    for lag in range(world.pp if world.pp > 1 else 0, world.lag):
        yield _with_world(scenario, lag=lag)
    for name, plain in _PLAIN.items():
        if getattr(world, name) not in (plain, "none"):
            yield _with_world(scenario, **{name: plain, **_one_stage(world, name)})
    for name in ("device_pages", "host_pages"):
        yield from _smaller_pools(scenario, name)
    for number in range(len(world.side_pools)):
        yield _without_side_pool(scenario, number)
    if world.storage != "none" and world.mode != "buffer_only":
        yield _with_world(scenario, storage="none")
    if world.mode == "write_through_selective":
        yield _with_world(scenario, mode="write_through")


def _one_stage(world: World, name: str) -> dict[str, int]:
    return {"tp": world.num_ranks} if name == "pp" else {}


def _smaller_pools(scenario: Scenario, name: str) -> Iterator[Scenario]:
    pages: tuple[int, ...] = getattr(scenario.world, name)
    least = min(pages)
    if max(pages) > least:
        yield _with_pages(scenario, name, (least,) * len(pages))
    floor = 1 if name == "device_pages" else 0
    for fewer in (least // 2, least - 1):
        if floor <= fewer < least:
            yield _with_pages(scenario, name, tuple(p - least + fewer for p in pages))


def _with_pages(scenario: Scenario, name: str, pages: tuple[int, ...]) -> Scenario:
    """Expectations about the whole pool follow its size."""
    old: tuple[int, ...] = getattr(scenario.world, name)
    pool = name.removesuffix("_pages")
    entries = [
        msgspec.structs.replace(entry, free={**entry.free, pool: pages})
        if isinstance(entry, Expect) and entry.free and entry.free.get(pool) == old
        else entry
        for entry in scenario.do
    ]
    return _with_entries(_with_world(scenario, **{name: pages}), entries)


def _without_side_pool(scenario: Scenario, number: int) -> Scenario:
    """One side pool less; its faults and what is expected of it go with it."""
    pools = scenario.world.side_pools
    gone = pools[number].name + "."
    entries: list[Do] = []
    for entry in scenario.do:
        if isinstance(entry, Fault) and entry.site.startswith(gone):
            continue
        kept = entry
        if isinstance(kept, Expect) and kept.free:
            free = {pool: pages for pool, pages in kept.free.items() if not pool.startswith(gone)}
            kept = msgspec.structs.replace(kept, free=free)
        entries.append(kept)
    smaller = _with_world(scenario, side_pools=pools[:number] + pools[number + 1 :])
    return _with_entries(smaller, entries)


def _without_rank(scenario: Scenario, gone: int) -> Scenario:
    """One rank less; those above it move down. Faults of the rank go with it."""
    world = scenario.world

    def cut(pages: tuple[int, ...]) -> tuple[int, ...]:
        return pages[:gone] + pages[gone + 1 :]

    entries: list[Do] = []
    for entry in scenario.do:
        kept = _moved(entry, gone)
        if isinstance(kept, Expect) and kept.free:
            kept = msgspec.structs.replace(kept, free={k: cut(v) for k, v in kept.free.items()})
        if kept is not None:
            entries.append(kept)
    smaller = msgspec.structs.replace(
        world,
        tp=world.num_ranks - 1,
        pp=1,
        device_pages=cut(world.device_pages),
        host_pages=cut(world.host_pages),
        side_pools=tuple(
            msgspec.structs.replace(
                pool, device_pages=cut(pool.device_pages), host_pages=cut(pool.host_pages)
            )
            for pool in world.side_pools
        ),
    )
    return msgspec.structs.replace(scenario, world=smaller, do=numbered(entries))


def _moved(entry: Do, gone: int) -> Do | None:
    """``entry`` with its ranks renumbered; ``None``: it was about the rank that is gone."""
    changes: dict[str, Any] = {}
    if isinstance(entry, Fault):
        if entry.rank == gone:
            return None
        changes["rank"] = entry.rank - (entry.rank > gone)
    if entry.ranks is not None:
        ranks = tuple(rank - (rank > gone) for rank in entry.ranks if rank != gone)
        if not ranks:
            return None
        changes["ranks"] = ranks
    raises = entry.raises
    if raises is not None and raises.rank is not None:
        rank = raises.rank - (raises.rank > gone)
        changes["raises"] = msgspec.structs.replace(raises, rank=rank)
    return msgspec.structs.replace(entry, **changes) if changes else entry


# -- smaller entries -----------------------------------------------------------------------------

_SMALLER: dict[str, tuple[Any, ...]] = {
    "times": (1, 2, 3, 5),
    "after": (0, 1),
    "steps": (1, 2, 5),
    "seconds": (0.015, 0.05),
    "pages": (1, 2, 3),
    "hold": (False,),
    "load": (False,),
    "namespace": ("",),
    "max_steps": (10, 20),
}


def _simpler(entry: Do, page_size: int) -> Iterator[dict[str, Any]]:
    for name, values in _SMALLER.items():
        current = getattr(entry, name, None)
        if current is None:
            continue
        for value in values:
            if value == current:
                break
            if isinstance(value, bool | str) or not 0 <= current < value:
                yield {name: value}
    tokens: Ranges | None = getattr(entry, "tokens", None)
    if tokens is not None:
        for shorter in _shorter(tokens, page_size):
            yield {"tokens": shorter}


def _shorter(tokens: Ranges, page_size: int) -> Iterator[Ranges]:
    if not tokens:
        return
    *before, (start, stop) = tokens
    if before:
        yield tuple(before)
    if stop - start > page_size:
        yield (*before, (start, stop - page_size))
