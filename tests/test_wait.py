"""One wait: when it looks around, warns, gives up, and who is excused; by a clock of the tests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvpact.consensus.core.errors import Misuse, StoreSilent
from kvpact.consensus.epoch.closing import Closer
from kvpact.consensus.epoch.report import LastSeen
from kvpact.consensus.step.wait import StepLimits, VerdictWait

LIMITS = StepLimits(warn_s=4.0, deadline_s=10.0, grace_s=0.5, slice_s=0.25, pause_s=100.0)
STEP = 7


class Surroundings:
    """The store, the locator and the clock; ``asked`` is a log of what was asked of them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.asked: list[str] = []
        self.is_closing_now = False
        self.is_silent = False
        self.is_locator_silent = False
        self.is_settled = False
        self.paused: set[int] = set()
        self.seen: dict[int, LastSeen | None] = {}

    # The closer.

    def is_closing(self, step: int) -> bool:
        self.asked.append(f"closing {step}")
        if self.is_silent:
            self.now_s += 1.0  # such a call takes its time
            raise StoreSilent("no answer")
        return self.is_closing_now

    def claim_given_up(self, step: int) -> bool:
        self.asked.append(f"give up {step}")
        return not self.is_settled

    # The locator.

    def is_gone(self, rank: int) -> bool:
        return False

    def is_paused(self, rank: int) -> bool:
        self.asked.append(f"paused {rank}")
        if self.is_locator_silent:
            self.now_s += 1.0
            raise StoreSilent("no answer")
        return rank in self.paused

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        assert not asks, "a warning asks nobody"
        return {rank: self.seen.get(rank) for rank in ranks}


class Wait:
    """Rank 1 of three waits from 1000 s on."""

    def __init__(self, limits: StepLimits = LIMITS) -> None:
        self.around = Surroundings()
        self.verdict_wait = VerdictWait(
            1, (0, 1, 2), limits, self.around, lambda: self.around.now_s
        )
        self.verdict_wait.begin(self.around.now_s)

    def at(self, seconds: float) -> str:
        """What comes of a look so many seconds after the wait began."""
        self.around.now_s = 1000.0 + seconds
        return self.verdict_wait.look_around(STEP, self.around.now_s, cast("Closer", self.around))

    @property
    def asked(self) -> list[str]:
        """What was asked since the last time."""
        asked, self.around.asked = self.around.asked, []
        return asked


def test_limits_are_positive_and_cannot_be_changed() -> None:
    for name in ("warn_s", "deadline_s", "grace_s", "slice_s", "pause_s", "progress_s"):
        given: dict[str, Any] = {name: 0}
        with pytest.raises(Misuse, match=f"{name} must be positive"):
            StepLimits(**given)
    with pytest.raises(AttributeError):
        LIMITS.warn_s = 1.0  # pyright: ignore[reportAttributeAccessIssue]


# -- looking around --------------------------------------------------------------------------------


def test_the_store_is_asked_once_a_slice() -> None:
    wait = Wait()
    assert [wait.at(0.0), wait.at(0.2), wait.at(0.24)] == [""] * 3
    assert wait.asked == []
    assert wait.at(0.25) == ""
    assert wait.asked == [f"closing {STEP}"]
    assert wait.at(0.4) == ""
    assert wait.asked == []
    assert wait.at(0.5) == ""
    assert wait.asked == [f"closing {STEP}"]


def test_who_is_asked_for_its_report_gives_up_at_once() -> None:
    wait = Wait()
    wait.around.is_closing_now = True
    assert wait.at(0.2) == ""
    assert wait.at(0.3) == "asked"


def test_a_silent_store_is_not_asked_again_for_a_quarter_of_the_deadline() -> None:
    wait = Wait()
    wait.around.is_silent = True
    assert wait.at(0.3) == ""
    assert wait.asked == [f"closing {STEP}"]
    # The call took a second; from its end on it is a quarter of 10 s, and a slice.
    for seconds in (1.5, 3.0, 3.8, 4.04):
        assert wait.at(seconds) == ""
        assert wait.asked == []
    assert wait.at(4.06) == ""
    assert wait.asked == [f"closing {STEP}"], "and nobody is asked for pauses meanwhile"


def test_a_look_at_a_silent_store_ends_before_the_deadline_is_looked_at() -> None:
    """Its call took a while: the verdict may have come meanwhile, which is looked at first."""
    wait = Wait()
    wait.around.is_silent = True
    assert wait.at(10.5) == ""
    assert wait.at(10.6) == "waited"


def test_the_store_that_answers_again_is_asked_as_before() -> None:
    wait = Wait()
    wait.around.is_silent = True
    assert wait.at(0.3) == ""
    wait.around.is_silent = False
    assert wait.at(4.1) == ""
    assert wait.at(4.4) == ""
    assert wait.asked.count(f"closing {STEP}") == 3


# -- the deadline ----------------------------------------------------------------------------------


def test_it_gives_up_at_the_deadline_and_not_before() -> None:
    wait = Wait()
    assert wait.at(9.99) == ""
    assert f"give up {STEP}" not in wait.asked
    assert wait.at(10.0) == "waited"
    assert wait.asked[-1] == f"give up {STEP}"
    assert wait.verdict_wait.waited_s(wait.around.now_s) == 10.0


