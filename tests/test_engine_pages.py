"""The engine's own pages: at once out of a voted headroom, by vote beyond it."""

from __future__ import annotations

import pytest

from kvpact.cache.config import CacheConfig
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World, outcome

DEVICE = Tier.DEVICE
PENDING, READY, REFUSED = TicketState.PENDING, TicketState.READY, TicketState.REFUSED
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def allocate(world: World, request: str, num_pages: int) -> int | None:
    """How many pages it got; each rank has its own."""
    answers = world.each(lambda cache: cache.allocate(request, num_pages))
    counts = {None if pages is None else len(pages) for pages in answers}
    assert len(counts) == 1
    return counts.pop()


@LAGS
def test_at_once_out_of_the_headroom_and_topped_up_by_vote(lag: int) -> None:
    world = World(headroom_pages=4, lag=lag)
    world.match("a", "r")
    assert allocate(world, "r", 1) is None  # nothing was voted yet
    world.step_all(1 + lag)
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 4
    assert world.same(lambda cache: cache.room()) == 12
    assert allocate(world, "r", 3) == 3
    assert allocate(world, "r", 2) is None  # beyond it: by ticket
    assert world.same(lambda cache: cache.room()) == 12  # it was taken out of room before
    world.step_all(1 + lag)
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 4
    assert world.same(lambda cache: cache.room()) == 9
    world.abort("r")
    assert world.same(lambda cache: cache.room()) == 12
    world.drain()
    world.is_empty()


@LAGS
def test_beyond_it_by_ticket(lag: int) -> None:
    world = World(lag=lag)
    tickets = world.each(lambda cache: cache.request_pages("r", 6))
    assert outcome(tickets) == (PENDING, 0)
    world.step_all(1 + lag)
    assert outcome(tickets) == (READY, 6)
    assert world.each(lambda cache: len(cache.core.requests.require("r").private)) == [6, 6]
    world.each(lambda cache: cache.free("r", 2))
    assert world.free_pages(DEVICE) == [12, 12]
    world.abort("r")
    world.drain()
    world.is_empty()


@LAGS
@pytest.mark.parametrize("rank", [0, 1])
def test_refused_on_one_rank_is_refused_on_all(lag: int, rank: int) -> None:
    world = World(lag=lag)
    world.fault(rank, "device.reserve", "refuse")
    tickets = world.each(lambda cache: cache.request_pages("r", 6))
    world.drain()
    assert outcome(tickets) == (REFUSED, 0)
    assert "no device pages" in tickets[0].why
    assert world.metrics()["pages_refused"] == 1
    assert world.free_pages(DEVICE) == [16, 16]
    world.abort("r")
    world.is_empty()


def test_half_of_a_ticket_is_of_no_use() -> None:
    world = World(device_pages=[4, 16])
    world.checks = False
    taken = world.caches[1].core.tiers.pools[DEVICE].reserve(14)
    tickets = world.each(lambda cache: cache.request_pages("r", 4))
    world.step_all(2)
    assert taken is not None
    world.caches[1].core.tiers.pools[DEVICE].free(taken)
    world.check()
    assert outcome(tickets) == (REFUSED, 0)
    assert world.free_pages(DEVICE) == [4, 16]


@LAGS
def test_the_headroom_takes_what_every_rank_can_give(lag: int) -> None:
    world = World(headroom_pages=6, lag=lag)
    world.checks = False
    taken = world.caches[1].core.tiers.pools[DEVICE].reserve(12)
    world.step_all(1 + lag)
    assert taken is not None
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 4
    world.caches[1].core.tiers.pools[DEVICE].free(taken)
    world.checks = True
    world.step_all(2 + lag)
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 6
    world.drain()


