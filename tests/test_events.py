"""Events: what came and went, by tier, told in one order on every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.tree.events import CacheEvent, EventLog
from kvpact.cache.tree.node import STORAGE, Tier
from tests.cache_world import PAGE_SIZE, World, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def hashes(text: str, namespace: str = "") -> list[int]:
    return page_hashes(prompt(text), PAGE_SIZE, namespace=namespace)


class Router:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[int]] = {"device": set(), "host": set(), STORAGE: set()}

    def hear(self, events: list[CacheEvent]) -> None:
        for event in events:
            there = self.tiers[event.tier]
            if event.kind == "stored":
                there.update(event.pages)
            elif event.kind == "removed":
                there.difference_update(event.pages)
            else:
                there.clear()


def really(world: World, tier: Tier) -> set[int]:
    """Pages that the first rank has published in ``tier``."""
    found: set[int] = set()
    for node in world.caches[0].core.tree.nodes():
        if node.at(tier).is_published:
            tokens = np.concatenate([above.tokens for above in node.path()])
            found.update(page_hashes(tokens, PAGE_SIZE)[-node.num_pages :])
    return found


def test_an_insert_is_told_with_its_place() -> None:
    world = World(events_max=100)
    world.store("ab")
    world.store("abc")
    first, second = [event for event in world.hear() if event.tier == "device"]
    assert first == CacheEvent("stored", "device", tuple(hashes("ab")), 0, "")
    assert second == CacheEvent("stored", "device", tuple(hashes("abc")[2:]), hashes("ab")[-1], "")
    assert not world.hear()


def test_tenants_have_other_names_for_the_same_tokens() -> None:
    world = World(events_max=100)
    assert world.put("ab", namespace="tenant")
    world.drain()
    told = world.hear()
    assert told[0].namespace == "tenant"
    assert told[0].pages == tuple(hashes("ab", "tenant"))
    assert told[0].pages != tuple(hashes("ab"))


def test_without_a_bound_nothing_is_told() -> None:
    world = World()
    world.store("ab")
    assert not world.hear()


@pytest.mark.parametrize("mode", ["write_through", "write_back", "buffer_only"])
def test_who_hears_everything_knows_what_is_there(mode: str) -> None:
    choose = random.Random(mode)
    world = World(mode=mode, storage=True, events_max=10_000, device_pages=8, host_pages=8)
    router = Router()
    for _ in range(120):
        text = "".join(choose.choice("ab") for _ in range(choose.randint(1, 4)))
        call = choose.randrange(6)
        if call < 3:
            world.put(text)
        elif call == 3:
            world.evict(choose.choice(list(Tier)), choose.randint(1, 4))
        elif call == 4:
            world.fetch(text, "r")
            world.drain()
            world.finish("r")
        else:
            world.match(text)
        world.step()
        router.hear(world.hear())
        for tier in Tier:
            assert router.tiers[tier.value] == really(world, tier)
    assert router.tiers[STORAGE]
    world.each(lambda cache: cache.reset())
    router.hear(world.hear())
    assert not router.tiers["device"]
    assert not router.tiers["host"]


def test_what_is_not_published_is_not_told() -> None:
    world = World(events_max=100, lag=1)
    world.fault(1, "device.reserve", "refuse")
    assert world.put("ab")
    world.step()
    assert not world.hear()
    world.drain()
    assert not world.hear()


def test_a_failed_backup_is_told_as_removed() -> None:
    world = World(events_max=100)
    world.fault(1, "write", "fail")
    assert world.put("ab")
    world.drain()
    assert [(event.kind, event.tier) for event in world.hear()] == [
        ("stored", "device"),
        ("stored", "host"),
        ("removed", "host"),
    ]


def test_when_nobody_listens_all_is_replaced_by_cleared() -> None:
    world = World(events_max=3)
    world.store("a", "b", "c")
    told = world.hear()
    assert [event.kind for event in told[:3]] == ["cleared"] * 3
    assert {event.tier for event in told[:3]} == {"device", "host", STORAGE}
    assert len(told) <= 3 + 3


def test_a_log_that_is_off_keeps_nothing() -> None:
    log = EventLog(PAGE_SIZE, events_max=0, enabled=False)
    log.cleared("device")
    assert log.take() == []
