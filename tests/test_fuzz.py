"""The fuzzer: random worlds hold, one seed is one run, and failures become small files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvpact.cache.paths.write_through import WriteThrough
from kvpact.cache.tree.eviction import POLICIES
from kvpact.consensus.core.participant import Intent
from kvpact.harness.cli.main import main
from kvpact.harness.fuzz.run import run_world, signature, small_scenario
from kvpact.harness.fuzz.worlds import draw_scenario
from kvpact.harness.scenario.model import Idle, Mode, NewWeights, Reset, Scenario
from kvpact.harness.scenario.read import parse_scenario, read_scenario
from kvpact.harness.scenario.write import scenario_text

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_worlds_keep_all_promises(first: int) -> None:
    for seed in range(first, first + 25):
        result = run_world(seed)
        assert result.failures == [], f"kvpact fuzz --seed {seed} --worlds 1"
        assert result.rank_steps > 0


def test_each_commit_explores_other_worlds() -> None:
    commit = os.environ.get("GITHUB_SHA", "0" * 40)
    first = int(commit[:12], 16)
    for seed in range(first, first + 25):
        assert run_world(seed).failures == [], f"kvpact fuzz --seed {seed} --worlds 1"


def test_healed_worlds_drain_and_give_everything_back() -> None:
    for seed in range(25):
        result = run_world(seed, liveness=True)
        assert result.failures == [], f"kvpact fuzz --seed {seed} --worlds 1 --liveness"


def test_worlds_differ_from_each_other() -> None:
    drawn = [draw_scenario(seed).scenario for seed in range(120)]
    assert len({scenario.world for scenario in drawn}) > 100
    assert {type(entry).__name__ for scenario in drawn for entry in scenario.do} >= {
        "Insert", "LoadBack", "Evict", "Finish", "Abort", "Admit", "Take", "Compute", "Free",
        "Step", "Drain", "Fault", "Heal", "Expect", "Prefetch", "Settle", "AttachStorage",
        "DetachStorage", "Reset", "NewWeights", "Restart", "TakeMatch", "LoadMatch",
        "DropNamespace",
    }  # fmt: skip
    assert any(entry.raises for scenario in drawn for entry in scenario.do)
    worlds = [scenario.world for scenario in drawn]
    assert {world.mode for world in worlds} == set(get_args(Mode))
    assert {world.storage for world in worlds} == {"none", "memory", "file"}
    assert {world.eviction for world in worlds} == set(POLICIES)
    assert {world.policy for world in worlds} == {"raise", "reset", "detach", "observe"}
    assert {pool.need for world in worlds for pool in world.side_pools} == {
        "per_page", "per_node", "window",
    }  # fmt: skip


def test_it_stops_at_a_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--rank-steps", "1000", "--out", str(tmp_path)]) == 0
    found = re.search(r"([\d,]+) rank-steps", capsys.readouterr().out)
    assert found is not None
    assert 1000 <= int(found[1].replace(",", "")) < 10_000


def test_one_seed_is_one_run_byte_for_byte(tmp_path: Path) -> None:
    said: list[str] = []
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        command = [
            sys.executable,
            "-m",
            "kvpact",
            "fuzz",
            "--worlds",
            "12",
            "--seed",
            "7",
        ]
        done = subprocess.run(
            [*command, "--journal", str(folder), "--out", str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found = re.search(r"digest (\w+)", done.stdout)
        assert found is not None, done.stdout
        said.append(found[1])
    assert said[0] == said[1]
    ours = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.jsonl"))
    assert len(ours) >= 24
    for path in ours:
        assert (tmp_path / "1" / path).read_bytes() == (tmp_path / "2" / path).read_bytes()


def test_several_processes_find_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests: list[str] = []
    for jobs in ("1", "2"):
        flags = ["--worlds", "10", "--seed", "90", "--out", str(tmp_path)]
        assert main(["fuzz", *flags, "--jobs", jobs]) == 0
        found = re.search(r"digest (\w+)", capsys.readouterr().out)
        assert found is not None
        digests.append(found[1])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--worlds", "0"], "--worlds"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--rank-steps", "0"], "--rank-steps"),
        (["--seed", "-1"], "--seed"),
        (["--jobs", "0"], "--jobs"),
        (["--failures-max", "0"], "--failures-max"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", *flags]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


def _forget_to_unpin(self: WriteThrough, intent: Intent) -> None:
    """A planted fault: a backup that is over keeps the pin of its parent's path."""
    self._carriages[intent.serial].anchor = None
    _ENDED(self, intent)


_ENDED = WriteThrough.ended


def _small_failing_seed() -> int:
    """The first failing world that is quick to run: making it small takes hundreds of runs."""
    for seed in range(500):
        drawn = draw_scenario(seed).scenario
        is_quick = drawn.world.num_ranks <= 3 and len(drawn.do) <= 70
        if is_quick and run_world(seed).failures:
            return seed
    raise AssertionError("no world finds the planted fault")