def test_room_is_made_by_eviction_and_refused_where_it_cannot_be() -> None:
    world = World(device_pages=8)
    world.store("abcd")
    world.match("ab", "pinner")
    tickets = world.each(lambda cache: cache.request_pages("r", 6))
    assert world.peek("abcd")["device"] == 2
    world.drain()
    assert outcome(tickets) == (READY, 6)
    more = world.each(lambda cache: cache.request_pages("r", 1))
    assert outcome(more) == (REFUSED, 0)
    assert world.peek("abcd")["device"] == 2
    world.abort("r")
    world.abort("pinner")
    world.is_empty()


@LAGS
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_cancelled_in_every_state(lag: int, when: int) -> None:
    world = World(lag=lag, headroom_pages=2)
    tickets = world.each(lambda cache: cache.request_pages("r", 5))
    world.step_all(when)
    world.abort("r")
    assert outcome(tickets) == ((READY, 5) if when > lag else (REFUSED, 0))
    world.drain()
    assert world.metrics()["pages_refused"] == 0
    world.is_empty()


def test_a_smaller_headroom_gives_pages_back() -> None:
    world = World(headroom_pages=8)
    world.drain()
    world.step()
    assert world.free_pages(DEVICE) == [8, 8]
    world.each(lambda cache: cache.expect_pages(3))
    world.step()
    assert world.free_pages(DEVICE) == [13, 13]
    assert world.same(lambda cache: cache.room()) == 13


def test_tickets_without_a_slot_wait_and_the_line_is_bounded() -> None:
    world = World(device_pages=64, num_slots=16, waiting_tickets_max=2)
    names = [f"r{index}" for index in range(19)]
    tickets = [world.each(lambda cache, n=name: cache.request_pages(n, 1)) for name in names]
    assert world.same(lambda cache: cache.core.engine_pages.num_waiting) == 2
    assert outcome(tickets[-1]) == (REFUSED, 0)
    world.abort(names[16])
    world.drain()
    states = [outcome(one)[0] for one in tickets]
    assert states == [READY] * 16 + [REFUSED, READY, REFUSED]


@pytest.mark.parametrize("num_pages", [0, -1])
def test_nonsense_is_refused_and_changes_nothing(num_pages: int) -> None:
    world = World(1, headroom_pages=4)
    world.drain()
    world.step()
    cache = world.caches[0]
    before = cache.journal.fingerprint, cache.core.requests.digest, cache.core.engine_pages.headroom
    for call in (cache.allocate, cache.request_pages):
        with pytest.raises(Misuse, match="at least 1"):
            call("r", num_pages)
    with pytest.raises(Misuse, match="not live"):
        cache.free("r", 1)
    assert before == (
        cache.journal.fingerprint,
        cache.core.requests.digest,
        cache.core.engine_pages.headroom,
    )


@LAGS
def test_a_headroom_of_another_size_than_it_shall_have_is_pending(lag: int) -> None:
    world = World(headroom_pages=4, lag=lag)
    assert world.same(lambda cache: cache.has_pending())
    world.drain()
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 4
    world.each(lambda cache: cache.expect_pages(1))
    assert world.same(lambda cache: cache.has_pending())
    world.drain()
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 1
    world.each(lambda cache: cache.request_pages("r", 15))
    world.each(lambda cache: cache.expect_pages(3))
    world.drain()  # what the device cannot give now is nothing to step for
    world.abort("r")
    assert world.same(lambda cache: cache.has_pending())
    world.drain()
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 3
    world.is_empty()


def test_a_headroom_above_the_device_is_refused_where_it_is_said() -> None:
    with pytest.raises(Misuse, match=r"headroom_pages .* device_pages \(4\)"):
        CacheConfig(page_size=4, device_pages=4, host_pages=4, headroom_pages=5)
    world = World(device_pages=[8, 6], headroom_pages=6)
    for cache in world.caches:
        before = cache.journal.fingerprint
        with pytest.raises(Misuse, match="must be at most 6"):
            cache.expect_pages(7)
        assert cache.journal.fingerprint == before
    world.drain()
    assert world.same(lambda cache: cache.core.engine_pages.headroom) == 6
