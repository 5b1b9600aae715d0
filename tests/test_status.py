"""How a rank stands, against an independent count; and reading it changes nothing."""

from __future__ import annotations

import msgspec
import pytest

from kvpact.cache.status import CacheStatus
from kvpact.cache.tree.node import STORAGE, Tier
from kvpact.harness.verify.agreement import snapshot
from tests.cache_world import World

FACTS = ("pages", "free", "limbo", "orphaned")


def of(world: World) -> list[CacheStatus]:
    return [cache.status() for cache in world.caches]


def test_a_new_cache_is_empty():
    (status, _) = of(World(device_pages=[6, 8], host_pages=5))
    device = status.pools["device"]
    assert (device.pages, device.free, device.usable, device.in_use) == (6, 6, 6, 0)
    assert (status.rank, status.epoch, status.step, status.requests) == (0, 0, 0, 0)
    assert (status.storage, status.is_pending, status.num_open) == ("", False, 0)
    assert status.pools["host"].pages == 5
    assert status.pools[STORAGE].pages == 0


def test_every_page_is_counted_once():
    world = World(device_pages=8, host_pages=8)
    world.store("abc")
    world.match("abc", "a")
    world.put("xy")
    assert of(world)[0].open_intents == {"insert": 1}
    assert of(world)[0].is_pending
    world.step()
    status = of(world)[0]
    device, host = status.pools["device"], status.pools["host"]
    nodes = list(world.caches[0].core.tree.nodes())
    assert device.charged == sum(node.num_pages for node in nodes if node.device.state)
    assert device.pinned >= 3
    assert device.free + device.in_use == device.pages
    assert host.free + host.in_use == host.pages
    assert status.counters == world.caches[0].metrics()
    assert sum(status.open_intents.values()) == len(world.caches[0].core.manager.open_intents)


@pytest.mark.parametrize("lag", [0, 2])
def test_what_is_agreed_is_equal_on_all_ranks(lag: int):
    world = World(3, lag=lag, device_pages=[8, 9, 10], storage=True)
    world.store("abcd")
    world.match("abx", "a")
    world.put("abq")
    for _ in range(4):
        world.step()
        told = [msgspec.to_builtins(status) for status in of(world)]
        for one in told:
            one.pop("rank")
            one["counters"] = {k: v for k, v in one["counters"].items() if "submitted" not in k}
            for pool in one["pools"].values():
                for fact in FACTS:
                    pool.pop(fact)
        assert told[0] == told[1] == told[2]


def test_reading_it_changes_nothing():
    world = World(storage=True)
    world.store("abc")
    world.put("abd")
    before = [snapshot(cache) for cache in world.caches]
    first = of(world)
    assert of(world) == first
    assert [snapshot(cache) for cache in world.caches] == before
    assert msgspec.json.decode(msgspec.json.encode(first[0]), type=CacheStatus) == first[0]
    with pytest.raises(AttributeError):
        first[0].epoch = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_orphan_and_a_reset_are_told():
    world = World()
    world.store("abc")
    world.match("abc", "a")
    world.each(lambda cache: cache.reset())
    status = of(world)[0]
    assert (status.epoch, status.pools["device"].orphaned, status.requests) == (1, 3, 1)
    assert status.pools["device"].in_use == 3
    assert world.free_pages(Tier.DEVICE)[0] == status.pools["device"].free


def test_a_staging_pool_is_told_under_the_name_of_its_tier() -> None:
    """A pool may have a name of its own; the ballot and the status call it by its tier."""
    world = World(mode="buffer_only", storage=True)
    for cache in world.caches:
        cache.core.tiers.pools[Tier.HOST].name = "staging"
    world.store("abcd")
    told = world.same(lambda cache: cache.status().pools["host"])
    assert (told.pages, told.free, told.charged) == (16, 16, 0)
