"""A rank's cache from its configuration and the store's address, and how it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpact.cache.config import CacheConfig
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import join_cache
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.storage import open_backend
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse, ResourceError, StoreSilent
from kvpact.consensus.core.journal import read_journal
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.rank.launch import RankContext, launch

SLOW_S = 0.8
CONFIG = CacheConfig(page_size=4, device_pages=8, host_pages=8, deadline_s=10.0)
TOKENS = np.arange(12, dtype=np.int32)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store, port = serve_tcp_store()
    yield port
    del store


def join_alone(port: int, name: str, **more: Any) -> HierarchicalCache:
    return join_cache(CONFIG, "127.0.0.1", port, name=name, rank=0, ranks=[0], **more)


def kvpact_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name in {"kvpact-copies", "kvpact-watch 0"}}


@pytest.mark.ranks
def test_one_call_makes_a_cache_that_works(port: int, tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with join_alone(port, "alone", journal_path=path) as cache:
        assert cache.match_prefix(TOKENS, request="a").device_pages == 0
        ticket = cache.request_pages("a", 3)
        cache.step(1)
        assert ticket.state is TicketState.READY
        row = cache.pages("a")
        assert len(row) == 3
        cache.tensors(Tier.DEVICE).k[0, row[0] * 4] = 7.0
        cache.finish_request("a", TOKENS)
        drain(cache, iter(range(2, 50)))
        assert cache.peek(TOKENS) == {"device": 3, "host": 3, "usable": 3}
        (leaf,), _ = cache.core.tree.walk(TOKENS)
        assert cache.tensors(Tier.HOST).k[0, leaf.host.pages[0] * 4, 0, 0] == 7.0
        assert cache.match_prefix(TOKENS, request="b").pages == cache.pages("b") == row
        cache.check_integrity()
        assert kvpact_threads() == {"kvpact-copies", "kvpact-watch 0"}

    assert [entry.tag for entry in read_journal(path)].count("commit") == 2
    cache.close()  # once more changes nothing
    assert not kvpact_threads()
    with pytest.raises(Misuse, match="is closed"):
        cache.step(50)


@pytest.mark.ranks
def test_the_collector_no_longer_walks_what_was_there_before(port: int) -> None:
    config = msgspec.structs.replace(CONFIG, freezes_gc=True)
    assert gc.get_freeze_count() == 0
    try:
        with join_cache(config, "127.0.0.1", port, name="frozen", rank=0, ranks=[0]) as cache:
            assert gc.get_freeze_count() > 10_000
            cache.step(1)
    finally:
        gc.unfreeze()


@pytest.mark.ranks
def test_what_was_stored_is_there_for_the_next_process(port: int, tmp_path: Path) -> None:
    open_storage = partial(open_backend, "file", path=tmp_path, capacity_bytes=1 << 20)
    for life, name in enumerate(["first", "second"]):
        with join_alone(port, name, open_storage=open_storage, model="m") as cache:
            clock = iter(range(1, 200))
            ticket = cache.prefetch("a", TOKENS)
            drain(cache, clock)
            if life == 1:
                assert ticket.state is TicketState.READY
                assert cache.peek(TOKENS) == {"device": 0, "host": 3, "usable": 3}
                return
            assert ticket.state is TicketState.REFUSED
            cache.request_pages("a", 3)
            cache.step(next(clock))
            cache.finish_request("a", TOKENS)
            drain(cache, clock)
            cache.check_integrity()


def drain(cache: HierarchicalCache, clock: Iterator[int]) -> None:
    """Step until nothing is pending, a moment apart: storage answers from threads."""
    while cache.has_pending():
        cache.step(next(clock))
        time.sleep(0.02)


def test_without_a_store_it_says_so_and_leaves_nothing() -> None:
    with pytest.raises(StoreSilent, match=r"127\.0\.0\.1:1\b"):
        join_alone(1, "nowhere")
    assert not kvpact_threads()


def test_without_memory_nobody_is_met(port: int) -> None:
    config = CacheConfig(page_size=4, device_pages=1 << 45, host_pages=8)
    with pytest.raises(ResourceError, match="cannot allocate"):
        join_cache(config, "127.0.0.1", port, name="big", rank=0, ranks=[0])
    assert not kvpact_threads()


def join_differently(context: RankContext, _: Any) -> str:
    config = CacheConfig(page_size=4 + context.rank, device_pages=8, host_pages=8)
    try:
        _join(context, config, "differ")
    except Misuse as error:
        return f"{error.rank} {error.message}"
    return "joined"


def leave_apart(context: RankContext, _: Any) -> list[float]:
    """Rank 1 leaves later; then, in another replica, it dies instead. How long closing took."""
    cache = _join(context, CONFIG, "late")
    cache.step(1)
    time.sleep(SLOW_S * context.rank)
    began = time.monotonic()
    cache.close()
    waited = [time.monotonic() - began]
    cache = _join(context, CONFIG, "dead")
    cache.step(1)
    if context.rank == 1:
        os._exit(0)
    began = time.monotonic()
    cache.close()
    return [*waited, time.monotonic() - began]


def _join(context: RankContext, config: CacheConfig, name: str) -> HierarchicalCache:
    return join_cache(
        config,
        context.store_host,
        context.store_port,
        name=name,
        rank=context.rank,
        ranks=range(context.num_ranks),
        leave_timeout_s=30.0,
    )


@pytest.mark.ranks
def test_ranks_that_are_configured_differently_are_told() -> None:
    said = [rank.result for rank in launch(f"{__name__}:join_differently", 2).ranks]
    assert said[0] == said[1]
    assert said[0].startswith("1 rank 1 has page_size = 5, rank 0 has 4")


@pytest.mark.ranks
def test_closing_waits_for_the_others_but_not_for_the_dead() -> None:
    first, second = launch(f"{__name__}:leave_apart", 2).ranks
    assert second.ended == "exited"
    assert first.error is None, first.error
    for_late, for_dead = first.result
    assert 0.5 * SLOW_S < for_late < 15.0
    assert for_dead < 15.0
