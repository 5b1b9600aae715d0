"""Where ranks are, seen without processes (clock and store by hand), and once with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from kvpact.consensus.core.errors import Misuse, StoreSilent
from kvpact.consensus.transport.store import Store, TcpStore
from kvpact.consensus.transport.watch import LEFT, Life, Position, Watch, process_life
from kvpact.harness.rank.launch import Launch, RankContext
from kvpact.harness.rank.store import MemoryStore


class _Clock:
    """Time that passes only in ``sleep``; ``beats`` are called after each."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.beating: list[Watch] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += max(seconds, 0.001)
        for watch in self.beating:
            watch.beat()


class _Ranks:
    """Watches of several ranks over one store, none with a thread."""

    def __init__(self, num_ranks: int) -> None:
        self.clock = _Clock()
        self.store = MemoryStore()
        self.lives: dict[int, Life] = {}
        self.watches = [
            Watch(
                self.store,
                rank,
                interval_s=0.25,
                clock=self.clock,
                sleep=self.clock.sleep,
                probe=lambda pid, started: self.lives.get(pid, Life.BEATING),
            )
            for rank in range(num_ranks)
        ]


def _position(store: Store, watch: Watch, rank: int) -> Position:
    position = watch.positions([rank])[rank]
    assert position is not None
    return position


def test_a_position_says_where_and_for_how_long() -> None:
    ranks = _Ranks(2)
    ranks.watches[1].at(3, 17, "reserve", 18)
    ranks.clock.now_s += 2.5
    ranks.watches[1].beat()
    position = _position(ranks.store, ranks.watches[0], 1)
    assert (position.rank, position.epoch, position.step) == (1, 3, 17)
    assert (position.phase, position.posted, position.since_s) == ("reserve", 18, 2.5)
    assert (position.pid, position.beat) == (os.getpid(), 1)
    assert ranks.watches[0].positions([0, 1])[0] is None


def test_judge_tells_the_living_from_the_silent() -> None:
    ranks = _Ranks(4)
    for watch in ranks.watches[1:3]:
        watch.at(0, 5, "copy", 6)
        watch.beat()
    ranks.clock.beating = [ranks.watches[1]]
    began_s = ranks.clock.now_s
    seen = ranks.watches[0].judge([1, 2, 3])
    assert [seen[rank].life for rank in (1, 2, 3)] == [Life.BEATING, Life.SILENT, Life.UNSEEN]
    assert ranks.clock.now_s - began_s <= 1.2  # four beats
    assert seen[2].unseen_s >= 1.0
    text = str(seen[2])
    assert text.startswith("rank 2: silent, in 'copy' of step 5 (epoch 0) for ")
    assert "6 collectives posted" in text
    assert str(seen[3]) == "rank 3: unseen"


def test_judge_is_quick_where_everyone_beats_or_was_still_for_long() -> None:
    ranks = _Ranks(3)
    ranks.watches[1].beat()
    ranks.watches[2].beat()
    ranks.watches[0].positions([2])
    ranks.clock.now_s += 30.0
    ranks.clock.beating = [ranks.watches[1]]
    began_s = ranks.clock.now_s
    seen = ranks.watches[0].judge([1, 2])
    assert [seen[rank].life for rank in (1, 2)] == [Life.BEATING, Life.SILENT]
    assert seen[2].unseen_s >= 30.0
    assert ranks.clock.now_s - began_s <= 0.25


def test_a_beat_before_the_question_is_no_sign_of_life() -> None:
    ranks = _Ranks(2)
    ranks.watches[1].beat()
    ranks.watches[0].positions([1])
    ranks.clock.now_s += 5.0
    ranks.watches[1].beat()  # its last one: it stopped long before it is asked for
    assert ranks.watches[0].judge([1])[1].life is Life.SILENT


@pytest.mark.parametrize("life", [Life.GONE, Life.STOPPED])
def test_on_the_same_machine_the_process_itself_is_looked_at(life: Life) -> None:
    ranks = _Ranks(2)
    ranks.watches[1].beat()
    ranks.lives[os.getpid()] = life
    began_s = ranks.clock.now_s
    assert ranks.watches[0].judge([1])[1].life is life
    assert ranks.clock.now_s == began_s


def test_stop_says_that_it_left_and_is_bounded() -> None:
    ranks = _Ranks(2)
    assert ranks.watches[1].stop()  # never started
    real = Watch(ranks.store, 1, interval_s=60.0)
    real.at(2, 9, "vote", 10)
    real.start()
    with pytest.raises(Misuse, match="started already"):
        real.start()
    assert real.stop()
    position = _position(ranks.store, ranks.watches[0], 1)
    assert (position.phase, position.epoch, position.step) == (LEFT, 2, 9)
    assert ranks.watches[0].judge([1])[1].life is Life.LEFT


def test_a_silent_store_is_noted_and_forgotten_when_it_answers_again() -> None:
    store = MemoryStore()
    watch = Watch(store, 0, interval_s=0.01)
    store.silent = True
    watch.start()
    _until(lambda: watch.silent_since_s is not None)
    assert watch.trouble == ""
    with pytest.raises(StoreSilent):
        watch.positions([0])
    store.silent = False
    _until(lambda: watch.silent_since_s is None)
    assert _position(store, watch, 0).phase == "starting"
    assert watch.stop()