def test_a_step_that_a_straggler_has_settled_has_a_second_deadline() -> None:
    wait = Wait()
    wait.around.is_settled = True
    assert wait.at(10.0) == ""
    assert wait.at(19.99) == ""
    assert wait.asked.count(f"give up {STEP}") == 1
    assert wait.at(20.0) == "waited"
    assert f"give up {STEP}" not in wait.asked, "it is claimed already"


def test_the_next_wait_begins_anew() -> None:
    wait = Wait()
    wait.around.is_settled = True
    assert wait.at(10.0) == ""
    wait.verdict_wait.begin(wait.around.now_s)
    wait.around.is_settled = False
    assert wait.at(19.9) == ""
    assert wait.at(20.0) == "waited"
    assert wait.verdict_wait.waited_s(1021.0) == 11.0


# -- pauses ----------------------------------------------------------------------------------------


def test_pauses_are_looked_for_once_it_lasts() -> None:
    """Before that a wait is ordinary, and asking costs."""
    wait = Wait()
    assert wait.at(3.9) == ""
    assert wait.asked == [f"closing {STEP}"]
    assert wait.at(4.2) == ""
    assert wait.asked == [f"closing {STEP}", "paused 0", "paused 2"], "of the others only"


def test_half_a_deadline_is_long_where_a_warning_comes_later() -> None:
    wait = Wait(StepLimits(warn_s=9.0, deadline_s=10.0, slice_s=0.25))
    assert wait.at(4.9) == ""
    assert wait.asked == [f"closing {STEP}"]
    assert wait.at(5.2) == ""
    assert "paused 0" in wait.asked


def test_the_whole_deadline_begins_when_a_pause_has_ended() -> None:
    wait = Wait()
    wait.around.paused = {2}
    assert [wait.at(seconds) for seconds in (5.0, 9.0, 14.0, 30.0)] == [""] * 4
    wait.around.paused = set()
    assert wait.at(39.9) == "", "counted from 30 s on"
    assert wait.at(40.0) == "waited"
    assert wait.verdict_wait.waited_s(wait.around.now_s) == 40.0


def test_a_pause_that_was_seen_is_looked_at_in_every_slice() -> None:
    wait = Wait()
    wait.around.paused = {0}
    assert wait.at(5.0) == ""
    assert wait.asked[-1] == "paused 0"
    assert wait.at(5.3) == ""
    assert wait.asked[-1] == "paused 0", "though only 0.3 s are counted"


def test_a_pause_has_a_limit() -> None:
    wait = Wait()
    wait.around.paused = {0}
    for seconds in range(5, 100, 5):
        assert wait.at(seconds) == ""
    assert wait.at(100.0) == ""
    assert "paused 0" not in wait.asked[-1:], "nobody is excused any more"
    assert wait.at(105.0) == "waited"


def test_a_store_that_is_silent_about_pauses_excuses_nobody() -> None:
    wait = Wait()
    wait.around.is_locator_silent = True
    wait.around.paused = {0, 2}
    assert wait.at(5.0) == ""
    assert wait.asked == [f"closing {STEP}", "paused 0"]
    assert wait.at(6.5) == ""
    assert wait.asked == [], "it is left alone for a while"
    assert wait.at(10.0) == ""
    assert wait.at(10.1) == "waited"


# -- the warning -----------------------------------------------------------------------------------


def test_it_says_once_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait()
    wait.around.seen = {
        0: LastSeen(STEP, "waiting for the verdict", 0.0),
        2: LastSeen(STEP - 1, "its copies", 3.0),
    }
    with caplog.at_level(logging.WARNING, "kvpact"):
        assert wait.at(3.9) == ""
        assert caplog.messages == []
        assert wait.at(4.0) == ""
        assert wait.at(6.0) == ""
    expected = f"rank 1 waits for rank 2 in step {STEP} for 4.0 s: its copies of step {STEP - 1}"
    assert caplog.messages == [expected]


def test_who_was_never_seen_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait()
    wait.around.seen = {0: LastSeen(STEP, "", 0.0), 2: None}
    with caplog.at_level(logging.WARNING, "kvpact"):
        assert wait.at(4.5) == ""
    assert caplog.messages == [f"rank 1 waits for rank 2 in step {STEP} for 4.5 s: never seen"]


def test_without_the_store_nothing_is_said_of_others(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait()
    wait.around.is_silent = True
    with caplog.at_level(logging.WARNING, "kvpact"):
        assert wait.at(3.9) == ""
        assert wait.at(4.2) == ""
        assert wait.at(4.4) == ""
    assert caplog.messages == []


def test_each_wait_warns_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait()
    with caplog.at_level(logging.WARNING, "kvpact"):
        assert wait.at(5.0) == ""
        wait.verdict_wait.begin(1005.0)
        assert wait.at(8.0) == ""
        assert len(caplog.messages) == 2, "one for each of the other ranks"
        assert wait.at(9.0) == ""
    assert len(caplog.messages) == 4
