"""The sentinel: says who differs while the scheduler's thread hangs, and does nothing else."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpact.cache.config import CacheConfig
from kvpact.cache.join import join_cache
from kvpact.consensus.core.errors import KvpactError, PeerError
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.report import Policy, Report, SealedError
from kvpact.consensus.step.sentinel import GATHER_S, HEAR_S, Sentinel
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.rank.launch import RankContext, launch
from tests.test_step import World


def sentinels(world: World) -> list[Sentinel]:
    return [
        Sentinel(rank.stepper, world.store, clock=lambda: world.net.now_s) for rank in world.ranks
    ]


def keys_of(world: World) -> list[str]:
    return world.store.keys()


def looked(watching: list[Sentinel], times: int = 3) -> list[SealedError | None]:
    for _ in range(times):
        for one in watching:
            one.look()
    return [one.alarm for one in watching]


def differing(lag: int = 2) -> World:
    """Rank 1 made a call alone; ballots that show it are posted, and nobody has settled them."""
    world = World(lag=lag)
    world.settle_in(4)
    world.ranks[1].manager.note("evict", "host", 17)
    assert not any(world.step().values())
    return world


def test_all_name_the_rank_before_any_scheduler_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = differing()
    before = [(rank.stepper.stage, rank.manager.settled_step) for rank in world.ranks]
    with caplog.at_level(logging.ERROR, logger="kvpact"):
        alarms = looked(sentinels(world))
    for alarm in alarms:
        assert alarm is not None
        assert (alarm.kind, alarm.field, alarm.ranks) == ("Divergence", "fingerprint", (1,))
        assert any("evict host 17" in line for line in alarm.story)
    assert "rank 2 has not reacted yet, it is idle: rank 1 differs in fingerprint" in caplog.text
    assert [(rank.stepper.stage, rank.manager.settled_step) for rank in world.ranks] == before


def test_it_never_acts(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sealed or asked for; the schedulers find the error themselves, the same."""
    world = differing()
    alarms = looked(sentinels(world))
    assert not [key for key in keys_of(world) if "seal" in key or "closing" in key]
    error = world.until_all_raise()
    assert alarms[0] is not None
    assert error.message == alarms[0].build().message
    assert world.net.calls.keys() == set(range(1, world.ranks[0].link.num_calls + 1))


def test_what_is_found_stands_in_the_store() -> None:
    world = differing()
    looked(sentinels(world))
    found = world.store.get("epoch/0/alarm/0/1")
    assert found is not None
    report = msgspec.msgpack.decode(found, type=Report)
    assert (report.rank, report.at_step, report.phase) == (1, 5, "idle")


def test_it_waits_for_the_others_to_file_but_not_for_ever() -> None:
    world = differing()
    first = sentinels(world)[0]
    first.look()
    first.look()
    assert first.alarm is None, "the others may still file theirs"
    world.net.now_s += GATHER_S
    first.look()
    assert first.alarm is not None
    assert first.alarm.ranks == (1, 2), "those who have filed nothing: it knows no better"


def test_it_is_silent_where_the_scheduler_reacts(caplog: pytest.LogCaptureFixture) -> None:
    world = differing()
    watching = sentinels(world)
    for one in watching:
        one.look()
    world.until_all_raise()
    with caplog.at_level(logging.ERROR, logger="kvpact"):
        looked(watching)
    assert "has not reacted" not in caplog.text


def test_ranks_that_agree_are_no_news() -> None:
    world = World(lag=2)
    watching = sentinels(world)
    for _ in range(6):
        world.open()
        assert not any(world.step().values())
        assert looked(watching, 1) == [None] * 3
    assert not [key for key in keys_of(world) if "alarm" in key]


def test_a_silent_store_is_tried_again() -> None:
    world = differing()
    watching = sentinels(world)
    thread = watching[0]
    thread._interval_s = 0.01
    world.store.silent = True
    thread.start()
    time.sleep(0.05)
    world.store.silent = False
    end_s = time.monotonic() + 10.0
    while world.store.get("epoch/0/alarm/0/0") is None:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert thread.stop()
    assert not [one for one in threading.enumerate() if "sentinel 0" in one.name]


def test_a_journal_that_grows_meanwhile_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    world = differing()
    tries = iter(range(3))

    def tail(journal: Journal, num_entries: int = 512) -> list[object]:
        if next(tries) < 2:
            raise RuntimeError("deque mutated during iteration")
        return []

    monkeypatch.setattr(Journal, "tail", tail)
    sentinels(world)[0].look()
    assert world.store.get("epoch/0/alarm/0/0") is not None


# -- what others report ----------------------------------------------------------------------------