def test_the_loss_of_the_store_is_said_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    watch = Watch(store, 0, interval_s=0.005)
    store.silent = True
    with caplog.at_level("WARNING", "kvpact"):
        watch.start()
        _until(lambda: watch.silent_since_s is not None)
        time.sleep(0.1)  # many beats
        assert [record.getMessage() for record in caplog.records] == [
            "rank 0: store memory:0 is silent; steps go on without it"
        ]
        store.silent = False
        _until(lambda: watch.silent_since_s is None)
        assert watch.stop()
    assert watch.num_silences == 1
    assert len(caplog.records) == 2
    assert "the store answers again" in caplog.records[1].getMessage()


def test_no_exception_leaves_the_thread() -> None:
    class Broken(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            raise ZeroDivisionError(key)

    watch = Watch(Broken(), 0, interval_s=0.01)
    watch.start()
    _until(lambda: "ZeroDivisionError" in watch.trouble)
    assert watch.stop()


def test_stop_does_not_wait_for_a_store_that_hangs() -> None:
    released = threading.Event()

    class Hanging(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            released.wait(20.0)

    watch = Watch(Hanging(), 0)
    watch.start()
    began_s = time.monotonic()
    assert not watch.stop(timeout_s=0.1)
    assert time.monotonic() - began_s < 2.0
    released.set()
    assert watch.stop(timeout_s=5.0)


def test_stacks_show_where_the_thread_that_steps_is_and_leave_out_who_is_silent() -> None:
    store = MemoryStore()
    stuck = threading.Event()
    asked = Watch(store, 1, interval_s=0.02)
    asked.start()

    def a_stuck_forward_pass() -> None:
        asked.at(0, 4, "forward", 5)
        stuck.wait(20.0)

    thread = threading.Thread(target=a_stuck_forward_pass)
    thread.start()
    asker = Watch(store, 0, interval_s=0.02)
    _until(lambda: "forward" in str(asker.positions([1])[1]))
    found = asker.stacks([1, 2], timeout_s=1.5)
    assert set(found) == {1}
    assert "a_stuck_forward_pass" in found[1]
    again = asker.stacks([1], timeout_s=10.0)  # a new question gets a new answer
    assert set(again) == {1}
    stuck.set()
    thread.join()
    assert asked.stop()


def test_saying_where_we_are_is_cheap() -> None:
    watch = Watch(MemoryStore(), 0)
    took_s: list[float] = []
    for _ in range(5):
        began_s = time.perf_counter()
        for step in range(1000):
            watch.at(0, step, "reserve", step)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) / 1000 < 20e-6  # about 0.3 µs; nothing that communicates would fit


def test_process_life() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process_life(process.pid, 0) is Life.BEATING
        assert process_life(process.pid, 1) is Life.GONE  # the pid was given away again
        process.send_signal(signal.SIGSTOP)
        _until(lambda: process_life(process.pid, 0) is Life.STOPPED)
        process.kill()
        _until(lambda: process_life(process.pid, 0) is Life.GONE)  # a zombie
    finally:
        process.kill()
        process.wait()
    assert process_life(process.pid, 0) is Life.GONE


def test_interval_must_be_positive() -> None:
    with pytest.raises(Misuse, match="interval_s"):
        Watch(MemoryStore(), 0, interval_s=0.0)


def _until(condition: Any, within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)


# -------------------------------------------------------------------------------- real processes


def be_watched(context: RankContext, args: Any) -> None:
    store = TcpStore(context.store_host, context.store_port)
    watch = Watch(store, context.rank, interval_s=0.05)
    watch.at(1, context.rank, "forward", 3)
    watch.start()
    context.send("watched")
    stuck_in_the_forward_pass()


def stuck_in_the_forward_pass() -> None:
    time.sleep(60.0)


@pytest.mark.ranks
def test_real_ranks_stuck_stopped_and_dead_are_told_apart() -> None:
    with Launch(f"{__name__}:be_watched", 2, grace_s=0.1) as ranks:
        for rank in range(2):
            assert ranks.receive(rank, 90.0) == "watched"
        store = TcpStore("127.0.0.1", ranks.store_port)
        watch = Watch(store, 9, interval_s=0.05)
        _until(lambda: None not in watch.positions([0, 1]).values())
        seen = watch.judge([0, 1], within_s=5.0)
        assert [sighting.life for sighting in seen.values()] == [Life.BEATING, Life.BEATING]
        assert "stuck_in_the_forward_pass" in watch.stacks([0], timeout_s=5.0)[0]
        ranks.signal(0, signal.SIGSTOP)
        ranks.signal(1, signal.SIGKILL)
        time.sleep(0.2)
        seen = watch.judge([0, 1])
        assert [sighting.life for sighting in seen.values()] == [Life.STOPPED, Life.GONE]
        assert "step 1 (epoch 1)" in str(seen[1])
        assert watch.stacks([0], timeout_s=0.2) == {}
        ranks.signal(0, signal.SIGCONT)
        assert watch.judge([0], within_s=5.0)[0].life is Life.BEATING
        store.close()
