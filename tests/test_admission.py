"""Admission: load and pages as one wish, in line until there is room, never in part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.paths.admission import OVERTAKEN_MAX, TRIES_MAX
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PENDING, READY, REFUSED = TicketState.PENDING, TicketState.READY, TicketState.REFUSED
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def admit(world: World, text: str, request: str, **options: Any) -> list[Ticket]:
    return world.each(lambda cache: cache.admit(request, prompt(text), **options))


def holds(world: World, request: str) -> tuple[int, int]:
    """Pages of the path that it pins, and pages of its own: the same on all ranks."""
    return world.same(
        lambda cache: (
            cache.core.requests.require(request).held_pages,
            len(cache.core.requests.require(request).private),
        )
    )


@LAGS
def test_what_is_cached_what_is_loaded_and_the_rest_come_with_one_verdict(lag: int) -> None:
    world = World(lag=lag)
    world.store("abcd")
    world.evict(DEVICE, 2)
    tickets = admit(world, "abcdef", "r", extra_pages=1)
    for _ in range(lag):
        world.step()
        assert outcome(tickets)[0] is PENDING
        assert holds(world, "r") == (2, 0)
    world.step()
    assert outcome(tickets) == (READY, 5)
    assert holds(world, "r") == (4, 3)
    report = world.same(lambda cache: cache.report("r"))
    assert (report.device_hit_pages, report.host_hit_pages, report.prompt_pages) == (2, 2, 6)
    world.compute("abcdef", "r")
    world.insert("abcdef", "r")
    world.finish("r")
    world.drain()
    world.is_empty()


@LAGS
@pytest.mark.parametrize("site", ["device.reserve", "load"])
def test_a_rank_that_cannot_take_all_takes_nothing_and_it_stays_in_line(
    lag: int, site: str
) -> None:
    world = World(lag=lag)
    world.host_only("abcd")
    action = "short" if site == "device.reserve" else "fail"
    # A load that fails is told with the next ballot: by then the request runs, and starts anew.
    world.fault(1, site, action, times=1, after=1 if site == "device.reserve" else 0)
    tickets = admit(world, "abcdef", "r")
    world.step_all(1 + lag)
    if site == "load":
        assert outcome(tickets) == (READY, 6)
        void = [one.must_recompute for _ in range(2 + lag) for one in world.step()]
        assert ("r",) in void
        world.abort("r")
    else:
        assert outcome(tickets)[0] is PENDING
        assert holds(world, "r") == (0, 0)  # the load found its pages on both ranks: it went, too
        assert world.metrics()["admissions_again"] == 1
        world.drain()
        assert outcome(tickets) == (READY, 6)
        world.finish("r")
    world.drain()
    world.is_empty()


@LAGS
def test_two_that_do_not_fit_together_come_one_after_the_other(lag: int) -> None:
    """Each asked for load and pages apart would get half of what the other needs."""
    world = World(lag=lag, device_pages=8)
    world.host_only("abcd")
    world.host_only("uvwx")
    first = admit(world, "abcdef", "first")
    second = admit(world, "uvwxyz", "second")
    world.drain()
    assert (outcome(first), outcome(second)) == ((READY, 6), (PENDING, 0))
    assert not world.caches[0].has_pending()  # no step helps, only the end of the first
    world.finish("first")
    assert world.caches[0].has_pending()
    world.drain()
    assert outcome(second) == (READY, 6)
    world.finish("second")
    counts = world.metrics()
    assert (counts["admitted"], counts["admissions_again"], counts["aborts"]) == (2, 0, 0)
    world.is_empty()


@LAGS
def test_who_waits_holds_nothing_of_what_is_cached(lag: int) -> None:
    """A prefix that waits for pages would keep them from whoever is before it."""
    world = World(lag=lag, device_pages=8, host_pages=0)
    runner = admit(world, "klmn", "runner")
    world.drain()
    assert outcome(runner) == (READY, 4)
    world.store("ab")
    waiting = admit(world, "abcdef", "waits")
    world.step_all(2 + lag)
    assert outcome(waiting) == (PENDING, 0)
    assert world.pinned()[DEVICE] == 0  # the runner's pages are its own
    assert world.evict(DEVICE, 2) == 2
    world.finish("runner")
    world.drain()
    assert outcome(waiting) == (READY, 6)
    world.finish("waits")
    world.is_empty()


@LAGS
def test_who_would_fit_does_not_overtake_the_head(lag: int) -> None:
    world = World(lag=lag, device_pages=8)
    runner = admit(world, "klmn", "runner")
    world.drain()
    assert outcome(runner) == (READY, 4)
    large = admit(world, "uvwxyz", "large")
    small = admit(world, "st", "small")
    world.step_all(3 + lag)
    assert (outcome(large), outcome(small)) == ((PENDING, 0), (PENDING, 0))
    world.finish("runner")
    world.drain()
    assert (outcome(large), outcome(small)) == ((READY, 6), (READY, 2))
    for name in ("large", "small"):
        world.finish(name)
    world.is_empty()


def test_who_can_never_fit_is_refused_by_name_at_once_and_holds_up_nobody() -> None:
    world = World(device_pages=(8, 6), headroom_pages=1)
    world.step_all(2)
    tickets = admit(world, "abcdef", "big")
    assert outcome(tickets) == (REFUSED, 0)
    assert "'big' needs 6 device pages" in tickets[0].why
    assert "smallest device has 6, 1 are kept as headroom" in tickets[0].why
    fits = admit(world, "abcde", "fits")
    world.each(lambda cache: cache.expect_pages(2))
    world.drain()
    assert "needs 5 device pages" in fits[0].why  # the headroom grew while it stood in line
    for name in ("big", "fits"):
        world.finish(name)


def test_the_order_is_priority_then_first_come() -> None:
    world = World(device_pages=4)
    names = {"low": 0, "high": 2, "low too": 0, "high too": 2}
    blocker = admit(world, "wxyz", "blocker")
    world.drain()
    tickets = {
        name: admit(world, "abc" + name[-1], name, priority=priority)
        for name, priority in names.items()
    }
    order: list[str] = []
    world.finish("blocker")
    assert outcome(blocker)[0] is READY
    for _ in range(4):
        world.drain()
        (new,) = [n for n, one in tickets.items() if outcome(one)[0] is READY and n not in order]
        order.append(new)
        world.finish(new)
    assert order == ["high", "high too", "low", "low too"]


def test_nobody_is_overtaken_for_ever() -> None:
    world = World(device_pages=2)
    admit(world, "zz", "running")
    world.drain()
    patient = admit(world, "ab", "patient")
    for number in range(OVERTAKEN_MAX + 1):
        admit(world, "cd", f"urgent {number}", priority=9)
        world.finish("running" if number == 0 else f"urgent {number - 1}")
        world.drain()
    assert outcome(patient)[0] is READY
    assert world.metrics()["admitted"] == OVERTAKEN_MAX + 2


def test_a_minimum_lets_it_begin_with_what_there_is() -> None:
    world = World(device_pages=8)
    admit(world, "wxyz", "running")
    world.drain()
    all_of_it = admit(world, "abcdef", "all of it")
    world.drain()
    assert outcome(all_of_it) == (PENDING, 0)
    world.abort("all of it")
    assert outcome(all_of_it) == (REFUSED, 0)
    some = admit(world, "abcdef", "some", minimum_pages=3)
    world.drain()
    assert outcome(some) == (READY, 4)
    for name in ("running", "some"):
        world.finish(name)


@LAGS
def test_an_abort_ends_it_in_line_and_open(lag: int) -> None:
    world = World(lag=lag, device_pages=6)
    world.host_only("abcd")
    opened = admit(world, "abcdef", "open")
    waits = admit(world, "uvwxyz", "waits")
    world.step_all(lag)
    world.abort("open")
    world.abort("waits")
    assert (outcome(opened), outcome(waits)) == ((REFUSED, 0), (REFUSED, 0))
    world.drain()
    world.is_empty()


def test_a_whole_hit_needs_no_step_and_the_headroom_gives_at_once() -> None:
    world = World(headroom_pages=3)
    world.store("abcd")
    world.drain()
    assert outcome(admit(world, "abcd", "hit")) == (READY, 0)
    assert outcome(admit(world, "abcdef", "at once")) == (READY, 2)
    assert outcome(admit(world, "abcdefg", "asks"))[0] is PENDING  # one is left
    world.drain()
    for name in ("hit", "at once", "asks"):
        world.finish(name)


def test_a_rank_that_never_has_pages_costs_the_request_not_the_engine() -> None:
    world = World()
    world.fault(0, "device.reserve", "refuse", times=-1)
    tickets = admit(world, "ab", "r")
    world.drain()
    assert outcome(tickets) == (REFUSED, 0)
    assert f"{TRIES_MAX} times some rank lacked pages" in tickets[0].why
    world.finish("r")


def test_a_reset_ends_the_line() -> None:
    world = World(device_pages=4)
    admit(world, "abcd", "runs")
    world.drain()
    waits = admit(world, "uvwx", "waits")
    world.step()
    world.each(lambda cache: cache.reset())
    assert outcome(waits) == (REFUSED, 0)
    assert "epoch" in waits[0].why
    for name in ("runs", "waits"):
        world.abort(name)
    world.drain()
    world.is_empty()


@pytest.mark.parametrize("options", [{"extra_pages": -1}, {"minimum_pages": 0}])
def test_misuse_changes_nothing(options: dict[str, Any]) -> None:
    world = World()
    with pytest.raises(Misuse, match="pages must be at least"):
        world.caches[0].admit("r", prompt("ab"), **options)
    with pytest.raises(Misuse, match="no tokens"):
        world.caches[0].admit("r", prompt(""))
    assert world.caches[0].core.requests.get("r") is None
    admit(world, "ab", "r")
    for cache in world.caches:
        with pytest.raises(Misuse, match="waits for its admission or owns pages"):
            cache.admit("r", prompt("ab"))
    world.drain()
    for cache in world.caches:
        with pytest.raises(Misuse, match="waits for its admission or owns pages"):
            cache.admit("r", prompt("ab"))
    world.finish("r")


WISHES = st.lists(
    st.tuples(st.text("ab", max_size=3), st.text("xyz", min_size=1, max_size=4), st.integers(0, 2)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(WISHES, st.integers(0, 2), st.sampled_from(["write_through", "write_back"]))
def test_everybody_who_fits_gets_in_once_and_nothing_is_left(
    wishes: list[tuple[str, str, int]], lag: int, mode: str
) -> None:
    world = World(lag=lag, device_pages=7, host_pages=9, mode=mode)
    tickets: dict[str, list[Ticket]] = {}
    running: dict[str, str] = {}
    for number, (start, rest, priority) in enumerate(wishes):
        name, text = f"r{number}", start + rest
        running[name] = text
        tickets[name] = admit(world, text, name, priority=priority)
        if number % 3 == 2:
            world.step()
    for _ in range(60):
        world.step()
        for name in list(running):
            if outcome(tickets[name])[0] is READY:
                held, own = holds(world, name)
                assert held + own == len(running[name])
                world.compute(running[name], name)
                world.insert(running[name], name)
                world.finish(name)
                del running[name]
    assert not running
    world.drain()
    counts = world.metrics()
    assert (counts["admitted"], counts["admissions_again"]) == (len(wishes), 0)
    world.is_empty()
