"""Metrics for Prometheus: counters, gauges and histograms of one rank.

Installed by :func:`metrics` where somebody asks for it; nothing is measured otherwise.
OpenTelemetry reads the same numbers through its Prometheus receiver. Names follow Prometheus'
conventions, and those of engines where they mean the same: a counter ends in ``_total``, a unit
stands in the name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvpact.cache.requests.results import StepResult
from kvpact.cache.status import CacheStatus
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.participant import Outcome, OutcomeKind

if TYPE_CHECKING:
    from kvpact.cache.hierarchical_cache import HierarchicalCache

__all__ = ["CacheMetrics", "metrics"]

_STEP_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_LATENCY_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: Counter -> its help, and the key of ``HierarchicalCache.metrics()`` by the label ``outcome``.
_OUTCOMES: dict[str, tuple[str, dict[str, str]]] = {
    "back_ups": (
        "Decided backups of nodes, by how it came out.",
        {
            "commit": "backups",
            "abort": "backups_aborted",
            "no_room": "backups_no_room",
            "lost": "backups_lost",
            "dropped": "backups_dropped",
        },
    ),
    "load_backs": (
        "Decided load-backs, by how it came out.",
        {
            "commit": "loads",
            "abort": "loads_aborted",
            "no_room": "loads_no_room",
            "failed": "loads_failed",
        },
    ),
}
#: Counter -> its help, and the key of ``HierarchicalCache.metrics()``.
_TOTALS: dict[str, tuple[str, str]] = {
    "collectives": ("Ballots that were reduced.", "collectives"),
    "inserts_refused": ("Inserts whose pages were not to be had on every rank.", "refused"),
    "pages_refused": ("Requests for device pages that were refused.", "pages_refused"),
    "deferred": ("Queued nodes times steps in which they had to wait.", "deferred"),
    "prefetched_pages": ("Pages that came from storage.", "prefetched_pages"),
    "stored_pages": ("Pages that storage has taken.", "stored_pages"),
    "copies_wrong": ("Copies whose bytes differed from their source.", "copies_wrong"),
    "divergences": ("Epochs that ended because ranks differed.", "divergences"),
    "stalls": ("Epochs that ended because a rank did not come.", "stalls"),
    "resets": ("Times that the cache was dropped and begun anew.", "resets"),
    "store_silences": ("Times that the store stopped answering this rank.", "store_silences"),
}


def metrics(cache: HierarchicalCache, *, replica: str = "", registry: Any = None) -> CacheMetrics:
    """Offer the numbers of ``cache`` to Prometheus, labelled with ``replica`` and its rank.

    ``registry`` is a ``prometheus_client.CollectorRegistry``, by default the one of the process.
    From now on each step fills two histograms more. Raises BadInput where prometheus-client
    is not installed.
    """
    try:
        import prometheus_client as client
    except ImportError:
        raise BadInput("kvpact.metrics needs prometheus-client: install kvpact[metrics]") from None
    return CacheMetrics(cache, replica, registry or client.REGISTRY)


class CacheMetrics:
    """A collector of ``prometheus_client``; :meth:`close` takes it out of its registry."""

    def __init__(self, cache: HierarchicalCache, replica: str, registry: Any) -> None:
        from prometheus_client import Histogram

        self._cache = cache
        self._labels = {"replica": replica, "rank": str(cache.rank)}
        self._registry = registry
        self._began_s = self._waited_s = 0.0

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Any:
            whole = Histogram(
                f"kvpact_{name}", text, tuple(self._labels), registry=None, buckets=buckets
            )
            self._histograms.append(whole)
            return whole.labels(**self._labels)

        self._histograms: list[Any] = []
        self._step = histogram("step_seconds", "Wall time of a step.", _STEP_S)
        self._wait = histogram("step_wait_seconds", "Wait for other ranks in a step.", _STEP_S)
        self._batch = histogram("backup_batch_nodes", "Nodes backed up by one step.", _BATCH)
        self._load = histogram(
            "load_back_seconds", "From asking for a load-back to its end on all ranks.", _LATENCY_S
        )
        cache.observer = self
        registry.register(self)

    def close(self) -> None:
        """Measure no more, and leave the registry."""
        self._cache.observer = None
        self._registry.unregister(self)

    # -- what the cache calls --------------------------------------------------------------------

    def began(self) -> None:
        """Note that a step begins."""
        self._began_s = time.perf_counter()

    def ended(self, result: StepResult) -> None:
        """Note how long it took and what it decided."""
        self._step.observe(time.perf_counter() - self._began_s)
        waited_s = self._cache.stepper.waited_s
        self._wait.observe(max(0.0, waited_s - self._waited_s))
        self._waited_s = waited_s
        if result.outcomes:
            self._observe(result.outcomes)

    def _observe(self, outcomes: Sequence[Outcome]) -> None:
        num_backed_up, now_ms = 0, self._cache.core.manager.clock_ms
        for outcome in outcomes:
            kind = outcome.intent.kind
            if kind == "back_up" and outcome.kind is OutcomeKind.COMMIT:
                num_backed_up += 1
            elif kind == "load_back" and outcome.kind is OutcomeKind.END:
                self._load.observe((now_ms - outcome.intent.opened_ms) / 1000)
        if num_backed_up:
            self._batch.observe(num_backed_up)

    # -- what Prometheus calls -------------------------------------------------------------------

    def collect(self) -> Iterable[Any]:
        """Yield the metric families; called by the registry, from its own thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = list(self._labels)
        values = list(self._labels.values())
        status = self._cache.status()
        counts = status.counters
        for name, (text, key) in _TOTALS.items():
            total = CounterMetricFamily(f"kvpact_{name}", text, labels=labels)
            total.add_metric(values, counts[key])
            yield total
        for name, (text, keys) in _OUTCOMES.items():
            total = CounterMetricFamily(f"kvpact_{name}", text, labels=[*labels, "outcome"])
            for outcome, key in keys.items():
                total.add_metric([*values, outcome], counts[key])
            yield total
        yield from self._hits(labels, values, counts)
        yield from self._of_tiers(labels, values, status)
        for name, text, value in (
            ("epoch", "The epoch that this rank is in.", status.epoch),
            ("step", "The last step that this rank has settled.", status.settled_step),
            ("open_intents", "Intents that hold a slot.", status.num_open),
            ("store_silent", "1 while the store does not answer.", counts["store_silent"]),
        ):
            gauge = GaugeMetricFamily(f"kvpact_{name}", text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for whole in self._histograms:
            yield from whole.collect()

    def _hits(self, labels: list[str], values: list[str], counts: dict[str, int]) -> Iterable[Any]:
        """In tokens, as engines count them; of requests that have ended."""
        from prometheus_client.core import CounterMetricFamily

        tokens = self._cache.config.page_size
        queries = CounterMetricFamily(
            "kvpact_prefix_cache_queries", "Tokens of prompts, in whole pages.", labels=labels
        )
        queries.add_metric(values, tokens * counts["prompt_pages"])
        hits = CounterMetricFamily(
            "kvpact_prefix_cache_hits", "Tokens that were found.", labels=[*labels, "tier"]
        )
        for tier in Tier:
            hits.add_metric([*values, tier.value], tokens * counts[f"{tier.value}_hit_pages"])
        yield from (queries, hits)

    def _of_tiers(self, labels: list[str], values: list[str], status: CacheStatus) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        total = GaugeMetricFamily("kvpact_pages", "Pages of the pool.", labels=[*labels, "tier"])
        used = GaugeMetricFamily(
            "kvpact_used_pages", "Pages charged to the ledger.", labels=[*labels, "tier"]
        )
        limbo = GaugeMetricFamily(
            "kvpact_held_back_pages",
            "Pages that quarantined copies or copies of an old epoch still hold.",
            labels=[*labels, "tier"],
        )
        evicted = CounterMetricFamily(
            "kvpact_evicted_pages", "Pages that left the tier for others.", labels=[*labels, "tier"]
        )
        for tier in Tier:
            pool = status.pools[tier.value]
            place = [*values, tier.value]
            total.add_metric(place, pool.pages)
            used.add_metric(place, pool.charged)
            limbo.add_metric(place, pool.limbo)
            evicted.add_metric(place, status.counters[f"evicted_{tier.value}"])
        yield from (total, used, limbo, evicted)
