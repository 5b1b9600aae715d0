"""The cache as a scheduler sees it: each call and each misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Divergence, Misuse
from tests.cache_world import World, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def serve(world: World, text: str, request: str) -> None:
    """Match, get pages for the rest, compute and insert; the request stays live."""
    world.match(text, request)
    world.own(text, request)
    world.insert(text, request)


# -- match ---------------------------------------------------------------------------------------


def test_match_tells_the_tiers_apart_and_only_whole_pages_count() -> None:
    world = World()
    world.store("abcd")
    world.evict(DEVICE, 1)
    for match in world.match("abcdxy"):
        assert (match.device_pages, match.host_pages, match.storage_pages) == (3, 1, 0)
        assert len(match.pages) == 3
    tokens = prompt("abc")[:-1]
    assert world.same(lambda cache: cache.match_prefix(tokens).device_pages) == 2
    assert world.match("zz")[0].node is None


def test_match_pins_for_its_request_and_peek_changes_nothing() -> None:
    world = World()
    world.store("abcd")
    world.match("abcd")
    assert world.pinned()[DEVICE] == 0
    before = world.same(lambda cache: cache.journal.fingerprint)
    assert world.peek("abxx")["device"] == 2  # inside a node: nothing is split for it
    assert world.same(lambda cache: cache.journal.fingerprint) == before
    assert world.same(lambda cache: len(list(cache.core.tree.nodes()))) == 1
    world.match("ab", "r")
    assert world.pinned()[DEVICE] == 2
    world.match("abc", "r")  # again, while it waits: the pin moves along
    assert world.pinned()[DEVICE] == 3
    world.abort("r")
    world.is_empty()


def test_namespaces_never_match_each_other() -> None:
    world = World()
    world.put("abcd", namespace="tenant")
    world.drain()
    assert world.match("abcd")[0].device_pages == 0
    assert world.match("abcd", namespace="other")[0].device_pages == 0
    assert world.match("abcd", namespace="tenant")[0].device_pages == 4
    world.match("abcd", "r", namespace="tenant")
    with pytest.raises(Misuse, match="namespace"):
        world.caches[0].insert("r", prompt("abcd"))


# -- insert --------------------------------------------------------------------------------------


def test_insert_takes_the_requests_own_pages() -> None:
    world = World()
    world.match("abcd", "r")
    world.own("abcd", "r")
    own = world.each(lambda cache: list(cache.core.requests.require("r").private))
    results = world.insert("abcd", "r")
    assert [result.pages for result in results] == own
    assert (results[0].new_pages, results[0].duplicate_pages) == (4, 0)
    assert world.pinned()[DEVICE] == 4
    world.drain()
    assert world.peek("abcd")["host"] == 4
    world.finish("r")
    world.is_empty()


def test_duplicates_are_freed_and_the_rows_are_the_trees() -> None:
    world = World()
    world.match("abcd", "late")
    world.own("abcd", "late")
    serve(world, "abxy", "early")
    results = world.insert("abcd", "late")
    assert (results[0].new_pages, results[0].duplicate_pages) == (2, 2)
    for cache, result in zip(world.caches, results, strict=True):
        assert result.pages == cache.match_prefix(prompt("abcd")).pages
    world.check()
    assert world.free_pages(DEVICE) == [10, 10]
    world.finish("late")
    world.finish("early")
    world.drain()
    world.is_empty()


def test_chunked_prefill_is_insert_repeated() -> None:
    """Also with pages to spare: what is not inserted yet stays the request's own."""
    world = World()
    world.match("abcdef", "r")
    world.own("abcdef", "r")
    for end in (2, 4, 6):
        result = world.insert("abcdef"[:end], "r")[0]
        assert (result.new_pages, len(result.pages)) == (2, end)
        world.step()
        assert world.peek("abcdef")["host"] == end
    assert world.insert("abcd", "r")[0].new_pages == 0  # less than it holds: nothing changes
    assert world.pinned()[DEVICE] >= 6
    report = world.same(lambda cache: cache.finish_request("r", prompt("abcdef")))
    assert (report.prompt_pages, report.device_hit_pages, report.computed_pages) == (6, 0, 6)
    world.drain()
    world.is_empty()


def test_what_is_under_way_for_another_vote_stays_the_requests_own() -> None:
    world = World(lag=1)
    world.match("abcd", "r")
    world.own("abcd", "r")
    world.put("ab")  # the same tokens, undecided
    result = world.insert("abcd", "r")[0]
    assert (result.new_pages, result.duplicate_pages) == (0, 0)
    world.drain()
    result = world.insert("abcd", "r")[0]
    assert (result.new_pages, result.duplicate_pages) == (2, 2)
    world.finish("r")
    world.drain()
    world.is_empty()


MISUSES: list[tuple[str, Callable[[HierarchicalCache], object]]] = [
    ("not live", lambda cache: cache.insert("nobody", prompt("ab"))),
    ("not live", lambda cache: cache.finish_request("nobody")),
    ("not live", lambda cache: cache.free("nobody", 1)),
    ("not live", lambda cache: cache.report("nobody")),
    ("not live", lambda cache: cache.start_loading(["nobody"])),
    ("inserts 5 pages but holds 2 and owns 2", lambda cache: cache.insert("r", prompt("abxyz"))),
    ("other tokens", lambda cache: cache.insert("r", prompt("aZcd"))),
    ("owns 2 pages, not 3", lambda cache: cache.free("r", 3)),
    ("at least 0", lambda cache: cache.free("r", -1)),
    ("before it matches again", lambda cache: cache.match_prefix(prompt("a"), request="r")),
    ("at least 1", lambda cache: cache.request_pages("r", 0)),
    ("at least 1", lambda cache: cache.allocate("r", -1)),
    ("less than one page", lambda cache: cache.propose_insert("r", prompt("a")[:2])),
    ("int32", lambda cache: cache.match_prefix(prompt("ab").astype("int64"))),
]


