"""Writes to storage: what was backed up everywhere goes out, pinned until every rank has it."""

from __future__ import annotations

import pytest

from kvpact.cache.storing.put import Storing
from kvpact.cache.storing.tier import StorageState
from kvpact.cache.tree.node import STORAGE, Tier
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def storing(world: World, rank: int = 0) -> Storing:
    tier = world.caches[rank].core.storage
    assert tier is not None
    return tier.storing


@LAGS
def test_what_is_backed_up_is_written_and_pinned_until_every_rank_has_it(lag: int) -> None:
    world = World(lag=lag, storage=True)
    world.fault(1, "storage.put", "delay", steps=6, times=3)
    assert world.put("abc")
    world.step_all(5 + 2 * lag)
    assert world.in_storage("abc") == [3, 0]
    assert world.pinned() == {DEVICE: 0, HOST: 3}
    assert world.evict(HOST, 3) == 0
    world.drain()
    assert world.in_storage("abc") == [3, 3]
    assert world.same(lambda cache: cache.metrics()["stored_pages"]) == 3
    assert world.evict(HOST, 3) == 3
    world.is_empty()


def test_a_failed_page_is_recorded_exactly() -> None:
    """As stored count the leading pages that every rank has."""
    world = World(events_max=100, storage=True)
    world.fault(0, "storage.put", "fail", after=3)
    world.fault(1, "storage.put", "fail", after=2)
    world.store("abcd")
    assert world.in_storage("abcd") == [3, 2]
    told = [event for event in world.hear() if event.tier == STORAGE]
    assert [len(event.pages) for event in told] == [2]
    assert storing(world).num_stored == 2
    assert world.caches[0].core.manager.ledger.charged(STORAGE) == 0


def test_a_slow_storage_fills_the_queue_for_everybody() -> None:
    world = World(storage=True, storage_queue_pages=2, device_pages=16)
    world.fault(1, "storage.put", "delay", steps=4, times=1)
    for text in ("ab", "cd", "ef"):
        assert world.put(text)
    world.step_all(4)
    assert world.same(lambda cache: len(cache.core.manager.open_intents)) == 1
    assert world.same(lambda cache: cache.core.manager.room(STORAGE)) == 0
    assert storing(world).num_queued == 2
    world.drain()
    assert [world.in_storage(text) for text in ("ab", "cd", "ef")] == [[2, 2]] * 3


def test_what_never_fits_the_queue_is_dropped_and_unpinned() -> None:
    world = World(storage=True, storage_queue_pages=2)
    world.store("abc")
    assert world.same(lambda cache: cache.metrics()["stored_pages"]) == 0
    assert storing(world).num_dropped == 1
    assert world.pinned() == {DEVICE: 0, HOST: 0}


def test_a_queue_of_nodes_has_a_bound() -> None:
    world = World(storage=True, storage_queue_pages=1, write_queue_nodes_max=2)
    world.fault(0, "storage.put", "hang", times=-1)
    for letter in "abcdef":
        assert world.put(letter)
        world.step_all(2)
    assert storing(world).num_queued == 2
    assert storing(world).num_dropped == 3
    world.heal()
    world.drain()
    world.is_empty()


def test_a_hung_write_is_quarantined_and_its_pages_wait_for_it() -> None:
    world = World(storage=True, copy_timeout_s=0.05)
    world.fault(0, "storage.put", "hang", times=-1)
    assert world.put("ab")
    world.step_all(12)
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    assert world.evict(HOST, 2) == 2
    assert [pool.num_limbo for pool in (c.core.tiers.pools[HOST] for c in world.caches)] == [2, 0]
    assert world.same(lambda cache: cache.metrics()["stored_pages"]) == 0
    world.drain()
    world.heal()
    world.step_all(2)
    assert world.free_pages(HOST) == [16, 16]
    # It was written after all, and what is there has the right bytes.
    assert world.in_storage("ab") == [2, 2]


def test_what_is_taken_back_from_the_host_is_not_written() -> None:
    """A child waits for a place; its parent's backup fails, and the child's pages are free."""
    world = World(storage=True, storage_queue_pages=1)
    world.fault(0, "storage.put", "hang")
    assert world.put("z")
    world.step_all(3)
    world.fault(0, "write", "delay", steps=5)
    world.fault(1, "write", "fail")
    assert world.put("a")
    assert world.put("ac")
    world.step_all(3)
    assert storing(world).num_queued == 1
    world.step_all(5)
    assert world.peek("ac")["host"] == 0
    world.heal()
    world.drain()
    assert storing(world).num_dropped == 1
    assert world.in_storage("ac") == [0, 0]
    world.is_empty()


def test_what_was_computed_on_an_open_load_waits_and_others_pass() -> None:
    world = World(storage=True, host_pages=20)
    world.host_only("ab")
    world.fault(0, "load", "delay", steps=8)
    world.load("ab", "e")
    world.step()
    world.own("abc", "e")
    world.insert("abc", "e")
    world.finish("e")
    assert world.put("z")
    world.step_all(5)
    assert world.in_storage("z") == [1, 1]
    assert world.in_storage("abc") == [2, 2]
    assert storing(world).num_queued == 1
    world.drain()
    assert world.in_storage("abc") == [3, 3]


# -- attach and detach -----------------------------------------------------------------------------


def test_detach_completes_what_is_open() -> None:
    world = World(storage=True)
    world.fault(1, "storage.put", "delay", steps=4, times=2)
    assert world.put("ab")
    world.step_all(4)
    with pytest.raises(Misuse, match="open"):
        world.caches[0].detach_storage(complete=False)
    world.each(lambda cache: cache.detach_storage())
    assert world.put("cd")
    world.drain()
    tier = world.caches[0].core.storage
    assert tier is not None
    assert tier.state is StorageState.DETACHED
    assert world.in_storage("ab") == [2, 2]
    assert world.in_storage("cd") == [0, 0]
    assert world.peek("cd")["host"] == 2
    world.step()
    assert world.same(lambda cache: cache.core.manager.ledger.usable(STORAGE)) == 0
    world.each(lambda cache: cache.attach_storage())
    world.step()
    world.store("ef")
    assert world.in_storage("ef") == [2, 2]


def test_detach_of_an_idle_storage_is_immediate() -> None:
    world = World(storage=True)
    world.store("ab")
    world.each(lambda cache: cache.detach_storage(complete=False))
    tier = world.caches[0].core.storage
    assert tier is not None
    assert not tier.is_attached
    assert tier.usable == 0


def test_without_a_storage_there_is_nothing_to_attach() -> None:
    world = World()
    for call in (world.caches[0].attach_storage, world.caches[0].detach_storage):
        with pytest.raises(Misuse, match="without a storage"):
            call()
