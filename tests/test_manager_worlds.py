"""The manager in whole small worlds: all of them where they are few, drawn at random elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State
from tests.foreign import Replica, only

# -- all worlds of two ranks and two intents -------------------------------------------------------

FIRST, SECOND = "first", "second"
#: Who grants what: one flag for each intent on each rank.
GRANTS = list(itertools.product([True, False], repeat=4))


def _holders(grants: tuple[bool, ...], is_child: bool) -> dict[str, list[int]]:
    """The ranks that hold pages of each intent; a child cannot be held without its parent."""
    first = [rank for rank in (0, 1) if grants[rank]]
    second = [rank for rank in (0, 1) if grants[2 + rank] and (grants[rank] or not is_child)]
    return {FIRST: first, SECOND: second}


def _orders(holders: dict[str, list[int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    return itertools.permutations([(key, rank) for key in holders for rank in holders[key]])


def _expected(
    holders: dict[str, list[int]], order: tuple[tuple[str, int], ...], is_child: bool
) -> list[list[str]]:
    """What each ballot brings, told without a manager: the n-th ending precedes the n-th ballot."""
    ballots: list[list[str]] = [[] for _ in range(len(order) + 1)]
    commits = {key: holders[key] == [0, 1] for key in (FIRST, SECOND)}
    commits[SECOND] = commits[SECOND] and (commits[FIRST] or not is_child)
    for key in (FIRST, SECOND):
        ballots[0].append(f"{'commit' if commits[key] else 'abort'} {key}")
    for key in (FIRST, SECOND):
        last = max((n for n, (ended, _) in enumerate(order) if ended == key), default=0)
        ballots[last].append(f"end {key}")
    return ballots


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("grants", GRANTS)
def test_all_orders_of_endings(lag: int, is_child: bool, grants: tuple[bool, ...]) -> None:
    holders = _holders(grants, is_child)
    for order in _orders(holders):
        replica = Replica(lag=lag)
        for key, base in ((FIRST, 0), (SECOND, 2)):
            for rank in (0, 1):
                if not grants[base + rank]:
                    replica.owners[rank].refuse.add((key, "a"))
        intents = {FIRST: replica.open(FIRST, {"a": 2})}
        parents = [intents[FIRST]] if is_child else []
        intents[SECOND] = replica.open(SECOND, {"a": 3}, parents=parents)
        for manager in replica.managers:
            manager.reserve_open()
        told: list[list[str]] = []
        for number in range(len(order) + 1 + lag):
            if number < len(order):
                key, rank = order[number]
                replica.end(intents[key], ranks=[rank])
            told.append(replica.step())
        expected = _expected(holders, order, is_child)
        assert told == [[]] * lag + expected, (grants, order)
        committed = {line.split()[1] for line in expected[0] if line.startswith("commit")}
        kept = sum(pages for key, pages in ((FIRST, 2), (SECOND, 3)) if key in committed)
        assert (replica.charged(), replica.free()) == (kept, [10 - kept] * 2)
        assert replica.managers[0].is_idle


# -- random worlds ---------------------------------------------------------------------------------


class Managers(RuleBasedStateMachine):
    """Two or three ranks whose pools, refusals and endings are their own; all else is agreed.

    ``Replica.check`` holds after every settled ballot: equal ledgers, slots and fingerprints,
    nothing below zero, every page with one owner, and the same outcomes everywhere.
    """

    @initialize(
        lag=st.integers(0, 2),
        capacities=st.lists(st.integers(4, 12), min_size=2, max_size=3),
        num_slots=st.integers(1, 5),
    )
    def start(self, lag: int, capacities: list[int], num_slots: int) -> None:
        self.replica = Replica([{"a": n, "b": n} for n in capacities], lag=lag, num_slots=num_slots)
        self.intents: list[list[Intent]] = []
        self.num_opened = 0
        self.told: dict[int, list[str]] = {}
        self.epoch = 0

    def _hear(self, lines: list[str]) -> None:
        for line in lines:
            event, key = line.split()
            self.told.setdefault(int(key), []).append(event)

    def _pick(self, which: int, *states: State) -> list[Intent] | None:
        """One of the intents that are decided alike everywhere, by agreed state alone."""
        found = [one for one in self.intents if one[0].state in states]
        return found[which % len(found)] if found else None

    @rule(
        needs=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any),
        is_elastic=st.booleans(),
        parent=st.none() | st.integers(0, 5),
        ends_on_commit=st.booleans(),
        refusing=st.sets(st.integers(0, 2)),
        pool=st.sampled_from(["a", "b"]),
    )
    def propose(
        self,
        needs: tuple[int, int],
        is_elastic: bool,
        parent: int | None,
        ends_on_commit: bool,
        refusing: set[int],
        pool: str,
    ) -> None:
        replica = self.replica
        need = {name: n for name, n in zip(("b", "a"), needs, strict=True) if n}
        if any(replica.room(name) < n for name, n in need.items()):
            return
        for rank in refusing & set(replica.ranks):
            replica.owners[rank].refuse.add((self.num_opened, pool))
        parents = []
        if parent is not None and self.intents:
            parents = [self.intents[parent % len(self.intents)]]
        before = replica.charged("a"), replica.charged("b")
        intents = replica.try_open(
            self.num_opened,
            need,
            parents=parents,
            minimum=1 if is_elastic and len(need) == 1 else None,
            ends_on_commit=ends_on_commit,
        )
        if not intents:
            assert (replica.charged("a"), replica.charged("b")) == before
            return
        self.num_opened += 1
        self.intents.append(intents)

    @rule()
    def reserve_early(self) -> None:
        for manager in self.replica.managers:
            manager.reserve_open()

    @rule(which=st.integers(0, 9), rank=st.integers(0, 2), result=st.none() | st.integers(0, 3))
    def end(self, which: int, rank: int, result: int | None) -> None:
        """One rank's copy ends, wherever its vote is."""
        rank %= len(self.replica.managers)
        running = [one for one in self.intents if one[rank].vote and not one[rank].local_ended]
        if running:
            intents = running[which % len(running)]
            vote = intents[rank].vote
            self.replica.end(intents, None if result is None else min(result, vote), ranks=[rank])

    @rule(which=st.integers(0, 9))
    def withdraw(self, which: int) -> None:
        if self.intents:
            self.replica.withdraw(self.intents[which % len(self.intents)])

    @rule(ms=st.sampled_from([0, 0, 0, 300, 1500]))
    def step(self, ms: int) -> None:
        self._hear(self.replica.step(ms))

    @rule(which=st.integers(0, 9))
    def evict(self, which: int) -> None:
        """An agreed call: what is done leaves the tree, here and in the ledger."""
        intents = self._pick(which, State.DONE)
        if intents is None or intents[0].key not in self.replica.owners[0].tree:
            return
        for manager, owner in zip(self.replica.managers, self.replica.owners, strict=True):
            for pool, num_pages in owner.tree.pop(intents[0].key).items():
                owner.free[pool] += num_pages
                manager.ledger.refund(pool, num_pages)
            manager.note("evict", intents[0].key)

    @rule(rank=st.integers(0, 2), which=st.integers(0, 9))
    def stop_quarantined(self, rank: int, which: int) -> None:
        owner = self.replica.owners[rank % len(self.replica.owners)]
        if owner.stuck:
            owner.stops(list(owner.stuck)[which % len(owner.stuck)])

    @precondition(lambda self: self.num_opened > 3)
    @rule(gone=st.booleans())
    def new_epoch(self, gone: bool) -> None:
        """Everything is dropped; what still runs keeps its pages out of use until it stops."""
        self.epoch += 1
        for owner in self.replica.owners:
            running = {f: owner.held.pop(f) for f in list(owner.held)}
            for pool in owner.capacity:
                owner.free[pool] = owner.capacity[pool]
            owner.tree.clear()
            owner.stuck.clear()
            if not gone:
                for serial, held in running.items():
                    owner.stuck[-1 - serial - 1000 * self.epoch] = held
                    for pool, num_pages in held.items():
                        owner.free[pool] -= num_pages
        dropped = self.replica.begin_epoch(self.epoch)
        assert all(intent.state is State.DROPPED for one in dropped for intent in one)
        self.intents = []

    def teardown(self) -> None:
        """Progress: once every copy ends, everything is decided and only the tree is charged."""
        if hasattr(self, "replica"):
            self._drain(self.replica)
            self._check_the_end(self.replica)

    def _drain(self, replica: Replica) -> None:
        for owner in replica.owners:
            for serial in list(owner.stuck):
                owner.stops(serial)
        for _ in range(3 + 3 * replica.lag):
            for manager in replica.managers:
                manager.reserve_open()
            for intents in self.intents:
                replica.end(intents)
            self._hear(replica.step())
        for _ in range(2 + 2 * replica.lag):  # what is cooling needs a few ballots more
            self._hear(replica.step())

    def _check_the_end(self, replica: Replica) -> None:
        assert replica.managers[0].is_idle
        tree = only(owner.tree for owner in replica.owners)
        for pool in ("a", "b"):
            kept = sum(pages.get(pool, 0) for pages in tree.values())
            assert replica.charged(pool) == kept
            for owner in replica.owners:
                assert owner.free[pool] == owner.capacity[pool] - kept
        for key, events in self.told.items():
            assert events[0] in ("commit", "abort"), (key, events)
            assert events[1:] in ([], ["end"], ["fail"], ["quarantine"]), (key, events)
            assert events != ["abort", "fail"]
        for intents in self.intents:
            assert len(self.told[int(intents[0].key)]) == 2, "verdict and ending, once each"
            for parent_and_child in intents:
                assert parent_and_child.parents == ()


TestManagers = Managers.TestCase
TestManagers.settings = settings(stateful_step_count=40)
