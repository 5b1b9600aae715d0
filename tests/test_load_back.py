"""Load-backs: the same length on all ranks, elastic, and void everywhere where one rank failed."""

from __future__ import annotations

import msgspec
import pytest

from kvpact.cache.requests.results import Match
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Residency, Tier
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PENDING, READY, REFUSED = TicketState.PENDING, TicketState.READY, TicketState.REFUSED
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def make_world(text: str = "abcd", **config: object) -> World:
    world = World(**config)  # type: ignore[arg-type]
    world.host_only(text)
    return world


def take(world: World, rank: int, num_pages: int) -> list[int]:
    """Pages of one rank vanish, without a word to anybody."""
    world.checks = False
    pages = world.caches[rank].core.tiers.pools[DEVICE].reserve(num_pages)
    assert pages is not None
    return pages


def give_back(world: World, rank: int, pages: list[int]) -> None:
    world.caches[rank].core.tiers.pools[DEVICE].free(pages)
    world.checks = True


@LAGS
def test_loaded_and_the_same_everywhere(lag: int) -> None:
    world = make_world(lag=lag)
    tickets = world.load("abcd")
    for _ in range(lag):
        world.step()
        assert outcome(tickets)[0] is PENDING
        assert world.peek("abcd")["device"] == 0
    world.step()
    assert outcome(tickets) == (READY, 4)
    assert world.peek("abcd")["device"] == 4
    assert world.node("abcd").device.state is Residency.COPYING
    world.drain()
    assert world.pinned() == {DEVICE: 4, HOST: 0}  # the request holds it
    assert world.same(lambda cache: cache.report("load").host_hit_pages) == 4
    world.finish("load")
    world.is_empty()


@LAGS
@pytest.mark.parametrize("left", [0, 1, 3])
def test_the_length_is_the_least_that_any_rank_could(lag: int, left: int) -> None:
    world = make_world(lag=lag)
    pages = take(world, 1, 16 - left)
    tickets = world.load("abcd")
    world.step_all(1 + lag)
    assert outcome(tickets) == ((READY, left) if left else (REFUSED, 0))
    world.step_all(2 + lag)
    give_back(world, 1, pages)
    world.check()
    assert world.peek("abcd") == {"device": left, "host": 4, "usable": 4}
    world.finish("load")
    world.is_empty()


def test_pages_max_and_minimum() -> None:
    world = make_world(load_back_minimum_pages=3)
    assert outcome(world.load("abcd", "short", pages_max=2)) == (REFUSED, 0)
    assert "too short" in world.load("abcd", "short", pages_max=2)[0].why
    tickets = world.load("abcd", "enough", pages_max=3)
    world.drain()
    assert outcome(tickets) == (READY, 3)
    world.finish("short")
    world.finish("enough")


def test_below_the_minimum_on_one_rank_nobody_loads() -> None:
    world = make_world(load_back_minimum_pages=3)
    pages = take(world, 0, 14)
    tickets = world.load("abcd")
    world.step_all(3)
    give_back(world, 0, pages)
    assert outcome(tickets) == (REFUSED, 0)
    assert world.peek("abcd")["device"] == 0
    world.finish("load")
    world.is_empty()


def test_nothing_to_load() -> None:
    world = World()
    world.store("abcd")
    assert outcome(world.load("abcd")) == (REFUSED, 0)
    assert outcome(world.load("xy", "other")) == (REFUSED, 0)
    assert not world.caches[0].has_pending()
    assert world.pinned()[DEVICE] == 4
    world.finish("load")
    world.finish("other")


def test_room_is_made_for_it_before_it_is_voted() -> None:
    world = World(device_pages=6)
    world.host_only("abcd")
    world.store("uvwx")
    tickets = world.load("abcd")
    assert world.peek("uvwx")["device"] == 2
    world.drain()
    assert outcome(tickets) == (READY, 4)
    world.finish("load")


@LAGS
def test_source_and_base_are_pinned_until_it_has_ended(lag: int) -> None:
    world = World(lag=lag)
    world.store("abcd")
    assert world.evict(DEVICE, 2) == 2
    world.fault(0, "load", "delay", steps=4)
    world.load("abcd")
    world.abort("load")  # the request is over: what it asked for is withdrawn
    world.drain()
    world.is_empty()

    tickets = world.load("abcd", "again")
    world.step_all(1 + lag)
    assert outcome(tickets) == (READY, 2)
    world.finish("again")  # nobody needs it any more, but the copy runs
    assert world.pinned() == {DEVICE: 4, HOST: 2}
    assert world.evict(HOST, 9) == 0
    assert world.evict(DEVICE, 9) == 0
    world.drain()
    world.is_empty()


@LAGS
def test_two_requests_share_one_load(lag: int) -> None:
    world = make_world(lag=lag)
    one = world.load("abcd", "one")
    two = world.load("abcd", "two")
    world.drain()
    assert outcome(one) == outcome(two) == (READY, 4)
    assert world.metrics()["loads"] == 1
    world.finish("one")
    assert world.pinned()[DEVICE] == 4
    world.finish("two")
    world.is_empty()


@LAGS
def test_a_longer_request_loads_only_the_rest(lag: int) -> None:
    world = make_world("abcdef", lag=lag)
    one = world.load("abcd", "one")
    two = world.load("abcdef", "two")
    world.drain()
    assert (outcome(one), outcome(two)) == ((READY, 4), (READY, 6))
    assert world.metrics()["loads"] == 2
    world.finish("one")
    world.finish("two")
    world.is_empty()


