"""Inserts whose device pages are voted: everywhere or nowhere."""

from __future__ import annotations

import pytest

from kvpact.cache.tree.node import Tier
from tests.cache_world import World

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


@LAGS
def test_nobody_matches_before_the_verdict(lag: int) -> None:
    world = World(lag=lag)
    assert world.put("abc")
    for _ in range(lag):
        world.step()
        assert world.peek("abc")["usable"] == 0
    world.step()
    assert world.peek("abc") == {"device": 3, "host": 3, "usable": 3}
    world.drain()
    world.is_empty()


@LAGS
def test_refused_on_one_rank_is_refused_on_all(lag: int) -> None:
    world = World(lag=lag)
    world.fault(1, "device.reserve", "refuse")
    assert world.put("abc", "r", hold=True)
    world.drain()
    assert world.peek("abc")["usable"] == 0
    assert world.metrics()["refused"] == 1
    assert world.metrics()["backups"] == 0  # its backup counts only where the insert commits
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    assert world.same(lambda cache: cache.report("r").why) == "its insert was refused"
    world.abort("r")
    world.is_empty()


@LAGS
def test_what_builds_on_a_refused_insert_is_refused_too(lag: int) -> None:
    world = World(lag=lag)
    world.fault(0, "device.reserve", "refuse")
    assert world.put("ab")
    assert world.put("abcd", "r", hold=True)
    assert world.put("xy")
    world.drain()
    assert world.metrics()["refused"] == 2
    assert world.peek("abcd")["usable"] == 0
    assert world.peek("xy")["device"] == 2
    world.abort("r")
    world.is_empty()


@LAGS
def test_the_same_tokens_twice_share_one_fate(lag: int) -> None:
    """The second insert needs no page of its own, but it stands and falls with the first."""
    world = World(lag=lag)
    world.fault(0, "device.reserve", "refuse")
    assert world.put("ab", "one", hold=True)
    assert world.put("ab", "two", hold=True)
    world.drain()
    assert world.metrics()["refused"] == 2
    for request in ("one", "two"):
        assert world.same(lambda cache, r=request: cache.core.requests.require(r).held) is None
        assert world.same(lambda c, r=request: c.report(r).why) == "its insert was refused"
    assert world.pinned()[DEVICE] == 0


def test_no_room_is_refused_at_once_and_leaves_nothing() -> None:
    world = World(device_pages=4)
    world.store("ab")
    world.match("ab", "pinner")
    assert not world.put("xyz", "r", hold=True)
    assert world.metrics()["refused"] == 1
    assert world.peek("ab")["device"] == 2
    assert len(list(world.caches[0].core.tree.nodes())) == 1
    assert not world.caches[0].has_pending()
    world.check()


def test_pages_of_a_refused_insert_stay_charged_while_a_copy_reads_them() -> None:
    world = World(device_pages=4, host_pages=4)
    world.fault(0, "write", "delay", steps=2)  # rank 0 has the pages and backs them up
    world.fault(1, "device.reserve", "refuse")
    world.put("abc")
    world.step()
    assert world.metrics()["refused"] == 1
    assert world.same(lambda cache: cache.room()) == 1  # also on rank 1, which never had any
    assert not world.put("xyz")
    world.step_all(3)
    assert world.same(lambda cache: cache.room()) == 4
    world.drain()
    world.is_empty()


def test_insert_evicts_from_agreed_state_before_it_votes() -> None:
    world = World(device_pages=[4, 6])
    world.store("abcd")
    assert world.put("xyz")
    world.drain()
    assert world.peek("xyz")["device"] == 3
    assert world.peek("abcd") == {"device": 1, "host": 4, "usable": 4}
    assert world.free_pages(DEVICE) == [0, 2]


@pytest.mark.parametrize("lag", [1, 2])
def test_an_undecided_insert_keeps_what_it_builds_on(lag: int) -> None:
    """The first insert is decided while the second, below it, is not: nothing between may go."""
    world = World(device_pages=6, lag=lag)
    assert world.put("ab")
    world.step()
    assert world.put("abcd")
    world.step_all(lag)
    assert world.peek("ab")["device"] == 2
    assert not world.put("uvwxyz")  # room could only come from "ab"
    assert world.peek("ab")["device"] == 2
    world.drain()
    assert world.peek("abcd")["device"] == 4


def test_an_insert_on_top_of_an_undecided_load_that_is_cut_short_is_refused() -> None:
    world = World(device_pages=8)
    world.host_only("abcd")
    world.load("abcd")
    assert world.put("abcdef")
    # Rank 1 is short of pages for the whole load.
    taken = world.caches[1].core.tiers.pools[DEVICE].reserve(6)
    assert taken is not None
    world.checks = False
    world.step()
    world.caches[1].core.tiers.pools[DEVICE].free(taken)
    world.checks = True
    world.drain()
    assert world.peek("abcdef")["device"] == 2
    assert world.metrics()["refused"] == 1
    world.finish("load")
    world.is_empty()
