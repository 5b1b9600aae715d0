"""Backups: queued at insert, merged into one copy per step, published on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.copies.mover import PartPlan
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.paths.write_through import WriteThrough
from kvpact.cache.tree.node import Residency, Tier
from kvpact.consensus.core.errors import PeerError
from kvpact.consensus.core.participant import OutcomeKind
from tests.cache_world import World, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def resident(world: World, text: str) -> None:
    """Put a prompt on DEVICE without a backup."""
    for rank in world.ranks:
        cache = rank.cache
        for node in cache.core.tree.insert(prompt(text)):
            if not node.device.state:
                pages = cache.core.tiers.pools[DEVICE].reserve(node.num_pages)
                assert pages is not None
                cache.core.manager.ledger.charge("device", node.num_pages)
                rank.compute([node], pages)
                cache.core.tree.place(node, DEVICE, Residency.RESIDENT, pages)


def queue(world: World, text: str) -> None:
    world.each(lambda cache: cache.core.backup.add_path(cache.core.tree.match(prompt(text))))


def backups(cache: HierarchicalCache) -> WriteThrough:
    assert isinstance(cache.core.backup, WriteThrough)
    return cache.core.backup


# -- the queue -----------------------------------------------------------------------------------


def test_add_only_queues() -> None:
    """The path that ends a request pays for an append: nothing is pinned, charged or noted."""
    world = World()
    resident(world, "abcd")
    before = [cache.journal.fingerprint for cache in world.caches]
    charged = world.caches[0].core.manager.ledger.charged("host")
    world.each(lambda cache: backups(cache).add(cache.core.tree.walk(prompt("abcd"))[0][0]))
    assert [cache.journal.fingerprint for cache in world.caches] == before
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    assert world.caches[0].core.manager.ledger.charged("host") == charged
    assert not world.caches[0].core.manager.open_intents
    assert world.same(lambda cache: cache.core.backup.num_queued) == 1
    assert world.same(lambda cache: cache.has_pending())
    world.drain()
    assert world.peek("abcd")["host"] == 4


def test_a_node_is_queued_once() -> None:
    world = World()
    resident(world, "ab")
    for _ in range(3):
        queue(world, "ab")
    assert world.same(lambda cache: cache.core.backup.num_queued) == 1
    world.drain()
    assert world.metrics()["backups"] == 1
    queue(world, "ab")
    assert world.same(lambda cache: cache.core.backup.num_queued) == 0


def test_dead_nodes_are_dropped_and_counted() -> None:
    world = World()
    resident(world, "ab")
    queue(world, "ab")
    assert world.evict(DEVICE, 2) == 2
    world.drain()
    assert world.metrics()["backups"] == 0
    assert world.metrics()["backups_lost"] == 1
    assert world.metrics()["aborts"] == 0
    world.is_empty()


def test_what_is_queued_goes_last() -> None:
    """Whatever was used later: who makes room before the step finds another victim."""
    world = World(device_pages=4)
    resident(world, "ab")
    queue(world, "ab")
    resident(world, "cd")
    world.match("cd")
    assert world.evict(DEVICE, 2) == 2
    assert (world.peek("ab")["device"], world.peek("cd")["device"]) == (2, 0)
    world.drain()
    assert world.peek("ab")["host"] == 2
    assert world.metrics()["backups_lost"] == 0
    assert world.evict(DEVICE, 2) == 2  # what waits no longer is a victim like any other


@LAGS
def test_a_flush_lets_vote_and_ending_share_a_ballot(lag: int) -> None:
    world = World(lag=lag)
    resident(world, "ab")
    queue(world, "ab")
    world.each(lambda cache: cache.flush())
    assert world.pinned() == {DEVICE: 2, HOST: 2}
    world.step_all(1 + lag)
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    assert world.peek("ab")["host"] == 2
    assert world.metrics()["collectives"] == 1 + lag
    assert world.same(lambda cache: cache.has_pending()) is False


@LAGS
def test_a_flush_of_an_undecided_insert(lag: int) -> None:
    """Its pages are reserved and read before the step, and read again by what is queued later."""
    world = World(lag=lag)
    assert world.put("ab")
    world.each(lambda cache: cache.flush())
    world.match("a")  # splits what is being copied
    assert world.put("abcd")
    world.step()
    world.drain()
    assert world.peek("abcd") == {"device": 4, "host": 4, "usable": 4}
    world.evict(DEVICE, 10)
    world.evict(HOST, 10)
    world.is_empty()


def test_a_flush_that_fails_on_one_rank_is_the_error_of_all() -> None:
    world = World()
    resident(world, "ab")
    queue(world, "ab")
    world.checks = False

    def breaks() -> None:
        raise OSError("no pinned memory")

    world.caches[1].core.tiers.copier.submit = breaks
    world.each(lambda cache: cache.flush())
    with pytest.raises(PeerError, match="no pinned memory"):
        world.step()


def test_a_split_while_queued_is_repaired() -> None:
    world = World()
    resident(world, "abcdef")
    queue(world, "abcdef")
    world.match("ab")
    world.match("abcd")
    assert world.same(lambda cache: cache.core.backup.num_queued) == 1
    world.drain()
    assert world.peek("abcdef")["host"] == 6
    assert world.metrics()["backups"] == 3


def test_the_rest_of_a_trimmed_node_is_still_backed_up() -> None:
    world = World()
    resident(world, "abcdef")
    queue(world, "abcdef")
    assert world.evict(DEVICE, 2) == 2  # splits; the part that is in the queue goes
    world.drain()
    assert world.peek("abcdef") == {"device": 4, "host": 4, "usable": 4}


@LAGS
def test_ancestors_first(lag: int) -> None:
    """Queued leaves first, they are backed up below their ancestors all the same."""
    world = World(lag=lag)
    for text in ("ab", "abcd", "abcdef"):
        resident(world, text)
    for cache in world.caches:
        for node in reversed(cache.core.tree.match(prompt("abcdef"))):
            backups(cache).add(node)
    world.step_all(1 + lag)
    assert world.peek("abcdef")["host"] == 6
    world.drain()
    world.is_empty()


def test_one_merged_copy_per_step_whatever_the_number_of_nodes() -> None:
    world = World(device_pages=64, host_pages=64)
    for index in range(20):
        world.put(chr(ord("A") + index) * 2)
    world.step()
    assert world.each(lambda cache: cache.metrics()["writes_submitted"]) == [1, 1]
    assert world.metrics()["backups"] == 20
    assert world.metrics()["collectives"] == 1
    world.drain()


def test_the_queue_is_bounded() -> None:
    world = World(device_pages=32, write_queue_nodes_max=4)
    texts = [chr(ord("A") + index) for index in range(6)]
    for text in texts:
        resident(world, text)
        queue(world, text)
    assert world.same(lambda cache: cache.core.backup.num_queued) == 4
    assert world.same(lambda cache: cache.core.backup.num_dropped) == 2
    world.drain()
    assert sum(world.peek(text)["host"] for text in texts) == 4
    queue(world, texts[-1])  # dropped is not lost: the next insert that touches it asks again
    world.drain()
    assert world.peek(texts[-1])["host"] == 1


@LAGS
def test_what_finds_no_slot_stays_in_line(lag: int) -> None:
    world = World(device_pages=64, host_pages=64, num_slots=16, lag=lag)
    texts = [chr(ord("A") + index) for index in range(40)]
    for text in texts:
        resident(world, text)
        queue(world, text)
    world.step_all(1 + lag)
    backed_up = [text for text in texts if world.peek(text)["host"]]
    assert backed_up == texts[:16]
    world.drain()
    assert all(world.peek(text)["host"] for text in texts)
    assert world.metrics()["aborts"] == 0


def test_a_full_table_of_slots_is_noticed_once_per_step() -> None:
    """A long queue behind taken slots costs one look, not one per node, and evicts nobody."""
    world = World(1, device_pages=64, host_pages=64, num_slots=16)
    for index in range(40):
        resident(world, chr(ord("A") + index))
        queue(world, chr(ord("A") + index))
    cache = world.caches[0]
    world.fault(0, "write", "hang", times=-1)
    world.step()
    asked: list[int] = []
    make_room = cache.core.tiers.make_room

    def watch(tier: Tier, num_pages: int, side: Mapping[str, int] | None = None) -> bool:
        asked.append(num_pages)
        return make_room(tier, num_pages, side)

    cache.core.tiers.make_room = watch
    world.step()
    assert len(asked) <= 1
    assert cache.core.backup.num_queued == 24
    world.heal()
    del cache.core.tiers.make_room
    world.drain()


# -- the verdict ---------------------------------------------------------------------------------


@LAGS
def test_nothing_is_published_before_the_verdict(lag: int) -> None:
    world = World(lag=lag)
    resident(world, "ab")
    queue(world, "ab")
    for _ in range(lag):
        world.step()
        assert world.node("ab").host.state is Residency.RESERVED
        assert world.peek("ab")["host"] == 0
    world.step()
    assert world.peek("ab")["host"] == 2


@LAGS
@pytest.mark.parametrize("rank", [0, 1])
def test_refused_on_one_rank_nobody_publishes(lag: int, rank: int) -> None:
    world = World(lag=lag)
    world.fault(rank, "host.reserve", "refuse")
    world.put("ab")
    world.drain()
    assert world.peek("ab") == {"device": 2, "host": 0, "usable": 2}
    assert world.metrics()["backups"] == 0
    assert world.metrics()["backups_aborted"] == 1
    assert world.free_pages(HOST) == [16, 16]
    world.is_empty()
    world.put("ab")  # not retried by itself; the next insert that touches it asks again
    world.drain()
    assert world.peek("ab")["host"] == 2


@LAGS
def test_a_child_falls_with_its_parent(lag: int) -> None:
    world = World(lag=lag)
    for text in ("ab", "abcd"):
        resident(world, text)
    queue(world, "abcd")
    world.fault(1, "host.reserve", "refuse")  # the parent's: it comes first
    world.drain()
    assert world.peek("abcd")["host"] == 0
    assert world.metrics()["backups_aborted"] == 2
    world.is_empty()


def test_a_parent_stands_without_its_child() -> None:
    world = World()
    for text in ("ab", "abcd"):
        resident(world, text)
    queue(world, "abcd")
    world.fault(1, "host.reserve", "refuse", after=1)
    world.drain()
    assert world.peek("abcd")["host"] == 2
    world.is_empty()


def test_a_host_pool_without_room_aborts_only_what_does_not_fit() -> None:
    world = World(host_pages=[3, 16])
    world.store("ab")
    world.match("ab", "pinner")
    world.each(lambda cache: cache.core.tree.pin_path(world.node("ab", cache.rank), HOST))
    world.put("xyz")
    world.put("w")
    world.drain()
    assert world.peek("xyz")["host"] == 0
    assert world.peek("w")["host"] == 1
    assert world.peek("ab")["host"] == 2


def test_without_a_host_tier_nothing_is_queued() -> None:
    world = World(host_pages=0)
    world.put("ab")
    world.drain()
    assert world.metrics()["backups"] == 0
    assert world.metrics()["aborts"] == 0
    assert world.peek("ab")["device"] == 2


# -- the ending ----------------------------------------------------------------------------------


@LAGS
def test_pins_stay_until_it_has_ended_on_all_ranks(lag: int) -> None:
    world = World(lag=lag)
    world.fault(1, "write", "delay", steps=3)
    world.put("ab")
    world.step_all(2 + lag)  # ended on rank 0, not on rank 1
    assert world.peek("ab")["host"] == 2  # published by the verdict
    assert world.node("ab").host.state is Residency.COPYING
    assert world.pinned() == {DEVICE: 2, HOST: 2}
    assert world.evict(DEVICE, 9) == 0
    assert world.evict(HOST, 9) == 0
    world.drain()
    assert world.node("ab").host.state is Residency.RESIDENT
    world.is_empty()


@pytest.mark.parametrize("action", ["fail", "corrupt"])
@LAGS
def test_failure_takes_descendants(lag: int, action: str) -> None:
    """The parent's copy is late and fails; the children below it have long ended well."""
    world = World(lag=lag)
    world.fault(1, "write", "delay", steps=4)
    world.put("ab")
    world.step_all(1 + lag)
    world.put("abcd")
    world.put("abef")
    world.step_all(2 + lag)
    assert world.peek("abcd")["host"] == 4
    world.drain()
    assert world.peek("abcd")["host"] == 4
    world.is_empty()

    world.fault(1, "write", action)
    world.put("uv")
    world.step()
    world.put("uvwx")
    outcomes = [o.kind for _ in range(6) for o in world.step()[0].outcomes]
    assert OutcomeKind.FAIL in outcomes
    world.drain()
    assert world.peek("uvwx")["host"] == 0
    assert world.peek("uvwx")["device"] == 4
    assert world.peek("abcd")["host"] == 4
    world.is_empty()


