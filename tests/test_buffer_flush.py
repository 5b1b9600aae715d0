"""Buffer-only mode: staging on the host, one merged copy per flush, nothing kept there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.paths.buffer_flush import BufferFlush
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Residency, Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def buffered(**config: object) -> World:
    return World(mode="buffer_only", storage=True, **config)  # pyright: ignore[reportArgumentType]


def flush(world: World, rank: int = 0) -> BufferFlush:
    backup = world.caches[rank].core.backup
    assert isinstance(backup, BufferFlush)
    return backup


def resident(world: World, *texts: str) -> None:
    """Prompts on DEVICE that nobody has queued yet."""
    for rank in world.ranks:
        cache = rank.cache
        for text in texts:
            for node in cache.core.tree.insert(prompt(text)):
                if not node.device.state:
                    pages = cache.core.tiers.pools[DEVICE].reserve(node.num_pages)
                    assert pages is not None
                    cache.core.manager.ledger.charge("device", node.num_pages)
                    rank.compute([node], pages)
                    cache.core.tree.place(node, DEVICE, Residency.RESIDENT, pages)


def queue(world: World, *texts: str) -> None:
    for text in texts:
        world.each(
            lambda cache, text=text: cache.core.backup.add_path(cache.core.tree.match(prompt(text)))
        )


@contextmanager
def no_device_allocator() -> Generator[None]:
    """Whoever takes or gives back a device page meanwhile has done wrong."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reserve", "reserve_up_to", "free"):
            patch.setattr(PagePool, name, _forbidden(name))
        yield


def _forbidden(name: str) -> Callable[[PagePool, Any], Any]:
    original: Callable[[PagePool, Any], Any] = getattr(PagePool, name)

    def call(self: PagePool, pages: Any) -> Any:
        assert self.name != "device" or not pages, f"device pool: {name}({pages})"
        return original(self, pages)

    return call


def test_it_needs_a_storage_and_no_side_pools() -> None:
    with pytest.raises(Misuse, match="storage"):
        World(mode="buffer_only")
    with pytest.raises(Misuse, match="side pools"):
        World(
            mode="buffer_only",
            storage=True,
            side_pools=(SideSpec("m", "per_node"),),
            side={"m": (1, 1)},
        )


@LAGS
def test_a_flush_is_one_copy_and_takes_no_device_page(lag: int) -> None:
    world = buffered(lag=lag, device_pages=16, host_pages=16)
    texts = ["ab", "cd", "ef", "gh", "ij", "kl", "mn"]
    resident(world, *texts)
    free = world.free_pages(DEVICE)
    queue(world, *texts)
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    with no_device_allocator():
        world.step()
        assert world.pinned() == {DEVICE: 14, HOST: 0}
        world.drain()
    assert world.free_pages(DEVICE) == free
    assert world.metrics()["writes_submitted"] == 1
    assert world.metrics()["backups"] == 7
    assert [world.in_storage(text) for text in texts] == [[2, 2]] * 7
    assert world.free_pages(HOST) == [16, 16]


def test_the_end_of_one_ranks_copy_releases_nothing() -> None:
    world = buffered()
    resident(world, "ab", "cd")
    queue(world, "ab", "cd")
    world.fault(1, "write", "delay", steps=4)
    world.step_all(4)
    # On rank 0 both have ended, on rank 1 "ab" has not: one ack is for both.
    assert not world.caches[0].core.tiers.copier.num_running
    assert world.pinned()[DEVICE] == 4
    assert world.evict(DEVICE, 4) == 0
    assert world.free_pages(HOST) == [12, 12]
    world.drain()
    assert world.pinned()[DEVICE] == 0
    assert world.free_pages(HOST) == [16, 16]


def test_each_storage_write_keeps_its_own_staging() -> None:
    world = buffered()
    resident(world, "ab", "cdef")
    queue(world, "ab", "cdef")
    world.fault(1, "storage.put", "delay", steps=5, times=2)
    world.step_all(4)
    assert world.pinned()[DEVICE] == 0
    assert world.free_pages(HOST) == [14, 14]
    assert flush(world).charged_pages(HOST) == 2
    world.drain()
    assert world.free_pages(HOST) == [16, 16]


def test_the_head_of_the_line_waits_and_the_earlier_ones_go() -> None:
    world = buffered(host_pages=[5, 8])
    texts = ["ab", "cd", "ef", "gh"]
    resident(world, *texts)
    queue(world, *texts)
    world.step()
    assert world.metrics()["backups"] == 2
    assert world.metrics()["deferred"] == 2
    assert world.metrics()["writes_submitted"] == 1
    world.drain()
    assert world.metrics()["backups"] == 4
    assert [world.in_storage(text) for text in texts] == [[2, 2]] * 4


