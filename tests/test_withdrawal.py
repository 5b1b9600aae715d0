"""Taking back what was published, leaves first, in agreed order."""

from __future__ import annotations

from kvpact.cache.tree.node import Tier
from tests.cache_world import World

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def retract_host(world: World, text: str) -> None:
    """As if the backup of the node had failed everywhere."""
    for cache in world.caches:
        cache.core.withdrawal.retract_host(world.node(text, cache.rank))
        cache.core.tiers.prune()


def test_host_goes_with_all_descendants_and_nothing_else() -> None:
    world = World()
    world.store("ab", "abcd", "abef", "xy")
    retract_host(world, "ab")
    for text in ("abcd", "abef"):
        assert world.peek(text) == {"device": 4, "host": 0, "usable": 4}
    assert world.peek("xy")["host"] == 2
    world.check()
    retract_host(world, "ab")  # again: nothing is left to take back
    world.check()
    world.is_empty()


def test_what_is_nowhere_then_is_deleted() -> None:
    world = World()
    world.store("ab", "abcd")
    assert world.evict(DEVICE, 2) == 2
    retract_host(world, "ab")
    assert world.peek("abcd") == {"device": 2, "host": 0, "usable": 2}
    assert world.same(lambda cache: len(list(cache.core.tree.nodes()))) == 1
    world.check()


def test_open_backups_below_are_withdrawn() -> None:
    world = World()
    world.store("ab")
    world.fault(0, "write", "delay", steps=2)
    world.put("abcd")
    world.step()
    assert world.peek("abcd")["host"] == 4
    retract_host(world, "ab")
    assert world.peek("abcd")["host"] == 0
    assert world.free_pages(HOST) == [14, 14]  # the copy still runs: its pages wait for it
    world.check()
    world.drain()
    assert world.peek("abcd")["host"] == 0
    world.is_empty()


def test_undecided_backups_below_are_aborted() -> None:
    world = World(lag=1)
    world.store("ab")
    world.put("abcd")
    world.step()
    retract_host(world, "ab")
    world.drain()
    assert world.peek("abcd") == {"device": 4, "host": 0, "usable": 4}
    assert world.metrics()["backups_aborted"] == 1
    world.is_empty()


def test_a_chain_of_a_thousand_nodes_is_taken_back() -> None:
    """Chunk by chunk a prompt becomes one node per chunk, deeper than Python may recurse."""
    length = 1100
    world = World(1, device_pages=length, host_pages=length)
    text = "".join(chr(ord("A") + index) for index in range(length))
    world.store(text)
    node = world.node(text)
    for _ in range(length - 1):
        world.caches[0].core.tree.split(node, 1)
    assert world.peek(text)["host"] == length
    assert len(world.node(text).path()) == length
    retract_host(world, text[:1])
    assert world.peek(text) == {"device": length, "host": 0, "usable": length}
    world.check()
