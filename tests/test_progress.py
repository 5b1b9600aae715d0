"""Progress: ranks that wait together for ever, in perfect agreement, are told so."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact.consensus.core.errors import KvpactError, ProgressLost
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.step.progress import MAX_DESCRIBED, MAX_WAITING_TOLD, Progress, describe
from kvpact.consensus.step.step import StepLimits, Stepper
from tests.foreign import Engine, Owner, make_manager, only
from tests.test_step import LAGS, Baggage, World, one_error

BOUND_S = 2.0


def world_with(lag: int, waits: Any = None) -> World:
    """Ranks whose copies never time out, so that only the age of an intent can end the wait."""
    world = World(lag=lag)
    for rank in world.ranks:
        rank.manager._copy_timeout_ms = 10**9
        rank.stepper._progress = Progress(rank.manager, bound_s=BOUND_S, waits=waits)
    return world


def step_until_error(world: World, limit: int = 60) -> list[KvpactError]:
    for _ in range(limit):
        world.net.now_s += 0.2
        errors = [error for error in world.step().values() if error is not None]
        if errors:
            assert len(errors) == len(world.ranks)
            return errors
    raise AssertionError("nobody minded")


@LAGS
def test_a_copy_that_never_ends_on_one_rank_is_named(lag: int) -> None:
    world = world_with(lag)
    for rank in world.ranks:
        intent = rank.manager.open("copy", "slow", {"a": 2}, rank.owner)
        assert intent is not None
        rank.manager.reserve(intent)
        if rank.manager.rank != 2:
            rank.manager.mark_ended(intent)
    error = one_error(step_until_error(world))
    assert isinstance(error, ProgressLost)
    assert error.ranks == (2,)
    assert "copy slow has waited for" in error.message
    assert "it has not ended on all ranks" in error.message
    assert any("rank 2: copy slow" in line and "not ended here" in line for line in error.story)
    assert only(rank.manager.settled_step for rank in world.ranks)


@LAGS
def test_what_waits_in_line_is_named(lag: int) -> None:
    world = world_with(lag, lambda: {"pages for request r7": "a pin that blocks every admission"})
    error = one_error(step_until_error(world))
    assert isinstance(error, ProgressLost)
    assert "pages for request r7 has waited for" in error.message
    assert "a pin that blocks every admission" in error.message


@LAGS
def test_whoever_else_waits_is_told_too(lag: int) -> None:
    world = world_with(
        lag, lambda: {f"pages for r{n}": "room" for n in range(MAX_WAITING_TOLD + 3)}
    )
    error = one_error(step_until_error(world))
    told = [line for line in error.story if line.startswith("in line: ")]
    assert len(told) == MAX_WAITING_TOLD + 1
    assert told[0].startswith("in line: pages for r0 has waited for ")
    assert told[0].endswith(" s: room")
    assert told[-1] == "in line: and 3 more"


def test_the_longest_wait_comes_first() -> None:
    manager = make_manager(0)
    waits = {"young": "room"}
    progress = Progress(manager, bound_s=BOUND_S, waits=lambda: waits)
    for clock_ms in (0, 500):
        manager.clock_ms = clock_ms
        assert progress.overdue() == ""
        waits = {"older": "a slot", **waits} if clock_ms == 0 else waits
    manager.clock_ms = 1000
    waits = {"youngest": "room", **waits}
    assert progress.waiting() == [
        "young has waited for 1.0 s: room",
        "older has waited for 0.5 s: a slot",
        "youngest has waited for 0.0 s: room",
    ]


def test_what_is_opened_after_an_idle_hour_is_not_an_hour_old() -> None:
    """Nobody steps an idle engine, and the clock of its last step is the clock of its next call."""
    owner = Owner({"a": 9})
    manager = make_manager(0, owner, copy_timeout_s=1e6)
    progress = Progress(manager, bound_s=BOUND_S, waits=lambda: {"a ticket": "room"})
    assert progress.overdue() == ""
    assert manager.open("copy", "slow", {"a": 1}, owner) is not None
    for clock_ms in (3_600_000, 3_600_900, 3_601_800):
        manager.clock_ms = clock_ms
        assert progress.overdue() == ""
    manager.clock_ms = 3_602_100
    assert progress.overdue() == "copy slow has waited for 2.1 s: it has no verdict yet"


def test_an_intent_may_be_as_old_as_its_bound_and_no_older() -> None:
    owner = Owner({"a": 9})
    manager = make_manager(0, owner, copy_timeout_s=1e6)
    manager.clock_ms = 500
    intent = manager.open("copy", "slow", {"a": 1}, owner)
    assert intent is not None
    progress = Progress(manager, bound_s=BOUND_S)
    for clock_ms in (500, 1400, 2300, 2500):
        manager.clock_ms = clock_ms
        assert progress.overdue() == ""
    manager.clock_ms = 2501
    assert progress.overdue() == "", "it looks a few times within the bound only"
    manager.clock_ms = 2625
    assert progress.overdue() == "copy slow has waited for 2.1 s: it has no verdict yet"
    assert describe(manager)[0].endswith("open for 2.1 s")
    manager.reserve_open()
    manager.settle(manager.read(manager.post(1, now_ms=2800)))
    assert progress.overdue() == "copy slow has waited for 2.3 s: it has not ended on all ranks"
    manager.mark_ended(intent)
    assert ", ended here, open for 2.3 s" in describe(manager)[0]
    manager.settle(manager.read(manager.post(2, now_ms=9000)))
    assert progress.overdue() == ""


def test_lines_are_looked_at_now_and_then_only() -> None:
    """Asking costs, and it is done on the hot path."""
    manager = make_manager(0)
    asked: list[int] = []

    def waits() -> dict[str, str]:
        asked.append(manager.clock_ms)
        return {"r": "room"}

    progress = Progress(manager, bound_s=1.6, waits=waits)
    for now_ms in range(0, 1001, 10):
        manager.clock_ms = now_ms
        assert progress.overdue() == ""
    assert asked == list(range(0, 1001, 100)), "sixteen times within the bound"
    manager.clock_ms = 1600
    assert progress.overdue() == ""
    manager.clock_ms = 1700
    assert progress.overdue() == "r has waited for 1.7 s: room"


def test_who_comes_and_goes_does_not_grow_old() -> None:
    manager = make_manager(0)
    waiting: dict[str, str] = {}
    progress = Progress(manager, bound_s=BOUND_S, waits=lambda: waiting)
    for second in range(20):
        manager.clock_ms = second * 1000
        waiting.clear()
        waiting[f"request {second}"] = "room"
        assert progress.overdue() == ""


def test_an_age_begins_anew_with_the_epoch() -> None:
    manager = make_manager(0)
    progress = Progress(manager, bound_s=BOUND_S, waits=lambda: {"r": "room"})
    manager.clock_ms = 1500
    assert progress.overdue() == ""
    progress.restart()
    for clock_ms in (0, 950, 1900):
        manager.clock_ms = clock_ms
        assert progress.overdue() == ""
    manager.clock_ms = 2200
    assert progress.overdue().startswith("r has waited for 2.2 s")


def test_an_ordinary_copy_is_left_alone() -> None:
    world = world_with(0)
    for _ in range(30):
        world.open()
        world.net.now_s += 0.2
        assert not any(world.step().values())


def open_many(manager: TransactionManager, owner: Owner, number: int) -> None:
    for index in range(number):
        assert manager.open("copy", index, {"a": 1}, owner) is not None


def test_a_description_is_bounded_and_says_what_is_local() -> None:
    owner = Owner({"a": 100})
    manager = make_manager(0, owner, num_slots=MAX_DESCRIBED + 9)
    open_many(manager, owner, MAX_DESCRIBED + 3)
    lines = describe(manager)
    assert len(lines) == MAX_DESCRIBED + 1
    assert lines[0] == "copy 0 (#0, slot 0, a=1): proposed, not ended here, open for 0.0 s"
    assert lines[-1] == "and 3 more"
    few = make_manager(0, owner, num_slots=MAX_DESCRIBED + 9)
    open_many(few, owner, MAX_DESCRIBED)
    assert len(describe(few)) == MAX_DESCRIBED == 32, "nothing is left to be counted"


def test_the_bound_is_a_limit_of_the_stepper() -> None:
    assert StepLimits(progress_s=7.0).progress_s == 7.0
    world = World(size=1)
    rank = world.ranks[0]
    engine = Engine(rank.manager)
    engine.waits = lambda: {"a ticket": "nobody"}
    stepper = Stepper(
        rank.manager,
        rank.link,
        world.store,
        engine,
        limits=StepLimits(progress_s=0.5),
        locator=world.net,
        carrier=Baggage(),
    )

    def run() -> None:
        for iteration in range(20):
            stepper.run(iteration)
            world.net.now_s += 0.1

    with pytest.raises(ProgressLost, match="a ticket has waited"):
        run()