@LAGS
def test_staging_refused_on_one_rank_keeps_the_order(lag: int) -> None:
    world = buffered(lag=lag)
    texts = ["ab", "cd", "ef", "gh"]
    resident(world, *texts)
    queue(world, *texts)
    world.fault(1, "host.reserve", "refuse", after=1)
    world.step_all(1 + lag)
    assert world.metrics()["backups"] == 1
    world.drain()
    assert world.metrics()["backups"] == 4
    flushed = [
        list(entry.values[1:])
        for entry in world.caches[0].journal.tail(200)
        if entry.tag == "flush"
    ]
    assert flushed == [[1, 2, 3, 4], [2, 3, 4]]


@LAGS
def test_what_comes_behind_an_undecided_insert_keeps_the_order(lag: int) -> None:
    """Such a node is an intent of its own, with the one before it as its parent."""
    world = buffered(lag=lag)
    resident(world, "ab", "cd", "ef")
    queue(world, "ab")
    assert world.put("xy")
    queue(world, "cd", "ef")
    world.fault(1, "host.reserve", "refuse", after=1)
    world.step_all(1 + lag)
    assert world.metrics()["backups"] == 1
    world.drain()
    texts = ["ab", "xy", "cd", "ef"]
    assert [world.in_storage(text) for text in texts] == [[2, 2]] * 4
    opened = [
        entry.values[1]
        for entry in world.caches[0].journal.tail(200)
        if entry.tag == "open" and entry.values[0] == "stage"
    ]
    a, x, c = (world.node(text).node_id for text in ("ab", "xy", "cd"))
    assert opened == [a, x, c, x], "the second time all three go together"


def test_an_insert_that_is_refused_takes_no_other_node_along() -> None:
    world = buffered()
    resident(world, "ab", "cd")
    queue(world, "ab")
    world.fault(0, "device.reserve", "refuse")
    refused = world.put("xy")
    queue(world, "cd")
    world.step()
    assert refused
    assert world.metrics()["refused"] == 1
    world.drain()
    assert [world.in_storage(text) for text in ("ab", "cd", "xy")] == [[2, 2], [2, 2], [0, 0]]
    assert world.free_pages(HOST) == [16, 16]


@LAGS
def test_a_part_that_fails_takes_no_other_node_along(lag: int) -> None:
    """It is not stored; what came behind it is copied again, without being asked for."""
    world = buffered(lag=lag)
    texts = ["ab", "cd", "ef", "gh"]
    resident(world, *texts)
    queue(world, *texts)
    world.fault(1, "write", "fail", after=1)
    world.drain()
    assert [world.in_storage(text)[0] for text in texts] == [2, 0, 2, 2]
    assert [world.node(text).is_stored for text in texts] == [True, False, True, True]
    world.store("cd")
    assert [world.in_storage(text) for text in texts] == [[2, 2]] * 4
    world.is_empty()


def test_parts_that_always_fail_do_not_hold_up_the_line() -> None:
    world = buffered()
    texts = ["ab", "cd", "ef"]
    resident(world, *texts)
    queue(world, *texts)
    world.fault(0, "write", "fail", times=-1)
    world.drain()
    assert [world.in_storage(text) for text in texts] == [[0, 0]] * 3
    assert world.free_pages(HOST) == [16, 16]
    assert world.pinned() == {DEVICE: 0, HOST: 0}


def test_too_large_is_dropped_with_what_lies_below() -> None:
    world = buffered(host_pages=[3, 8])
    resident(world, "abcd", "abcdx", "e")
    queue(world, "abcd", "abcdx", "e")
    world.drain()
    assert world.metrics()["backups"] == 1
    assert world.metrics()["backups_no_room"] == 2
    assert world.in_storage("e") == [1, 1]
    assert world.in_storage("abcdx") == [0, 0]


@LAGS
def test_flushes_of_one_ballot_keep_the_order(lag: int) -> None:
    """What was flushed first is refused on one rank: what was flushed after it stays behind it."""
    world = buffered(host_pages=8, lag=lag)
    resident(world, "ab", "cd")
    world.fault(1, "host.reserve", "refuse")
    queue(world, "ab")
    world.each(lambda cache: cache.flush())
    queue(world, "cd")
    world.each(lambda cache: cache.flush())
    world.step_all(1 + lag)
    if lag == 0:  # else the step that hears of it has planned them again already
        waiting = world.same(
            lambda cache: [one.node_id for one in cache.core.backup.waiting_nodes()]
        )
        assert waiting == [world.node("ab").node_id, world.node("cd").node_id]
    world.drain()
    assert [world.in_storage(text) for text in ("ab", "cd")] == [[2, 2], [2, 2]]
    assert world.metrics()["backups_lost"] == 0