def test_one_of_two_cancels_the_other_gets_it() -> None:
    world = make_world()
    world.load("abcd", "one")
    two = world.load("abcd", "two")
    world.abort("one")
    world.drain()
    assert outcome(two) == (READY, 4)
    world.finish("two")
    world.is_empty()


def test_both_cancel_and_nobody_loads() -> None:
    world = make_world()
    tickets = [*world.load("abcd", "one"), *world.load("abcd", "one"), *world.load("abcd", "two")]
    world.abort("one")
    world.abort("two")
    assert {ticket.state for ticket in tickets} == {REFUSED}
    world.drain()
    assert world.metrics()["loads"] == 0
    assert world.peek("abcd")["device"] == 0
    world.is_empty()


def test_asking_twice_and_aborting_withdraws_the_load() -> None:
    world = make_world()
    world.load("abcd", "one")
    world.load("abcd", "one")
    world.abort("one")
    world.drain()
    assert world.metrics()["loads"] == 0
    world.is_empty()


def test_cancelling_does_not_take_another_requests_insert_along() -> None:
    """A prompt that is on HOST is computed anew by one request; another one waits for that."""
    world = make_world()
    assert world.put("abcd", "computes", hold=True)
    tickets = world.load("abcd", "waits")
    assert outcome(tickets)[0] is PENDING
    world.abort("waits")
    world.drain()
    assert world.metrics()["refused"] == 0
    assert world.peek("abcd")["device"] == 4
    world.finish("computes")
    world.is_empty()


@LAGS
@pytest.mark.parametrize("when", [0, 1, 2, 3, 4])
def test_abort_in_every_state(lag: int, when: int) -> None:
    world = make_world(lag=lag)
    world.fault(1, "load", "delay", steps=2)
    world.load("abcd")
    world.step_all(when)
    world.abort("load")
    world.abort("load")
    assert len(world.caches[0].core.requests) == 0
    world.drain()
    world.is_empty()


def test_who_finds_no_slot_waits_in_line() -> None:
    world = World(device_pages=64, host_pages=64, num_slots=16)
    texts = [chr(ord("A") + index) for index in range(20)]
    world.store(*texts[:10])
    world.store(*texts[10:])
    world.evict(DEVICE, 64)
    tickets = [world.load(text, text) for text in texts]
    assert world.same(lambda cache: cache.core.load_back.num_waiting) == 4
    world.step()
    assert [outcome(one)[0] for one in tickets] == [READY] * 16 + [PENDING] * 4
    world.abort(texts[-1])
    world.drain()
    assert [outcome(one)[0] for one in tickets] == [READY] * 19 + [REFUSED]
    for text in texts:
        world.abort(text)
    world.is_empty()


# --- handles that are older than what they speak of ----------------------------------------------


def load_held(world: World, matches: list[Match], request: str) -> list[Ticket]:
    return [
        cache.request_load_back(request, match)
        for cache, match in zip(world.caches, matches, strict=True)
    ]


@LAGS
@pytest.mark.parametrize("pinned", [True, False])
def test_a_match_from_before_a_reset_reads_nothing_of_another_prompt(
    lag: int, pinned: bool
) -> None:
    world = make_world(lag=lag)
    matches = world.match("abcd", "r" if pinned else None)
    world.each(lambda cache: cache.reset())
    world.store("wxyz")  # has the pages by now
    tickets = load_held(world, matches, "r")
    assert outcome(tickets) == (REFUSED, 0)
    assert world.each(lambda cache: cache.pages("r")) == [[], []]
    world.check()
    world.finish("r")
    world.host_only("abcd")
    matches = [msgspec.structs.replace(match, pages=[]) for match in matches]
    tickets = load_held(world, matches, "again")
    world.drain()
    assert outcome(tickets) == (READY, 4), "what was computed anew since is found"
    world.finish("again")
    world.is_empty()


def test_a_match_of_evicted_nodes_finds_what_is_there_in_their_place() -> None:
    world = make_world()
    matches = world.match("abcd")
    world.evict(HOST, 100)
    node = matches[0].node
    assert node is not None
    assert not world.caches[0].core.tree.has(node)
    assert outcome(load_held(world, matches, "r")) == (REFUSED, 0)
    world.host_only("abcd")
    tickets = load_held(world, matches, "r")
    world.drain()
    assert outcome(tickets) == (READY, 4)
    world.finish("r")
    world.is_empty()


def test_a_match_keeps_its_own_tokens() -> None:
    world = make_world()
    tokens = prompt("abcd")
    matches = world.each(lambda cache: cache.match_prefix(tokens))
    tokens[:] = 7  # the scheduler's buffer is used for another prompt
    world.each(lambda cache: cache.reset())
    world.host_only("abcd")
    tickets = load_held(world, matches, "r")
    world.drain()
    assert outcome(tickets) == (READY, 4)


def test_loads_of_before_a_reset_are_never_taken_for_newer_ones() -> None:
    world = make_world()
    world.fault(0, "load", "hang", times=1)
    world.fault(1, "load", "hang", times=1)
    world.load("abcd", "old")
    world.step()
    old = world.each(lambda cache: cache.start_loading(["old"]))
    world.each(lambda cache: cache.reset())
    assert all(old)
    for cache, loads in zip(world.caches, old, strict=True):
        assert not cache.wait_layer(0, loads, 0.0), "it still runs"
        assert cache.start_loading(["old"]) == ()
    world.abort("old")
    world.host_only("wx")
    world.load("wx", "new")
    world.step()
    new = world.each(lambda cache: cache.start_loading(["new"]))
    for cache, before, after in zip(world.caches, old, new, strict=True):
        assert not set(before) & set(after)
        assert cache.wait_layer(0, after, 0.0)
    world.heal()
    world.drain()
    world.finish("new")