def test_failure_takes_a_descendant_that_is_only_on_host() -> None:
    world = World()
    world.fault(1, "write", "hang")
    world.put("ab")
    world.step()
    world.put("abcd")
    world.step_all(2)
    assert world.evict(DEVICE, 2) == 2  # "cd" is only on HOST now, "ab" is still being copied
    assert world.peek("abcd") == {"device": 2, "host": 4, "usable": 4}
    mover = world.ranks[1].mover
    assert isinstance(mover, DeferredMover)
    mover._withheld[0].plan = PartPlan(ok=False)  # and when it ends, it will have failed
    world.heal()
    world.drain()
    assert world.peek("abcd") == {"device": 2, "host": 0, "usable": 2}
    world.is_empty()


@LAGS
def test_a_copy_that_hangs_is_given_up_by_all_in_the_same_step(lag: int) -> None:
    world = World(lag=lag, copy_timeout_s=0.05)
    world.fault(1, "write", "hang")
    world.put("ab")
    kinds = [[o.kind for o in result.outcomes] for result in world.step_all(1)]
    for _ in range(12):
        kinds = [[o.kind for o in result.outcomes] for result in world.step()]
        if OutcomeKind.QUARANTINE in kinds[0]:
            break
    assert kinds[0] == kinds[1] == [OutcomeKind.QUARANTINE]
    assert world.peek("ab")["host"] == 0
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    world.drain()
    assert world.same(lambda cache: cache.core.manager.ledger.usable("host")) == 14
    assert world.free_pages(HOST) == [16, 14]
    world.heal()
    world.step_all(2 + lag)
    assert world.same(lambda cache: cache.core.manager.ledger.usable("host")) == 16
    world.is_empty()


def test_a_split_while_copying_covers_both_parts() -> None:
    world = World()
    world.fault(1, "write", "delay", steps=2)
    world.put("abcd")
    world.step()
    world.match("ab")
    assert world.peek("abcd")["host"] == 4
    world.drain()
    assert [node.host.state for node in world.node("abcd").path()] == [Residency.RESIDENT] * 2
    world.is_empty()
