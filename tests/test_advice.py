"""Advice is tested against the event that it names: the field that differs, and what it tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Divergence, Misuse
from tests.cache_world import World, prompt

ALONE: list[tuple[str, str, Callable[[HierarchicalCache], object]]] = [
    ("epoch", "one rank alone called reset()", lambda cache: cache.reset()),
    ("fingerprint", "that call was made on some ranks only", lambda cache: cache.detach_storage()),
    ("fingerprint", "some ranks only", lambda cache: cache.clear_storage()),
    ("fingerprint", "some ranks only", lambda cache: cache.drop_namespace("tenant")),
    ("fingerprint", "some ranks only", lambda cache: cache.evict(Tier.DEVICE, 1)),
    ("fingerprint", "an abort that reached one rank first", lambda cache: cache.abort("live")),
    ("fingerprint", "some ranks only", lambda cache: cache.match_prefix(prompt("a"), request="x")),
    ("fingerprint", "with other arguments", lambda cache: cache.expect_pages(1)),
]


@pytest.mark.parametrize("field,advice,call", ALONE)
def test_a_call_on_one_rank_alone(
    field: str, advice: str, call: Callable[[HierarchicalCache], object]
) -> None:
    world = World(3, storage=True)
    world.store("ab")
    world.match("ab", "live")
    world.checks = False
    call(world.caches[1])
    with pytest.raises(Divergence) as caught:
        world.step()
    assert (caught.value.field, caught.value.ranks) == (field, (1,))
    assert advice in caught.value.advice


def test_attaching_storage_on_one_rank_alone() -> None:
    world = World(3, storage=True)
    world.each(lambda cache: cache.detach_storage())
    world.step()
    world.checks = False
    world.caches[1].attach_storage()
    with pytest.raises(Divergence) as caught:
        world.step()
    assert (caught.value.field, caught.value.ranks) == ("fingerprint", (1,))


def test_an_iteration_that_one_scheduler_skips() -> None:
    world = World(3)
    world.step()
    for rank, cache in enumerate(world.caches):
        cache.begin_step(2 + (rank == 1))
    with pytest.raises(Divergence) as caught:
        world.finish_step()
    assert (caught.value.field, caught.value.ranks) == ("iteration", (1,))
    assert "skipped or repeated an iteration" in caught.value.advice


def test_an_extra_round_of_one_rank_alone() -> None:
    world = World(3)
    world.step()
    world.caches[1].begin_decide()
    world.iteration += 1
    for rank in (0, 2):
        world.caches[rank].begin_step(world.iteration)
    with pytest.raises(Divergence) as caught:
        world.finish_step()
    assert (caught.value.field, caught.value.ranks) == ("iteration", (1,))
    assert "it alone called decide()" in caught.value.advice


def test_detaching_with_writes_open_says_how_and_its_advice_works() -> None:
    world = World(storage=True)
    world.put("abcd")
    for _ in range(2):
        world.step()
    for cache in world.caches:
        with pytest.raises(Misuse, match="let them end, or detach with complete=True"):
            cache.detach_storage(complete=False)
        cache.detach_storage(complete=True)
    world.drain()
