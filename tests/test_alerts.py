"""The alert rules and the dashboard ask for what ranks really offer, and the rules fire."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from kvpact.cache.metrics import metrics
from tests.cache_world import World
from tests.test_metrics import Watched

ROOT = Path(__file__).parent.parent
DATA = ROOT / "harness" / "data"
NAME = re.compile(r"\bkvpact_[a-z_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Debian's prometheus is not installed"
)


def offered() -> set[str]:
    """The names of all samples of a rank."""
    page = Watched().page()
    families = text_string_to_metric_families(page)
    # A sample family with a label that has no value yet has no sample: take the header as well.
    heads = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    return heads | {sample.name for family in families for sample in family.samples}


def panels() -> list[dict[str, Any]]:
    return json.loads((DATA / "grafana_replica.json").read_text())["panels"]


@pytest.mark.parametrize("file", ["alerts.yml", "grafana_replica.json"])
def test_every_name_is_offered(file: str) -> None:
    asked = set(NAME.findall((DATA / file).read_text()))
    assert len(asked) >= 8
    assert asked <= offered()


def test_the_panels_do_not_overlap() -> None:
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels()]
    assert len(set(places)) == len(places)
    assert len({one["id"] for one in panels()}) == len(places)


@needs_promtool
def test_the_rules_fire_on_what_they_are_for() -> None:
    for words in (
        ["check", "rules", str(DATA / "alerts.yml")],
        ["test", "rules", str(ROOT / "tests" / "alerts_test.yml")],
    ):
        done = subprocess.run(
            ["promtool", *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def ask(port: int, query: str) -> list[dict[str, Any]]:
    """Put a query to the Prometheus on ``port``."""
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
    return found


def until(is_true: Callable[[], object], limit_s: float) -> None:
    """Wait for it, at most ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if is_true():
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError("not in time")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_fetches_them_and_understands_every_panel(tmp_path: Path) -> None:
    world = World()
    registry = CollectorRegistry()
    metrics(world.caches[0], replica="r0", registry=registry)
    world.store("abcd")
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"rule_files: [{DATA / 'alerts.yml'}]\n"
        "scrape_configs:\n"
        "  - job_name: kvpact\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{server.server_port}']}}]\n"
    )
    running = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: ask(port, 'kvpact_used_pages{tier="host"} == 4'), 30.0)
        for panel in panels():
            for target in panel["targets"]:
                ask(port, target["expr"].replace("$replica", ".*"))  # raises where it is no query
    finally:
        running.terminate()
        running.wait(10.0)
        server.shutdown()
        server.server_close()
        thread.join(5.0)
