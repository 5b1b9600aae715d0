"""What a rank tells Prometheus is what its cache counts, under names that keep the conventions."""

from __future__ import annotations

import re
import shutil
import subprocess
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpact.cache.metrics import CacheMetrics, metrics
from kvpact.consensus.transport.watch import Watch
from kvpact.harness.rank.store import MemoryStore
from tests.cache_world import PAGE_SIZE, World


class Watched:
    """A world whose ranks are measured, each in a registry of its own, as in real processes."""

    def __init__(self) -> None:
        self.world = World()
        self.registries = [CollectorRegistry() for _ in self.world.ranks]
        self.collectors: list[CacheMetrics] = [
            metrics(rank.cache, replica="r0", registry=registry)
            for rank, registry in zip(self.world.ranks, self.registries, strict=True)
        ]

    def page(self, rank: int = 0) -> str:
        """What Prometheus fetches from ``rank``."""
        return generate_latest(self.registries[rank]).decode()

    def value(self, name: str, rank: int = 0, **labels: str) -> float:
        """One sample."""
        wanted = {"replica": "r0", "rank": str(rank), **labels}
        (found,) = [
            sample.value
            for family in text_string_to_metric_families(self.page(rank))
            for sample in family.samples
            if sample.name == f"kvpact_{name}" and sample.labels == wanted
        ]
        return found


@pytest.fixture
def loaded() -> Watched:
    """One prompt was inserted, backed up, evicted, loaded back and finished."""
    watched = Watched()
    watched.world.host_only("abcd")
    watched.world.load("abcd", "r")
    watched.world.drain()
    watched.world.finish("r")
    return watched


def test_counts_are_the_caches_own(loaded: Watched) -> None:
    for rank, cache in enumerate(loaded.world.caches):
        counts = cache.metrics()
        backups = loaded.value("back_ups_total", rank, outcome="commit")
        loads = loaded.value("load_backs_total", rank, outcome="commit")
        assert (backups, loads) == (counts["backups"], counts["loads"]) == (1, 1)
        assert loaded.value("evicted_pages_total", rank, tier="device") == 4
        assert loaded.value("collectives_total", rank) == counts["collectives"]
        assert loaded.value("used_pages", rank, tier="host") == 4
        assert loaded.value("step", rank) == cache.core.manager.settled_step


def test_hits_are_counted_in_tokens_once_a_request_has_ended(loaded: Watched) -> None:
    hits = loaded.value("prefix_cache_hits_total", tier="host")
    queries = loaded.value("prefix_cache_queries_total")
    loaded.world.match("abcx", "s")
    assert loaded.value("prefix_cache_queries_total") == queries
    loaded.world.finish("s")
    assert loaded.value("prefix_cache_queries_total") == queries + 4 * PAGE_SIZE
    assert loaded.value("prefix_cache_hits_total", tier="device") == 3 * PAGE_SIZE
    assert loaded.value("prefix_cache_hits_total", tier="host") == hits == 4 * PAGE_SIZE


def test_each_step_and_each_load_is_measured(loaded: Watched) -> None:
    steps = loaded.world.caches[0].stepper.num_collectives
    assert loaded.value("step_seconds_count") == loaded.value("step_wait_seconds_count") == steps
    assert loaded.value("load_back_seconds_count") == 1
    assert loaded.value("backup_batch_nodes_sum") == 1


def test_names_keep_the_conventions(loaded: Watched) -> None:
    for family in text_string_to_metric_families(loaded.page()):
        assert re.fullmatch(r"kvpact_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert {"replica", "rank"} <= set(sample.labels)
            if family.type == "counter":
                assert sample.name.endswith("_total")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
def test_prometheus_own_checker_has_nothing_to_say(loaded: Watched) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=loaded.page(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def wait_for(watched: Watched, silent: int) -> None:
    """Until ``store_silent`` of rank 0 is as wanted."""
    ends_at = time.monotonic() + 10
    while watched.value("store_silent") != silent:
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def test_a_silent_store_shows() -> None:
    watched = Watched()
    assert (watched.value("store_silent"), watched.value("store_silences_total")) == (0, 0)
    store = MemoryStore()
    watch = Watch(store, 0, interval_s=0.01)
    watched.world.caches[0].store_health = watch
    store.silent = True
    watch.start()
    try:
        wait_for(watched, 1)
        assert watched.world.caches[0].metrics()["store_silences"] == 1
        store.silent = False
        wait_for(watched, 0)
        assert watched.value("store_silences_total") == 1
    finally:
        assert watch.stop()


def test_nothing_is_measured_before_or_after() -> None:
    watched = Watched()
    watched.world.step()
    for one in watched.collectors:
        one.close()
    watched.world.step()
    assert all(cache.observer is None for cache in watched.world.caches)
    assert watched.page() == ""
    assert World().caches[0].observer is None
