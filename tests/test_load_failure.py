"""Load-backs that fail after the verdict: void on every rank, with all that was built on them."""

from __future__ import annotations

import pytest

from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.copies.mover import PartPlan
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.participant import OutcomeKind
from tests.cache_world import World, outcome

DEVICE, HOST = Tier.DEVICE, Tier.HOST
READY, REFUSED = TicketState.READY, TicketState.REFUSED
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def make_world(text: str = "abcd", **config: object) -> World:
    world = World(**config)  # type: ignore[arg-type]
    world.host_only(text)
    return world


@LAGS
@pytest.mark.parametrize("action", ["fail", "corrupt"])
def test_failure_after_the_verdict_voids_who_used_it(lag: int, action: str) -> None:
    world = make_world(lag=lag)
    world.fault(1, "load", action)
    tickets = world.load("abcd")
    void: list[tuple[str, ...]] = []
    for _ in range(3 + 2 * lag):
        results = world.step()
        assert results[0].must_recompute == results[1].must_recompute
        void.append(results[0].must_recompute)
    assert outcome(tickets)[0] is READY  # it was promised, and then it failed
    assert [names for names in void if names] == [("load",)]
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    assert world.same(lambda cache: cache.core.requests.require("load").must_recompute)
    world.abort("load")
    world.drain()
    world.is_empty()


@LAGS
def test_a_source_that_failed_is_not_offered_again_until_it_is_computed_anew(lag: int) -> None:
    world = make_world(lag=lag)
    world.fault(1, "load", "fail", times=-1)
    world.load("abcd")
    world.drain()
    world.abort("load")
    assert outcome(world.load("abcd", "again")) == (REFUSED, 0)  # nothing there to load
    world.abort("again")
    world.heal()
    world.host_only("abcd")  # the next insert backs it up
    tickets = world.load("abcd", "third")
    world.drain()
    assert outcome(tickets) == (READY, 4)
    world.abort("third")
    world.is_empty()


@LAGS
def test_partial_failure_keeps_the_leading_pages(lag: int) -> None:
    world = make_world(lag=lag)
    world.store("ab")  # a boundary: two nodes, two parts
    world.evict(DEVICE, 16)
    world.fault(0, "load", "fail", after=1)
    world.load("abcd")
    results = [world.step()[0] for _ in range(3 + 2 * lag)]
    assert world.peek("abcd") == {"device": 2, "host": 2, "usable": 2}
    assert [r.must_recompute for r in results if r.must_recompute] == [("load",)]
    assert world.pinned() == {DEVICE: 2, HOST: 0}
    world.abort("load")
    world.is_empty()


def fails_late(world: World, rank: int) -> None:
    """The load that hangs on ``rank`` ends at the next step, and has failed."""
    mover = world.ranks[rank].mover
    assert isinstance(mover, DeferredMover)
    for held in mover._withheld:
        held.plan = PartPlan(ok=False)
    world.heal()


@LAGS
@pytest.mark.parametrize("decided", [True, False])
def test_what_was_inserted_on_top_is_withdrawn_with_its_backup(lag: int, decided: bool) -> None:
    """Whether the load was already decided when the insert was proposed, or not yet."""
    world = make_world("ab", lag=lag)
    world.fault(1, "load", "hang")
    world.load("ab")
    if decided:
        world.step_all(1 + lag)
    assert world.put("abcd", "top", hold=True)
    world.step_all(3 + 2 * lag)
    assert world.peek("abcd") == {"device": 4, "host": 4, "usable": 4}  # and backed up
    fails_late(world, 1)
    void = [world.step()[0].must_recompute for _ in range(2 + lag)]
    assert sorted(name for names in void for name in names) == ["load", "top"]
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    world.abort("load")
    world.abort("top")
    world.drain()
    world.is_empty()


