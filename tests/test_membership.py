"""Where other ranks are, by their heartbeats: who counts as gone, who pauses, what is told of them.

Joining and leaving are in tests/test_assembly.py and tests/test_closing_real.py, with real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from kvpact.consensus.core.errors import StoreSilent
from kvpact.consensus.epoch.report import LastSeen
from kvpact.consensus.membership import WatchLocator
from kvpact.consensus.transport.watch import Life, Position, Sighting, Watch


class FakeWatch:
    """Says of each rank what the test wants to be seen."""

    interval_s = 0.5

    def __init__(self) -> None:
        self.sightings: dict[int, Sighting] = {}
        self.is_silent = False
        self.asked_for_stacks: list[int] = []

    def see(self, rank: int, life: Life, unseen_s: float = 0.0, phase: str = "idle") -> None:
        at = Position(rank, 0, 7, phase, 8, 1.5, 99, 1234, 5, "host", "machine")
        self.sightings[rank] = Sighting(rank, life, at, unseen_s)

    def judge(self, ranks: Sequence[int], *, within_s: float = 1.0) -> dict[int, Sighting]:
        if self.is_silent:
            raise StoreSilent("no answer")
        unseen = {rank: Sighting(rank, Life.UNSEEN, None, 0.0) for rank in ranks}
        return {rank: self.sightings.get(rank, unseen[rank]) for rank in ranks}

    def positions(self, ranks: Sequence[int]) -> dict[int, Position | None]:
        return {rank: one.position for rank, one in self.judge(ranks).items()}

    def stacks(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        self.asked_for_stacks += ranks
        return {ranks[0]: "step.py:1 wait"}


def pair() -> tuple[FakeWatch, WatchLocator]:
    watch = FakeWatch()
    return watch, WatchLocator(cast("Watch", watch))


@pytest.mark.parametrize(
    "life, unseen_s, is_gone",
    [
        (Life.BEATING, 0.0, False),
        (Life.BEATING, 99.0, False),
        (Life.STOPPED, 99.0, False),
        (Life.LEFT, 99.0, False),
        (Life.GONE, 0.0, True),
        (Life.SILENT, 0.0, False),
        (Life.SILENT, 9.9, False),
        (Life.SILENT, 10.0, True),
    ],
)
def test_who_counts_as_gone(life: Life, unseen_s: float, is_gone: bool) -> None:
    """Of a process on another machine nothing is known but that it was heard; twenty beats."""
    watch, locator = pair()
    watch.see(1, life, unseen_s)
    assert locator.is_gone(1) is is_gone


def test_who_was_never_seen_is_not_gone_and_does_not_pause() -> None:
    _, locator = pair()
    assert locator.is_gone(1) is False
    assert locator.is_paused(1) is False


def test_without_the_store_nobody_is_gone_and_nothing_is_known() -> None:
    watch, locator = pair()
    watch.see(1, Life.GONE)
    watch.is_silent = True
    assert locator.is_gone(1) is False
    assert locator.last_seen([1, 2]) == {1: None, 2: None}
    assert locator.last_seen([1, 2], asks=False) == {1: None, 2: None}
    with pytest.raises(StoreSilent):
        locator.is_paused(1)


@pytest.mark.parametrize("phase, is_paused", [("paused: graph capture", True), ("idle", False)])
def test_who_says_so_pauses(phase: str, is_paused: bool) -> None:
    watch, locator = pair()
    watch.see(1, Life.BEATING, phase=phase)
    assert locator.is_paused(1) is is_paused


def test_what_is_told_of_each_rank() -> None:
    watch, locator = pair()
    watch.see(0, Life.BEATING, 0.25)
    watch.see(1, Life.GONE, 3.0, "its copies")
    watch.see(2, Life.STOPPED, 2.0)
    assert locator.last_seen([0, 1, 2, 3]) == {
        0: LastSeen(7, "idle", 1.75, stack="step.py:1 wait", life="beating"),
        1: LastSeen(7, "its copies", 4.5, dead=True, life="gone"),
        2: LastSeen(7, "idle", 3.5, life="stopped"),
        3: None,
    }
    assert watch.asked_for_stacks == [0], "the others cannot answer"


def test_a_warning_asks_nobody_for_its_stack() -> None:
    watch, locator = pair()
    watch.see(0, Life.BEATING, 0.25)
    found = locator.last_seen([0, 3], asks=False)
    assert found == {0: LastSeen(7, "idle", 1.5, life="beating"), 3: None}
    assert watch.asked_for_stacks == []
