"""The door: ranks come in together as one run, or not at all, whatever stood there before."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvpact.consensus.core.errors import KvpactError, Misuse, PeerLost, RankStalled, StoreSilent
from kvpact.consensus.transport import door as door_module
from kvpact.consensus.transport.door import Caller, Door, Doorway, PatientStore
from kvpact.consensus.transport.watch import machine
from kvpact.harness.rank.store import MemoryStore


def doorway(store: MemoryStore, rank: int, ranks: Any = (0, 1), limit_s: float = 20.0) -> Doorway:
    hello = f"hello {rank}".encode()
    return Doorway(store, "r", rank, tuple(ranks), hello, timeout_s=limit_s)


def all_in(*doorways: Doorway, then: Callable[[Doorway], None] | None = None) -> list[Any]:
    """What each came in with, or raised: all at once, on threads."""
    ended: list[Any] = [None] * len(doorways)

    def run(index: int, one: Doorway) -> None:
        try:
            heard = one.enter()
            if then is not None:
                then(one)
            one.come_in()
            ended[index] = (one.run, heard)
        except Exception as error:  # noqa: BLE001  looked at by the test
            ended[index] = error if isinstance(error, KvpactError) else one.fail(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(doorways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return ended


HEARD = {0: b"hello 0", 1: b"hello 1"}


def dead_caller(rank: int) -> Caller:
    """A process of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return msgspec.structs.replace(Caller.here(rank), pid=ended.pid, started=1)


def stands(store: MemoryStore) -> Door:
    raw = store.get("r/door")
    assert raw is not None
    return msgspec.msgpack.decode(raw, type=Door)


def put(store: MemoryStore, door: Door) -> None:
    store.set("r/door", msgspec.msgpack.encode(door))


def test_ranks_come_in_together_and_the_next_run_has_the_next_number() -> None:
    store = MemoryStore()
    for run in (1, 2, 3):
        first, second = doorway(store, 0), doorway(store, 1)
        assert all_in(first, second) == [(run, HEARD)] * 2
        assert stands(store).state == "in"
        second.leave()
        first.leave()
        assert stands(store).state == "over"
    assert store.keys() == ["r/door"], "nothing else is left behind"


def test_many_ranks_that_come_at_once_get_in() -> None:
    store = MemoryStore()
    ended = all_in(*[doorway(store, rank, range(12)) for rank in range(12)])
    assert ended == [(1, {rank: f"hello {rank}".encode() for rank in range(12)})] * 12


def test_a_run_that_lives_is_not_joined_and_not_disturbed() -> None:
    store = MemoryStore()
    all_in(doorway(store, 0), doorway(store, 1))
    before = store.get("r/door")
    for rank in (0, 1):
        with pytest.raises(Misuse, match=r"'r' runs already in this store \(rank 0: pid \d+ on"):
            doorway(store, rank).enter()
    assert store.get("r/door") == before


@pytest.mark.parametrize("dead", [0, 1])
def test_a_run_whose_rank_died_is_over(dead: int) -> None:
    store = MemoryStore()
    callers = {0: Caller.here(0), 1: Caller.here(1)} | {dead: dead_caller(dead)}
    put(store, Door(7, (0, 1), callers, state="in"))
    assert all_in(doorway(store, 0), doorway(store, 1)) == [(8, HEARD)] * 2


def test_what_a_start_left_that_died_halfway_is_not_counted() -> None:
    """Rank 1 of the new attempt comes first, and finds the dead rank 0 of the old one."""
    store = MemoryStore()
    put(store, Door(3, (0, 1), {0: dead_caller(0)}))
    early = doorway(store, 1)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.extend(all_in(early)))
    thread.start()
    while 1 not in stands(store).callers:
        time.sleep(0.01)
    assert all_in(doorway(store, 0)) == [(4, HEARD)]
    thread.join(20.0)
    assert ended == [(4, HEARD)]


def test_two_processes_with_one_number_are_told_and_so_is_everybody_who_waits() -> None:
    store = MemoryStore()
    first, twin = doorway(store, 1, range(3)), doorway(store, 1, range(3))
    ended = all_in(doorway(store, 0, range(3)), first, twin)
    assert {type(error) for error in ended} == {Misuse}
    assert len({str(error) for error in ended}) == 1
    assert ended[0].ranks == (1,)
    assert "two processes say that they are rank 1" in ended[0].message


def test_ranks_with_different_lists_are_told() -> None:
    store = MemoryStore()
    ended = all_in(doorway(store, 0, (0, 1, 2)), doorway(store, 1, (0, 1)))
    assert {type(error) for error in ended} == {Misuse}
    assert len({str(error) for error in ended}) == 1
    assert "[0, 1, 2]" in str(ended[0])
    assert "[0, 1]" in str(ended[0])


