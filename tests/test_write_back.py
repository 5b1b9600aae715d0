"""Write-back: victims go to the host when their room is needed, on all ranks or on none."""

from __future__ import annotations

import pytest

from kvpact.cache.paths.write_back import WriteBack
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Residency, Tier
from kvpact.cache.tree.side import SideSpec
from tests.cache_world import World, outcome

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def lazy(**config: object) -> World:
    config.setdefault("device_pages", 4)
    return World(mode="write_back", **config)  # pyright: ignore[reportArgumentType]


def write_back(world: World, rank: int = 0) -> WriteBack:
    backup = world.caches[rank].core.backup
    assert isinstance(backup, WriteBack)
    return backup


def test_nothing_is_backed_up_at_insert() -> None:
    world = lazy(device_pages=8)
    world.store("abcd", "ef")
    assert world.metrics()["writes_submitted"] == 0
    assert world.peek("abcd")["host"] == 0


@LAGS
def test_an_insert_waits_for_its_victims(lag: int) -> None:
    world = lazy(lag=lag, evicts_whole_nodes=True)
    world.store("ab", "cd")
    assert world.put("xyz")
    assert world.same(lambda cache: cache.core.insert_line.num_waiting) == 1
    assert write_back(world).underway("device") == 4
    world.step_all(1 + lag)
    # Published on the host, while the device pages are still theirs.
    assert world.peek("ab") == {"device": 2, "host": 2, "usable": 2}
    world.drain()
    assert world.peek("xyz")["device"] == 3
    assert world.peek("ab") == {"device": 0, "host": 2, "usable": 2}
    assert world.metrics()["writes_submitted"] == 1
    assert write_back(world).underway("device") == 0
    world.load("ab", "r")
    world.drain()
    assert world.peek("ab")["device"] == 2
    world.finish("r")
    world.is_empty()


def test_device_pages_are_used_again_only_after_the_copy_has_ended_everywhere() -> None:
    world = lazy()
    world.store("abcd")
    world.fault(1, "write", "delay", steps=5)
    assert world.put("wxyz")
    world.step_all(4)
    assert world.peek("wxyz")["device"] == 0
    assert world.free_pages(DEVICE) == [0, 0]
    world.drain()
    assert world.peek("wxyz")["device"] == 4
    assert world.peek("abcd")["host"] == 4


@LAGS
def test_what_the_host_refuses_on_one_rank_is_dropped_on_all(lag: int) -> None:
    world = lazy(lag=lag)
    world.store("ab", "cd")
    world.fault(1, "host.reserve", "refuse")
    assert world.put("wxyz")
    world.drain()
    assert world.peek("wxyz")["device"] == 4
    assert world.peek("ab")["usable"] == 0
    assert world.peek("cd") == {"device": 0, "host": 2, "usable": 2}
    assert world.metrics()["backups_aborted"] == 1
    assert write_back(world).underway("device") == 0
    world.is_empty()


def test_without_host_pages_victims_are_deleted_at_once() -> None:
    world = lazy(host_pages=[0, 4])
    world.store("ab", "cd")
    assert world.put("wxyz")
    assert world.same(lambda cache: cache.core.insert_line.num_waiting) == 0
    world.drain()
    assert world.peek("wxyz")["device"] == 4
    assert world.metrics()["backups_no_room"] == 2


def test_a_failed_copy_deletes_the_victim() -> None:
    world = lazy()
    world.store("abcd")
    world.fault(0, "write", "fail")
    assert world.put("wx")
    world.drain()
    assert world.peek("abcd")["usable"] == 2  # trimmed: its last two pages were the victim
    assert world.peek("wx")["device"] == 2
    world.is_empty()


def test_a_hung_copy_is_quarantined_and_the_insert_goes_on() -> None:
    world = lazy(device_pages=6, copy_timeout_s=0.05, evicts_whole_nodes=True)
    world.store("abc", "def")
    world.fault(1, "write", "hang")
    assert world.put("xy")
    world.drain()
    assert world.peek("abc")["usable"] == 0
    assert write_back(world).underway("device") == 0
    world.heal()
    world.step_all(3)
    assert world.put("xyz")
    world.drain()
    assert world.peek("xyz")["device"] == 3
    world.is_empty()


def test_a_victim_that_is_needed_again_stays() -> None:
    world = lazy()
    world.store("abcd")
    world.fault(1, "write", "delay", steps=4)
    world.evict(DEVICE, 4)
    world.step()
    world.match("abcd", "r")
    world.drain()
    assert world.peek("abcd") == {"device": 4, "host": 4, "usable": 4}
    world.finish("r")
    assert world.evict(DEVICE, 4) == 4  # it is on the host: nothing has to move
    assert world.free_pages(DEVICE) == [4, 4]


