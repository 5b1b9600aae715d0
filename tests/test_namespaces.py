"""One call drops one namespace: nothing of before is served again, from nowhere and to nobody."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.namespaces import Namespaces
from kvpact.cache.requests.table import RequestTable
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.eviction import LeastRecentlyUsed
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.errors import Divergence, Misuse
from tests.cache_world import PAGE_SIZE, World, no_note, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])
NAME = "adapter"


def drop(world: World, namespace: str = NAME) -> None:
    world.each(lambda cache: cache.drop_namespace(namespace))


def usable(world: World, text: str, namespace: str = NAME) -> int:
    return world.same(lambda cache: cache.peek(prompt(text), namespace=namespace))["usable"]


@LAGS
def test_what_may_go_goes_at_once_and_the_others_keep_theirs(lag: int) -> None:
    world = World(lag=lag)
    world.put("abcd", namespace=NAME)
    world.store("abcd")
    drop(world)
    assert usable(world, "abcd") == 0
    assert usable(world, "abcd", "") == 4
    world.drain()
    assert world.free_pages(DEVICE) == world.free_pages(HOST) == [12, 12]
    world.check()


@LAGS
def test_what_is_under_way_arrives_where_nobody_looks(lag: int) -> None:
    world = World(lag=lag, storage=True)
    world.put("abcd", namespace=NAME)  # undecided
    drop(world)
    world.put("ab", namespace=NAME)  # of the new one
    world.drain()
    assert usable(world, "abcd") == 2
    world.evict(DEVICE, 100)
    world.evict(HOST, 100)
    tickets = world.each(lambda cache: cache.prefetch("p", prompt("abcd"), namespace=NAME))
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 2), "in storage, too"
    drop(world)
    tickets = world.each(lambda cache: cache.prefetch("q", prompt("ab"), namespace=NAME))
    world.drain()
    assert outcome(tickets) == (TicketState.REFUSED, 0)
    world.finish("p")
    world.finish("q")
    world.is_empty()


def test_requests_of_before_keep_what_they_hold_and_insert_nothing() -> None:
    world = World()
    world.put("ab", namespace=NAME)
    world.drain()
    matches = world.match("abcd", "r", NAME)
    world.each(lambda cache: cache.request_pages("r", 2))
    world.drain()
    pages = world.each(lambda cache: cache.pages("r"))
    drop(world)
    assert world.each(lambda cache: cache.pages("r")) == pages
    results = world.each(lambda cache: cache.insert("r", prompt("abcd"), namespace=NAME))
    assert [(one.pages, one.new_pages) for one in results] == [([], 0)] * 2
    assert not any(world.each(lambda c: c.propose_insert("r", prompt("xy"), namespace=NAME)))
    assert usable(world, "abcd") == 0
    for cache, match in zip(world.caches, matches, strict=True):
        with pytest.raises(Misuse, match="loads other tokens"):
            cache.request_load_back("r", match)
        assert cache.request_load_back("new", match).num_pages == 0
        assert cache.pages("new") == []
    world.finish("r")
    world.finish("new")
    world.put("ab", "r", namespace=NAME)  # the name is used again, by a request of after
    world.drain()
    assert usable(world, "ab") == 2


def test_one_rank_alone_is_found() -> None:
    world = World(3)
    world.caches[2].drop_namespace(NAME)
    world.checks = False
    with pytest.raises(Divergence) as caught:
        world.step()
    assert caught.value.ranks == (2,)


def test_inner_names_are_of_one_namespace_each() -> None:
    table = RequestTable(RadixTree(PAGE_SIZE, LeastRecentlyUsed(), no_note))
    names = Namespaces(table)
    before = table.open("before")
    seen = {names.inner(NAME), names.inner(""), names.inner("adapter1")}
    for _ in range(3):
        assert names.drop(NAME) in seen
        assert names.inner(NAME) not in seen
        seen.add(names.inner(NAME))
    assert names.inner("") == ""
    assert names.is_older(before, NAME)
    assert not names.is_older(before, "")
    assert not names.is_older(table.open("after"), NAME)
    with pytest.raises(Misuse, match="zero character"):
        names.inner("adapter\x001")


@LAGS
def test_ranks_that_did_not_drop_in_the_same_order_agree_after_a_reset(lag: int) -> None:
    world = World(lag=lag, policy="reset", deadline_s=1.0, warn_s=0.5)
    first, second = world.caches
    for cache in (first, second):
        cache.match_prefix(prompt("ab"), namespace=NAME, request="r")
    first.abort("r")
    first.match_prefix(prompt("ab"), namespace=NAME, request="r")
    first.drop_namespace(NAME)
    second.abort("r")
    second.drop_namespace(NAME)
    second.match_prefix(prompt("ab"), namespace=NAME, request="r")
    world.checks = False
    world.step_all(lag + 2)
    assert world.caches[0].core.manager.epoch == 1
    older = [
        cache.core.namespaces.is_older(cache.core.requests.require("r"), NAME)
        for cache in world.caches
    ]
    assert older == [True, True]
    world.checks = True
    world.step_all(3)
