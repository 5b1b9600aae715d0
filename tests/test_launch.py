"""Real processes: what a rank reports, and that none is left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from kvpact.consensus.core.errors import Divergence, InternalError, Misuse, PeerLost, RankStalled
from kvpact.consensus.transport.watch import Life, process_life
from kvpact.harness.rank.child import Said, Unpacker, pack
from kvpact.harness.rank.launch import Launch, RankContext, launch

pytestmark = pytest.mark.ranks


def echo(context: RankContext, args: Any) -> Any:
    context.send(["hello", context.rank])
    return {"args": args, "got": context.receive(10.0), "ranks": context.num_ranks}


def count(context: RankContext, args: Any) -> str:
    for number in range(args):
        context.send(number)
    return "x" * 300_000


def fail(context: RankContext, args: Any) -> None:
    if context.rank == 0:
        raise Divergence("trees differ", rank=1, step=7, field="live", ours=1, theirs=2)
    time.sleep(60)


class _Awkward(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("awkward")


def fail_awkwardly(context: RankContext, args: Any) -> None:
    raise _Awkward(1, 2)


def crash(context: RankContext, args: Any) -> None:
    sys.stderr.write("last words\n")
    os._exit(3)


def sleep(context: RankContext, args: Any) -> None:
    context.send(os.getpid())
    time.sleep(60)


def ignore_terminate(context: RankContext, args: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.send("ready")
    time.sleep(60)


def environment(context: RankContext, args: Any) -> list[str | None]:
    return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "EXTRA")]


def _here(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def _is_gone(pid: int, within_s: float = 5.0) -> bool:
    end_s = time.monotonic() + within_s
    while process_life(pid, 0) is not Life.GONE:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def test_messages_go_both_ways_and_results_come_back_by_rank() -> None:
    with Launch(_here(echo), 2, args=["a", {"b": 1}], serve_store=False) as ranks:
        for rank in range(2):
            assert ranks.receive(rank, 20.0) == ["hello", rank]
            ranks.send(rank, rank + 10)
        report = ranks.join()
    assert report.results() == [
        {"args": "a", "got": 10, "ranks": 2},
        {"args": {"b": 1}, "got": 11, "ranks": 2},
    ]
    assert not report.deadline_passed
    assert [rank.exit_code for rank in report.ranks] == [0, 0]


def test_streamed_messages_end_up_in_the_report_and_env_is_set() -> None:
    (rank,) = launch(_here(count), 1, args=[500], serve_store=False).ranks
    assert rank.messages == list(range(500))
    assert (rank.ended, len(rank.result), rank.num_dropped) == ("returned", 300_000, 0)
    report = launch(_here(environment), 1, serve_store=False, env={"EXTRA": "1"})
    assert report.results() == [["lo", "1", "1"]]


def test_one_rank_raises_and_the_others_are_ended_after_the_grace() -> None:
    report = launch(_here(fail), 2, grace_s=0.2, serve_store=False)
    failed, other = report.ranks
    assert failed.ended == "raised"
    assert isinstance(failed.error, Divergence)
    assert (failed.error.rank, failed.error.step, failed.error.field) == (1, 7, "live")
    assert (other.ended, other.exit_code) == ("killed", -signal.SIGTERM)
    assert "in fail" in other.output  # it said where it was
    assert not report.deadline_passed
    assert report.duration_s < 20
    assert _is_gone(other.pid)
    with pytest.raises(Divergence, match="trees differ"):
        report.results()


def test_an_error_that_cannot_be_pickled_still_tells_its_story() -> None:
    (rank,) = launch(_here(fail_awkwardly), 1, serve_store=False).ranks
    assert isinstance(rank.error, InternalError)
    assert "_Awkward: awkward" in str(rank.error)


def test_a_crash_is_an_exit_code_with_the_last_words() -> None:
    report = launch(_here(crash), 1, serve_store=False)
    assert (report.ranks[0].ended, report.ranks[0].exit_code) == ("exited", 3)
    with pytest.raises(PeerLost, match="last words"):
        report.results()


def test_the_deadline_ends_a_rank_that_ignores_being_asked() -> None:
    with Launch(
        _here(ignore_terminate), 1, deadline_s=1.5, grace_s=0.1, serve_store=False
    ) as ranks:
        assert ranks.receive(0, 20.0) == "ready"
        report = ranks.join()
    assert report.deadline_passed
    assert (report.ranks[0].ended, report.ranks[0].exit_code) == ("killed", -signal.SIGKILL)


def test_receive_names_the_rank_that_is_late_or_has_ended() -> None:
    with Launch(_here(sleep), 1, serve_store=False) as ranks:
        pid = ranks.receive(0, 20.0)
        assert pid == ranks.pid(0)
        with pytest.raises(RankStalled, match="rank 0 sent nothing"):
            ranks.receive(0, 0.05)
        ranks.signal(0, signal.SIGKILL)
        with pytest.raises(PeerLost, match="exit code -9"):
            ranks.receive(0, 10.0)


def test_a_failing_test_leaves_no_rank_not_even_a_stopped_one() -> None:
    pids: list[int] = []

    def failing_test() -> None:
        with Launch(_here(sleep), 1, serve_store=False) as ranks:
            pids.append(ranks.receive(0, 20.0))
            ranks.signal(0, signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_test()
    assert len(pids) == 1
    assert _is_gone(pids[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_launcher(number: signal.Signals) -> None:
    code = f"""
        from kvpact.harness.rank.launch import Launch
        with Launch({_here(sleep)!r}, 2, serve_store=False) as ranks:
            pids = [ranks.receive(rank, 20.0) for rank in range(2)]
            ranks.signal(1, 19)  # a stopped rank cannot see its launcher go
            print(*pids, flush=True)
            ranks.join()
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(process_life(pid, 0) is not Life.GONE for pid in pids)
        launcher.send_signal(number)
        assert all(_is_gone(pid) for pid in pids)
        launcher.wait(10.0)


def test_misuse_is_said_at_once() -> None:
    with pytest.raises(Misuse, match="module:function"):
        Launch("nonsense", 1)
    with pytest.raises(Misuse, match="as many args"):
        Launch("a:b", 2, args=[1])


def test_frames_arrive_whole_in_any_pieces() -> None:
    data = b"".join(pack(Said(number)) for number in range(5))
    unpacker = Unpacker()
    frames = [
        frame for index in range(len(data)) for frame in unpacker.feed(data[index : index + 1])
    ]
    assert frames == [Said(number) for number in range(5)]
