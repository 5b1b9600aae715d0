"""Emptying the storage at run time: on all ranks or on none, and nothing begins meanwhile."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.events import CacheEvent
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World, prompt


def stored_world() -> World:
    """Two pages are in the storage of both ranks, and nowhere else."""
    world = World(2, storage=True, events_max=100)
    world.put("ab")
    world.drain()
    world.evict(Tier.DEVICE, 16)
    world.evict(Tier.HOST, 16)
    return world


def fetched(world: World, name: str) -> list[int]:
    """Pages that a prefetch brings on each rank."""
    tickets = [cache.prefetch(name, prompt("ab")) for cache in world.caches]
    world.drain()
    for cache in world.caches:
        cache.abort(name)
    return [t.num_pages if t.state is TicketState.READY else 0 for t in tickets]


def test_it_is_empty_on_every_rank_and_goes_on() -> None:
    world = stored_world()
    for cache in world.caches:
        cache.clear_storage()
        assert cache.has_pending()
    world.drain()
    assert fetched(world, "r") == [0, 0]
    cleared = CacheEvent("cleared", "storage")
    assert all(cleared in cache.events() for cache in world.caches)
    world.put("ab")
    world.drain()
    world.evict(Tier.DEVICE, 16)
    world.evict(Tier.HOST, 16)
    assert fetched(world, "s") == [2, 2]


def test_nothing_is_stored_or_fetched_while_it_lasts() -> None:
    world = stored_world()
    for cache in world.caches:
        cache.clear_storage()
    tickets = [cache.prefetch("r", prompt("ab")) for cache in world.caches]
    assert [ticket.why for ticket in tickets] == ["no storage is attached"] * 2
    for cache in world.caches:
        cache.abort("r")
        with pytest.raises(Misuse, match="it is being cleared"):
            cache.clear_storage()
    world.drain()


def test_open_writes_make_it_a_misuse_that_changes_nothing() -> None:
    world = World(2, storage=True)
    world.put("ab")
    world.step()
    world.step()
    assert world.caches[0].core.storage is not None
    assert world.caches[0].core.storage.storing.is_busy
    for cache in world.caches:
        with pytest.raises(Misuse, match="writes or prefetches open"):
            cache.clear_storage()
    world.drain()
    world.evict(Tier.DEVICE, 16)
    world.evict(Tier.HOST, 16)
    assert fetched(world, "r") == [2, 2]


def test_without_storage_it_is_a_misuse() -> None:
    with pytest.raises(Misuse, match="without a storage"):
        World(1).caches[0].clear_storage()
