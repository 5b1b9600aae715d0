"""A foreign engine for the tests of the core: integer pools and a dict for a tree; no cache.

:class:`Owner` is one rank's participant. :class:`Replica` is a few ranks in lockstep, whose ballots
are reduced right here, without a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvpact.consensus.core.ballot import Schema, Status, Vector
from kvpact.consensus.core.journal import Journal, Value
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent, Outcome
from kvpact.consensus.core.transaction import State

__all__ = ["Engine", "Owner", "Replica", "make_manager", "only"]

T = TypeVar("T")


class Engine:
    """The machine of a stepper: it reserves what is open. Tests put their own calls in place."""

    def __init__(self, manager: TransactionManager) -> None:
        self.prepare: Callable[[], None] = manager.reserve_open
        self.settled: Callable[[list[Outcome]], None] = lambda _: None
        self.live_digest: Callable[[], int] = int
        self.is_at_rest: Callable[[], bool] = bool
        self.waits: Callable[[], Mapping[str, str]] = dict


class Owner:
    """Free pages by pool, and a tree of what is published by key. ``calls`` is a log.

    A copy that still runs when its intent is quarantined keeps its pages until :meth:`stops`.
    """

    def __init__(self, pools: Mapping[str, int]) -> None:
        self.capacity = dict(pools)
        self.free = dict(pools)
        self.tree: dict[Value, dict[str, int]] = {}
        self.held: dict[int, dict[str, int]] = {}
        self.stuck: dict[int, dict[str, int]] = {}
        self.running: set[Value] = set()  # keys of intents that started and have not ended
        self.refuse: set[tuple[Value, str]] = set()
        self.calls: list[tuple[Any, ...]] = []

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        taken = 0 if (intent.key, pool) in self.refuse else min(num_pages, self.free[pool])
        self.calls.append(("reserve", intent.key, pool, taken))
        self.free[pool] -= taken
        self.held.setdefault(intent.serial, {})[pool] = taken
        return taken

    def unreserve(self, intent: Intent, pool: str) -> None:
        self.calls.append(("unreserve", intent.key, pool))
        self.free[pool] += self.held[intent.serial].pop(pool)

    def start(self, intent: Intent) -> None:
        self.calls.append(("start", intent.key))
        self.running.add(intent.key)

    def commit(self, intent: Intent) -> None:
        self.calls.append(("commit", intent.key))
        self.tree[intent.key] = dict.fromkeys(intent.need, intent.agreed)

    def abort(self, intent: Intent) -> None:
        self.calls.append(("abort", intent.key))

    def ended(self, intent: Intent) -> None:
        self.calls.append(("ended", intent.key))
        self.running.discard(intent.key)
        held = self.held.pop(intent.serial, {})
        kept: dict[str, int] = {}
        if intent.state is State.DONE:
            elastic = len(intent.need) == 1
            kept = {pool: intent.result if elastic else n for pool, n in intent.need.items()}
            self.tree[intent.key] = kept
        else:
            self.tree.pop(intent.key, None)
        back = {pool: num_pages - kept.get(pool, 0) for pool, num_pages in held.items()}
        if intent.state is State.QUARANTINED and not intent.local_ended:
            self.stuck[intent.serial] = back
        else:
            self._give(back)

    def stops(self, serial: int) -> None:
        """A quarantined copy has really ended."""
        self._give(self.stuck.pop(serial))

    def _give(self, pages: dict[str, int]) -> None:
        for pool, num_pages in pages.items():
            self.free[pool] += num_pages

    def usable(self, pool: str) -> int:
        return self.capacity[pool] - sum(held.get(pool, 0) for held in self.stuck.values())

    def keys(self, call: str) -> list[Value]:
        """The keys for which ``call`` was made, in order."""
        return [line[1] for line in self.calls if line[0] == call]

    def check(self) -> None:
        """Every page is free, held by an open intent, stuck, or in the tree: once."""
        for pool, capacity in self.capacity.items():
            held = sum(pages.get(pool, 0) for pages in self.held.values())
            stuck = sum(pages.get(pool, 0) for pages in self.stuck.values())
            owned = capacity - self.free[pool] - held - stuck
            assert self.free[pool] >= 0
            assert owned == self._in_tree(pool), (pool, self.free, self.held, self.tree)

    def _in_tree(self, pool: str) -> int:
        """Pages of what is published and over: those of an open intent count as held."""
        return sum(n.get(pool, 0) for key, n in self.tree.items() if key not in self.running)


def make_manager(
    rank: int,
    owner: Owner | None = None,
    *,
    lag: int = 0,
    num_slots: int = 8,
    copy_timeout_s: float = 1.0,
) -> TransactionManager:
    """A manager over the pools of ``owner``, in epoch 0."""
    found = owner if owner is not None else Owner({"a": 10})
    pools = tuple(sorted(found.capacity))
    manager = TransactionManager(
        rank=rank,
        schema=Schema(pools, num_slots),
        lag=lag,
        copy_timeout_s=copy_timeout_s,
        journal=Journal(rank),
        usable={pool: partial(found.usable, pool) for pool in pools},
    )
    manager.begin_epoch(0, {pool: found.usable(pool) for pool in pools})
    return manager


class Replica:
    """``len(capacities)`` ranks; every call is made on all of them and must give the same."""

    def __init__(
        self,
        capacities: Sequence[Mapping[str, int]] = ({"a": 10}, {"a": 10}),
        *,
        lag: int = 0,
        num_slots: int = 8,
        copy_timeout_s: float = 1.0,
    ) -> None:
        self.owners = [Owner(capacity) for capacity in capacities]
        self.managers = [
            make_manager(r, owner, lag=lag, num_slots=num_slots, copy_timeout_s=copy_timeout_s)
            for r, owner in enumerate(self.owners)
        ]
        self.ranks = range(len(self.owners))
        self.lag = lag
        self.now_ms = 0
        self.in_flight: deque[Vector] = deque()
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> list[list[Intent]]:
        agreed = {
            pool: min(owner.usable(pool) for owner in self.owners)
            for pool in self.owners[0].capacity
        }
        self.in_flight.clear()
        return [manager.begin_epoch(epoch, agreed) for manager in self.managers]

    def open(self, key: Value, need: Mapping[str, int], **how: Any) -> list[Intent]:
        """One intent per rank. ``parents`` are lists over ranks."""
        found = self.try_open(key, need, **how)
        assert found, "no slot"
        return found

    def try_open(self, key: Value, need: Mapping[str, int], **how: Any) -> list[Intent]:
        """The same, empty where there is no slot on any rank."""
        parents: Sequence[list[Intent]] = how.pop("parents", ())
        found: list[Intent] = []
        for rank in self.ranks:
            intent = self.managers[rank].open(
                "copy", key, need, self.owners[rank], parents=[p[rank] for p in parents], **how
            )
            if intent is not None:
                found.append(intent)
        assert len(found) in (0, len(self.owners))
        return found

    def withdraw(self, intents: list[Intent]) -> None:
        for rank in self.ranks:
            self.managers[rank].withdraw(intents[rank])

    def end(
        self, intents: list[Intent], result: int | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """The copy ends on these ranks, all by default; where it never started nothing happens."""
        for rank in self.ranks if ranks is None else ranks:
            if intents[rank].vote and not intents[rank].local_ended:
                self.managers[rank].mark_ended(intents[rank], result)

    def post(self, status: Mapping[int, Status] | None = None) -> None:
        ballots: list[Vector] = []
        for rank, manager in enumerate(self.managers):
            manager.reserve_open()
            says = (status or {}).get(rank, Status.HEALTHY)
            ballots.append(manager.post(manager.step, now_ms=self.now_ms, status=says))
        self.in_flight.append(np.minimum.reduce(ballots))

    def settle(self) -> list[str]:
        """Settle the oldest ballot everywhere; the outcomes as lines, equal on all ranks."""
        reduced = self.in_flight.popleft()
        told = [
            [f"{one.kind.value} {one.intent.key}" for one in manager.settle(manager.read(reduced))]
            for manager in self.managers
        ]
        self.check()
        return only(told)

    def step(self, ms: int = 0) -> list[str]:
        """One step, ``ms`` later. With lag it settles an earlier ballot before it posts its own."""
        self.now_ms += ms
        told: list[str] = []
        if self.lag and len(self.in_flight) >= self.lag:
            told = self.settle()
        self.post()
        return told if self.lag else self.settle()

    def decide(self, ms: int = 0) -> list[str]:
        """Steps until what the first of them posts is settled; all outcomes on the way."""
        return [line for _ in range(1 + self.lag) for line in self.step(ms)]

    def check(self) -> None:
        """Agreed state is equal everywhere, accounts are not negative, no page is lost."""
        for manager, owner in zip(self.managers, self.owners, strict=True):
            manager.check_integrity()
            owner.check()
        only(manager.journal.fingerprint for manager in self.managers)
        only(manager.is_idle for manager in self.managers)
        only([(i.serial, i.slot) for i in manager.open_intents] for manager in self.managers)
        for pool in self.owners[0].capacity:
            assert self.charged(pool) >= 0
            assert self.room(pool) >= 0

    def charged(self, pool: str = "a") -> int:
        return only(manager.ledger.charged(pool) for manager in self.managers)

    def room(self, pool: str = "a") -> int:
        return only(manager.room(pool) for manager in self.managers)

    def states(self, intents: list[Intent]) -> State:
        """The state, where it is the same everywhere: after the verdict."""
        return only(intent.state for intent in intents)

    def free(self, pool: str = "a") -> list[int]:
        return [owner.free[pool] for owner in self.owners]


def only(values: Iterable[T]) -> T:
    """The one value that all ranks have."""
    found = list(values)
    assert found.count(found[0]) == len(found), found
    return found[0]