def test_who_does_not_come_is_named_the_same_everywhere_and_the_next_start_is_clean() -> None:
    store = MemoryStore()
    late, early = doorway(store, 1, range(3), 9.0), doorway(store, 0, range(3), 0.2)
    began_s = time.monotonic()
    ended = all_in(early, late)
    assert time.monotonic() - began_s < 5.0
    assert {type(error) for error in ended} == {RankStalled}
    assert {error.ranks for error in ended} == {(2,)}
    assert all_in(*[doorway(store, rank, range(3)) for rank in range(3)])[0][0] == 2
    put(store, msgspec.structs.replace(stands(store), state="failed", message="no interface"))
    with pytest.raises(RankStalled, match="the start before this one failed: no interface"):
        doorway(store, 0, (0, 1), 0.1).enter()


def test_a_failure_between_the_rounds_is_everybodys() -> None:
    store = MemoryStore()

    def form(one: Doorway) -> None:
        if one.me.rank == 1:
            raise ValueError("no such device")
        one.meet("formed")

    ended = all_in(doorway(store, 0), doorway(store, 1), then=form)
    assert {str(error) for error in ended} == {str(ended[0])}
    assert "rank 1 could not start: ValueError: no such device" in str(ended[0])
    assert ended[0].ranks == (1,)
    assert all_in(doorway(store, 0), doorway(store, 1))[0] == (2, HEARD)


def test_who_dies_between_the_rounds_is_named_at_once() -> None:
    store = MemoryStore()
    mine = doorway(store, 0)
    put(store, Door(1, (0, 1), {0: mine.me, 1: dead_caller(1)}, {"ready": (0, 1)}))
    with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+ on .*\) ended while replica 'r' started"):
        mine.meet("formed")


def test_a_start_that_was_replaced_says_so() -> None:
    store = MemoryStore()
    mine = doorway(store, 0)
    put(store, Door(2, (0, 1), {1: Caller.here(1)}))
    with pytest.raises(PeerLost, match="was started anew"):
        mine.meet("formed")


class Elsewhere:
    """Rank ``rank`` on another machine: it is judged by its heartbeat alone."""

    def __init__(self, store: MemoryStore, rank: int, key: str) -> None:
        self.caller = msgspec.structs.replace(Caller.here(rank), machine="another", host="far")
        self._store = store
        self._key = key or f"r/beat/{self.caller.key}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._over.wait(0.02):
            number += 1
            self._store.set(self._key, b"%d" % number)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self.caller

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "LOOK_S", 0.3)
    monkeypatch.setattr(door_module, "BEAT_S", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_run_on_another_machine_is_known_by_its_heartbeat() -> None:
    store = MemoryStore()
    here = Caller.here(1)
    assert here.machine == machine()
    with Elsewhere(store, 0, "r/5/watch/at/0") as far:
        put(store, Door(5, (0, 1), {0: far, 1: here}, state="in"))
        with pytest.raises(Misuse, match=r"rank 0: pid \d+ on far"):
            doorway(store, 1).enter()
    assert all_in(doorway(store, 0), doorway(store, 1))[0] == (6, HEARD)


@pytest.mark.usefixtures("quick")
def test_who_waits_on_another_machine_is_known_by_its_heartbeat() -> None:
    store = MemoryStore()
    with Elsewhere(store, 1, "") as far:
        put(store, Door(1, (0, 1), {1: far}))
        with pytest.raises(Misuse, match="two processes say that they are rank 1"):
            doorway(store, 1).enter()
    put(store, Door(2, (0, 1), {1: far}))
    assert all_in(doorway(store, 0), doorway(store, 1))[0] == (3, HEARD)


def test_the_end_of_a_start_waits_no_longer_than_all_that_is_left() -> None:
    """Come in and over at once: who reads that late has come in all the same."""
    store = MemoryStore()
    mine = doorway(store, 0)
    passed = {"ready": (0, 1), "in": (0, 1)}
    put(store, Door(1, (0, 1), {0: mine.me, 1: Caller.here(1)}, passed, state="over"))
    mine.come_in()
    assert mine.run == 1


class Moody(MemoryStore):
    """Silent for its first ``number`` calls."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def _check(self, key: str) -> None:
        self.number -= 1
        if self.number >= 0:
            raise StoreSilent("a name was looked up")
        super()._check(key)


def test_silence_is_borne_while_a_start_may_last() -> None:
    assert all_in(doorway(Moody(7), 0, (0,)))[0] == (1, {0: b"hello 0"})


def test_silence_ends_the_start_at_its_bound() -> None:
    store = MemoryStore()
    store.silent = True
    began_s = time.monotonic()
    with pytest.raises(StoreSilent):
        doorway(store, 0, (0,), 0.2).enter()
    assert 0.2 <= time.monotonic() - began_s < 5.0


CALLS: dict[str, Callable[[PatientStore], object]] = {
    "get": lambda store: store.get("a"),
    "set": lambda store: store.set("a", b"1"),
    "compare_set": lambda store: store.compare_set("a", None, b"1"),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_of_a_patient_store_is_tried_again(
    call: Callable[[PatientStore], object],
) -> None:
    call(PatientStore(Moody(2), time.monotonic() + 20.0))
    with pytest.raises(StoreSilent):
        call(PatientStore(Moody(2), 0.0))
