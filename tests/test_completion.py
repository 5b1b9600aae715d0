"""Present means complete: what nodes lack of side pools comes by a vote, in both tiers."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.side import SideSpec
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PER_PAGE = SideSpec("indexer", "per_page")
PER_NODE = SideSpec("mamba", "per_node")
WINDOW = SideSpec("swa", "window", window_pages=2)
ALL = (PER_PAGE, PER_NODE, WINDOW)
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def beside(specs: tuple[SideSpec, ...] = ALL, pages: int = 16, **config: object) -> World:
    sizes = {spec.name: (pages, pages) for spec in specs}
    return World(side_pools=specs, side=sizes, **config)  # pyright: ignore[reportArgumentType]


def free(world: World, tier: Tier) -> list[list[int]]:
    return [
        [rank.side[index].pools[tier].num_free for rank in world.ranks]
        for index in range(len(world.ranks[0].side))
    ]


def everything_comes_back(world: World) -> None:
    world.evict(DEVICE, 100)
    world.evict(HOST, 100)
    world.is_empty()
    for tier in Tier:
        assert all(set(pages) == {16} for pages in free(world, tier))


def compute_own(world: World, text: str, request: str) -> None:
    """As an engine with pages of its own: match, take pages, compute, insert."""
    world.match(text, request)
    world.own(text, request)
    world.insert(text, request)


@LAGS
def test_a_state_that_a_split_lost_comes_back_with_the_next_insert(lag: int) -> None:
    world = beside(lag=lag)
    world.store("abcd", "abxy")
    assert world.peek("ab") == {"device": 0, "host": 0, "usable": 0}
    assert world.put("ab")
    assert world.peek("ab")["usable"] == 0, "nothing is published before the verdict"
    world.drain()
    assert world.peek("ab") == {"device": 2, "host": 2, "usable": 2}
    world.evict(DEVICE, 100)
    tickets = world.load("ab")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 2)
    assert world.caches[0].side_pages("load").keys() == {"indexer", "mamba", "swa"}
    world.finish("load")
    everything_comes_back(world)


@LAGS
def test_pages_of_the_engine_are_complete_after_a_vote(lag: int) -> None:
    world = beside(lag=lag)
    compute_own(world, "abcd", "r")
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    world.drain()
    assert world.peek("abcd") == {"device": 4, "host": 4, "usable": 4}
    side = world.caches[0].side_pages("r")
    assert {name: [at for at, _ in pages] for name, pages in side.items()} == {
        "indexer": [0, 1, 2, 3],
        "mamba": [3],
        "swa": [2, 3],
    }  # fmt: skip
    world.finish("r")
    everything_comes_back(world)


def test_a_request_that_goes_on_completes_each_end() -> None:
    world = beside()
    compute_own(world, "abcd", "r")
    world.drain()
    world.own("abcdef", "r")
    world.insert("abcdef", "r")
    world.drain()
    assert [world.peek(text)["device"] for text in ("abcd", "abcdef")] == [4, 6]
    world.finish("r")
    everything_comes_back(world)


def test_a_window_reaches_into_the_node_above() -> None:
    world = beside((WINDOW,))
    world.store("abcd")
    assert world.put("abxy")
    world.drain()
    assert world.peek("ab")["usable"] == 0
    assert world.put("abz")  # its window is z and what the split left without: b
    world.drain()
    assert world.peek("abz") == {"device": 3, "host": 3, "usable": 3}
    everything_comes_back(world)


@pytest.mark.parametrize("spec", ALL, ids=[spec.name for spec in ALL])
def test_a_rank_without_side_pages_leaves_all_as_they_were(spec: SideSpec) -> None:
    world = beside((spec,))
    compute_own(world, "abcd", "r")
    world.fault(1, f"{spec.name}.device.reserve", "refuse")
    world.drain()
    assert world.peek("abcd")["usable"] == 0
    assert free(world, DEVICE) == [[16, 16]]
    world.insert("abcd", "r")
    world.drain()
    assert world.peek("abcd") == {"device": 4, "host": 4, "usable": 4}, "the next one asks again"
    world.finish("r")
    everything_comes_back(world)


@pytest.mark.parametrize("action", ["fail", "hang"])
def test_a_copy_to_the_host_that_goes_wrong_publishes_nothing(action: str) -> None:
    world = beside((PER_NODE,), copy_timeout_s=0.1)
    world.store("abcd", "abxy")
    assert world.put("ab")
    world.step_all(1)
    world.fault(1, "write", action)
    world.step_all(30)
    assert world.peek("ab") == {"device": 2, "host": 0, "usable": 2}
    assert world.peek("abcd")["host"] == 4, "what was whole before is not touched"
    world.heal()
    world.drain()
    assert world.put("ab")
    world.drain()
    assert world.peek("ab")["host"] == 2
    everything_comes_back(world)


def test_without_the_state_pages_are_kept_and_served_to_nobody() -> None:
    world = beside((PER_NODE,))
    world.match("ab", "r")
    world.own("ab", "r")
    world.each(lambda cache: cache.insert("r", prompt("ab")))
    world.drain()
    assert world.peek("ab")["usable"] == 0
    world.insert("ab", "r")
    world.drain()
    assert world.peek("ab")["usable"] == 2
    world.finish("r")
    everything_comes_back(world)


def test_a_load_of_a_part_ends_where_its_state_is() -> None:
    world = beside((PER_NODE,))
    world.store("ab", "abcd")
    world.evict(DEVICE, 100)
    tickets = world.load("abcd", pages_max=3)
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 2), "in the middle of cd there is none"
    world.finish("load")
    everything_comes_back(world)


def test_state_on_the_host_is_of_no_use_beside_an_incomplete_device() -> None:
    world = beside((PER_NODE,))
    world.host_only("ab")
    world.each(lambda cache: cache.core.tree.match(prompt("")))
    world.each(lambda cache: cache.core.requests.open("r"))
    world.own("ab", "r")
    world.each(lambda cache: cache.insert("r", prompt("ab")))
    world.drain()
    assert world.peek("ab") == {"device": 0, "host": 2, "usable": 0}, "no load would bring it"
    assert world.match("ab")[0].host_pages == 0
    world.finish("r")
    everything_comes_back(world)


@LAGS
def test_what_was_computed_on_a_load_that_failed_completes_nothing(lag: int) -> None:
    world = beside((PER_NODE,), lag=lag)
    world.host_only("abcd")
    world.fault(1, "load", "fail")
    world.load("abcd", "r")
    world.step_all(1 + lag)
    assert world.put("abcdef")
    world.drain()
    assert world.peek("abcdef")["usable"] == 0
    world.abort("r")
    everything_comes_back(world)


@LAGS
def test_a_reset_forgets_what_waits_for_its_state(lag: int) -> None:
    world = beside(lag=lag)
    compute_own(world, "abcd", "r")
    world.each(lambda cache: cache.reset())
    assert not world.caches[0].has_pending()
    world.finish("r")
    world.step_all(1)
    everything_comes_back(world)