def test_a_planted_fault_is_found_and_made_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WriteThrough, "ended", _forget_to_unpin)
    seed = _small_failing_seed()
    status = main(["fuzz", "--worlds", "1", "--seed", str(seed), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 1
    assert f"kvpact fuzz --seed {seed} --worlds 1" in out
    file = tmp_path / f"fuzz_{seed}.toml"
    small = read_scenario(file)
    drawn = draw_scenario(seed)
    before = len(drawn.scenario.do) - drawn.num_tail
    assert len(small.do) - drawn.num_tail < before / 2
    assert small.world.num_ranks <= drawn.scenario.world.num_ranks
    assert main(["scenario", str(file)]) == 1
    monkeypatch.undo()
    assert main(["scenario", str(file)]) == 0


def test_it_stops_at_a_failure_and_says_so_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WriteThrough, "ended", _forget_to_unpin)
    monkeypatch.setattr("kvpact.harness.fuzz.run._SHRUNK_MAX", 0)
    flags = ["fuzz", "--worlds", "40", "--out", str(tmp_path)]
    assert main(flags) == 1
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("stopped at failure 1 (--failures-max goes on): 1 worlds fail:")
    assert main([*flags, "--failures-max", "1000"]) == 1
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert re.match(r"\d+ worlds fail: 40 worlds,", last)


def test_weighted_worlds_are_nearer_to_what_has_failed() -> None:
    """More lag, headroom, side pools and ends of epochs; and each runs again by its flag."""

    def share(weighted: bool, has: Callable[[Scenario], bool]) -> float:
        drawn = [draw_scenario(seed, weighted=weighted).scenario for seed in range(150)]
        return sum(map(has, drawn)) / len(drawn)

    asks: list[Callable[[Scenario], bool]] = [
        lambda one: one.world.lag >= 3,
        lambda one: one.world.headroom_pages > 0,
        lambda one: bool(one.world.side_pools),
        lambda one: one.world.policy in ("reset", "detach"),
        lambda one: any(isinstance(entry, Reset | NewWeights) for entry in one.do),
    ]
    for has in asks:
        assert share(True, has) > 1.2 * share(False, has)


def test_worlds_have_tiny_limits_and_long_uptimes() -> None:
    drawn = [draw_scenario(seed).scenario for seed in range(300)]
    for name in (
        "waiting_tickets_max",
        "mover_parts_max",
        "storage_requests_max",
        "journal_entries_max",
        "write_queue_nodes_max",
    ):
        assert sum(getattr(one.world, name) == 1 for one in drawn) >= 20, name
    hours = [e.seconds > 3600 for one in drawn for e in one.do if isinstance(e, Idle)]
    assert sum(hours) >= 5
    assert {one.world.lag for one in drawn} >= {0, 1, 2, 3, 4}


def _children(pid: int) -> list[int]:
    """Processes that ``pid`` started, threads' children included."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("words", ["fuzz --minutes 5", "search"])
def test_no_worker_outlives_its_parent_and_ctrl_c_is_one_line(
    words: str, how: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvpact", *words.split(), "--jobs", "2"]
    flags = ["--out", str(tmp_path)] if words != "search" else []
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end_s = time.monotonic() + 60.0
        while len(_workers(process.pid)) < 2 and time.monotonic() < end_s:
            time.sleep(0.1)
        workers = _workers(process.pid)
        assert len(workers) == 2
        time.sleep(3.0)
        if how is signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        out, err = process.communicate(timeout=30)
        end_s = time.monotonic() + 10.0
        while any(map(_is_alive, workers)) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert not any(map(_is_alive, workers))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if how is signal.SIGINT:
        assert process.returncode == 130, err
        assert err == ""
        assert out.strip().splitlines()[-1].startswith("stopped by hand")


def _workers(pid: int) -> list[int]:
    """Those that run worlds: multiprocessing has a process of its own beside them."""
    return [
        child
        for child in _children(pid)
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_shrinking_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteThrough, "ended", _forget_to_unpin)
    seed = _small_failing_seed()
    assert small_scenario(seed, runs_max=60) == small_scenario(seed, runs_max=60)


def test_a_signature_forgets_numbers_only() -> None:
    one = signature("rank 0, after step 5: <node 6> is gone; the journal before it: #1")
    assert one == signature("rank 3, after step 17: <node 1> is gone")
    assert one != signature("rank 3, after step 17: <node 1> is there")


@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_reads_back(seed: int) -> None:
    scenario = draw_scenario(seed).scenario
    again = parse_scenario(scenario_text(scenario), scenario.path)
    assert again == scenario


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_files_survive_writing(path: Path) -> None:
    scenario = read_scenario(path)
    assert parse_scenario(scenario_text(scenario), str(path)) == scenario


def test_texts_are_quoted() -> None:
    scenario = msgspec.structs.replace(
        draw_scenario(0).scenario, name='a "b" \\ c\x7f\n\x01', about="üß", source="x#y"
    )
    assert parse_scenario(scenario_text(scenario), scenario.path) == scenario
