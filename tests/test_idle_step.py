"""Steps in which nothing happens: few calls, one comparison, and every difference is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.core import CacheCore
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.ballot import Header, Schema, Status, repeated, told_the_same
from kvpact.consensus.core.errors import Divergence, Misuse
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.transport.collective import Vector
from kvpact.harness.bench.path_counts import count_failure, count_life
from tests.cache_world import World, prompt
from tests.foreign import Owner, make_manager

SCHEMA = Schema(("device", "host"), num_slots=4)
HEADER = Header(SCHEMA.digest, 1, 5, 40, 0, 123, 456)
AGREED = [7, 9]


def ballot(rank: int, clock_ms: int, device: int, host: int) -> Vector:
    usable = {"device": device, "host": host}
    said = SCHEMA.ballot(rank, HEADER, Status.HEALTHY, 0, usable)
    return repeated(said, 6, 41, clock_ms)


# ----------------------------------------------------------------------------------- the ballot


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_ranks_that_repeat_themselves_agree_on_the_slowest_clock(one: int, two: int):
    mine, theirs = ballot(0, one, 7, 20), ballot(1, two, 11, 9)
    reduced = np.minimum(mine, theirs)
    for said in (mine, theirs):
        assert told_the_same(reduced, said, AGREED) == min(one, two)


@given(st.integers(0, 6), st.integers(1, 1 << 40))
def test_a_header_that_differs_is_seen_by_all(field: int, change: int):
    mine, theirs = ballot(0, 50, 7, 9), ballot(1, 50, 7, 9)
    theirs[2 * field : 2 * field + 2] += [change, -change]
    reduced = np.minimum(mine, theirs)
    assert told_the_same(reduced, mine, AGREED) == told_the_same(reduced, theirs, AGREED) == -1


@given(st.integers(0, 1), st.integers(-5, 5))
def test_other_usable_pages_are_settled_in_full(pool: int, change: int):
    mine, theirs = ballot(0, 50, 7, 9), ballot(1, 50, 7, 9)
    theirs[16 + pool] += change
    told = told_the_same(np.minimum(mine, theirs), mine, AGREED)
    assert told == (-1 if change < 0 else 50)


@pytest.mark.parametrize("status", [Status.LEAVING, Status.BROKEN])
def test_a_rank_that_leaves_or_is_broken_is_seen(status: Status):
    mine, theirs = ballot(0, 50, 7, 9), ballot(1, 50, 7, 9)
    theirs[14] = SCHEMA.ballot(1, HEADER, status, 0, {"device": 7, "host": 9})[14]
    assert told_the_same(np.minimum(mine, theirs), mine, AGREED) == -1


def test_a_ballot_that_carried_something_cannot_be_repeated():
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    with pytest.raises(Misuse, match="cannot be repeated"):
        manager.post_again(1, 0)
    settle(manager, manager.post(1))
    assert not manager.can_repeat, "its verdict has told how many pages are usable"
    settle(manager, manager.post(2))
    assert manager.can_repeat
    intent = manager.open("copy", "x", {"a": 1}, owner)
    assert intent is not None
    assert not manager.can_repeat
    with pytest.raises(Misuse, match="cannot be repeated"):
        manager.post_again(2, 0)
    manager.reserve_open()
    settle(manager, manager.post(3))
    manager.mark_ended(intent)
    settle(manager, manager.post(4))
    assert not manager.can_repeat, "the ballot before it carried an ending"
    settle(manager, manager.post(5))
    assert manager.can_repeat
    reduced = manager.post_again(6, 77)
    assert manager.told_again(reduced) == 77
    manager.settle_again(77)
    assert (manager.settled_step, manager.clock_ms) == (6, 77)


def settle(manager: TransactionManager, reduced: Vector) -> None:
    manager.settle(manager.read(reduced))


# ------------------------------------------------------------------------------------ the cache


def resting(lag: int) -> World:
    world = World(lag=lag)
    world.store("abc")
    world.step_all(lag + 3)
    assert all(cache.stepper.rests for cache in world.caches)
    return world


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_rank_at_rest_plans_no_more_until_it_is_called(lag: int, monkeypatch: pytest.MonkeyPatch):
    world = resting(lag)
    asked: list[int] = []
    prepare = CacheCore.prepare

    def counted(core: CacheCore) -> None:
        asked.append(core.rank)
        prepare(core)

    monkeypatch.setattr(CacheCore, "prepare", counted)
    world.step_all(5)
    assert not asked
    world.evict(Tier.DEVICE, 1)
    world.step()
    assert asked == [0, 1]


CALLS: dict[str, Callable[[HierarchicalCache], object]] = {
    "evict": lambda cache: cache.evict(Tier.DEVICE, 1),
    "match": lambda cache: cache.match_prefix(prompt("abc"), request="b"),
    "pages": lambda cache: cache.request_pages("b", 1),
    "headroom": lambda cache: cache.expect_pages(1),
    "flush": lambda cache: cache.flush(),
}


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_one_rank_does_alone_after_a_rest_is_found_within_lag_steps(
    lag: int, call: Callable[[HierarchicalCache], object]
):
    world = resting(lag)
    world.checks = False
    call(world.caches[1])
    with pytest.raises(Divergence):
        world.step_all(lag + 1)


# ----------------------------------------------------------------------------------- the budget


@pytest.mark.ranks
def test_an_idle_step_and_a_requests_life_keep_their_budget():
    """Counted, so a busy machine changes nothing; figures that only go down."""
    passages = {passage.name: passage for passage in count_life()}
    idle, life = passages["an idle step"], passages["a request's life"]
    assert (idle.calls, len(idle.files)) <= (35, 8), idle
    assert life.calls <= 1120
    assert len(life.files) <= 40


@pytest.mark.ranks
def test_a_failing_step_is_counted_on_every_rank():
    passages = count_failure(2)
    assert [one.name for one in passages] == [f"rank {rank}, until it raised" for rank in (0, 1)]
    assert all("consensus/epoch/closing.py" in passage.files for passage in passages)
    # Who comes last finds the seal written, and judges nothing.
    assert any("consensus/epoch/judge.py" in passage.files for passage in passages)
