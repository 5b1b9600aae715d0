"""The manager, driven by a foreign engine (tests/foreign.py) through every transition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvpact.consensus.core.ballot import Schema, Status
from kvpact.consensus.core.errors import InternalError, Misuse
from kvpact.consensus.core.journal import Journal, read_journal
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State
from tests.foreign import Owner, Replica, make_manager, only

LAGS = pytest.mark.parametrize("lag", [0, 1, 2])
THREE = ({"a": 10}, {"a": 10}, {"a": 10})


def world(lag: int = 0, capacities: Iterable[dict[str, int]] = THREE, **how: int) -> Replica:
    return Replica(list(capacities), lag=lag, **how)


# -- commit and abort ------------------------------------------------------------------------------


@LAGS
def test_commit_publishes_at_the_verdict_and_ends_when_all_ranks_have_ended(lag: int) -> None:
    replica = world(lag)
    intent = replica.open("x", {"a": 4})
    assert (replica.charged(), replica.room()) == (4, 6), "charged when proposed"
    assert replica.free() == [10, 10, 10]
    for _ in range(lag):
        assert replica.step() == []
        assert replica.states(intent) is State.VOTED
        assert all(owner.tree == {} for owner in replica.owners), "nothing before the verdict"
    assert replica.step() == ["commit x"]
    assert replica.states(intent) is State.COMMITTED
    assert [owner.tree for owner in replica.owners] == [{"x": {"a": 4}}] * 3
    replica.end(intent, ranks=[0, 1])
    assert replica.decide() == []
    replica.end(intent, ranks=[2])
    assert replica.decide() == ["end x"]
    assert replica.states(intent) is State.DONE
    assert (replica.charged(), replica.free()) == (4, [6, 6, 6])
    assert replica.managers[0].open_intents == ()
    calls = [("reserve", "x", "a", 4), ("start", "x"), ("commit", "x"), ("ended", "x")]
    assert only(owner.calls for owner in replica.owners) == calls


@LAGS
@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_one_rank_without_pages_aborts_on_all(lag: int, refuses: int) -> None:
    replica = world(lag)
    replica.owners[refuses].refuse.add(("x", "a"))
    intent = replica.open("x", {"a": 4})
    assert replica.decide() == ["abort x"]
    assert replica.states(intent) is State.ABORTED
    assert all(one.cause == "refused" for one in intent)
    free = [6, 6, 6]
    free[refuses] = 10
    assert replica.free() == free, "the copies of the others still run"
    assert replica.charged() == 4, "so the pages stay charged, everywhere"
    assert replica.decide() == []
    replica.end(intent)
    assert replica.decide() == ["end x"]
    assert replica.states(intent) is State.CLOSED
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])
    for rank, owner in enumerate(replica.owners):
        assert ("start", "x") in owner.calls or rank == refuses
        assert owner.keys("commit") == []
        assert owner.keys("abort") == owner.keys("ended") == ["x"]


@LAGS
def test_refused_everywhere_is_over_with_its_verdict(lag: int) -> None:
    replica = world(lag)
    for owner in replica.owners:
        owner.refuse.add(("x", "a"))
    replica.open("x", {"a": 4})
    assert replica.decide() == ["abort x", "end x"]
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])


POOLS: tuple[str, ...] = ("a", "b", "c", "d")


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("has_some", [False, True])
def test_a_pool_that_fails_rolls_back_exactly(failing: int, has_some: bool) -> None:
    """Whether pool ``failing`` gives nothing or merely too few pages."""
    capacity = dict.fromkeys(POOLS, 9)
    capacity[POOLS[failing]] = 2 if has_some else 0
    owner = Owner(capacity)
    manager = make_manager(0, owner)
    intent = manager.open("copy", "x", dict.fromkeys(POOLS, 3), owner)
    assert intent is not None
    assert not manager.reserve(intent)
    taken = list(POOLS[: failing + 1])
    assert [call[2] for call in owner.calls if call[0] == "reserve"] == taken
    undone = [pool for pool in taken if pool != POOLS[failing] or has_some]
    assert [call[2] for call in owner.calls if call[0] == "unreserve"] == undone[::-1]
    assert owner.free == capacity
    assert intent.state is State.REFUSED
    assert (intent.vote, intent.reservation.num_pages) == (0, {})
    assert "start" not in {call[0] for call in owner.calls}


def test_pools_are_reserved_in_canonical_order_whatever_the_caller_says() -> None:
    for need in ({"b": 1, "a": 2, "d": 3}, {"d": 3, "b": 1, "a": 2}):
        owner = Owner(dict.fromkeys(POOLS, 9))
        manager = make_manager(0, owner)
        intent = manager.open("copy", "x", need, owner)
        assert intent is not None
        assert manager.reserve(intent)
        assert [call[2] for call in owner.calls if call[0] == "reserve"] == ["a", "b", "d"]
        assert list(intent.need.items()) == [("a", 2), ("b", 1), ("d", 3)]
        assert intent.vote == intent.total == 6


@LAGS
def test_side_pools_are_kept_or_given_back_together(lag: int) -> None:
    replica = world(lag, [{"a": 9, "b": 9}] * 2)
    good, bad = replica.open("good", {"a": 2, "b": 1}), replica.open("bad", {"a": 2, "b": 1})
    replica.owners[1].refuse.add(("bad", "b"))
    assert replica.decide() == ["commit good", "abort bad"]
    replica.end(good)
    replica.end(bad)
    replica.decide()
    assert (replica.charged("a"), replica.charged("b")) == (2, 1)
    assert (replica.free("a"), replica.free("b")) == ([7, 7], [8, 8])


# -- elastic intents -------------------------------------------------------------------------------


@LAGS
def test_an_elastic_intent_gets_the_minimum_of_all_votes(lag: int) -> None:
    replica = world(lag, [{"a": 9}, {"a": 5}, {"a": 7}])
    intent = replica.open("x", {"a": 8}, minimum=2)
    assert replica.decide() == ["commit x"]
    assert [one.vote for one in intent] == [8, 5, 7]
    assert only(one.agreed for one in intent) == 5
    assert replica.charged() == 8, "the copies may still write into all of them"
    replica.end(intent)
    assert replica.decide() == ["end x"]
    assert (replica.charged(), replica.free()) == (5, [4, 0, 2]), "the rest is given back"


@LAGS
def test_an_elastic_intent_below_its_minimum_aborts(lag: int) -> None:
    replica = world(lag, [{"a": 9}, {"a": 1}])
    intent = replica.open("x", {"a": 8}, minimum=2)
    assert replica.decide() == ["abort x"]
    assert intent[1].vote == 0, "too few are given back at once"
    replica.end(intent)
    replica.decide()
    assert (replica.charged(), replica.free()) == (0, [9, 1])


# -- parents ---------------------------------------------------------------------------------------


@LAGS
@pytest.mark.parametrize("same_ballot", [True, False])
def test_a_child_of_an_aborted_parent_aborts_whatever_its_votes(
    lag: int, same_ballot: bool
) -> None:
    replica = world(lag)
    replica.owners[0].refuse.add(("parent", "a"))
    parent = replica.open("parent", {"a": 1})
    if not same_ballot:
        replica.decide()
    child = replica.open("child", {"a": 1}, parents=[parent])
    told = replica.decide()
    assert "abort child" in told
    assert [one.cause for one in child] == ["parent"] * 3
    assert ("reserve", "child", "a", 1) not in replica.owners[0].calls, "it could not help any more"


@LAGS
@pytest.mark.parametrize("lacks", ["first", "second"])
@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_bound_commits_together_or_not_at_all(lag: int, lacks: str, rank: int) -> None:
    for refuses in (True, False):
        replica = world(lag)
        if refuses:
            replica.owners[rank].refuse.add((lacks, "a"))
        first = replica.open("first", {"a": 3})
        second = replica.open("second", {"a": 2}, minimum=1)
        for manager, *both in zip(replica.managers, first, second, strict=True):
            manager.bind(both)
        verdict = "abort" if refuses else "commit"
        told = [line for line in replica.decide() if not line.startswith("end")]
        assert told == [f"{verdict} first", f"{verdict} second"]
        assert [one.cause for one in (*first, *second)] == ["refused" if refuses else ""] * 6
        if refuses and lacks == "first":
            assert ("reserve", "second", "a", 2) not in replica.owners[rank].calls


@LAGS
def test_what_is_bound_to_what_is_withdrawn_aborts(lag: int) -> None:
    replica = world(lag)
    first, second = replica.open("first", {"a": 3}), replica.open("second", {"a": 2})
    for manager, *both in zip(replica.managers, first, second, strict=True):
        manager.bind(both)
    replica.withdraw(second)
    assert replica.decide()[:2] == ["abort first", "abort second"]


def test_only_what_was_just_opened_in_a_row_can_be_bound() -> None:
    replica = world()
    first, second = replica.open("first", {"a": 1}), replica.open("second", {"a": 1})
    third = replica.open("third", {"a": 1})
    manager = replica.managers[0]
    before = manager.journal.fingerprint
    with pytest.raises(Misuse, match="opened in a row"):
        manager.bind([first[0], third[0]])
    manager.reserve(second[0])
    with pytest.raises(Misuse, match="opened in a row"):
        manager.bind([first[0], second[0]])
    assert (first[0].bound, manager.journal.fingerprint) == ((), before)


@LAGS
def test_a_child_and_its_parent_may_share_a_ballot(lag: int) -> None:
    replica = world(lag)
    parent = replica.open("parent", {"a": 1})
    child = replica.open("child", {"a": 1}, parents=[parent])
    assert replica.decide() == ["commit parent", "commit child"]
    replica.end(child)
    assert replica.decide() == ["end child"], "endings come in any order"


@LAGS
def test_a_child_of_a_withdrawn_parent_aborts(lag: int) -> None:
    replica = world(lag)
    committed = replica.open("committed", {"a": 1})
    replica.decide()
    replica.withdraw(committed)
    undecided = replica.open("undecided", {"a": 1})
    replica.withdraw(undecided)
    for parent in (committed, undecided):
        child = replica.open(f"of {parent[0].key}", {"a": 1}, parents=[parent])
        assert f"abort of {parent[0].key}" in replica.decide()
        assert all(one.vote == 0 for one in child), "nobody starts what cannot be"


@LAGS
@pytest.mark.parametrize("is_short_everywhere", [True, False])
def test_a_child_of_a_partly_committed_parent_aborts(lag: int, is_short_everywhere: bool) -> None:
    """The child builds on the end of its parent, which is not there."""
    replica = world(lag, [{"a": 6, "b": 9}, {"a": 6 if is_short_everywhere else 20, "b": 9}])
    parent = replica.open("parent", {"a": 8}, minimum=1)
    child = replica.open("child", {"b": 1}, parents=[parent])
    assert replica.decide()[:2] == ["commit parent", "abort child"]
    assert only(one.agreed for one in parent) == 6
    assert child[0].vote == 0, "a rank without all pages of the parent starts nothing"
    assert child[1].vote == (0 if is_short_everywhere else 1)


@LAGS
def test_a_child_of_a_parent_that_arrived_in_part_aborts(lag: int) -> None:
    replica = world(lag)
    parent = replica.open("parent", {"a": 4}, minimum=1)
    replica.decide()
    replica.end(parent, result=3)
    replica.step()
    replica.open("child", {"a": 1}, parents=[parent])
    assert "abort child" in replica.decide()
    assert only(one.result for one in parent) == 3


@LAGS
def test_verdicts_come_before_the_endings_of_the_same_ballot(lag: int) -> None:
    """So the child commits first, and whoever owns the tree withdraws it when its parent fails."""
    replica = world(lag)
    parent = replica.open("parent", {"a": 4})
    replica.decide()
    replica.end(parent, result=0)
    replica.open("child", {"a": 1}, parents=[parent])
    assert replica.decide() == ["commit child", "fail parent"]


@LAGS
def test_a_child_of_a_parent_that_is_done_commits(lag: int) -> None:
    replica = world(lag)
    parent = replica.open("parent", {"a": 4}, minimum=1)
    replica.decide()
    replica.end(parent)
    replica.decide()
    assert replica.states(parent) is State.DONE
    replica.open("child", {"a": 1}, parents=[parent])
    assert replica.decide() == ["commit child"]


def test_a_child_is_not_reserved_before_its_parent() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    parent = manager.open("copy", "parent", {"a": 1}, owner)
    assert parent is not None
    child = manager.open("copy", "child", {"a": 1}, owner, parents=[parent])
    assert child is not None
    with pytest.raises(Misuse, match="reserve that first"):
        manager.reserve(child)
    assert (child.state, owner.calls) == (State.PROPOSED, [])


# -- withdrawing -----------------------------------------------------------------------------------


def _propose(replica: Replica, refused: bool = False) -> list[Intent]:
    if refused:
        replica.owners[0].refuse.add(("x", "a"))
    return replica.open("x", {"a": 2})


def _reserve(replica: Replica, refused: bool = False) -> list[Intent]:
    intents = _propose(replica, refused)
    for manager in replica.managers:
        manager.reserve_open()
    return intents


def _post(replica: Replica, refused: bool = False) -> list[Intent]:
    intents = _propose(replica, refused)
    replica.step()
    return intents


@LAGS
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("come_to", [_propose, _reserve, _post])
def test_withdrawn_before_the_verdict_is_aborted_whatever_the_votes(
    lag: int, refused: bool, come_to: Callable[[Replica, bool], list[Intent]]
) -> None:
    replica = world(lag)
    if come_to is _post and not lag:
        pytest.skip("without lag nothing is undecided after its ballot")
    intents = come_to(replica, refused)
    before = replica.managers[0].journal.count
    replica.withdraw(intents)
    replica.withdraw(intents)
    assert replica.managers[0].journal.count == before + 1, "once"
    assert replica.charged() == 2
    told = replica.decide()
    assert told[0] == "abort x"
    assert [one.cause for one in intents] == ["withdrawn"] * 3
    replica.end(intents)
    replica.decide()
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])
    assert only(owner.keys("commit") for owner in replica.owners) == []


@LAGS
def test_withdrawn_after_the_commit_stays_charged_until_it_has_ended(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 2})
    replica.decide()
    replica.withdraw(intents)
    assert replica.states(intents) is State.WITHDRAWN
    assert replica.decide() == []
    assert replica.charged() == 2
    replica.end(intents)
    assert replica.decide() == ["end x"]
    assert replica.states(intents) is State.CLOSED
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])


@LAGS
@pytest.mark.parametrize("how", ["aborted", "withdrawn", "done", "closed", "dropped"])
def test_withdrawing_what_is_decided_against_or_over_changes_nothing(lag: int, how: str) -> None:
    replica = world(lag)
    if how in ("aborted", "closed"):
        replica.owners[1].refuse.add(("x", "a"))
    intents = replica.open("x", {"a": 2})
    replica.decide()
    if how == "withdrawn":
        replica.withdraw(intents)
    if how in ("done", "closed"):
        replica.end(intents)
        replica.decide()
    if how == "dropped":
        replica.begin_epoch(1)
    assert replica.states(intents).value == how
    before = [manager.journal.fingerprint for manager in replica.managers]
    replica.withdraw(intents)
    assert replica.states(intents).value == how
    assert [manager.journal.fingerprint for manager in replica.managers] == before


# -- endings ---------------------------------------------------------------------------------------


@LAGS
def test_an_ending_before_the_ballot_rides_along_with_the_vote(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 2})
    for manager in replica.managers:
        manager.reserve_open()
    replica.end(intents)
    assert replica.decide() == ["commit x", "end x"]
    assert replica.states(intents) is State.DONE


@pytest.mark.parametrize("lag", [1, 2])
def test_an_ending_between_ballot_and_verdict_comes_with_the_next_ballot(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 2})
    replica.step()
    replica.end(intents)
    told = [replica.step() for _ in range(lag + 1)]
    assert told == [[]] * (lag - 1) + [["commit x"], ["end x"]]


@LAGS
def test_ranks_that_end_at_different_times_are_waited_for(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 2})
    for manager in replica.managers:
        manager.reserve_open()
    replica.end(intents, ranks=[1])
    assert replica.decide() == ["commit x"]
    replica.end(intents, ranks=[0])
    assert replica.decide() == []
    replica.end(intents, ranks=[2])
    assert replica.decide() == ["end x"]


@LAGS
def test_a_slow_copy_blocks_nobody(lag: int) -> None:
    replica = world(lag)
    slow, quick = replica.open("slow", {"a": 1}), replica.open("quick", {"a": 1})
    replica.decide()
    replica.end(quick)
    assert replica.decide() == ["end quick"]
    assert replica.states(slow) is State.COMMITTED


@LAGS
@pytest.mark.parametrize("early", [False, True])
def test_a_copy_that_failed_on_one_rank_failed_on_all(lag: int, early: bool) -> None:
    """``early``: before the ballot, in which an ending could ride along, but a failure cannot."""
    replica = world(lag)
    intents = replica.open("x", {"a": 3})
    if not early:
        replica.decide()
    for manager in replica.managers:
        manager.reserve_open()
    replica.end(intents, ranks=[0, 2])
    replica.end(intents, 0, ranks=[1])
    told = replica.decide() + replica.decide()
    assert told == (["commit x", "fail x"] if early else ["fail x"])
    assert replica.states(intents) is State.FAILED
    assert not intents[0].is_committed
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])
    assert only(owner.tree for owner in replica.owners) == {}


@LAGS
def test_an_elastic_copy_keeps_what_arrived_everywhere(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 8}, minimum=2)
    replica.decide()
    for rank, result in enumerate([8, 3, 5]):
        replica.end(intents, result, ranks=[rank])
    assert replica.decide() == ["end x"]
    assert only(one.result for one in intents) == 3
    assert (replica.charged(), replica.free()) == (3, [7, 7, 7])


@LAGS
@pytest.mark.parametrize("minimum", [None, 4])
def test_less_than_the_minimum_is_a_failure(lag: int, minimum: int | None) -> None:
    """All or nothing holds for what arrives as it does for what is reserved."""
    replica = world(lag)
    intents = replica.open("x", {"a": 8}, minimum=minimum)
    replica.decide()
    replica.end(intents, 3, ranks=[1])
    replica.end(intents)
    assert replica.decide() == ["fail x"]
    assert (replica.charged(), replica.free()) == (0, [10, 10, 10])


@LAGS
def test_a_part_of_several_pools_is_a_failure(lag: int) -> None:
    replica = world(lag, [{"a": 9, "b": 9}] * 2)
    intents = replica.open("x", {"a": 2, "b": 2})
    replica.decide()
    replica.end(intents, 3)
    assert replica.decide() == ["fail x"]
    assert (replica.charged("a"), replica.charged("b")) == (0, 0)


@LAGS
def test_what_ends_on_commit_needs_no_ending(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 3}, ends_on_commit=True)
    assert replica.decide() == ["commit x", "end x"]
    assert replica.charged() == 3
    replica.end(intents)
    assert replica.decide() == [], "a late word changes nothing"


@LAGS
def test_what_ends_on_commit_drains_like_any_other_where_it_is_aborted(lag: int) -> None:
    replica = world(lag)
    replica.owners[0].refuse.add(("x", "a"))
    intents = replica.open("x", {"a": 3}, ends_on_commit=True)
    assert replica.decide() == ["abort x"]
    assert replica.charged() == 3
    replica.end(intents)
    assert replica.decide() == ["end x"]
    assert replica.charged() == 0


@LAGS
def test_ended_twice_is_our_bug(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 3})
    replica.decide()
    replica.managers[1].mark_ended(intents[1])
    with pytest.raises(InternalError, match="ended twice on rank 1"):
        replica.managers[1].mark_ended(intents[1], 0)
    assert intents[1].local_result == 3


def test_refused_has_ended_already_and_proposed_has_not_begun() -> None:
    owner = Owner({"a": 1})
    manager = make_manager(0, owner)
    intent = manager.open("copy", "x", {"a": 2}, owner)
    assert intent is not None
    with pytest.raises(InternalError, match="before it was reserved"):
        manager.mark_ended(intent)
    assert not manager.reserve(intent)
    with pytest.raises(InternalError, match="twice"):
        manager.mark_ended(intent)


@pytest.mark.parametrize("result", [-1, 4])
def test_a_result_beyond_what_is_held_is_refused(result: int) -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    intent = manager.open("copy", "x", {"a": 3}, owner)
    assert intent is not None
    manager.reserve(intent)
    with pytest.raises(Misuse, match="holds 3 pages"):
        manager.mark_ended(intent, result)
    assert not intent.local_ended
    manager.mark_ended(intent, 3)


# -- quarantine ------------------------------------------------------------------------------------


@LAGS
@pytest.mark.parametrize("verdict", ["commit", "abort"])
def test_a_copy_that_outlives_its_timeout_is_quarantined_by_all(lag: int, verdict: str) -> None:
    replica = world(lag)
    if verdict == "abort":
        replica.owners[2].refuse.add(("x", "a"))
    intents = replica.open("x", {"a": 4})
    assert replica.decide() == [f"{verdict} x"]
    serial = intents[0].serial
    replica.end(intents, ranks=[0])
    assert replica.decide(ms=1000 // (1 + lag)) == [], "exactly its timeout is not beyond it"
    told: list[str] = []
    while not told:
        told = replica.step(ms=1)
    assert told == ["quarantine x"]
    assert replica.states(intents) is State.QUARANTINED
    assert only(owner.tree for owner in replica.owners) == {}, "its target is not resident"
    assert replica.managers[0].open_intents == (), "its slot is free"

    # The charge cools until a ballot posted afterwards has told everyone where pages are stuck.
    assert replica.charged() == 4
    settled = replica.managers[0].settled_step
    while replica.managers[0].ledger.is_cooling:
        assert not replica.managers[0].is_idle
        assert replica.charged() == 4
        assert replica.room() <= 6
        replica.step()
    assert replica.managers[0].settled_step == settled + lag + 1
    assert (replica.charged(), replica.room()) == (0, 6)

    # Where the copy really ends its pages are usable again; the intent stays over.
    for rank in (1, 2):
        if serial in replica.owners[rank].stuck:
            replica.owners[rank].stops(serial)
            replica.managers[rank].mark_ended(intents[rank])
    assert replica.decide() == []
    assert (replica.room(), replica.free()) == (10, [10, 10, 10])
    assert replica.managers[0].is_idle


@LAGS
def test_the_slowest_clock_decides(lag: int) -> None:
    """The agreed clock is the MIN: a rank whose clock runs ahead quarantines nothing."""
    replica = world(lag, [{"a": 9}] * 2)
    replica.open("x", {"a": 1})
    replica.decide()
    for _ in range(4 + lag):
        if lag and len(replica.in_flight) >= lag:
            replica.settle()
        ballots = [
            manager.post(manager.step, now_ms=now)
            for manager, now in zip(replica.managers, [10**9, 0], strict=True)
        ]
        replica.in_flight.append(np.minimum.reduce(ballots))
        if not lag:
            replica.settle()
    assert len(replica.managers[0].open_intents) == 1
    assert replica.managers[0].clock_ms == 0


@LAGS
def test_only_what_is_overdue_is_quarantined_oldest_first(lag: int) -> None:
    replica = world(lag)
    old = [replica.open(f"old {n}", {"a": 1}) for n in range(2)]
    replica.decide()
    replica.step(ms=600)
    replica.decide()
    young = replica.open("young", {"a": 1})
    assert replica.decide() == ["commit young"]
    told = replica.step(ms=600) + replica.decide()
    assert told == ["quarantine old 0", "quarantine old 1"]
    assert {replica.states(one) for one in old} == {State.QUARANTINED}
    assert replica.states(young) is State.COMMITTED


@LAGS
def test_what_is_asked_for_after_a_long_idle_time_is_not_overdue(lag: int) -> None:
    """An engine that waits for requests does not step, so the agreed clock jumps afterwards."""
    replica = world(lag)
    replica.decide()
    replica.now_ms += 3_600_000
    replica.open("x", {"a": 1})
    assert replica.decide() == ["commit x"]
    assert replica.decide() == []
    assert replica.decide(ms=1001) == ["quarantine x"]


@LAGS
def test_what_ended_in_a_long_pause_is_not_quarantined(lag: int) -> None:
    replica = world(lag)
    intents = replica.open("x", {"a": 1})
    replica.decide()
    replica.now_ms += 3_600_000
    replica.end(intents)
    assert replica.decide() == ["end x"]


def test_an_undecided_intent_is_never_quarantined() -> None:
    replica = world(2)
    replica.open("x", {"a": 1})
    assert replica.step() == []
    assert replica.step(ms=10_000) == []
    assert replica.step(ms=10_000) == ["commit x"]


# -- slots -----------------------------------------------------------------------------------------


@LAGS
def test_without_a_slot_there_is_no_intent_and_no_charge(lag: int) -> None:
    replica = world(lag, num_slots=2)
    first, second = replica.open(1, {"a": 1}), replica.open(2, {"a": 1})
    before = replica.managers[0].journal.fingerprint
    assert replica.try_open(3, {"a": 1}) == []
    assert replica.charged() == 2
    assert replica.managers[0].journal.fingerprint == before
    replica.decide()
    replica.end(first)
    replica.end(second)
    assert replica.decide() == ["end 1", "end 2"]
    freed_in = replica.managers[0].step
    while not (third := replica.try_open(3, {"a": 1})):
        replica.step()
    assert [one.slot for one in third] == [0, 0, 0]
    assert third[0].opened_step == freed_in + lag + 1


@LAGS
def test_a_new_user_of_a_slot_is_not_mistaken_for_the_old_one(lag: int) -> None:
    """One slot, many users, each of which ends the moment it has started."""
    replica = world(lag, [{"a": 99}] * 2, num_slots=1)
    told: list[str] = []
    key = 0
    while key < 20:
        intents = replica.try_open(key, {"a": 1})
        if intents:
            key += 1
            if key % 3 == 0:
                replica.owners[key % 2].refuse.add((key - 1, "a"))
            for manager in replica.managers:
                manager.reserve_open()
            replica.end(intents)
        told += replica.step()
    told += replica.decide()
    verdicts = ["abort" if key % 3 == 2 else "commit" for key in range(20)]
    assert told == [line for k, v in enumerate(verdicts) for line in (f"{v} {k}", f"end {k}")]


# -- epochs ----------------------------------------------------------------------------------------


@LAGS
def test_a_new_epoch_drops_everything_and_old_endings_change_nothing(lag: int) -> None:
    replica = world(lag)
    committed = replica.open("committed", {"a": 2})
    replica.decide()
    posted = replica.open("posted", {"a": 2})
    replica.post()
    proposed = replica.open("proposed", {"a": 2})
    dropped = replica.begin_epoch(1)
    assert [list(one) for one in zip(*dropped, strict=True)] == [committed, posted, proposed]
    assert {replica.states(one) for one in (committed, posted, proposed)} == {State.DROPPED}
    assert (replica.charged(), replica.managers[0].open_intents) == (0, ())
    assert replica.managers[0].find("copy", "committed") is None
    before = [(m.journal.fingerprint, m.ledger.charged("a")) for m in replica.managers]
    for intents in (committed, posted, proposed):
        for manager, intent in zip(replica.managers, intents, strict=True):
            manager.mark_ended(intent)
            manager.mark_ended(intent)
    assert [(m.journal.fingerprint, m.ledger.charged("a")) for m in replica.managers] == before

    for owner in replica.owners:
        owner.__init__(owner.capacity)
    fresh = replica.open("fresh", {"a": 10})
    assert (fresh[0].slot, fresh[0].epoch) == (0, 1)
    assert replica.decide() == ["commit fresh"]
    assert replica.managers[0].step == 1 + lag


@LAGS
def test_after_a_divergence_nothing_of_it_is_left_in_a_new_epoch(lag: int) -> None:
    """The reason why the old epoch ended: one rank opened more intents than the others."""
    replica = world(lag)
    replica.managers[1].open("copy", "only here", {"a": 1}, replica.owners[1])
    replica.begin_epoch(1)
    replica.open("x", {"a": 1})
    assert replica.decide() == ["commit x"]


def test_a_new_epoch_needs_all_pools() -> None:
    manager = make_manager(0)
    for usable in ({}, {"a": 1, "b": 1}):
        with pytest.raises(Misuse, match="usable"):
            manager.begin_epoch(1, usable)
    assert manager.epoch == 0


# -- ballots and misuse ----------------------------------------------------------------------------


def test_a_broken_rank_votes_nothing_and_cannot_be_settled() -> None:
    replica = world()
    intents = replica.open("x", {"a": 3})
    replica.post({1: Status.BROKEN})
    vector = replica.in_flight[0]
    manager = replica.managers[0]
    verdict = manager.read(vector)
    assert (verdict.status, verdict.status_rank) == (Status.BROKEN, 1)
    assert (verdict.votes[0], verdict.ended[0], verdict.usable) == (0, 0, {"a": 0})
    with pytest.raises(InternalError, match="differ"):
        manager.settle(verdict)
    assert (manager.settled_step, intents[0].state) == (0, State.VOTED), "nothing has changed"


def test_a_rank_can_say_that_it_is_broken_whatever_is_broken() -> None:
    """An intent that nobody reserved, a pool that raises: the others must hear of it."""

    def fails() -> int:
        raise RuntimeError("no pool")

    schema = Schema(("a",), 4)
    manager = TransactionManager(
        rank=3, schema=schema, lag=0, copy_timeout_s=1, journal=Journal(3), usable={"a": fails}
    )
    manager.begin_epoch(0, {"a": 5})
    manager.open("copy", "x", {"a": 1}, Owner({"a": 5}))
    with pytest.raises(Misuse, match="reserved"):
        manager.post(1)
    manager.reserve_open()
    with pytest.raises(RuntimeError, match="no pool"):
        manager.post(1)
    assert (manager.step, manager.oldest_posted) == (0, None), "a failed post changes nothing"
    verdict = manager.read(manager.post(1, status=Status.BROKEN))
    assert (verdict.status, verdict.status_rank, verdict.step) == (Status.BROKEN, 3, 1)


@LAGS
def test_ballots_in_flight_are_bounded(lag: int) -> None:
    manager = make_manager(0, lag=lag)
    vectors = [manager.post(1) for _ in range(lag + 1)]
    with pytest.raises(Misuse, match="settle the oldest"):
        manager.post(1)
    assert manager.step == lag + 1
    if lag:
        with pytest.raises(InternalError, match=f"step {lag + 1} was read for step 1"):
            manager.settle(manager.read(vectors[-1]))
        assert manager.settled_step == 0


def test_there_must_be_a_ballot_to_settle() -> None:
    manager = make_manager(0)
    verdict = manager.read(manager.post(1))
    manager.settle(verdict)
    with pytest.raises(Misuse, match="no ballot"):
        manager.settle(verdict)


BAD_OPENINGS: list[tuple[dict[str, int], int | None]] = [
    ({}, None),
    ({"a": 0}, None),
    ({"a": -1}, None),
    ({"a": 3, "b": -1}, None),
    ({"a": 1, "nowhere": 1}, None),
    ({"a": 1, "b": 1}, 1),
    ({"a": 3}, 0),
    ({"a": 3}, 4),
]


@pytest.mark.parametrize("need,minimum", BAD_OPENINGS)
def test_needs_without_sense_are_refused(need: dict[str, int], minimum: int | None) -> None:
    owner = Owner({"a": 9, "b": 9})
    manager = make_manager(0, owner)
    before = manager.journal.fingerprint
    with pytest.raises(Misuse):
        manager.open("copy", "x", need, owner, minimum=minimum)
    manager.check_integrity()
    assert manager.is_idle
    assert manager.journal.fingerprint == before
    assert (manager.room("a"), manager.room("b")) == (9, 9)


def test_a_second_reservation_is_refused() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    intent = manager.open("copy", "x", {"a": 2}, owner)
    assert intent is not None
    manager.reserve(intent)
    with pytest.raises(Misuse, match="cannot be reserved again"):
        manager.reserve(intent)
    assert owner.free == {"a": 7}


@pytest.mark.parametrize("says", [-1, 3])
def test_a_participant_that_reserves_nonsense_is_our_bug(says: int) -> None:
    class Odd(Owner):
        def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
            return says

    owner = Odd({"a": 9})
    manager = make_manager(0, owner)
    intent = manager.open("copy", "x", {"a": 2}, owner)
    assert intent is not None
    with pytest.raises(InternalError, match=f"reserved {says} of 2"):
        manager.reserve(intent)


@pytest.mark.parametrize(
    "how,match",
    [
        ({"lag": -1}, "lag"),
        ({"copy_timeout_s": 0.0}, "copy_timeout_s"),
        ({"usable": {}}, "usable"),
        ({"usable": {"a": int, "b": int}}, "usable"),
    ],
)
def test_managers_without_sense_are_refused(how: dict[str, object], match: str) -> None:
    given: dict[str, object] = {
        "rank": 0,
        "schema": Schema(("a",)),
        "lag": 0,
        "copy_timeout_s": 1.0,
        "journal": Journal(0),
        "usable": {"a": int},
    }
    with pytest.raises(Misuse, match=match):
        TransactionManager(**(given | how))  # type: ignore[arg-type]


# -- what is agreed is in the fingerprint ----------------------------------------------------------


def _opened(
    key: int = 1,
    need: dict[str, int] | None = None,
    minimum: int | None = None,
    with_parent: bool = False,
    ends_on_commit: bool = False,
) -> int:
    owner = Owner({"a": 9, "b": 9})
    manager = make_manager(0, owner)
    first = manager.open("copy", 0, {"a": 1}, owner)
    assert first is not None
    manager.open(
        "copy",
        key,
        need or {"a": 4},
        owner,
        minimum=minimum,
        parents=[first] if with_parent else [],
        ends_on_commit=ends_on_commit,
    )
    return manager.journal.fingerprint


def test_everything_that_a_verdict_depends_on_is_in_the_fingerprint() -> None:
    """So that ranks which differ in it are found before they decide differently."""
    variants = [
        _opened(),
        _opened(key=2),
        _opened(need={"a": 5}),
        _opened(need={"b": 4}),
        _opened(need={"a": 2, "b": 2}),
        _opened(minimum=1),
        _opened(with_parent=True),
        _opened(ends_on_commit=True),
    ]
    assert len(set(variants)) == len(variants)
    assert _opened() == variants[0]


def test_what_is_withdrawn_or_renamed_or_noted_is_in_the_fingerprint() -> None:
    def after(*calls: Callable[[TransactionManager, Intent], None]) -> int:
        owner = Owner({"a": 9})
        manager = make_manager(0, owner)
        intent = manager.open("copy", 1, {"a": 4}, owner)
        assert intent is not None
        for call in calls:
            call(manager, intent)
        return manager.journal.fingerprint

    def alias(key: int, manager: TransactionManager, intent: Intent) -> None:
        manager.alias(intent, key)

    variants = [
        after(),
        after(TransactionManager.withdraw),
        after(partial(alias, 2)),
        after(partial(alias, 3)),
        after(lambda manager, _: manager.note("free", 3)),
    ]
    assert len(set(variants)) == len(variants)


def test_reservations_and_endings_are_facts_and_not_in_the_fingerprint() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    intent = manager.open("copy", 1, {"a": 4}, owner)
    assert intent is not None
    before = manager.journal.fingerprint
    manager.reserve(intent)
    manager.mark_ended(intent, 0)
    manager.post(1)
    assert manager.journal.fingerprint == before


def test_find_follows_aliases_until_the_intent_is_over() -> None:
    replica = world()
    intents = replica.open("x", {"a": 1})
    for manager, intent in zip(replica.managers, intents, strict=True):
        manager.alias(intent, "y")
    manager = replica.managers[0]
    assert manager.find("copy", "x") is manager.find("copy", "y") is intents[0]
    assert manager.find("load", "x") is None
    newer = replica.open("x", {"a": 1})
    assert manager.find("copy", "x") is newer[0]
    replica.step()
    replica.end(intents)
    replica.step()
    assert manager.find("copy", "y") is None
    assert manager.find("copy", "x") is newer[0], "the older one takes only its own names along"


def test_agreed_room_is_that_of_the_poorest_rank() -> None:
    replica = world(0, [{"a": 10}, {"a": 6}])
    assert replica.room() == 6
    replica.owners[0].capacity["a"] = replica.owners[0].free["a"] = 4
    replica.step()
    assert replica.room() == 4


def test_a_ballot_says_to_which_epoch_it_belongs() -> None:
    manager = make_manager(0)
    manager.begin_epoch(3, {"a": 10})
    manager.note("evict", 7)
    manager.post(5)
    header = manager.newest.header
    assert (header.epoch, header.step, header.iteration) == (3, 1, 5)
    assert header.schema == manager.schema.digest
    assert header.fingerprint == manager.journal.fingerprint != 0


# -- what is told of it ----------------------------------------------------------------------------


def written(tmp_path: Path, live: Callable[[TransactionManager, Owner], None]) -> list[str]:
    """What one rank alone writes down while it lives; entries as words."""
    owner = Owner({"a": 9, "b": 9})
    manager = make_manager(0, owner)
    manager.journal = Journal(0, path=tmp_path / "0.journal")
    live(manager, owner)
    manager.journal.close()
    told = read_journal(tmp_path / "0.journal")
    return [" ".join(map(str, (entry.tag, *entry.values))) for entry in told]


def turn(manager: TransactionManager, now_ms: int = 0) -> None:
    manager.reserve_open()
    manager.settle(manager.read(manager.post(40 + manager.step, now_ms=now_ms)))


def test_the_journal_tells_a_whole_life(tmp_path: Path) -> None:
    def live(manager: TransactionManager, owner: Owner) -> None:
        first = manager.open("copy", "x", {"b": 1, "a": 2}, owner)
        second = manager.open("load", "y", {"a": 4}, owner, minimum=3, ends_on_commit=True)
        assert first is not None
        assert second is not None
        owner.refuse.add(("y", "a"))
        turn(manager)
        manager.mark_ended(first, 3)
        turn(manager)

    assert written(tmp_path, live) == [
        "open copy x 0 0 a 2 b 1 at least 3 ends",
        "open load y 1 1 a 4 at least 3 ends on commit",
        "reserve 0 3",
        "refuse 1",
        "post 40 2",
        "commit copy 0 3",
        "abort load 1 refused",
        "end 1 0",
        "ended 0 3",
        "post 41 1",
        "end 0 3",
    ]


def test_the_journal_tells_what_was_withdrawn_and_given_up(tmp_path: Path) -> None:
    def live(manager: TransactionManager, owner: Owner) -> None:
        first = manager.open("copy", "x", {"a": 2}, owner)
        assert first is not None
        second = manager.open("copy", "y", {"a": 1}, owner, parents=[first])
        assert second is not None
        manager.withdraw(second)
        manager.withdraw(second)
        turn(manager)
        manager.withdraw(first)
        turn(manager, 1001)

    assert written(tmp_path, live) == [
        "open copy x 0 0 a 2 at least 2 ends",
        "open copy y 1 1 a 1 at least 1 ends 0",
        "withdraw 1",
        "reserve 0 2",
        "refuse 1",
        "post 40 2",
        "commit copy 0 2",
        "abort copy 1 withdrawn",
        "end 1 0",
        "withdraw 0",
        "post 41 1",
        "quarantine 0",
    ]


def test_a_new_manager_and_a_new_epoch_count_from_nothing() -> None:
    owner = Owner({"a": 9})
    made = TransactionManager(
        rank=0,
        schema=Schema(("a",), 4),
        lag=0,
        copy_timeout_s=1.0,
        journal=Journal(0),
        usable={"a": partial(owner.usable, "a")},
    )
    for epoch in range(2):
        assert (made.epoch, made.step, made.settled_step, made.clock_ms) == (epoch, 0, 0, 0)
        opened = [made.open("copy", key, {"a": 1}, owner) for key in range(3)]
        assert [intent and intent.serial for intent in opened] == [0, 1, 2]
        assert made.oldest_open is opened[0]
        turn(made, 700)
        assert (made.step, made.settled_step, made.clock_ms) == (1, 1, 700)
        made.begin_epoch(epoch + 1, {"a": 9})
        assert made.oldest_open is None


def test_what_a_ballot_says_unless_told_otherwise() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    assert manager.oldest_posted is None
    intents = [manager.open("copy", key, {"a": 1}, owner) for key in range(2)]
    manager.reserve_open()
    for intent in intents:
        assert intent is not None
        manager.mark_ended(intent)
    vector = manager.post(5)
    header, verdict = manager.newest.header, manager.read(vector)
    assert (header.live, header.round, verdict.clock_ms) == (0, 0, 0)
    assert (verdict.votes, verdict.ended) == ([1, 1], [1, 1]), "only slots that are in use"
    posted = manager.oldest_posted
    assert posted is not None
    assert (posted.step, posted.num_slots, manager.newest.num_slots) == (1, 2, 2)
    assert posted.intents == posted.voted == tuple(intents)
    with pytest.raises(AttributeError):
        posted.step = 2
    manager.settle(verdict)
    assert manager.oldest_posted is None


def test_a_pool_of_which_nothing_is_needed_may_be_named() -> None:
    replica = world(0, [{"a": 9, "b": 9}] * 2)
    replica.open("x", {"a": 2, "b": 0})
    assert replica.step() == ["commit x"]


def test_who_is_refused_hears_it_as_no() -> None:
    owner = Owner({"a": 1})
    manager = make_manager(0, owner)
    intent = manager.open("copy", 1, {"a": 2}, owner)
    assert intent is not None
    assert manager.reserve(intent) is False


@pytest.mark.parametrize("spoils", ["twice", "lost"])
def test_slots_that_do_not_match_are_found(spoils: str) -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    first, second = (manager.open("copy", key, {"a": 1}, owner) for key in range(2))
    assert first is not None
    assert second is not None
    manager.check_integrity()
    if spoils == "twice":
        second.slot = first.slot
    else:
        del manager._open[second.serial]
    with pytest.raises(InternalError, match="slots"):
        manager.check_integrity()


def test_a_new_intent_knows_nothing_yet() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner)
    intent = manager.open("copy", 1, {"a": 2}, owner)
    assert intent is not None
    assert (intent.vote, intent.agreed, intent.result, intent.local_result) == (0, 0, 0, 0)
    assert (intent.decided_ms, intent.posted_step, intent.cause) == (-1, -1, "")
    assert (intent.opened_step, intent.opened_ms) == (1, 0)
    assert not intent.is_committed
    turn(manager, 300)
    assert intent.is_committed
    assert (intent.decided_ms, intent.posted_step) == (300, 1)
    manager.mark_ended(intent)
    manager.reserve_open()
    outcomes = manager.settle(manager.read(manager.post(9)))
    assert intent.is_committed
    with pytest.raises(AttributeError):
        setattr(outcomes[0], "intent", None)  # noqa: B010  the type forbids it, too


# -- what an engine adds ---------------------------------------------------------------------------


class Whole(Owner):
    """An engine that allocates all pools of an intent in one call, and pins at the opening."""

    def reserve_all(self, intent: Intent) -> bool:
        self.calls.append(("reserve_all", intent.key))
        if any(num_pages > self.free[pool] for pool, num_pages in intent.need.items()):
            return False
        for pool, num_pages in intent.need.items():
            self.free[pool] -= num_pages
            self.held.setdefault(intent.serial, {})[pool] = num_pages
        return True

    def opened(self, intent: Intent) -> None:
        self.calls.append(("opened", intent.key))


def test_all_pools_at_once_or_none() -> None:
    owner = Whole({"a": 4, "b": 2})
    manager = make_manager(0, owner)
    fits = manager.open("copy", "x", {"a": 2, "b": 2}, owner)
    short = manager.open("copy", "y", {"a": 2, "b": 1}, owner)
    assert fits is not None
    assert short is not None
    manager.reserve_open()
    assert (fits.vote, fits.state) == (4, State.RESERVED)
    assert (short.vote, short.state) == (0, State.REFUSED)
    assert owner.free == {"a": 2, "b": 0}
    assert owner.keys("reserve") == owner.keys("unreserve") == []
    assert owner.calls[:2] == [("opened", "x"), ("opened", "y")], "a refused rank hears of it too"


def test_a_payload_comes_along_and_decides_nothing() -> None:
    owner = Owner({"a": 4})
    one, two = make_manager(0, owner), make_manager(1, owner)
    first = one.open("copy", "x", {"a": 1}, owner, payload=[1])
    second = two.open("copy", "x", {"a": 1}, owner)
    assert first is not None
    assert second is not None
    assert (first.payload, second.payload) == ([1], None)
    assert one.journal.fingerprint == two.journal.fingerprint


def test_what_is_kept_is_charged_until_it_is_given_back_and_ranks_see_that_alike() -> None:
    replica = world()
    intent = replica.open("x", {"a": 4})
    replica.decide()
    replica.end(intent)
    replica.decide()
    assert (replica.charged(), replica.room()) == (4, 6)
    one, two, _ = replica.managers
    one.give_back("a", 3)
    assert (one.ledger.charged("a"), one.room("a")) == (1, 9)
    assert one.journal.fingerprint != two.journal.fingerprint, "a refund on one rank shows at once"
    with pytest.raises(Misuse, match="2 pages of a cannot be given back: 1 are charged"):
        one.give_back("a", 2)
    assert one.ledger.charged("a") == 1
    one.hold("a", 5)
    assert one.room("a") == 4
    with pytest.raises(Misuse, match="cannot be held"):
        one.hold("a", -1)


@LAGS
def test_free_slots_are_as_many_as_can_be_opened(lag: int) -> None:
    replica = world(lag, num_slots=3)
    manager = replica.managers[0]
    for step in range(8):
        promised, opened = manager.num_free_slots, 0
        while replica.try_open(f"{step}.{opened}", {"a": 1}):
            opened += 1
        assert opened == promised
        for intent in manager.open_intents:
            replica.withdraw([m.find("copy", intent.key) or intent for m in replica.managers])
        replica.step()
        for one in manager.open_intents:
            replica.end([m.find("copy", one.key) or one for m in replica.managers])
