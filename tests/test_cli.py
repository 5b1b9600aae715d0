"""The command: what goes wrong is one line on stderr and a status, never a traceback."""

from __future__ import annotations

import gzip
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpact.consensus.core.errors import Divergence, InternalError, KvpactError
from kvpact.harness.cli import main as cli
from kvpact.harness.replay.config import ReplayConfig
from kvpact.harness.scenario.model import Scenario
from kvpact.harness.trace.conversations import shipped_trace
from kvpact.harness.trace.mooncake import read_trace

ROOT = Path(__file__).parents[1]
WORLD = """\
name = "one step"
[world]
tp = 2
page_size = 4
device_pages = 8
host_pages = 8
[[do]]
op = "step"
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpact", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"timestamp": 1}\n')
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "good.toml").write_text(WORLD)
    (tmp_path / "syntax.toml").write_text("name = \n")
    (tmp_path / "unknown.toml").write_text(WORLD + "count = 3\n")
    (tmp_path / "a_file").touch()
    return tmp_path


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("nope", "No such command 'nope'"),
        ("--nope", "No such option: --nope"),
        ("replay --tp", "Option '--tp' requires an argument"),
        ("replay --tp two", "Invalid value for '--tp'"),
        ("replay --ranks mpi", "Invalid value for '--ranks'"),
        ("replay {}/none.jsonl", "none.jsonl: no such file; expected a trace"),
        ("replay --tp 0", "--tp: must be between 1 and 64, got 0"),
        ("replay --pp -1", "--pp: must be between 1 and 64, got -1"),
        ("replay --tp 9 --pp 9", "--tp * --pp: must be between 1 and 64, got 81"),
        ("replay --pp 2 --lag 1", "--lag: with --pp 2 must be at least 2, got 1"),
        ("replay --lag -1", "--lag: must be between 0 and 64, got -1"),
        (
            "replay --device-pages 1,2,3",
            "--device-pages: expected one number, or one for each of 2",
        ),
        ("replay --device-pages x", "--device-pages: expected a number, or one per rank like"),
        ("replay --device-pages 0", "--device-pages: must be between 1 and"),
        ("replay --host-pages 4,", "--host-pages: expected a number"),
        ("replay --page-size 48", "--page-size: 48 does not divide the trace's block of 512"),
        ("replay --page-size 1024", "--page-size: must be between 1 and 512"),
        ("replay --lanes 0", "--lanes: must be between 1 and"),
        ("replay --limit 0", "--limit: must be between 1 and"),
        ("replay --seed -1", "--seed: must be between 0 and"),
        ("replay --kv-shape 2x2", "--kv-shape: expected LAYERSxHEADSxDIM like 2x2x8, got '2x2'"),
        ("replay --kv-shape 0x2x8", "--kv-shape: must be between 1 and"),
        ("replay --journal {}/a_file", "a_file is not a directory"),
        ("replay --journal {}/no/where", "its parent directory does not exist"),
        ("replay --json {}", "is a directory; expected a file to write"),
        ("replay --json {}/no/out.json", "its parent directory does not exist"),
        ("scenario", "Missing argument 'FILE...'"),
        ("scenario {}/none.toml", "none.toml: no such file; expected a scenario"),
        ("scenario {}", ": is a directory; expected a scenario"),
        ("scenario {}/syntax.toml", "syntax.toml:1: column 8: not valid TOML"),
        ("scenario {0}/good.toml {0}/unknown.toml", "unknown.toml:7: do 1 (step): count: unknown"),
        ("scenario --seed -1 {}/good.toml", "--seed: must not be negative"),
        ("scenario --json {0}/no/o {0}/good.toml", "its parent directory does not exist"),
        ("generate", "Missing argument 'OUT'"),
        ("generate {}", ": is a directory; expected a file to write"),
        ("generate {}/no/t.jsonl", "cannot be written: No such file or directory"),
        ("generate {}/t.jsonl --lanes 0", "lanes: must be at least 1, got 0"),
        ("generate {}/t.jsonl --turn-tokens 9..2", "turn_tokens: need 1 <= low <= high"),
        ("generate {}/t.jsonl --pause-ms a..b", "--pause-ms: expected a range like 50..600"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, complaint: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.format(files).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvpact: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("replay {}/none.jsonl", "none.jsonl: no such file"),
        ("scenario {}/unknown.toml", "unknown.toml:7: do 1 (step): count: unknown key"),
        ("generate {}/t.jsonl --lanes x", "Invalid value for '--lanes'"),
    ],
)
def test_the_real_command_ends_with_status_2_and_one_line(
    arguments: str, complaint: str, files: Path
) -> None:
    ended = run(*arguments.format(files).split())
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert complaint in ended.stderr


def test_the_real_command_generates_and_shows_help(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    made = run("generate", str(out), "--lanes", "3", "--turns", "2", "--seed", "5")
    assert (made.returncode, made.stdout) == (0, "")
    assert "requests" in made.stderr
    assert len(read_trace(out)) == 6
    bare = run()
    assert bare.returncode == 0
    assert all(name in bare.stdout for name in ("replay", "scenario", "generate"))


def stub(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> None:
    """Stand in for a module of the harness, which the command imports only when it runs."""
    stand_in = SimpleNamespace(**members)
    room, _, name = module.rpartition(".")
    monkeypatch.setitem(sys.modules, f"kvpact.harness.{module}", stand_in)
    package = importlib.import_module(f"kvpact.harness.{room}")
    monkeypatch.setattr(package, name, stand_in, raising=False)


def test_replay_hands_over_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[ReplayConfig] = []

    def replay(config: ReplayConfig) -> int:
        seen.append(config)
        return 1 if config.ranks == "sim" else 0

    stub(monkeypatch, "replay.run", replay=replay)
    assert cli.main(["replay"]) == 0
    flags = (
        f"replay {shipped_trace()} --ranks sim --tp 1 --pp 2 --device-pages 9,8 --host-pages 0"
        f" --page-size 16 --lanes 3 --limit 5 --kv-shape 4x2x16 --journal {tmp_path}/j"
        f" --json {tmp_path}/o.json --seed 6"
    )
    assert cli.main(flags.split()) == 1
    assert seen[0].trace == str(shipped_trace())
    assert (seen[0].ranks, seen[0].tp, seen[0].pp, seen[0].lag) == ("gloo", 2, 1, 0)
    assert seen[0].device_pages == (2048, 2048)
    assert seen[1] == ReplayConfig(
        trace=str(shipped_trace()),
        ranks="sim",
        tp=1,
        pp=2,
        lag=2,
        page_size=16,
        device_pages=(9, 8),
        host_pages=(0, 0),
        lanes=3,
        limit=5,
        kv_shape=(4, 2, 16),
        journal=f"{tmp_path}/j",
        json_out=f"{tmp_path}/o.json",
        seed=6,
    )


def test_scenario_hands_over_checked_files(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    seen: list[Any] = []

    def run_files(
        scenarios: list[Scenario], *, ranks: str, seed: int, json_out: str | None, traces: bool
    ) -> int:
        seen.append(([one.name for one in scenarios], ranks, seed, json_out, traces))
        return 1

    stub(monkeypatch, "scenario.run", run_files=run_files)
    good = str(files / "good.toml")
    assert cli.main(["scenario", good]) == 1
    assert cli.main(["scenario", good, good, "--ranks", "gloo", "--seed", "4"]) == 1
    assert cli.main(["scenario", good, "--trace"]) == 1
    assert seen == [
        (["one step"], "sim", 0, None, False),
        (["one step"] * 2, "gloo", 4, None, False),
        (["one step"], "sim", 0, None, True),
    ]


@pytest.mark.parametrize(
    "error, status",
    [
        (Divergence("rank 1 is elsewhere", rank=1, step=7, story=["one", "two"]), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_how_a_run_ends_is_its_status(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def replay(_: ReplayConfig) -> int:
        raise error

    stub(monkeypatch, "replay.run", replay=replay)
    assert cli.main(["replay"]) == status
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if isinstance(error, KvpactError):
        assert "Divergence: rank 1 is elsewhere (step 7)" in err
        assert "two" in err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(_: ReplayConfig) -> int:
        raise InternalError("a page has two owners")

    stub(monkeypatch, "replay.run", replay=replay)
    with pytest.raises(InternalError):
        cli.main(["replay"])


@pytest.mark.parametrize(
    "call, status, says",
    [
        ("kvpact.harness.cli.main soak --help", 0, "--journal"),
        ("kvpact.harness.cli.main soak --steps 5", 2, "ray is missing: install kvpact[ray]"),
        ("kvpact.harness.torchrun --steps 5", 2, "psutil is missing: install kvpact[ray]"),
    ],
)
def test_without_the_packages_of_a_soak_it_says_what_to_install(
    call: str, status: int, says: str
) -> None:
    module, *words = call.split()
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('psutil', 'ray', 'prometheus_client')));"
        f" import {module} as module; sys.exit(module.main({words!r}))"
    )
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **place, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert says in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == (1 if status else 0)