def test_leaves_go_first_and_children_stay_reachable() -> None:
    world = lazy(device_pages=6, evicts_whole_nodes=True)
    world.store("ab", "abcd")
    assert world.put("wxyz")
    world.drain()
    assert world.peek("abcd") == {"device": 2, "host": 0, "usable": 4}
    assert world.node("abcd").host.state is Residency.RESIDENT
    assert world.put("stuvwx")
    world.drain()
    assert world.peek("abcd") == {"device": 0, "host": 4, "usable": 4}


@LAGS
def test_an_insert_waits_for_one_level_after_the_other(lag: int) -> None:
    world = lazy(lag=lag, device_pages=6, evicts_whole_nodes=True)
    world.store("ab", "abcd", "abcdef")
    assert world.put("uvwxyz")
    world.drain()
    assert world.peek("uvwxyz")["device"] == 6
    assert world.peek("abcdef") == {"device": 0, "host": 6, "usable": 6}
    assert world.metrics()["refused"] == 0


def test_a_parent_that_is_deleted_takes_what_is_only_on_the_host_below_it() -> None:
    world = lazy(device_pages=6, evicts_whole_nodes=True)
    world.store("ab", "abcd")
    assert world.put("wxyz")
    world.drain()
    world.fault(1, "host.reserve", "refuse")
    assert world.put("stuvwx")
    world.drain()
    assert world.peek("abcd")["usable"] == 0
    assert world.peek("wxyz")["host"] == 4
    world.is_empty()


@LAGS
def test_the_low_water_mark_demotes_ahead_of_need(lag: int) -> None:
    world = lazy(lag=lag, device_pages=6, low_water_pages=3, evicts_whole_nodes=True)
    world.store("ab", "cd", "ef")
    for _ in range(6 + 2 * lag):
        world.step()
    assert world.same(lambda cache: cache.core.manager.room("device")) >= 3
    assert [world.peek(text)["usable"] for text in ("ab", "cd", "ef")] == [2, 2, 2]
    assert world.put("xyz")
    assert world.same(lambda cache: cache.core.insert_line.num_waiting) == 0


@LAGS
@pytest.mark.parametrize("host_pages", [0, 12])
def test_the_low_water_mark_takes_no_more_than_it_lacks(lag: int, host_pages: int) -> None:
    world = lazy(
        lag=lag,
        device_pages=6,
        host_pages=host_pages,
        low_water_pages=2,
        evicts_whole_nodes=True,
    )
    world.store("ab", "cd", "ef")
    for _ in range(6 + 2 * lag):
        world.step()
    assert world.same(lambda cache: cache.core.manager.room("device")) == 2


def test_engine_pages_wait_for_a_demotion_too() -> None:
    world = lazy()
    world.store("abcd")
    tickets = world.each(lambda cache: cache.request_pages("r", 3))
    world.step()
    assert outcome(tickets) == (TicketState.PENDING, 0)
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 3)
    world.finish("r")


def test_what_was_demoted_is_stored() -> None:
    world = lazy(storage=True)
    world.store("abcd")
    assert world.in_storage("abcd") == [0, 0]
    world.evict(DEVICE, 4)
    world.drain()
    assert world.in_storage("abcd") == [4, 4]


def test_room_in_a_side_pool_is_waited_for_instead_of_demoting_everything() -> None:
    world = lazy(
        device_pages=16,
        side_pools=(SideSpec("mamba", "per_node"),),
        side={"mamba": (4, 8)},
        evicts_whole_nodes=True,
    )
    world.store("ab", "cd", "ef", "gh")
    assert world.put("ij")
    assert world.same(lambda cache: cache.core.insert_line.num_waiting) == 1
    assert write_back(world).underway("mamba.device") == 1
    world.drain()
    assert world.peek("ij")["device"] == 2
    assert [world.peek(text)["device"] for text in ("ab", "cd", "ef", "gh")] == [0, 2, 2, 2]
    assert write_back(world).underway("mamba.device") == 0


def test_an_insert_waits_where_its_victim_finds_no_slot() -> None:
    world = lazy(device_pages=17, num_slots=16)
    world.store("a")
    world.step_all(3)
    for letter in "bcdefghijklmnopq":
        assert world.put(letter)
    assert world.put("z")
    assert world.same(lambda cache: cache.core.insert_line.num_waiting) == 1
    world.drain()
    assert world.peek("z")["device"] == 1
    assert world.peek("a")["usable"] == 1


def test_a_reset_with_demotions_under_way() -> None:
    world = lazy()
    world.store("abcd")
    world.fault(0, "write", "delay", steps=4)
    assert world.put("wxyz")
    world.step()
    world.each(lambda cache: cache.reset())
    assert write_back(world).underway("device") == 0
    world.step_all(6)
    assert world.free_pages(DEVICE) == [4, 4]
    assert world.free_pages(HOST) == [16, 16]
    world.store("wxyz")
