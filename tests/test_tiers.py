"""Room and eviction over tree, pools and ledger together."""

from __future__ import annotations

import pytest

from kvpact.cache.tree.node import Residency, Tier
from tests.cache_world import World, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def test_make_room_takes_exactly_what_is_missing() -> None:
    world = World(device_pages=8, host_pages=8)
    world.store("abcd", "xy")
    assert world.same(lambda cache: cache.core.tiers.make_room(DEVICE, 5))
    assert world.peek("abcd")["device"] == 1  # the oldest prompt was trimmed from its end
    assert world.peek("xy")["device"] == 2
    assert world.same(lambda cache: cache.core.manager.room("device")) == 5
    assert world.peek("abcd")["host"] == 4  # what is backed up stays there
    world.check()


def test_whole_nodes_go_where_configured() -> None:
    world = World(device_pages=8, host_pages=8, evicts_whole_nodes=True)
    world.store("abcd", "xy")
    assert world.evict(DEVICE, 1) == 4
    assert world.peek("abcd")["device"] == 0
    world.check()


def test_evicting_what_has_no_other_copy_deletes_it() -> None:
    world = World(device_pages=8, host_pages=0)
    world.store("abcd")
    assert world.evict(DEVICE, 3) == 3
    assert world.peek("abcd") == {"device": 1, "host": 0, "usable": 1}
    assert world.evict(DEVICE, 9) == 1
    assert world.same(lambda cache: len(list(cache.core.tree.nodes()))) == 0
    world.is_empty()


def test_nobody_goes_when_room_cannot_be_had() -> None:
    world = World(device_pages=8, host_pages=8)
    world.store("abcd", "xy")
    world.match("ab", "pinner")
    assert world.same(lambda cache: cache.room()) == 6
    assert not world.same(lambda cache: cache.core.tiers.make_room(DEVICE, 7))
    assert world.peek("abcd")["device"] == 4
    assert world.peek("xy")["device"] == 2
    assert world.same(lambda cache: cache.core.tiers.make_room(DEVICE, 6))
    assert world.peek("ab")["device"] == 2
    world.check()


def test_room_does_not_count_what_a_pinned_descendant_keeps() -> None:
    """A running backup pins its node only; the nodes above are not pinned and cannot go either."""
    world = World(device_pages=8, host_pages=8)
    world.store("ab")
    world.fault(0, "write", "hang")
    assert world.put("abcd")
    world.step()
    assert world.pinned()[DEVICE] == 2  # "cd"; "ab" above it is not pinned
    assert world.same(lambda cache: cache.room()) == 4
    world.put("xy")
    world.step()
    assert not world.same(lambda cache: cache.core.tiers.make_room(DEVICE, 5))
    assert world.peek("xy")["device"] == 2  # it was not evicted in vain


def test_room_counts_what_copies_of_the_past_still_hold() -> None:
    """Usable pages below what is charged are a debt: evicting must pay it before it makes room."""
    world = World(device_pages=8, host_pages=8, copy_timeout_s=0.02)
    world.host_only("abcd")
    world.store("wxyz")
    world.fault(1, "load", "hang")
    tickets = world.load("abcd")
    world.step_all(8)  # quarantined: 4 device pages of rank 1 stay with the copy
    assert all(ticket.state is not None for ticket in tickets)
    world.finish("load")
    ledger = world.caches[0].core.manager.ledger
    assert ledger.usable("device") == 4
    assert world.same(lambda cache: cache.room()) == 4
    assert not world.same(lambda cache: cache.core.tiers.make_room(DEVICE, 5))
    assert world.peek("wxyz")["device"] == 4
    world.heal()
    world.step_all(3)
    assert world.same(lambda cache: cache.room()) == 8


def test_room_pays_a_debt_before_it_promises() -> None:
    world = World(1, device_pages=8, host_pages=8)
    world.store("abcd", "wxyz")
    cache = world.caches[0]
    cache.core.manager.ledger.agree({"device": 6})  # as if copies that were given up held two pages
    assert cache.room() == 6
    assert not cache.core.tiers.make_room(DEVICE, 7)
    assert world.peek("abcd")["device"] == 4
    assert cache.core.tiers.make_room(DEVICE, 1)
    assert cache.core.manager.room("device") == 1
    assert world.peek("abcd")["device"] == 1


def test_prune_takes_what_is_nowhere_and_what_that_leaves_empty() -> None:
    world = World(1)
    cache = world.caches[0]
    (upper,) = cache.core.tree.insert(prompt("ab"))
    cache.core.tree.place(upper, HOST, Residency.RESIDENT, cache.core.tiers.pools[HOST].reserve(2))
    cache.core.manager.ledger.charge("host", 2)
    nodes = cache.core.tree.insert(prompt("abcd"))
    cache.core.tiers.hollow([nodes[-1]])
    cache.core.tiers.prune()
    assert [node.is_alive for node in nodes] == [True, False]
    cache.core.tiers.drop(upper, HOST)
    cache.core.tiers.prune()
    assert not upper.is_alive
    assert not list(cache.core.tree.nodes())
    world.check()


@pytest.mark.parametrize("tier", list(Tier))
def test_children_go_before_parents(tier: Tier) -> None:
    world = World()
    world.store("ab", "abcd")
    world.match("ab")  # the parent is older by its id, and used last
    assert world.evict(tier, 2) == 2
    assert world.peek("abcd")[tier.value] == 2
    assert world.metrics()[f"evicted_{tier.value}"] == 2
