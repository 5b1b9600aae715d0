"""Soaks on a real local Ray: they pass, they find what is wrong, and they leave nothing behind."""

from __future__ import annotations

import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.drive.drive import Options
from kvpact.harness.drive.report import SoakReport, read_report
from kvpact.harness.faults.plan import FaultLine, Plan
from kvpact.harness.soak.config import SoakConfig

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(180),
    # Ray's own; they say nothing about kvpact.
    pytest.mark.filterwarnings("ignore"),
]

COMMAND = [sys.executable, "-m", "kvpact", "soak"]
ROOT = Path(__file__).parent.parent


def soak(*words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the command with a Ray of its own."""
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def marked_processes(folder: str = "") -> list[str]:
    """Processes that belong to a soak, by the mark in their environment."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"KVPACT_SOAK={folder}".encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def mark_of(pid: int) -> str:
    """The folder of the Ray that the soak with this process started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        for word in words:
            if word.startswith(b"KVPACT_SOAK="):
                return word.partition(b"=")[2].decode()
    raise AssertionError(f"process {pid} started no guard")


def wait_until_gone(folder: str) -> None:
    end_s = time.monotonic() + 20.0
    while time.monotonic() < end_s:
        if not marked_processes(folder) and not Path(folder).exists():
            return
        time.sleep(0.2)
    assert not marked_processes(folder)
    assert not Path(folder).exists()


# -- with a Ray of its own -----------------------------------------------------------------------


def test_a_smoke_soak_with_faults_passes(tmp_path: Path) -> None:
    words = ("--seed", "5", "--out", str(tmp_path), "--journal", str(tmp_path / "journal"))
    done = soak("--smoke", "--steps", "1200", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(str(tmp_path))
    assert (report.verdict, report.history) == ("pass", "holds")
    assert report.collectives_per_step == 1.0
    assert report.compared_steps >= 1200
    assert report.compared_trees >= 20
    assert sum(sum(row.struck.values()) for row in report.faults) > 100
    seen = {row.name for row in report.points if row.times}
    assert {"abort after partial reserve", "copy quarantined", "split while copying"} <= seen
    assert "<h1>pass</h1>" in (tmp_path / "report.html").read_text()


def started(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A soak whose ranks are running, and the folder of its Ray."""
    driver = subprocess.Popen(
        [*COMMAND, "--minutes", "5", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    assert driver.stdout is not None
    for line in driver.stdout:
        said.append(line)
        if line.startswith("running"):
            return driver, mark_of(driver.pid)
    driver.wait()
    raise AssertionError(f"it ended with {driver.returncode} before it ran:\n{''.join(said)}")


def ended(driver: subprocess.Popen[str]) -> None:
    driver.kill()
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()


def test_nothing_stays_after_kill_9_of_the_driver() -> None:
    driver, folder = started()
    try:
        assert len(marked_processes(folder)) >= 3
    finally:
        ended(driver)
    wait_until_gone(folder)


def test_ctrl_c_ends_in_good_order_with_a_report(tmp_path: Path) -> None:
    driver, folder = started("--out", str(tmp_path))
    try:
        driver.send_signal(signal.SIGINT)
        assert driver.wait(60.0) == 130
    finally:
        ended(driver)
    report = read_report(str(tmp_path))
    assert report.is_stopped
    assert report.verdict == "pass"
    assert {rank.how for rank in report.ranks} == {"stopped"}
    assert len({rank.steps for rank in report.ranks}) == 1
    wait_until_gone(folder)


# -- in one Ray for all --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray with three cores, which the soaks join as they join a cluster."""
    from kvpact.harness.drive.ray import LocalRay

    with LocalRay(3):
        yield


def joined(tmp_path: Path, **how: object) -> tuple[int, SoakReport]:
    """Run a soak in the cluster of the fixture; its status and report."""
    from kvpact.harness.drive.ray import run_soak

    journal = str(tmp_path / "journal")
    config = SoakConfig(**{"steps": 400, "deadline_s": 4.0, "journal": journal, **how})  # pyright: ignore[reportArgumentType]
    options = Options(address="auto", out=str(tmp_path), start_timeout_s=40.0)
    status = run_soak(config, options, Console(quiet=True))
    return status, read_report(str(tmp_path))


@pytest.mark.usefixtures("cluster")
def test_without_votes_it_diverges_quickly(tmp_path: Path) -> None:
    faults = (
        FaultLine(site="host.reserve", action="refuse", ranks=(1,), every_steps=10),
        FaultLine(site="write", action="skew", ranks=(0,), steps=3, share=0.3),
    )
    status, report = joined(tmp_path, plan=Plan(fault=faults), unsafe_no_votes=True)
    assert (status, report.verdict, report.is_expected) == (10, "divergence", True)
    assert report.steps < 200
    assert report.detection_s is not None
    assert report.detection_s < 10
    assert any("first decision that differs" in line for line in report.ranks[0].story)
    assert "Journals, aligned" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("cluster")
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    plan = Plan(fault=(FaultLine(site="process", action="kill", ranks=(1,), at_step=50),))
    status, report = joined(tmp_path, plan=plan, steps=100_000)
    assert (status, report.verdict, report.is_expected) == (11, "hang", True)
    assert report.named_ranks == (1,)
    assert report.history == "holds", report.why
    (incident,) = report.incidents
    assert incident.seal.error.ranks == (1,)
    assert report.ranks[0].error in ("RankStalled", "PeerLost")
    assert report.detection_s is not None
    assert report.detection_s < 4.0


@pytest.mark.usefixtures("cluster")
def test_a_stop_shorter_than_the_deadline_is_survived(tmp_path: Path) -> None:
    fault = FaultLine(site="process", action="stop", ranks=(0,), at_step=100, seconds=1.0)
    plan = Plan(fault=(fault,), cover=("straggler within the deadline",))
    # Enough of them to be still under way when it strikes, a second after step 100.
    status, report = joined(tmp_path, plan=plan, steps=3_000)
    assert (status, report.verdict, report.history) == (0, "pass", "holds"), report.why
    assert report.step_ms.max > 500


@pytest.mark.usefixtures("cluster")
def test_a_stop_beyond_the_deadline_is_named(tmp_path: Path) -> None:
    fault = FaultLine(site="process", action="stop", ranks=(1,), at_step=50, seconds=45.0)
    status, report = joined(tmp_path, plan=Plan(fault=(fault,)), steps=100_000, deadline_s=2.0)
    assert (status, report.verdict, report.is_expected) == (11, "hang", True), report.why
    assert report.named_ranks == (1,)


@pytest.mark.usefixtures("cluster")
def test_one_rank_that_loses_a_node_is_found(tmp_path: Path) -> None:
    fault = FaultLine(site="scheduler", action="diverge", ranks=(1,), every_steps=20)
    plan = Plan(fault=(fault,))
    status, report = joined(tmp_path, plan=plan, steps=5_000, host_pages=(0, 0))
    assert (status, report.verdict, report.is_expected) == (10, "divergence", True), report.why


@pytest.mark.usefixtures("cluster")
def test_too_few_cores_for_the_placement_group(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(BadInput, match="4 ranks need 4 CPUs, the cluster has 3"):
        joined(tmp_path, tp=4, device_pages=(96,) * 4, host_pages=(192,) * 4)
    assert time.monotonic() - began_s < 10


@pytest.mark.usefixtures("cluster")
def test_too_few_gpus_for_the_placement_group(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2 ranks need 2 GPUs, the cluster has 0"):
        joined(tmp_path, device="cuda")


@pytest.mark.usefixtures("cluster")
def test_a_rank_per_node_needs_nodes(tmp_path: Path) -> None:
    from kvpact.harness.drive.ray import run_soak

    options = Options(address="auto", spread=True, start_timeout_s=2.0)
    with pytest.raises(BadInput, match="--spread needs a node per rank"):
        run_soak(SoakConfig(steps=10), options, Console(quiet=True))


# -- what cannot be run --------------------------------------------------------------------------


def refused(*words: str) -> str:
    began_s = time.monotonic()
    done = soak(*words, timeout_s=40.0)
    assert done.returncode == 2, done.stdout + done.stderr
    assert time.monotonic() - began_s < 15
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_an_unreachable_cluster() -> None:
    assert "no Ray answers at ray://127.0.0.1:9" in refused("--address", "ray://127.0.0.1:9")


def test_a_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"--metrics-port: port {port}" in refused("--metrics-port", str(port))


def test_an_unknown_fault(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nsite = "disk"\naction = "melt"\nat_step = 1\n')
    text = refused("--faults", str(plan))
    assert "fault 1: site: there is no fault at 'disk'" in text
    assert "host.reserve" in text


def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [*COMMAND, "--steps", "10", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 2, done.stderr
    assert "--out:" in done.stderr
    assert "cannot be written to" in done.stderr


def test_metrics_can_be_fetched(tmp_path: Path) -> None:
    import urllib.request

    from kvpact.harness.drive.gather import Gather
    from kvpact.harness.drive.live import Metrics

    metrics = Metrics(_free_port())
    try:
        metrics.show(Gather(SoakConfig(steps=1)))
        url = f"http://127.0.0.1:{metrics.port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    assert 'kvpact_step{rank="1"} 0.0' in text
    dashboard = (ROOT / "harness" / "data" / "grafana_soak.json").read_text()
    shown = set(re.findall(r"kvpact_[a-z_]+", dashboard))
    served = set(re.findall(r"# HELP (kvpact_[a-z_]+)", text))
    assert shown
    assert shown <= served


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
