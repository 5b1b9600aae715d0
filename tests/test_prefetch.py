"""Prefetch: from storage to the host, the longest run that every rank has, or less by policy."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.storing.prefetch import Prefetch
from kvpact.cache.tree.node import Tier
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
READY, REFUSED, PENDING = TicketState.READY, TicketState.REFUSED, TicketState.PENDING
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def stored(text: str, **config: object) -> World:
    """A prompt that is in storage only."""
    world = World(storage=True, **config)  # pyright: ignore[reportArgumentType]
    world.store(text)
    world.evict(DEVICE, 100)
    world.evict(HOST, 100)
    assert world.peek(text)["usable"] == 0
    assert len(set(world.in_storage(text))) == 1
    return world


def prefetch(world: World) -> Prefetch:
    tier = world.caches[0].core.storage
    assert tier is not None
    return tier.prefetch


def forget(world: World, rank: int, text: str, page: int) -> None:
    """One rank's storage loses one page."""
    keys = world.ranks[rank].keys
    assert keys is not None
    assert world.backends[rank].remove([keys.of(prompt(text))[page]]) == [True]


@LAGS
def test_what_is_stored_comes_back(lag: int) -> None:
    world = stored("abcd", lag=lag)
    tickets = world.fetch("abcd", "r")
    assert outcome(tickets) == (PENDING, 0)
    world.drain()
    assert outcome(tickets) == (READY, 4)
    assert world.peek("abcd") == {"device": 0, "host": 4, "usable": 4}
    world.load("abcd", "s")
    world.drain()
    assert world.peek("abcd")["device"] == 4
    for request in ("r", "s"):
        world.finish(request)
    world.is_empty()


@pytest.mark.parametrize("page", [0, 1, 3])
def test_hits_are_the_longest_run_that_every_rank_has(page: int) -> None:
    world = stored("abcd")
    forget(world, 1, "abcd", page)
    tickets = world.fetch("abcd", "r")
    world.drain()
    assert outcome(tickets) == ((READY, page) if page else (REFUSED, 0))
    assert world.peek("abcd")["host"] == page
    assert world.free_pages(HOST) == [16 - page] * 2
    world.finish("r")
    world.is_empty()


def test_a_page_with_wrong_bytes_is_a_miss_everywhere() -> None:
    world = stored("abcd")
    world.fault(0, "storage.get", "corrupt", after=2)
    tickets = world.fetch("abcd", "r")
    world.drain()
    assert outcome(tickets) == (READY, 2)
    assert world.backends[0].counters["wrong"] == 1
    assert world.free_pages(HOST) == [14, 14]


def test_a_rank_without_room_shortens_it_for_all() -> None:
    world = stored("abcd")
    world.fault(1, "host.reserve", "short")
    tickets = world.fetch("abcd", "r")
    world.drain()
    assert outcome(tickets) == (READY, 3)


def test_what_cannot_be_fetched_is_refused_at_once() -> None:
    world = World(storage=True, host_pages=0)
    tickets = world.fetch("ab", "r")
    assert outcome(tickets) == (REFUSED, 0)
    assert tickets[0].why == "no host pages can be had"
    world = World(storage=True)
    world.store("ab")
    assert world.fetch("ab", "r")[0].why == "all of it is cached"
    world.each(lambda cache: cache.detach_storage())
    assert world.fetch("cd", "r")[0].why == "no storage is attached"
    assert World().fetch("ab", "r")[0].why == "no storage is attached"


def test_too_short_is_not_worth_it() -> None:
    world = stored("abcd", prefetch_minimum_pages=3)
    forget(world, 0, "abcd", 2)
    tickets = world.fetch("abcd", "r")
    world.drain()
    assert outcome(tickets) == (REFUSED, 0)
    assert world.free_pages(HOST) == [16, 16]


# -- in every state --------------------------------------------------------------------------------


@LAGS
@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_request_that_ends_meanwhile_refunds_everything(
    lag: int, after: int, ends_well: bool
) -> None:
    world = stored("abcd", lag=lag)
    world.fault(1, "storage.get", "delay", steps=2, times=2)
    tickets = world.fetch("abcd", "r")
    world.step_all(after)
    was_pending = outcome(tickets)[0] is PENDING
    (world.finish if ends_well else world.abort)("r")
    assert outcome(tickets)[0] is (REFUSED if was_pending else READY)
    world.drain()
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    assert world.peek("abcd")["host"] == (0 if was_pending else 4)
    world.is_empty()


