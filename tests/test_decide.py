"""An extra round between two steps: settled at once, on every rank or with a named error."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.ticket import TicketState
from kvpact.consensus.core.errors import Divergence, Misuse
from tests.cache_world import World


def decide(world: World) -> None:
    """All ranks make the extra round."""
    for cache in world.caches:
        cache.begin_decide()
    world.finish_step()
    world.check()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_what_was_asked_is_decided_at_once(lag: int) -> None:
    world = World(2, lag=lag)
    for _ in range(3):
        world.step()
    before = world.caches[0].stepper.num_collectives
    tickets = [cache.request_pages("r", 4) for cache in world.caches]
    decide(world)
    assert [ticket.state for ticket in tickets] == [TicketState.READY] * 2
    assert [c.stepper.num_collectives for c in world.caches] == [before + 1] * 2
    assert [c.stepper.num_in_flight for c in world.caches] == [0, 0]
    for cache in world.caches:
        cache.abort("r")
    for _ in range(4):
        world.step()
    world.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_two_rounds_then_steps_go_on(lag: int) -> None:
    world = World(3, lag=lag)
    world.step()
    for name in ("a", "b"):
        tickets = [cache.request_pages(name, 3) for cache in world.caches]
        decide(world)
        assert all(ticket.state is TicketState.READY for ticket in tickets)
    for cache in world.caches:
        cache.abort("a")
        cache.abort("b")
    for _ in range(4):
        world.step()
    world.drain()


def test_a_rank_that_does_not_come_to_the_round_is_named() -> None:
    world = World(3)
    world.checks = False
    world.step()
    for cache in world.caches[:2]:
        cache.begin_decide()
    world.caches[2].begin_step(2)
    with pytest.raises(Divergence) as raised:
        world.finish_step()
    assert raised.value.ranks == (2,)


def test_with_pipeline_stages_it_is_refused() -> None:
    world = World(2, pipeline_stages=2, lag=2)
    with pytest.raises(Misuse, match="activations"):
        world.caches[0].decide()


def test_inside_a_step_it_is_refused() -> None:
    world = World(2)
    world.caches[0].begin_step(1)
    with pytest.raises(Misuse, match="between two steps"):
        world.caches[0].begin_decide()
