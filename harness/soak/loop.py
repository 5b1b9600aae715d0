"""The loop of one rank of a soak: the same under Ray, torchrun and the simulator's replay.

It joins the replica, steps until the agreed end, heals, drains, proves that everything came back,
and leaves. What it sees goes into its :class:`kvpact.harness.soak.feed.Feed`; another thread takes
it out.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from kvpact.cache.hierarchical_cache import StepResult
from kvpact.cache.tree.node import Node, Tier
from kvpact.consensus.core.errors import KvpactError, PeerError
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.engine import Rounds, SoakEngine
from kvpact.harness.soak.feed import Bucket, End, Feed
from kvpact.harness.soak.join import Joined, join
from kvpact.harness.soak.resources import own_process, sample
from kvpact.harness.trace.mooncake import TraceRequest
from kvpact.harness.verify.agreement import snapshot
from kvpact.harness.verify.promises import broken_promises

__all__ = ["SoakLoop", "run_soak_rank"]

RESOURCES_EVERY_S = 1.0
BUCKET_S = 1.0
SAMPLED_NODES = 8
TAIL_ENTRIES = 200


class SoakLoop:
    """What is done around each step of one rank."""

    def __init__(
        self,
        config: SoakConfig,
        joined: Joined,
        requests: Sequence[TraceRequest],
        feed: Feed,
    ) -> None:
        rank = joined.rank
        self.config = config
        self.rank = rank
        self.feed = feed
        self.process_faults = joined.process_faults
        self.coverage = joined.coverage
        self.is_ending = False
        self._store = joined.store
        self._process = own_process()
        self._draw = random.Random(f"sample {config.seed} {rank.cache.rank}")
        self._stop_at: int | None = config.steps
        self._was_stopped = False
        self._look_every = max(8, config.lag + 2)
        self._entered = time.perf_counter()
        self._waited_s = 0.0
        self._sampled_s = -RESOURCES_EVERY_S
        self._bucket = Bucket(0.0, BUCKET_S)
        self._seen = (0, 0)
        self._told_incident: Incident | None = None
        self.engine = SoakEngine(
            rank,
            Rounds(requests),
            lanes=config.lanes,
            before_step=self._before_step,
            after_step=self._after_step,
            drained=self._drained,
            patience_s=max(30.0, 6 * config.copy_timeout_s),
            drain_s=config.drain_s + config.copy_timeout_s,
        )
        self.coverage.watch(rank.cache)
        self.process_faults.attach(rank.heal)

    # -- before the step -------------------------------------------------------------------------

    def _before_step(self, step: int) -> None:
        if not self.is_ending:
            self._look_for_the_end(step)
        if self.config.pace_ms:
            left_s = self.config.pace_ms / 1000 - (time.perf_counter() - self._entered)
            time.sleep(max(0.0, left_s))
        self.process_faults.before_step(step, self.rank.cache.core.tiers)
        self._entered = time.perf_counter()

    def _look_for_the_end(self, step: int) -> None:
        """Everyone comes to the same end, since it follows from what everyone knows.

        Rank 0 writes an early end into the store before it posts this step's ballot; whoever has
        settled that ballot finds it when it looks the next time, before the end it names.
        """
        minutes, store = self.config.minutes, self._store
        if store is not None and step % self._look_every == 0:
            is_asked = self.rank.cache.rank == 0 and self.feed.stop_asked.is_set()
            if is_asked and not self._was_stopped:
                store.set("soak/stop", str(step + 2 * self._look_every).encode())
            asked = store.get("soak/stop")
            if asked is not None:
                self._stop_at, self._was_stopped = int(asked), True
        by_clock = minutes is not None and self.engine.now_ms >= minutes * 60_000
        if by_clock or (self._stop_at is not None and step > self._stop_at):
            self.is_ending = True
            self.feed.phase = "draining"
            self.process_faults.heal()
            self.engine.drain()

    # -- after the step --------------------------------------------------------------------------

    def _after_step(self, result: StepResult) -> None:
        cache, feed = self.rank.cache, self.feed
        self.note_incident()
        step_s = time.perf_counter() - self._entered
        waited_s = cache.stepper.waited_s - self._waited_s
        self._waited_s = cache.stepper.waited_s
        feed.step, feed.at_s = self.engine.iteration, self.engine.now_ms / 1000
        feed.steps.add(step_s)
        feed.waits.add(waited_s)
        self.coverage.after_step(result, step_s)
        walks = cache.core.manager.step % self.config.walk_every_steps == 0
        feed.add_snapshot(snapshot(cache, walk=walks))
        if walks:
            feed.failures.extend(broken_promises(cache))
            feed.failures.extend(self.rank.wrong_bytes(self._some_nodes()))
        self._fill_bucket(step_s, waited_s)
        if self.is_ending and not self.rank.mover.in_flight:
            time.sleep(0.001)  # nothing to do but to wait for others

    def _some_nodes(self) -> list[Node]:
        nodes = list(self.rank.cache.core.tree.nodes())
        return self._draw.sample(nodes, min(SAMPLED_NODES, len(nodes)))

    def _fill_bucket(self, step_s: float, waited_s: float) -> None:
        cache, engine, feed = self.rank.cache, self.engine, self.feed
        now_s = feed.at_s
        if now_s >= self._bucket.at_s + BUCKET_S:
            self._close_bucket(now_s)
        bucket, totals = self._bucket, engine.totals
        pages = totals.pages
        hits = totals.device_hits + totals.host_hits + totals.storage_hits
        bucket.steps += 1
        bucket.step_s += step_s
        bucket.step_max_s = max(bucket.step_max_s, step_s)
        bucket.waited_s += waited_s
        bucket.pages += pages - self._seen[0]
        bucket.hit_pages += hits - self._seen[1]
        self._seen = (pages, hits)
        device, host = (cache.core.tiers.pools[tier] for tier in (Tier.DEVICE, Tier.HOST))
        bucket.device_used = device.num_pages - device.num_free
        bucket.host_used = host.num_pages - host.num_free
        bucket.num_open = len(cache.core.manager.open_intents)
        bucket.num_waiting = engine.num_waiting

    def _close_bucket(self, now_s: float) -> None:
        self.feed.buckets.append(self._bucket)
        self._bucket = Bucket(now_s // BUCKET_S * BUCKET_S, BUCKET_S)
        self.publish_counts()
        if now_s >= self._sampled_s + RESOURCES_EVERY_S:
            self._sampled_s = now_s
            self.feed.resources.append(sample(self._process, now_s))

    def publish_counts(self) -> None:
        """Totals as of now."""
        totals, coverage, engine = self.engine.totals, self.coverage, self.engine
        if totals.retries:
            coverage.counts["request refused pages"] = totals.retries
        if engine.num_left_loading:
            coverage.counts["request aborted while loading"] = engine.num_left_loading
        self.feed.covered = dict(coverage.counts)
        self.feed.counts = {
            **coverage.causes,
            "requests finished": totals.requests,
            "requests aborted by their client": engine.num_left,
            "requests tried again": totals.retries,
            "requests recomputed": totals.recomputed,
            "pages of prompts": totals.pages,
            "pages hit on device": totals.device_hits,
            "pages hit on host": totals.host_hits,
            "pages hit in storage": totals.storage_hits,
            "collectives": self.rank.cache.stepper.num_collectives,
            "iterations": self.engine.iteration,
        }

    # -- the end ---------------------------------------------------------------------------------

    def note_incident(self) -> None:
        """Tell of the end of an epoch, once; what only the closing needed stays here."""
        incident = self.rank.cache.stepper.change.incident
        if incident is None or incident is self._told_incident:
            return
        self._told_incident = incident
        reports = [msgspec.structs.replace(one, held={}, kept=[]) for one in incident.reports]
        seal = msgspec.structs.replace(incident.seal, verdicts={}, kept=[])
        self.feed.incidents.append(msgspec.structs.replace(incident, reports=reports, seal=seal))

    def end(self) -> None:
        """The loop is over in good order: nothing may be left."""
        self.rank.cache.journal.flush()
        self.feed.end = End(
            how="stopped" if self._was_stopped else "done",
            leftovers=tuple(self._leftovers()),
            drain_steps=self.engine.drain_steps,
            tail=self._tail(),
            at_s=self.feed.now_s(),
        )

    def fail(self, error: BaseException) -> None:
        """The loop is over by an error."""
        self.note_incident()
        self.rank.cache.journal.flush()
        known = error if isinstance(error, KvpactError) else None
        self.feed.end = End(
            how="raised",
            error=type(error).__name__,
            raised=error.raised if isinstance(error, PeerError) else "",
            message=known.message if known is not None else str(error),
            ranks=known.ranks if known is not None else (),
            error_step=known.step if known is not None else None,
            story=known.story if known is not None else (),
            traceback="".join(traceback.format_exception(error))[-8000:],
            tail=self._tail(),
            drain_steps=self.engine.drain_steps,
            at_s=self.feed.now_s(),
        )

    def close(self) -> None:
        """Hand over what is counted so far."""
        self._close_bucket(self.feed.at_s)

    def _tail(self) -> tuple[tuple[int, str], ...]:
        return tuple(
            (entry.index, str(entry)) for entry in self.rank.cache.journal.tail(TAIL_ENTRIES)
        )

    def _drained(self) -> None:
        """The load is over and everything has ended: one last full look."""
        cache = self.rank.cache
        cache.check_integrity()
        self.feed.failures.extend(broken_promises(cache))
        self.feed.failures.extend(self.rank.wrong_bytes())

    def _leftovers(self) -> list[str]:
        """What has not come back to its baseline although everything has drained."""
        cache = self.rank.cache
        found = [f"{intent!r} is still open" for intent in cache.core.manager.open_intents]
        found += [f"request {request.name} is still live" for request in cache.core.requests]
        pools = cache.status().pools
        for tier in Tier:
            pool = pools[tier.value]
            if pool.pinned:
                found.append(f"{pool.pinned} pages are still pinned in {tier.value}")
            if pool.limbo:
                found.append(f"{pool.limbo} pages of {tier.value} are still held by copies")
            # Everything was evicted; what stays has an owner that nobody knows.
            if pool.in_use:
                found.append(f"{pool.in_use} pages of {tier.value} leaked")
            if pool.charged:
                found.append(f"{pool.charged} pages of {tier.value} are charged for nothing")
        return [line if line.startswith("rank") else f"rank {cache.rank}: {line}" for line in found]


def run_soak_rank(
    config: SoakConfig,
    requests: Sequence[TraceRequest],
    feed: Feed,
    host: str,
    port: int,
    *,
    start_timeout_s: float = 60.0,
) -> None:
    """One rank with a real group, from joining through the store at ``host:port`` to leaving.

    Never raises: how it ended is ``feed.end``.
    """
    feed.begin()
    with ExitStack() as stack:
        try:
            joined = join(config, feed, host, port, start_timeout_s, stack)
            loop = SoakLoop(config, joined, requests, feed)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            feed.end = End(
                how="raised",
                error=type(error).__name__,
                message=error.message if isinstance(error, KvpactError) else str(error),
                ranks=error.ranks if isinstance(error, KvpactError) else (),
                traceback=traceback.format_exc()[-8000:],
            )
            return
        feed.phase = "running"
        try:
            for _ in loop.engine.program():
                loop.rank.cache.stepper.pause()
            loop.close()
            loop.end()
        except BaseException as error:  # noqa: BLE001
            loop.close()
            loop.fail(error)
            # Its connections break now, so that nobody waits for it until the deadline.
            loop.rank.cache.close()
        feed.phase = "ended"