def test_an_undecided_insert_on_top_is_refused() -> None:
    world = make_world("ab", lag=1)
    world.fault(1, "load", "hang")
    world.load("ab")
    world.step_all(2)
    fails_late(world, 1)
    world.step()
    assert world.put("abcd", "top", hold=True)
    world.drain()
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    world.abort("load")
    world.abort("top")
    world.is_empty()


def test_who_finished_before_the_failure_was_known_is_named_too() -> None:
    """One token was all it wanted: its output is void all the same."""
    world = make_world("ab")
    world.fault(1, "load", "hang")
    world.load("ab")
    world.step()
    world.finish("load")
    fails_late(world, 1)
    void = [world.step()[0].must_recompute for _ in range(3)]
    assert [names for names in void if names] == [("load",)]
    world.is_empty()


def test_who_was_aborted_is_not_named() -> None:
    world = make_world("ab")
    world.fault(1, "load", "hang")
    world.load("ab")
    world.step()
    world.abort("load")
    fails_late(world, 1)
    assert not any(world.step()[0].must_recompute for _ in range(3))
    world.is_empty()


def test_a_host_copy_below_what_is_withdrawn_goes_too() -> None:
    """What is on HOST is closed towards the root, also where the lower part was older."""
    world = make_world("abcd")
    world.store("ab")
    world.evict(DEVICE, 16)
    world.evict(HOST, 2)  # "cd" is nowhere now
    world.host_only("abcd")
    world.fault(1, "load", "hang")
    world.load("ab")
    world.step()
    assert world.put("abc")
    world.step_all(2)
    assert world.peek("abcd") == {"device": 3, "host": 4, "usable": 4}
    fails_late(world, 1)
    world.step_all(3)
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    assert world.free_pages(HOST) == [16, 16]
    world.finish("load")
    world.drain()
    world.is_empty()


@LAGS
def test_a_load_that_hangs_is_given_up_by_all(lag: int) -> None:
    world = make_world(lag=lag, copy_timeout_s=0.05)
    world.fault(0, "load", "hang")
    world.load("abcd")
    kinds: list[OutcomeKind] = []
    void: list[str] = []
    for _ in range(14):
        results = world.step()
        assert [o.kind for o in results[0].outcomes] == [o.kind for o in results[1].outcomes]
        kinds += [o.kind for o in results[0].outcomes]
        void += results[0].must_recompute
        for tier in (DEVICE, HOST):  # no plan counts on pages that the copy may still touch
            room = world.same(lambda cache, tier=tier: cache.core.manager.room(tier.value))
            assert room <= min(world.free_pages(tier))
    assert kinds == [OutcomeKind.COMMIT, OutcomeKind.QUARANTINE]
    assert void == ["load"]
    assert world.peek("abcd") == {"device": 0, "host": 0, "usable": 0}
    assert world.pinned() == {DEVICE: 0, HOST: 0}
    for tier in (DEVICE, HOST):  # rank 0's copy may still read the one and write the other
        assert world.same(lambda cache, tier=tier: cache.room(tier)) == 12
        assert world.free_pages(tier) == [12, 16]
    world.heal()
    world.step_all(2 + lag)
    for tier in (DEVICE, HOST):
        assert world.same(lambda cache, tier=tier: cache.room(tier)) == 16
    world.abort("load")
    world.drain()
    world.is_empty()


def test_a_source_that_is_gone_before_the_reservation_is_not_read() -> None:
    """With lag, a verdict may unpublish on HOST what was asked for after its ballot was posted."""
    world = World(lag=1)
    world.fault(1, "write", "hang")
    world.put("ab")
    world.step_all(2)
    world.put("abcd")
    world.step_all(4)
    assert world.evict(DEVICE, 2) == 2
    assert world.peek("abcd") == {"device": 2, "host": 4, "usable": 4}
    fails_late(world, 1)
    world.step()  # the failure rides a ballot that is settled in the next step
    tickets = world.load("abcd")
    world.drain()
    assert outcome(tickets) == (REFUSED, 0)
    assert world.peek("abcd") == {"device": 2, "host": 0, "usable": 2}
    world.finish("load")
    world.is_empty()
