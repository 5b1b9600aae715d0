"""The soak under torchrun: the same loop without Ray, with real gloo ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.cli import main as cli
from kvpact.harness.drive.report import read_report
from kvpact.harness.torchrun import main, place_from

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def torchrun(num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, str(num_ranks), "-m", "kvpact.harness.torchrun", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.ranks
def test_two_ranks_pass_under_faults(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[fault]]\nsite = "host.reserve"\naction = "refuse"\nranks = [1]\nevery_steps = 10\n'
        '[[fault]]\nsite = "write"\naction = "skew"\nranks = [0]\nsteps = 3\nshare = 0.3\n'
    )
    out = tmp_path / "out"
    done = torchrun(2, "--steps", "250", "--faults", str(plan), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(str(out))
    assert report.verdict == "pass"
    assert report.launcher == "torchrun"
    assert report.command.startswith(
        "torchrun --nproc-per-node 2 -m kvpact.harness.torchrun --tp 2"
    )
    assert report.compared_steps >= 250
    assert (out / "report.html").exists()
    assert {rank.steps for rank in report.ranks} == {report.steps}


@pytest.mark.ranks
def test_a_killed_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nsite = "process"\naction = "kill"\nranks = [1]\nat_step = 50\n')
    out = tmp_path / "out"
    words = ("--steps", "100000", "--faults", str(plan), "--out", str(out), "--deadline", "3")
    done = torchrun(2, *words)
    assert done.returncode != 0
    report = read_report(str(out))
    assert (report.verdict, report.named_ranks) == ("hang", (1,)), report.why
    assert report.ranks[0].error in ("RankStalled", "PeerLost")
    assert cli.main(["explain", str(out / "report.json")]) == 0
    assert "incident 1 of 1" in capsys.readouterr().out
    assert "incident 1 of 1" in done.stdout, "a run that failed tells its story at once"


@pytest.mark.ranks
def test_ctrl_c_ends_in_good_order_with_a_report(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TORCHRUN, "2", "-m", "kvpact.harness.torchrun", "--minutes", "5", "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("running"):
                break
        # As a terminal does: to torchrun and to every rank.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    report = read_report(str(tmp_path))
    assert report.is_stopped
    assert report.verdict == "pass", report.why
    assert len({rank.steps for rank in report.ranks}) == 1


def test_outside_torchrun_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="started by torchrun"):
        place_from({})
    assert "RANK" not in os.environ
    assert main(["--steps", "1"]) == 2
    assert "torchrun --nproc-per-node 2 -m kvpact.harness.torchrun" in capsys.readouterr().err


def test_the_number_of_ranks_must_be_that_of_the_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert main(["--tp", "3", "--steps", "1"]) == 2
    assert "torchrun started 2 processes" in capsys.readouterr().err
    assert main(["--steps", "none"]) == 2
    assert "--steps" in capsys.readouterr().err
