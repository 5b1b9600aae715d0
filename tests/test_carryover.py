"""What survives the end of an epoch: pages that live requests hold, and under detach the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from typing import cast

import pytest

from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import STORAGE, Tier
from kvpact.harness.verify.promises import leftovers
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def reset(world: World) -> None:
    world.each(lambda cache: cache.reset())


def diverge(world: World, call: str = "touch") -> None:
    """Rank 1 alone makes an agreed call: found at the next step."""
    cache = world.caches[1]
    if call == "touch":
        cache.journal.note("on one rank only")
    world.checks = False
    world.step_all(2 + cache.config.lag)
    world.checks = True
    world.step()


def usable(world: World, pool: str) -> int:
    return world.same(lambda cache: cache.core.manager.ledger.usable(pool))


# -- an ordered reset ------------------------------------------------------------------------------


@LAGS
def test_pages_of_live_requests_are_orphaned_until_they_end(lag: int) -> None:
    world = World(lag=lag)
    assert world.put("abcd", "r", hold=True)
    assert world.put("xy")
    world.drain()
    reset(world)
    assert world.peek("abcd")["usable"] == 0
    assert world.free_pages(DEVICE) == [12, 12]
    assert world.free_pages(HOST) == [16, 16]
    world.step_all(1 + lag)
    assert usable(world, "device") == 12
    world.store("abcd")
    assert world.free_pages(DEVICE) == [8, 8]
    world.finish("r")
    assert world.free_pages(DEVICE) == [12, 12]
    world.step_all(1 + lag)
    assert usable(world, "device") == 16
    assert not [line for cache in world.caches for line in leftovers(cache)]
    world.is_empty()


def test_a_page_that_two_requests_hold_comes_back_with_the_second() -> None:
    world = World()
    assert world.put("ab", "r", hold=True)
    assert world.put("abc", "s", hold=True)
    world.drain()
    reset(world)
    assert world.free_pages(DEVICE) == [13, 13]
    world.finish("s")
    assert world.free_pages(DEVICE) == [14, 14]
    world.abort("r")
    assert world.free_pages(DEVICE) == [16, 16]


def test_a_second_reset_counts_orphans_once() -> None:
    world = World(device_pages=8)
    assert world.put("abc", "r", hold=True)
    world.drain()
    for _ in range(3):
        reset(world)
        assert usable(world, "device") == 5
        world.store("vwxyz")
    world.finish("r")
    world.step()
    assert usable(world, "device") == 8


def test_own_pages_are_orphaned_and_later_inserts_do_nothing() -> None:
    world = World(headroom_pages=2)
    tickets = world.each(lambda cache: cache.request_pages("r", 3))
    world.step()
    assert outcome(tickets) == (TicketState.READY, 3)
    reset(world)
    assert world.insert("abc", "r")[0].new_pages == 0
    assert world.peek("abc")["usable"] == 0
    world.step()
    assert usable(world, "device") == 13
    world.finish("r")
    world.step()
    world.is_empty()


def test_who_waits_is_told() -> None:
    world = World(mode="write_back", device_pages=4, storage=True)
    world.store("abcd")
    pages = world.each(lambda cache: cache.request_pages("p", 2))
    fetch = world.fetch("xy", "f")
    assert world.put("wxyz")
    reset(world)
    assert outcome(pages) == (TicketState.REFUSED, 0)
    assert outcome(fetch) == (TicketState.REFUSED, 0)
    assert not world.same(lambda cache: cache.has_pending())
    for request in ("p", "f"):
        world.finish(request)
    world.drain()
    world.is_empty()


@LAGS
def test_copies_of_the_old_epoch_change_nothing(lag: int) -> None:
    world = World(lag=lag, storage=True, host_pages=20)
    world.host_only("abcd")
    world.fault(0, "load", "delay", steps=6)
    world.fault(1, "write", "delay", steps=5)
    world.load("abcd", "r")
    assert world.put("xy")
    world.step_all(2 + lag)
    before = world.same(lambda cache: cache.metrics()["commits"])
    reset(world)
    assert world.free_pages(DEVICE)[0] < 16
    assert world.free_pages(HOST)[1] < 20
    world.abort("r")
    world.step_all(8)
    assert world.same(lambda cache: cache.metrics()["commits"]) == before
    assert world.free_pages(DEVICE) == [16, 16]
    assert world.free_pages(HOST) == [20, 20]


def test_storage_writes_of_the_old_epoch_end_quietly() -> None:
    world = World(storage=True)
    world.fault(1, "storage.put", "delay", steps=6, times=2)
    assert world.put("ab")
    world.step_all(4)
    reset(world)
    assert world.free_pages(HOST) == [16, 14]
    assert usable(world, STORAGE) > 0
    world.store("ab")
    world.step_all(6)
    assert world.in_storage("ab") == [2, 2]
    assert world.same(lambda cache: cache.metrics()["stored_pages"]) == 2
    world.is_empty()


# -- after a divergence ----------------------------------------------------------------------------


@LAGS
def test_policy_reset_goes_on_with_an_empty_cache(lag: int) -> None:
    world = World(3, lag=lag, policy="reset", deadline_s=1.0, warn_s=0.5)
    assert world.put("abcd", "r", hold=True)
    world.drain()
    diverge(world)
    assert world.same(lambda cache: cache.core.manager.epoch) == 1
    assert world.peek("abcd")["usable"] == 0
    assert usable(world, "device") == 12
    world.store("abcd")
    world.finish("r")
    world.step()
    world.is_empty()


@LAGS
def test_policy_detach_keeps_the_device_and_turns_the_rest_off(lag: int) -> None:
    world = World(3, lag=lag, policy="detach", deadline_s=1.0, warn_s=0.5, storage=True)
    assert world.put("abcd", "r", hold=True)
    world.store("xy")
    diverge(world)
    assert world.peek("abcd") == {"device": 4, "host": 0, "usable": 4}
    assert world.pinned() == {DEVICE: 4, HOST: 0}
    assert usable(world, "host") == 0
    assert world.free_pages(HOST) == [16] * 3
    world.store("ef")
    assert world.peek("ef") == {"device": 2, "host": 0, "usable": 2}
    assert outcome(world.fetch("gh", "f")) == (TicketState.REFUSED, 0)
    for request in ("f", "r"):
        world.finish(request)
    assert world.evict(DEVICE, 8) == 8
    world.is_empty()


def test_detach_from_buffer_only_with_everything_open() -> None:
    world = World(3, policy="detach", mode="buffer_only", storage=True, deadline_s=1.0, warn_s=0.5)
    world.fault(0, "write", "delay", steps=20)
    world.fault(1, "storage.put", "delay", steps=20, times=-1)
    assert world.put("ab")
    assert world.put("cd")
    world.step_all(3)
    diverge(world)
    assert world.peek("ab")["device"] == 2
    assert not world.same(lambda cache: cache.has_pending())
    assert world.put("ef")
    world.drain()
    assert world.peek("ef")["device"] == 2
    world.heal()
    world.step_all(3)
    assert world.free_pages(HOST) == [16] * 3
    assert world.evict(DEVICE, 100) == 6
    world.is_empty()


# -- a fresh start ---------------------------------------------------------------------------------

# What one rank alone may have done, each an agreed call that the others did not make.
ALONE: dict[str, Callable[[HierarchicalCache], object]] = {
    "another headroom": lambda cache: cache.expect_pages(5),
    "no headroom": lambda cache: cache.expect_pages(0),
    "asked for pages": lambda cache: cache.request_pages("s", 2),
    "asked and got away": lambda cache: (cache.request_pages("s", 1), cache.abort("s")),
    "allocated": lambda cache: cache.allocate("r", 1),
    "evicted": lambda cache: cache.evict(DEVICE, 1),
    "matched": lambda cache: cache.match_prefix(prompt("abcd"), request="t"),
    "fetched": lambda cache: cache.prefetch("p", prompt("mnop")),
    "detached storage": lambda cache: cache.detach_storage(),
    "dropped a namespace": lambda cache: cache.drop_namespace(""),
    "waits for admission": lambda cache: cache.admit("s", prompt("stuvwxyz")),
    "emptied storage": lambda cache: cache.clear_storage(),
    "inserted": lambda cache: cache.propose_insert("q", prompt("uv")),
}


@pytest.mark.parametrize("policy", ["reset", "detach"])
@pytest.mark.parametrize("call", ALONE)
@pytest.mark.parametrize("lag", [0, 3])
def test_what_one_rank_did_alone_does_not_part_them_again(call: str, policy: str, lag: int) -> None:
    world = World(
        3, lag=lag, policy=policy, deadline_s=1.0, warn_s=0.5, storage=True, headroom_pages=2
    )
    world.store("abcd")
    assert world.put("ab", "r", hold=True)
    world.drain()
    ALONE[call](world.caches[1])
    world.checks = False
    world.step_all(2 + lag)
    world.checks = True
    for request in ("r", "s", "t", "p", "q"):
        world.abort(request)
    for text in ("abcd", "wx", "yz"):
        world.store(text)
    world.step_all(3)
    endings = world.same(lambda cache: dict(cache.stepper.change.endings))
    assert endings == {"Divergence": 1}


def state(thing: object) -> dict[str, int | str | None]:
    """The own state of a path, containers by their length; no counts since the process began."""
    found: dict[str, int | str | None] = {}
    for name, value in vars(thing).items():
        if isinstance(value, (int, str, type(None))) and not name.startswith("num_"):
            found[name] = value
        elif isinstance(value, (list, dict, set, deque)):
            found[name] = len(cast("Sized", value))
    return found


@pytest.mark.parametrize("mode", ["write_through", "write_back", "buffer_only"])
def test_after_a_reset_all_state_is_that_of_a_new_cache(mode: str) -> None:
    def build() -> World:
        return World(mode=mode, storage=True, headroom_pages=2, device_pages=12)

    world = build()
    world.fault(0, "write", "delay", steps=3)
    for text in ("abcd", "efgh", "abxy", "mn", "ijkl"):
        world.put(text, text)
        world.step()
    world.each(lambda cache: cache.request_pages("waits", 3))
    world.each(lambda cache: cache.request_pages("for ever", 12))
    world.fetch("qrst", "q")
    world.step()
    for request in list(world.caches[0].core.requests):
        world.abort(request.name)
    reset(world)
    new = build()
    for cache in new.caches:
        cache.stepper.renew(dict.fromkeys(cache.core.manager.schema.pools, 0))
    for used, fresh in zip(world.caches, new.caches, strict=True):
        for path, other in zip(used.core.paths, fresh.core.paths, strict=True):
            assert state(path) == state(other), type(path).__name__
        assert used.core.requests.digest == fresh.core.requests.digest
        assert (used.core.manager.step, used.core.manager.clock_ms) == (0, 0)
        assert list(used.core.tree.nodes())[1:] == list(fresh.core.tree.nodes())[1:] == []
