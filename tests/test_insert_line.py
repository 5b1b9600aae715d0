"""Inserts that wait: in order, bounded, and only while their room is on its way."""

from __future__ import annotations

import pytest

from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import World, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def lazy(**config: object) -> World:
    config.setdefault("device_pages", 4)
    return World(mode="write_back", evicts_whole_nodes=True, **config)  # pyright: ignore[reportArgumentType]


def waiting(world: World) -> int:
    return world.same(lambda cache: cache.core.insert_line.num_waiting)


def test_what_can_be_planned_does_not_wait() -> None:
    world = lazy()
    assert world.put("ab")
    assert waiting(world) == 0


def test_who_comes_later_waits_behind_even_where_it_would_fit() -> None:
    world = lazy(device_pages=5)
    world.store("abc")
    assert world.put("wxyz")
    assert world.put("d")
    assert waiting(world) == 2
    assert world.caches[0].core.insert_line.waits()
    world.drain()
    assert waiting(world) == 0
    assert world.metrics()["refused"] == 0
    assert world.peek("d")["device"] == 1


def test_what_builds_on_a_waiting_insert_comes_after_it() -> None:
    world = lazy(device_pages=6)
    world.store("abcd")
    assert world.put("wxyz")
    assert world.put("wxyzv")
    world.drain()
    assert world.peek("wxyzv")["device"] == 5


def test_the_line_has_a_bound() -> None:
    world = lazy(waiting_tickets_max=2)
    world.store("abcd")
    answers = [world.put(text) for text in ("wxyz", "d", "e", "f")]
    assert answers == [True, True, False, False]
    assert world.metrics()["refused"] == 2
    world.drain()
    assert world.peek("e")["usable"] == 0


def test_what_can_never_fit_is_refused_when_its_turn_comes() -> None:
    world = lazy()
    world.store("abcd")
    assert world.put("wxyz")
    assert world.put("mnopq", "big", hold=True)
    world.drain()
    assert world.metrics()["refused"] == 1
    assert world.caches[0].core.requests.require("big").why == "its insert was refused"
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    world.finish("big")


def test_a_request_that_ends_while_it_waits_pins_nothing() -> None:
    world = lazy()
    world.store("abcd")
    assert world.put("wxyz", "r", hold=True)
    world.abort("r")
    world.drain()
    assert world.peek("wxyz")["device"] == 4
    world.is_empty()


def test_a_request_that_waits_holds_its_path_afterwards() -> None:
    world = lazy()
    world.store("abcd")
    assert world.put("wxyz", "r", hold=True)
    world.drain()
    assert world.pinned()[DEVICE] == 4
    world.finish("r")
    world.is_empty()


def test_nobody_waits_over_a_reset() -> None:
    world = lazy()
    world.store("abcd")
    world.fault(1, "write", "delay", steps=5)
    assert world.put("wxyz")
    world.each(lambda cache: cache.reset())
    assert waiting(world) == 0
    world.step_all(8)
    assert world.peek("wxyz")["usable"] == 0
    assert world.free_pages(DEVICE) == [4, 4]


def test_less_than_a_page_is_misuse() -> None:
    world = lazy()
    with pytest.raises(Misuse, match="page"):
        world.caches[0].core.insert_line.propose(prompt("a")[:-1], "", None, None)