@pytest.mark.parametrize("message,call", MISUSES)
def test_misuse_says_what_is_wrong_and_changes_nothing(
    message: str, call: Callable[[HierarchicalCache], object]
) -> None:
    world = World()
    world.store("ab")
    world.match("abxy", "r")
    world.own("abxy", "r")
    with pytest.raises(Misuse, match=message):
        call(world.caches[0])
    assert world.peek("abxy")["device"] == 2
    world.insert("abxy", "r")
    world.finish("r")
    world.drain()
    world.is_empty()


@LAGS
def test_a_call_on_one_rank_only_is_found_in_the_next_step(lag: int) -> None:
    world = World(lag=lag)
    world.store("ab")
    world.caches[1].match_prefix(prompt("ab"))
    world.checks = False
    with pytest.raises(Divergence):
        world.step_all(1 + lag)


def test_step_is_not_entered_twice() -> None:
    world = World()
    for cache in world.caches:
        cache.begin_step(1)
    with pytest.raises(Misuse, match="entered again"):
        world.caches[0].begin_step(1)
    world.finish_step()


# -- the rest of a request's life ----------------------------------------------------------------


def test_abort_is_idempotent_and_legal_for_strangers() -> None:
    world = World()
    world.abort("nobody")
    serve(world, "abcd", "r")
    world.each(lambda cache: cache.request_pages("r", 2))
    for _ in range(2):
        world.abort("r")
    world.drain()
    world.is_empty()
    assert world.peek("abcd")["device"] == 4


@LAGS
@pytest.mark.parametrize("when", range(5))
def test_abort_in_every_state(lag: int, when: int) -> None:
    world = World(lag=lag, headroom_pages=2)
    world.host_only("ab")
    world.load("abcd", "r")
    world.each(lambda cache: cache.request_pages("r", 3))
    world.put("abxy", "s", hold=True)
    world.step_all(when)
    world.each(lambda cache: cache.allocate("r", 1))
    world.abort("r")
    world.abort("s")
    assert len(world.caches[0].core.requests) == 0
    world.drain()
    world.is_empty()


def test_a_name_can_be_used_again() -> None:
    world = World()
    serve(world, "ab", "r")
    world.finish("r")
    world.match("abcd", "r")
    report = world.same(lambda cache: cache.report("r"))
    assert (report.prompt_pages, report.device_hit_pages, report.computed_pages) == (4, 2, 2)
    world.abort("r")


def test_room_falls_by_exactly_what_was_taken() -> None:
    world = World(headroom_pages=2)
    world.store("abcd")
    room = world.same(lambda cache: cache.room())
    assert room == 14  # the headroom is spoken for
    world.match("abc", "r")  # pins 3
    assert world.same(lambda cache: cache.room()) == room - 3
    world.each(lambda cache: cache.request_pages("s", 5))
    assert world.same(lambda cache: cache.room()) == room - 8
    world.put("xy")
    assert world.same(lambda cache: cache.room()) == room - 10
    world.each(lambda cache: cache.allocate("s", 2))
    assert world.same(lambda cache: cache.room()) == room - 10
    world.step()
    world.abort("s")
    world.abort("r")
    world.drain()
    assert world.same(lambda cache: cache.room()) == 14
    assert world.same(lambda cache: cache.room(HOST)) == 16


def test_has_pending_keeps_an_idle_engine_stepping() -> None:
    world = World()
    assert not world.caches[0].has_pending()
    for call in (
        lambda: world.put("ab"),
        lambda: world.each(lambda cache: cache.request_pages("r", 1)),
    ):
        call()
        assert world.same(lambda cache: cache.has_pending())
        world.drain()
        assert not world.same(lambda cache: cache.has_pending())


def test_start_loading_waits_for_every_load_on_the_path() -> None:
    """Also for one that an aborted request had asked for."""
    world = World()
    world.host_only("abcd")
    world.load("ab", "gone")
    world.step()
    world.abort("gone")
    world.fault(0, "load", "delay", steps=3)
    world.load("abcd", "r")
    world.step()
    world.match("zz", "without")
    assert world.each(lambda cache: cache.start_loading(["without"])) == [(), ()]
    assert world.same(lambda cache: cache.wait_layer(1, (), 0.0))
    loads = world.each(lambda cache: cache.start_loading(["r", "without"]))
    assert [len(tickets) for tickets in loads] == [1, 1]
    waited = [
        cache.wait_layer(1, tickets, 0.0)
        for cache, tickets in zip(world.caches, loads, strict=True)
    ]
    assert waited == [False, True]  # rank 0's is late
    world.drain()
    assert world.each(lambda cache: cache.start_loading(["r"])) == [(), ()]
    world.finish("r")
    world.abort("without")


def test_metrics_count_what_happened() -> None:
    world = World()
    world.store("abcd", "abxy")
    world.evict(DEVICE, 6)
    world.load("abcd", "r")
    world.drain()
    metrics = world.metrics()
    wanted = {
        "backups": 3,
        "loads": 1,
        "commits": 4,
        "aborts": 0,
        "refused": 0,
        "evicted_device": 6,
        "evicted_host": 0,
        "copies_wrong": 0,
        "writes_submitted": 1,
        "loads_submitted": 1,
        "collectives": world.iteration,
    }
    assert {name: metrics[name] for name in wanted} == wanted
    world.finish("r")