def test_what_is_queued_goes_last() -> None:
    world = buffered(device_pages=4)
    resident(world, "ab")
    queue(world, "ab")
    resident(world, "cd")
    assert world.evict(DEVICE, 2) == 2
    assert world.peek("ab")["device"] == 2
    world.drain()
    assert world.in_storage("ab") == [2, 2]


def test_a_node_that_is_split_in_the_queue_is_written_whole() -> None:
    world = buffered()
    resident(world, "abcd")
    queue(world, "abcd")
    world.match("ab")
    assert world.same(lambda cache: cache.core.backup.num_queued) == 1
    world.drain()
    assert world.in_storage("abcd") == [4, 4]
    assert world.metrics()["backups"] == 2


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_node_that_is_split_on_its_way_is_written_whole(steps: int) -> None:
    world = buffered(lag=1)
    resident(world, "abcd")
    queue(world, "abcd")
    world.fault(0, "write", "delay", steps=1)
    world.fault(1, "storage.put", "delay", steps=2)
    world.step_all(steps)
    world.match("ab")
    world.drain()
    assert world.in_storage("abcd") == [4, 4]
    assert all(node.is_stored for node in (world.node("ab"), world.node("abcd")))
    world.is_empty()


def test_a_failed_copy_is_not_stored_and_proposed_again() -> None:
    world = buffered()
    world.fault(1, "write", "fail")
    assert world.put("ab")
    world.drain()
    assert world.in_storage("ab") == [0, 0]
    assert world.free_pages(HOST) == [16, 16]
    world.store("ab")
    assert world.in_storage("ab") == [2, 2]


def test_a_failed_put_is_proposed_again() -> None:
    world = buffered()
    world.fault(0, "storage.put", "fail")
    world.store("ab")
    assert not world.node("ab").is_stored
    world.store("ab")
    assert world.in_storage("ab") == [2, 2]


def test_a_hung_copy_and_a_hung_put_are_quarantined() -> None:
    world = buffered(copy_timeout_s=0.05)
    resident(world, "ab", "cd")
    queue(world, "ab")
    world.fault(0, "write", "hang")
    world.step()
    queue(world, "cd")
    world.fault(1, "storage.put", "hang", times=-1)
    world.step_all(20)
    assert world.pinned()[DEVICE] == 0
    assert world.same(lambda cache: cache.core.manager.ledger.usable("host")) == 14
    world.evict(DEVICE, 4)
    assert world.free_pages(DEVICE) == [14, 16]
    world.heal()
    world.step_all(3)
    assert world.free_pages(DEVICE) == [16, 16]
    assert world.free_pages(HOST) == [16, 16]


# -- loads -----------------------------------------------------------------------------------------


@LAGS
def test_a_prefetch_goes_on_to_the_device_and_leaves_no_staging(lag: int) -> None:
    world = buffered(lag=lag)
    world.store("abcd")
    world.evict(DEVICE, 10)
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    tickets = world.fetch("abcd", "r")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 4)
    assert world.peek("abcd") == {"device": 4, "host": 0, "usable": 4}
    assert world.free_pages(HOST) == [16, 16]
    world.finish("r")
    world.is_empty()


def test_at_admission_the_rest_of_a_prompt_comes_from_storage() -> None:
    world = buffered()
    world.store("abcd")
    world.evict(DEVICE, 10)
    world.store("ab")
    tickets = world.load("abcd", "r")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 2)
    assert world.peek("abcd")["device"] == 4
    assert world.free_pages(HOST) == [16, 16]
    # It came from there: an insert on top writes nothing but what is new.
    puts = world.backends[0].counters["stored"]
    world.store("abcde")
    assert world.backends[0].counters["stored"] == puts + 1


@LAGS
@pytest.mark.parametrize("when", range(7))
def test_a_prompt_that_came_meanwhile_is_cut_where_the_fetched_one_parts(
    lag: int, when: int
) -> None:
    """Whenever another prompt enters, undecided or not: nobody holds pages beyond his own."""
    world = buffered(lag=lag)
    world.store("abcd")
    world.evict(DEVICE, 10)
    for rank in range(2):
        world.fault(rank, "storage.get", "delay", steps=2, times=-1)
    world.load("abcdefgh", "r")  # of which storage has the first four pages
    world.step_all(when)
    assert world.put("abcdefxy", "other")  # r's prompt parts from it after six
    world.drain()
    assert world.same(lambda cache: len(cache.pages("r"))) <= 6
    world.abort("r")
    world.abort("other")


