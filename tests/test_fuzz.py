"""The fuzzer: random worlds hold, one seed is one run, and failures become small files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
from kvpact.harness.scenario.model import Mode
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
        "DetachStorage", "Reset", "TakeMatch", "LoadMatch",
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
