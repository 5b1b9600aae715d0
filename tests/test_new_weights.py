"""Nothing that other weights computed is ever served: not from memory, not from storage."""

from __future__ import annotations

import pytest

from kvpact.cache.config import CacheConfig, config_facts
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Divergence, Misuse
from tests.cache_world import World, outcome

LAGS = pytest.mark.parametrize("lag", [0, 1, 3])


def renew(world: World, version: str) -> None:
    world.each(lambda cache: cache.new_weights(version))


def fetched(world: World, text: str, request: str) -> int:
    """Pages that a prefetch of ``text`` brings."""
    tickets = world.fetch(text, request)
    world.drain()
    state, num_pages = outcome(tickets)
    world.abort(request)
    return num_pages if state is TicketState.READY else 0


@LAGS
@pytest.mark.parametrize("mode", ["write_through", "write_back", "buffer_only"])
def test_what_old_weights_computed_is_gone_from_every_tier(mode: str, lag: int) -> None:
    world = World(lag=lag, mode=mode, storage=True)
    world.store("abcd")
    world.evict(Tier.DEVICE, 16)
    world.drain()
    assert world.in_storage("abcd") == [4, 4]
    renew(world, "2")
    assert world.same(lambda cache: cache.weights) == "2"
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    assert fetched(world, "abcd", "f") == 0
    world.drain()
    world.is_empty()


def test_what_the_new_weights_compute_is_stored_under_names_of_its_own() -> None:
    world = World(storage=True)
    world.store("abcd")
    renew(world, "2")
    world.store("abef")
    world.evict(Tier.DEVICE, 16)
    world.evict(Tier.HOST, 16)
    assert fetched(world, "abcd", "f") == 2  # what both prompts begin with, computed anew
    world.evict(Tier.HOST, 16)
    renew(world, "3")
    assert fetched(world, "abef", "g") == 0


def test_a_write_that_is_under_way_is_never_found_again() -> None:
    world = World(storage=True)
    world.fault(0, "storage.put", "delay", steps=6, times=-1)
    assert world.put("abcd")
    world.step_all(3)
    renew(world, "2")
    world.step_all(10)  # the old write ends meanwhile
    assert fetched(world, "abcd", "f") == 0


@pytest.mark.parametrize("versions", [("2", "3"), ("2", None)])
def test_ranks_that_differ_in_it_are_named(versions: tuple[str, str | None]) -> None:
    world = World(deadline_s=1.0, warn_s=0.5)
    world.store("ab")
    for cache, version in zip(world.caches, versions, strict=True):
        if version is not None:
            cache.new_weights(version)
    world.checks = False
    with pytest.raises(Divergence):
        world.step_all(3)


def test_a_rank_that_starts_with_other_weights_is_refused() -> None:
    def facts(weights: str) -> dict[str, str]:
        return config_facts(CacheConfig(page_size=4, device_pages=8, host_pages=8, weights=weights))

    assert facts("1") == facts("1")
    differ = {name for name in facts("1") if facts("1")[name] != facts("2")[name]}
    assert differ == {"weights"}


@pytest.mark.parametrize("version", ["", "a\nb", 2, None, "\udc80"])
def test_misuse_changes_nothing(version: object) -> None:
    world = World(storage=True)
    world.store("ab")
    before = world.same(lambda cache: (cache.journal.fingerprint, cache.core.manager.epoch))
    with pytest.raises(Misuse, match="new_weights needs a version"):
        world.caches[0].new_weights(version)  # type: ignore[arg-type]
    assert world.same(lambda cache: (cache.journal.fingerprint, cache.core.manager.epoch)) == before
    world.step()