def test_loads_come_before_writes_for_staging() -> None:
    world = buffered(host_pages=3)
    world.store("abc")
    world.evict(DEVICE, 10)
    resident(world, "xyz")
    queue(world, "xyz")
    tickets = world.fetch("abc", "r")
    world.step()
    assert [intent.kind for intent in world.caches[0].core.manager.open_intents] == ["prefetch"]
    assert world.metrics()["deferred"] > 0
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 3)
    assert world.in_storage("xyz") == [3, 3]
    assert world.free_pages(HOST) == [3, 3]


@pytest.mark.parametrize("after", range(8))
def test_a_load_that_is_aborted_leaves_no_staging(after: int) -> None:
    world = buffered(lag=1)
    world.store("abcd")
    world.evict(DEVICE, 10)
    world.fetch("abcd", "r")
    world.step_all(after)
    world.abort("r")
    world.drain()
    assert world.free_pages(HOST) == [16, 16]
    world.is_empty()


def test_a_load_without_device_room_leaves_no_staging() -> None:
    world = buffered(device_pages=4)
    world.store("abc")
    world.evict(DEVICE, 10)
    assert world.put("wxyz", "holder", hold=True)
    world.drain()
    tickets = world.fetch("abc", "r")
    world.drain()
    assert outcome(tickets)[0] is TicketState.REFUSED
    assert world.free_pages(HOST) == [16, 16]


def test_the_line_is_bounded_whatever_comes_back_to_it() -> None:
    """Two were taken out of a line of three and two more came: of five the last two have to go."""
    world = buffered(write_queue_nodes_max=3, lag=1, host_pages=[4, 16])
    texts = ["ab", "cd", "ef", "gh", "ij"]
    resident(world, *texts)
    queue(world, "ab", "cd", "ef")
    world.fault(1, "host.reserve", "refuse", times=2)
    world.step()
    assert world.same(lambda cache: cache.core.backup.num_queued) == 1
    queue(world, "gh", "ij")
    world.step()
    assert world.same(lambda cache: cache.core.backup.num_queued) <= 3
    world.drain()
    assert [world.in_storage(text)[0] for text in texts] == [2, 2, 2, 0, 0]
    assert not any(world.node(text).is_queued for text in texts)
    assert world.same(lambda cache: cache.core.backup.num_dropped) == 2


def test_what_is_loading_is_not_written_out() -> None:
    world = buffered()
    world.store("ab")
    world.evict(DEVICE, 10)
    world.fault(1, "load", "delay", steps=6)
    world.fetch("ab", "r")
    world.step_all(4)
    assert world.node("ab").device.state is Residency.COPYING
    assert world.put("abc")
    world.step_all(2)
    assert world.metrics()["backups"] == 2
    world.drain()
    assert world.in_storage("abc") == [3, 3]


def test_nothing_new_begins_while_storage_is_detached() -> None:
    world = buffered(host_pages=2)
    resident(world, "ab", "cd")
    queue(world, "ab", "cd")
    world.step()
    world.each(lambda cache: cache.detach_storage())
    world.drain()
    assert world.in_storage("cd") == [0, 0]
    assert not world.node("cd").is_queued
    assert world.free_pages(HOST) == [2, 2]
    assert world.put("ef")
    world.drain()
    world.each(lambda cache: cache.attach_storage())
    world.step()
    world.store("cd")
    assert world.in_storage("cd") == [2, 2]


def test_a_reset_with_everything_open() -> None:
    world = buffered()
    resident(world, "ab", "cd")
    queue(world, "ab")
    world.fault(0, "write", "delay", steps=6)
    world.step()
    queue(world, "cd")
    world.fault(1, "storage.put", "delay", steps=6, times=-1)
    world.step_all(4)
    world.each(lambda cache: cache.reset())
    assert not world.same(lambda cache: cache.has_pending())
    assert world.peek("ab")["device"] == 0
    assert all(number < 16 for number in world.free_pages(HOST))
    assert world.put("xy")
    world.step_all(8)
    world.heal()
    world.drain()
    assert world.free_pages(HOST) == [16, 16]
    assert world.free_pages(DEVICE) == [14, 14]
    assert world.in_storage("xy") == [2, 2]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_load_holds_nothing_of_what_others_inserted_meanwhile(steps: int) -> None:
    """Another prompt goes on where this one ends: its node is not held, nor read, as a whole."""
    world = buffered()
    world.store("ab")
    world.evict(DEVICE, 10)
    world.load("abc", "r")
    world.step_all(steps)
    assert world.put("abcd", "other")
    world.drain()
    for cache in world.caches:
        held = cache.core.requests.require("r").held
        assert held is not None
        tokens = np.concatenate([node.tokens for node in held.path()])
        assert tokens.tolist() == prompt("abc").tolist()[: len(tokens)]
