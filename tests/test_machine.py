"""The machine that a stepper drives: which of its calls a step makes, in which order."""

from __future__ import annotations

import pytest

from kvpact.consensus.core.participant import Outcome
from kvpact.consensus.engine.replica import EngineMachine
from tests.foreign import Owner, make_manager
from tests.test_step import World


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_step_prepares_once_and_tells_each_ballot_once_lag_steps_later(lag: int) -> None:
    world = World(size=2, lag=lag)
    rank = world.ranks[0]
    calls: list[str] = []

    def prepare() -> None:
        calls.append(f"prepare {rank.manager.step + 1}")
        rank.manager.reserve_open()

    def settled(outcomes: list[Outcome]) -> None:
        calls.append(f"settled {rank.manager.settled_step}: {len(outcomes)}")

    def live_digest() -> int:
        calls.append("digest")
        return 0

    rank.engine.prepare = prepare
    rank.engine.settled = settled
    rank.engine.live_digest = live_digest
    for step in range(1, 5):
        world.open()
        calls.clear()
        assert not any(world.step().values())
        told = [f"settled {step - lag}: 2"] if step > lag else []  # its commit and its end
        asked = [f"prepare {step}", "digest"]
        assert calls == (told + asked if lag else asked + told)


def test_an_engine_that_gives_no_functions_is_a_machine_that_only_reserves() -> None:
    manager = make_manager(0, Owner({"a": 1}))
    intent = manager.open("copy", "x", {"a": 1}, Owner({"a": 1}))
    assert intent is not None
    machine = EngineMachine(manager, plan=None, submit=None, settled=None, live=None, waits=None)
    machine.prepare()
    assert intent.vote == 1
    machine.settled([])
    assert machine.live_digest() == 0
    assert machine.waits() == {}
    assert not machine.is_at_rest()
