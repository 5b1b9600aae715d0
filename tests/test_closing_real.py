"""One outcome with real processes: killed at random moments, stopped, late, and without a store."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEADLINE_S = 1.5
#: What a loaded machine may add to every bound.
SLACK_S = 3.0
NUM_KILLS = 54

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


class Ranks:
    """The process that forks the ranks (tests/closing_ranks.py)."""

    def __init__(self) -> None:
        self._num_trials = 0
        env = dict(os.environ, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
                   TORCH_CPP_LOG_LEVEL="FATAL", RES_OPTIONS="attempts:0")  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.closing_ranks"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, signals: list[list[Any]], **how: Any) -> dict[int, dict[str, Any]]:
        """One trial; what each rank that was not killed tells. All of them must end by themselves.

        With ``whole_exit`` through the end of the interpreter: it takes torch a second of CPU.
        """
        self._num_trials += 1
        trial = {
            "name": f"trial{self._num_trials}", "deadline_s": DEADLINE_S, "lag": 0, "steps": 10**6,
            "think_s": 0.002, "signals": signals, "whole_exit": False, **how,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(trial) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._process.stdout.readline())
        told = {int(rank): line for rank, line in result["told"].items()}
        for rank, line in told.items():
            assert line, f"rank {rank} told nothing: {trial} {result}"
            assert result["statuses"][rank] == 0, f"rank {rank} hung at its end: {trial}"
        return told

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        finally:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    try:
        yield started
    finally:
        started.close()


def one_outcome(told: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The same settled steps and the same error on all; returns what they say."""
    first = next(iter(told.values()))
    for name in ("settled_step", "settled", "kind"):
        assert [line[name] for line in told.values()] == [first[name]] * len(told), (name, told)
    if first["kind"]:
        for name in ("text", "ranks", "dead"):
            assert [line[name] for line in told.values()] == [first[name]] * len(told), told
    return first


def test_ranks_killed_at_random_moments(ranks: Ranks) -> None:
    """54 deaths, some of rank 0, in the middle of posting, of a collective, of settling."""
    draw = random.Random(20)
    slowest_s = 0.0
    for number in range(NUM_KILLS):
        victim, lag = number % 3, number // 3 % 3
        told = ranks.run(
            [[victim, "SIGKILL", draw.random() * 0.12]], lag=lag, whole_exit=number % 18 == 0
        )
        found = one_outcome(told)
        assert (found["kind"], found["ranks"]) == ("RankStalled", [victim]), found
        assert found["dead"] is True
        slowest_s = max(slowest_s, *(line["waited_s"] for line in told.values()))
    assert slowest_s < DEADLINE_S + SLACK_S


def test_two_ranks_killed_at_once(ranks: Ranks) -> None:
    for first, second in ((0, 1), (1, 2), (2, 0)):
        told = ranks.run([[first, "SIGKILL", 0.05], [second, "SIGKILL", 0.0]])
        (found,) = told.values()
        assert found["kind"] == "RankStalled"
        assert sorted(found["ranks"]) == sorted((first, second))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_straggler_before_the_deadline_is_an_ordinary_settle(ranks: Ranks, lag: int) -> None:
    told = ranks.run([], lag=lag, steps=12, late=[1, 6], late_s=0.6 * DEADLINE_S)
    assert one_outcome(told)["kind"] == ""


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.25, 0.5, 1.5])
def test_a_straggler_about_the_deadline_is_one_outcome(ranks: Ranks, after_s: float) -> None:
    told = ranks.run([], steps=12, late=[2, 6], late_s=DEADLINE_S + after_s)
    found = one_outcome(told)
    assert len(told) == 3
    assert found["kind"] in ("", "RankStalled")
    if after_s >= 0.5:
        assert found["kind"] == "RankStalled", "so late is late"
    if found["kind"]:
        assert found["ranks"] == [2]


def test_a_rank_that_is_stopped_for_a_moment_is_no_trouble(ranks: Ranks) -> None:
    told = ranks.run(
        [[1, "SIGSTOP", 0.1], [1, "SIGCONT", 0.4]], steps=60, think_s=0.01, deadline_s=4.0
    )
    assert one_outcome(told)["kind"] == ""


@pytest.mark.parametrize("lag", [0, 2])
def test_a_stopped_rank_is_named_and_raises_the_same_when_it_is_back(
    ranks: Ranks, lag: int
) -> None:
    told = ranks.run(
        [[1, "SIGSTOP", 0.1], [1, "SIGCONT", DEADLINE_S + 2.0]], lag=lag, whole_exit=True
    )
    found = one_outcome(told)
    assert len(told) == 3
    assert (found["kind"], found["ranks"], found["dead"]) == ("RankStalled", [1], False)
    assert "its process is stopped" in found["text"]
    for rank in (0, 2):
        assert told[rank]["waited_s"] < DEADLINE_S + SLACK_S


def test_a_stopped_store_host_is_named_and_nobody_hangs(ranks: Ranks) -> None:
    """Steps need no store; when a rank dies nobody can be asked: the error says which host."""
    told = ranks.run(
        [["store", "SIGSTOP", 0.1], [2, "SIGKILL", 0.3]],
        own_store=True,
        deadline_s=1.0,
        whole_exit=True,
    )
    for line in told.values():
        assert line["kind"] == "StoreSilent", line
        assert "127.0.0.1:" in line["text"]
        assert line["waited_s"] < 1.0 + 2 * 2.0 + SLACK_S, "a deadline, two calls to the store"
    assert [line["settled_step"] for line in told.values()]