def test_a_hung_read_is_quarantined() -> None:
    world = stored("abcd", copy_timeout_s=0.05)
    world.fault(1, "storage.get", "hang", times=-1)
    tickets = world.fetch("abcd", "r")
    world.step_all(10)
    assert outcome(tickets) == (REFUSED, 0)
    assert world.free_pages(HOST) == [16, 12]
    assert world.same(lambda cache: cache.core.manager.ledger.usable("host")) == 12
    world.heal()
    world.step_all(3)
    assert world.free_pages(HOST) == [16, 16]
    assert world.peek("abcd")["host"] == 0


def test_a_reset_with_a_read_open() -> None:
    """What ends of an old epoch changes nothing; its pages come back when it really has ended."""
    world = stored("abcd")
    world.fault(1, "storage.get", "delay", steps=6, times=-1)
    tickets = world.fetch("abcd", "r")
    world.step_all(2)
    world.each(lambda cache: cache.reset())
    assert outcome(tickets) == (REFUSED, 0)
    assert world.free_pages(HOST) == [16, 12]
    assert world.put("xyz")
    world.step_all(3)
    assert world.free_pages(HOST) == [13, 9]
    world.step_all(5)
    assert world.free_pages(HOST) == [13, 13]
    assert world.peek("abcd")["host"] == 0
    world.finish("r")
    world.heal()
    world.drain()
    world.is_empty()


def test_somebody_else_was_quicker() -> None:
    """The pages that have no place any more are free, on every rank."""
    world = stored("abcd")
    world.fault(0, "storage.get", "delay", steps=5, times=-1)
    tickets = world.fetch("abcd", "r")
    world.step_all(2)
    assert world.put("abx")
    world.step_all(3)
    assert world.peek("abx")["host"] == 3
    world.drain()
    assert outcome(tickets) == (READY, 4)
    assert world.peek("abcd")["host"] == 4
    assert world.free_pages(HOST) == [11, 11]
    world.finish("r")


# -- policies --------------------------------------------------------------------------------------


def test_best_effort_ends_with_what_has_arrived() -> None:
    world = stored("abcd", prefetch_policy="best_effort")
    world.fault(1, "storage.get", "delay", steps=20, times=-1, after=3)
    tickets = world.fetch("abcd", "r")
    world.step_all(4)
    assert outcome(tickets) == (PENDING, 0)
    assert not world.same(lambda cache: cache.settle_for_prefetch("r"))
    world.step_all(2)
    assert outcome(tickets) == (READY, 3)
    assert world.same(lambda cache: cache.settle_for_prefetch("r"))
    assert world.free_pages(HOST) == [13, 13]


def test_best_effort_before_anything_was_asked() -> None:
    world = stored("ab", prefetch_policy="best_effort")
    tickets = world.fetch("ab", "r")
    world.each(lambda cache: cache.settle_for_prefetch("r"))
    world.drain()
    assert outcome(tickets) == (REFUSED, 0)
    assert world.free_pages(HOST) == [16, 16]


def test_timeout_ends_it_on_the_agreed_clock() -> None:
    world = stored("abcd", prefetch_policy="timeout", prefetch_timeout_s=0.05)
    world.fault(0, "storage.get", "delay", steps=40, times=-1, after=1)
    tickets = world.fetch("abcd", "r")
    world.step_all(3)
    assert outcome(tickets) == (PENDING, 0)
    world.drain(12)
    assert outcome(tickets) == (READY, 1)
    assert not prefetch(world).num_open


def test_wait_complete_waits() -> None:
    world = stored("abcd", prefetch_timeout_s=0.01)
    world.fault(0, "storage.get", "delay", steps=20, times=-1)
    tickets = world.fetch("abcd", "r")
    world.step_all(15)
    assert not world.same(lambda cache: cache.settle_for_prefetch("r"))
    assert outcome(tickets) == (PENDING, 0)
    world.drain()
    assert outcome(tickets) == (READY, 4)
