"""Side pools: in the transaction of the KV pages on every path, and divided by a split."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.side import SidePages, SideSpec, split_side
from kvpact.consensus.core.errors import Misuse
from kvpact.harness.verify.promises import incomplete
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PER_PAGE = SideSpec("indexer", "per_page")
PER_NODE = SideSpec("mamba", "per_node")
WINDOW = SideSpec("swa", "window", window_pages=2)
ALL = (PER_PAGE, PER_NODE, WINDOW)
SITES = [f"{spec.name}.{tier}.reserve" for spec in ALL for tier in ("device", "host")]
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def beside(
    specs: tuple[SideSpec, ...] = ALL,
    pages: Mapping[str, tuple[int, int]] | None = None,
    **config: object,
) -> World:
    sizes = {spec.name: (pages or {}).get(spec.name, (16, 16)) for spec in specs}
    return World(side_pools=specs, side=sizes, **config)  # pyright: ignore[reportArgumentType]


def side_free(world: World) -> dict[str, list[int]]:
    """Free pages of each side pool, by rank."""
    return {
        side.spec.pool(tier): [rank.side[index].pools[tier].num_free for rank in world.ranks]
        for index, side in enumerate(world.ranks[0].side)
        for tier in Tier
    }


def side_limbo(world: World) -> list[int]:
    return [
        sum(pool.num_limbo for side in rank.side for pool in side.pools.values())
        for rank in world.ranks
    ]


def is_empty(world: World) -> None:
    world.evict(DEVICE, 100)
    world.evict(HOST, 100)
    world.is_empty()
    assert set(map(tuple, side_free(world).values())) == {(16,) * len(world.ranks)}
    assert side_limbo(world) == [0] * len(world.ranks)


# -- which positions -------------------------------------------------------------------------------


def test_what_a_node_needs() -> None:
    assert list(PER_PAGE.positions(3)) == [0, 1, 2]
    assert list(PER_NODE.positions(3)) == [2]
    assert list(WINDOW.positions(3)) == [1, 2]
    assert list(WINDOW.positions(1)) == [0]


@pytest.mark.parametrize("need, window", [("window", 0), ("per_node", 2), ("per_page", 1)])
def test_a_window_belongs_to_need_window(need: str, window: int) -> None:
    with pytest.raises(Misuse, match="window_pages"):
        SideSpec("x", need, window)


@given(
    positions=st.lists(st.integers(0, 9), unique=True).map(sorted),
    cut=st.integers(1, 9),
)
def test_a_split_divides_by_position(positions: list[int], cut: int) -> None:
    whole: SidePages = {"x": [(position, 100 + position) for position in positions]}
    upper, lower = split_side(whole, cut)
    assert all(position < cut for position, _ in upper["x"])
    assert [*upper["x"], *((position + cut, page) for position, page in lower["x"])] == whole["x"]
    assert all(position >= 0 for position, _ in lower["x"])


def test_pools_are_named_once() -> None:
    with pytest.raises(Misuse, match="side_pages"):
        World(side_pools=(PER_NODE, PER_NODE), side={"mamba": (2, 2)})
    with pytest.raises(Misuse, match="side_pages"):
        World(side_pools=(PER_NODE,))


# -- the paths -------------------------------------------------------------------------------------


@LAGS
def test_they_go_all_the_way_and_come_back(lag: int) -> None:
    world = beside(lag=lag)
    world.store("abcd")
    assert side_free(world) == {
        "indexer.device": [12, 12],
        "indexer.host": [12, 12],
        "mamba.device": [15, 15],
        "mamba.host": [15, 15],
        "swa.device": [14, 14],
        "swa.host": [14, 14],
    }
    world.evict(DEVICE, 4)
    assert side_free(world)["indexer.device"] == [16, 16]
    tickets = world.load("abcd", "r")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 4)
    assert side_free(world)["swa.device"] == [14, 14]
    world.finish("r")
    is_empty(world)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_pool_of_one_rank_refuses_is_refused_as_a_whole(site: str, rank: int) -> None:
    world = beside(lag=1)
    world.fault(rank, site, "refuse")
    assert world.put("abcd")
    world.drain()
    is_host = ".host." in site
    assert world.peek("abcd") == {"device": 4 * is_host, "host": 0, "usable": 4 * is_host}
    assert world.metrics()["refused"] == (not is_host)
    assert world.metrics()["backups_aborted"] == 1
    is_empty(world)


@pytest.mark.parametrize("spec", ALL)
def test_a_load_needs_its_side_pages_too(spec: SideSpec) -> None:
    world = beside()
    world.host_only("abcd")
    world.fault(1, f"{spec.name}.device.reserve", "refuse")
    tickets = world.load("abcd", "r")
    world.drain()
    assert outcome(tickets)[0] is TicketState.REFUSED
    assert world.peek("abcd")["device"] == 0
    world.finish("r")
    is_empty(world)


def test_room_is_made_in_the_pool_that_is_short() -> None:
    world = beside((PER_NODE,), {"mamba": (2, 3)}, evicts_whole_nodes=True)
    for text in ("ab", "cd", "ef"):
        world.store(text)
    assert [world.peek(text)["device"] for text in ("ab", "cd", "ef")] == [0, 2, 2]
    world.store("gh")
    assert [world.peek(text)["host"] for text in ("ab", "cd", "ef", "gh")] == [0, 2, 2, 2]


def test_what_can_never_fit_is_refused() -> None:
    world = beside((PER_PAGE,), {"indexer": (3, 16)})
    assert not world.put("abcd")
    world.drain()
    assert world.metrics()["refused"] == 1
    assert world.peek("abcd")["usable"] == 0


def test_a_prefix_is_used_only_up_to_where_every_state_is() -> None:
    """The upper half of a split node has no state at its end."""
    world = beside((PER_NODE,))
    world.store("abcd")
    assert world.match("ab")[0].device_pages == 0
    assert world.match("abcd")[0].device_pages == 4
    world.store("abx")
    assert world.match("abx")[0].device_pages == 3
    world.evict(DEVICE, 100)
    assert world.match("ab")[0].host_pages == 0
    tickets = world.load("abx", "r")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 3)
    assert side_free(world)["mamba.device"] == [15, 15]


def test_a_window_reaches_over_nodes() -> None:
    world = beside((WINDOW,))
    world.store("abcd")
    assert [world.match(text)[0].device_pages for text in ("abc", "ab", "a")] == [0, 0, 0]
    world.store("abcde")
    world.match("abcd")
    assert world.match("abcde")[0].device_pages == 5
    assert world.match("abcd")[0].device_pages == 4


def test_a_split_while_it_is_copied() -> None:
    world = beside(lag=1)
    world.fault(1, "write", "delay", steps=3)
    assert world.put("abcd")
    world.step_all(2)
    world.match("ab")
    world.drain()
    assert world.peek("abcd")["host"] == 4
    assert side_free(world)["indexer.host"] == [12, 12]
    world.evict(DEVICE, 100)
    world.fault(0, "load", "delay", steps=3, times=2)
    world.load("abcd", "r")
    world.step_all(2)
    world.match("abc")
    world.drain()
    assert world.peek("abcd")["device"] == 4
    world.finish("r")
    is_empty(world)


@pytest.mark.parametrize("action", ["fail", "hang"])
@pytest.mark.parametrize("site", ["write", "load"])
def test_a_copy_that_goes_wrong_gives_all_pages_back(site: str, action: str) -> None:
    world = beside(copy_timeout_s=0.05)
    if site == "load":
        world.host_only("abcd")
    world.fault(1, site, action)
    if site == "load":
        world.load("abcd", "r")
    else:
        assert world.put("abcd")
    world.step_all(10)
    assert world.peek("abcd")["device" if site == "load" else "host"] == 0
    world.heal()
    world.drain()
    world.step_all(2)
    if site == "load":
        world.abort("r")
    is_empty(world)


def test_pages_of_a_quarantined_copy_are_not_used_by_anybody() -> None:
    """Side pages whose copy still runs are out of use on that rank, and everyone knows."""
    world = beside((PER_PAGE,), copy_timeout_s=0.05)
    world.store("ab")
    world.ranks[1].side[0].mover.plan_part = world.boards[1].plan_part
    world.fault(1, "write", "hang", after=1)  # the first occasion is that of the KV pages
    assert world.put("xyz")
    world.step_all(10)
    world.evict(DEVICE, 100)
    world.step_all(2)
    assert side_limbo(world) == [0, 6]
    usable = world.same(lambda cache: cache.core.manager.ledger.usable("indexer.host"))
    assert usable == 13
    world.heal()
    world.step_all(2)
    is_empty(world)


def test_write_back_takes_the_side_pages_along() -> None:
    world = beside(mode="write_back", device_pages=4, evicts_whole_nodes=True)
    world.store("abcd")
    assert side_free(world)["indexer.host"] == [16, 16]
    world.store("wxyz")
    assert world.peek("abcd") == {"device": 0, "host": 4, "usable": 4}
    assert side_free(world)["indexer.host"] == [12, 12]
    assert side_free(world)["mamba.device"] == [15, 15]


def test_a_reset_orphans_the_side_pages_of_live_requests() -> None:
    world = beside()
    assert world.put("abcd", "r", hold=True)
    world.drain()
    world.each(lambda cache: cache.reset())
    assert side_free(world)["indexer.device"] == [12, 12]
    assert side_free(world)["indexer.host"] == [16, 16]
    world.step()
    assert world.same(lambda cache: cache.core.manager.ledger.usable("indexer.device")) == 12
    world.finish("r")
    world.step()
    is_empty(world)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(list(Tier)), st.integers(1, 4)), max_size=2),
    st.text("abx", max_size=6),
)
@settings(max_examples=25)
def test_a_peek_says_what_a_match_finds_and_all_of_that_has_its_state(
    texts: list[str], evicted: list[tuple[Tier, int]], asked: str
) -> None:
    world = beside()
    for text in texts:
        world.put(text)
        world.drain()
    for tier, num_pages in evicted:
        world.evict(tier, num_pages)
    peeked = world.peek(asked)
    match = world.match(asked)[0]
    assert peeked["device"] == match.device_pages
    assert peeked["usable"] == match.device_pages + match.host_pages
    assert [line for cache in world.caches for line in incomplete(cache, match)] == []
    assert world.peek(asked) == peeked, "the match has cut nodes, not what can be used"


def test_what_has_state_beside_it_is_not_fetched_from_storage_without_that() -> None:
    world = beside((WINDOW,), storage=True)
    world.store("abcd")
    world.each(lambda cache: cache.reset())
    tickets = world.fetch("abcd")
    assert outcome(tickets) == (TicketState.REFUSED, 0)
    assert {ticket.why for ticket in tickets} == {
        "side pools are not stored: their state must be computed"
    }
    world.finish("fetch")
    world.host_only("abcd")
    tickets = world.load("abcd")
    world.drain()
    assert outcome(tickets) == (TicketState.READY, 4), "what is computed anew is whole"


@LAGS
def test_what_a_detach_keeps_is_charged_again_in_every_pool(lag: int) -> None:
    world = beside(policy="detach", lag=lag)
    world.store("abcd")
    before = side_free(world)
    world.caches[1].match_prefix(prompt("abcd"))  # one rank alone
    world.checks = False
    world.step_all(lag + 1)
    world.checks = True
    world.step()
    assert world.same(lambda cache: cache.core.manager.epoch) == 1
    assert world.peek("abcd") == {"device": 4, "host": 0, "usable": 4}
    for spec in ALL:
        name = spec.pool(DEVICE)
        assert side_free(world)[name] == before[name]
        assert world.same(lambda cache, pool=name: cache.core.manager.ledger.charged(pool)) > 0
