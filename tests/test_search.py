"""Small worlds exhaustively; and that the search finds what is wrong."""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import pytest

from kvpact.cache.paths.engine_pages import EnginePages
from kvpact.consensus.core import manager as managers
from kvpact.consensus.core.participant import Intent
from kvpact.harness.search.digest import digest
from kvpact.harness.search.ends import LARGE_ENDS, SMALL_ENDS, Ends, orders
from kvpact.harness.search.run import SMALL, explore, replay, search
from kvpact.harness.search.world import Setting, World


@pytest.mark.parametrize("setting", SMALL, ids=lambda setting: setting.name)
def test_all_promises_hold_in_every_state(
    setting: Setting, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explore(setting)
    with capsys.disabled():
        sys.stdout.write(f"\n{setting.name}: {found.num_states:,} states ")
    record_property("states", found.num_states)
    assert not found.failure, (found.failure, found.path)
    assert not found.is_cut
    assert found.num_drained >= 1


def test_the_same_search_twice_gives_the_same() -> None:
    setting = Setting(relation="line", refusals=False)
    first, second = explore(setting), explore(setting)
    assert (first.num_states, first.num_transitions) == (second.num_states, second.num_transitions)
    assert first.num_states > 50


def test_idle_steps_lead_back_to_where_they_began() -> None:
    path = [("go", 0, "", ""), ("go", 1, "", ""), ("go", 0, "", "")]
    world = replay(Setting(), path)
    later = replay(Setting(), path * 4)
    assert later.members[0].manager.step == 4 * world.members[0].manager.step
    assert digest(world) == digest(later)
    assert digest(world) != digest(World(Setting()))


def test_a_search_can_be_cut_short() -> None:
    assert explore(Setting(), states_max=20).is_cut


def test_two_processes_come_to_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr("kvpact.harness.search.run.SMALL_ENDS", SMALL_ENDS[:2])
    for jobs in (1, 2):
        assert search(small=True, states_max=40, jobs=jobs) == 0
        lines = capsys.readouterr().out.splitlines()
        told.append([re.sub(r"[\d.]+ s(, |$)", "", line) for line in lines])
    assert told[0] == told[1]
    assert len(told[0]) == len(SMALL) + 2 + 1
    assert told[0][-1].endswith(f"{len(SMALL)} of the settings cut short")


@pytest.mark.parametrize("ends", SMALL_ENDS, ids=lambda ends: ends.name)
def test_an_epoch_may_end_with_anything_in_hand(ends: Ends) -> None:
    found = orders(ends)
    assert not found.failure, (found.failure, found.text)
    assert found.num_orders == 8**ends.length


def test_every_way_to_end_is_tried_at_every_lag() -> None:
    for every in (SMALL_ENDS, LARGE_ENDS):
        assert {(ends.policy, ends.lag, ends.side) for ends in every} == set(
            itertools.product(("reset", "detach", "raise"), range(5), (False, True))
        )


# -- what is wrong is found ------------------------------------------------------------------------


def test_publishing_what_was_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(intent: Intent, votes: int) -> str:
        return ""

    monkeypatch.setattr(managers, "_why_not", always)
    assert "is committed, but voted_no" in explore(Setting()).failure


def test_building_on_what_came_in_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intent, "is_whole", Intent.is_committed)
    failure = explore(Setting(relation="heir", elastic=True)).failure
    assert "what it builds on is there in part" in failure


def test_a_verdict_beyond_what_a_rank_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = managers.TransactionManager._decide

    def generous(
        self: managers.TransactionManager, intent: Intent, votes: int, outcomes: Any
    ) -> None:
        real(self, intent, intent.total if votes else 0, outcomes)

    monkeypatch.setattr(managers.TransactionManager, "_decide", generous)
    assert "is committed, but rank" in explore(Setting(relation="child", elastic=True)).failure


def test_what_an_epoch_carries_over_and_was_not_agreed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = EnginePages.clear

    def keeps(self: EnginePages) -> None:
        stock = list(self._stock)
        real(self)
        self._stock += stock[:1]  # of the epoch that is over

    monkeypatch.setattr(EnginePages, "clear", keeps)
    found = orders(Ends(length=1, lag=2, policy="reset", side=False))
    assert "2 owned + 7 free" in found.failure
    assert "headroom_pages = 2" in found.text, "the file shows it"


def test_an_ending_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = managers.TransactionManager.mark_ended

    def forgets(
        self: managers.TransactionManager, intent: Intent, result: int | None = None
    ) -> None:
        if intent.posted_step < 0 or self.rank == 0:
            real(self, intent, result)
        else:
            intent.local_result = 1  # and never says that it has ended

    monkeypatch.setattr(managers.TransactionManager, "mark_ended", forgets)
    found = explore(Setting(relation="line", refusals=False))
    assert found.failure == "from here nothing leads to where all has drained"