def broken(*, lag: int = 1) -> World:
    """Rank 1 met an exception while it settled and has reported that; the others are elsewhere."""
    world = World(lag=lag)
    world.settle_in(4)

    world.ranks[1].owner.commit = _cannot  # type: ignore[method-assign]
    stepper = world.ranks[1].stepper
    stepper.begin(5)
    while not any("report" in key for key in keys_of(world)):
        assert stepper.poll() is None
    return world


def test_a_report_reaches_who_does_not_step_at_once(caplog: pytest.LogCaptureFixture) -> None:
    world = broken()
    told: list[KvpactError] = []
    first = Sentinel(
        world.ranks[0].stepper,
        world.store,
        clock=lambda: world.net.now_s,
        on_alarm=told.append,
    )
    before = keys_of(world)
    with caplog.at_level(logging.ERROR, logger="kvpact"):
        first.look()
        first.look()
    assert [(type(error), error.ranks) for error in told] == [(PeerError, (1,))]
    assert "ValueError: no such thing" in told[0].message
    assert "rank 0 has not reacted yet, it is idle" in caplog.text
    assert keys_of(world) == before, "it has only read"
    assert world.ranks[0].stepper.stage == "idle"


@pytest.mark.parametrize("kind, is_called", [("raise", True), ("reset", False), ("observe", False)])
def test_who_will_go_on_is_not_alarmed(kind: str, is_called: bool) -> None:
    """A difference that the policy heals is logged, and ends no engine."""
    world = differing()
    told: list[KvpactError] = []
    watching: list[Sentinel] = []
    for rank in world.ranks:
        rank.stepper.change.closer._policy = Policy(kind)
        sentinel = Sentinel(
            rank.stepper, world.store, clock=lambda: world.net.now_s, on_alarm=told.append
        )
        watching.append(sentinel)
    alarms = looked(watching)
    assert all(alarm is not None and alarm.ranks == (1,) for alarm in alarms)
    assert bool(told) is is_called


def test_who_is_waited_for_hears_of_it() -> None:
    """Ranks 0 and 1 have given up on rank 2: what its own sentinel says of it."""
    world = World(lag=1)
    world.settle_in(4)
    last = sentinels(world)[2]
    last.look()
    assert last.alarm is None
    found = world.step({2: 1e9})
    while not any(found.values()):
        found = world.step({2: 1e9})
    world.net.now_s += HEAR_S
    last.look()
    assert last.alarm is not None
    assert (last.alarm.kind, last.alarm.ranks) == ("RankStalled", (2,))


def test_what_is_no_exception_waits_for_the_other_reports() -> None:
    world = World(lag=1)
    world.settle_in(4)
    stepper = world.ranks[0].stepper
    stepper.begin(5)
    while not any("report" in key for key in keys_of(world)):
        world.net.now_s += 0.01
        if stepper.poll() is not None:
            stepper.begin(6)
    last = sentinels(world)[2]
    last.look()
    assert last.alarm is None, "rank 1 may still say more"
    world.net.now_s += GATHER_S
    last.look()
    assert last.alarm is not None
    assert last.alarm.kind == "RankStalled"


def test_a_hook_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = broken()

    def fails(_: KvpactError) -> None:
        raise RuntimeError("in the hook")

    one = Sentinel(world.ranks[2].stepper, world.store, on_alarm=fails)
    one.look()
    assert one.alarm is not None
    assert "in the hook" in caplog.text


def _cannot(_: object) -> None:
    raise ValueError("no such thing")


def hang_while_the_other_breaks(context: RankContext, port: int) -> list[Any]:
    """Rank 1 meets an exception in ``commit``; rank 0 is in a forward pass, which waits for it."""
    told: queue.SimpleQueue[KvpactError] = queue.SimpleQueue()
    config = CacheConfig(page_size=4, device_pages=16, host_pages=16, lag=1, deadline_s=30.0)
    where: dict[str, Any] = {"rank": context.rank, "ranks": range(2), "on_alarm": told.put}
    found: list[Any] = []
    with join_cache(config, "127.0.0.1", port, **where) as cache:
        for iteration in range(1, 4):
            cache.step(iteration)
        cache.propose_insert("a", np.arange(16, dtype=np.int32))
        cache.step(4)
        try:
            if context.rank:
                cache.core.insertion.commit = _cannot  # type: ignore[method-assign]
            else:
                found += [told.get(timeout=20.0).message, cache.stepper.stage]
            for iteration in (5, 6):
                cache.step(iteration)
        except KvpactError as error:
            found += [error.message, list(error.ranks)]
    return found


@pytest.mark.ranks
def test_a_real_rank_in_a_forward_pass_hears_of_an_exception() -> None:
    store, port = serve_tcp_store()
    first, second = launch(f"{__name__}:hang_while_the_other_breaks", 2, [port] * 2).ranks
    assert first.result is not None, first.error or first.output
    heard, stage, raised, ranks = first.result
    assert "ValueError: no such thing" in heard
    assert (stage, ranks) == ("idle", [1])
    assert second.result == [raised, [1]]
    del store
