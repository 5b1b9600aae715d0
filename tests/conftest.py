"""What all tests share: the environment of gloo ranks, Hypothesis profiles, no rank left behind."""

from __future__ import annotations

import os

# Before anything imports torch, and inherited by every rank that a test starts.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve hangs gloo
os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks, few cores
os.environ.setdefault("RES_OPTIONS", "attempts:0")  # see harness.launch.RESOLVER

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadline anywhere: machines are shared, and pytest's own timeout bounds a test.
settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=100, print_blob=True
)
settings.register_profile("dev", deadline=None, max_examples=50, print_blob=True)
settings.register_profile(
    "thorough",  # HYPOTHESIS_PROFILE=thorough scripts/test --fast: before a release
    deadline=None,
    max_examples=5000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

LEFTOVER_GRACE_S = 5.0
# Helpers that the standard library keeps for the life of the process; they end with it.
KEPT_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests with several ranks on one pytest worker; skip GPU tests where there is none."""
    no_gpu = None
    for item in items:
        if item.get_closest_marker("ranks") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        if item.get_closest_marker("gpu") is not None:
            if no_gpu is None:
                no_gpu = _no_gpu()
            item.add_marker(no_gpu)


def _no_gpu() -> pytest.MarkDecorator:
    import torch  # only where a GPU test is collected: it takes a second

    return pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _no_rank_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test with several ranks that leaves a process behind, and end what it left."""
    if request.node.get_closest_marker("ranks") is None:
        yield
        return
    before = _children()
    yield
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        _end(pid)
    assert not left, f"the test left processes behind (now ended): {sorted(left)}"


def _children() -> set[int]:
    """Return the ids of this process's living children (Linux; elsewhere none are seen)."""
    found: set[int] = set()
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in children.read_text().split())
        except OSError:
            continue  # the thread ended meanwhile
    return {pid for pid in found if _counts(pid)}


def _counts(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and not any(helper in command for helper in KEPT_HELPERS)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
