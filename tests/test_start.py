"""A replica starts again and again in one store, under one name, whatever ended it before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpact.cache.config import CacheConfig
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import join_cache
from kvpact.cache.storage import open_backend
from kvpact.consensus.core.errors import Divergence, KvpactError, Misuse
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.rank.launch import RankContext, launch

CONFIG = CacheConfig(page_size=4, device_pages=16, host_pages=16, deadline_s=10.0)
START_S = 30.0
#: One secret for all, or a run could not even see the one before it.
ENV = {"KVPACT_SECRET": "of this test"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store, port = serve_tcp_store()
    yield port
    del store


def join(context: RankContext, port: int, config: CacheConfig = CONFIG, **more: Any) -> Any:
    where: dict[str, Any] = {
        "rank": context.rank,
        "ranks": range(context.num_ranks),
        "start_timeout_s": START_S,
    }
    return join_cache(config, "127.0.0.1", port, **(where | more))


def use(cache: HierarchicalCache, num_pages: int = 16) -> None:
    """A few steps, from nothing cached and ``num_pages`` agreed device pages."""
    assert cache.peek(np.arange(16, dtype=np.int32))["device"] == 0
    cache.propose_insert("a", np.arange(16, dtype=np.int32))
    for iteration in range(1, 8):
        cache.step(iteration)
    assert cache.peek(np.arange(16, dtype=np.int32))["device"] == 4
    assert cache.core.manager.ledger.usable("device") == num_pages


def start_again_and_again(context: RankContext, port: int) -> list[Any]:
    """Runs of one name: in good order, with a divergence, with another configuration, a death."""
    ended: list[Any] = []
    with join(context, port) as cache:
        use(cache)
    ended.append("in good order")
    try:
        with join(context, port) as cache:
            if context.rank == 1:
                cache.match_prefix(np.arange(8, dtype=np.int32), request="x")
            for iteration in range(1, 8):
                cache.step(iteration)
    except Divergence as error:
        ended.append(error.step)
    smaller = CacheConfig(page_size=4, device_pages=12, host_pages=8, deadline_s=10.0)
    with join(context, port, smaller) as cache:
        use(cache, 12)
    with join(context, port) as cache:
        use(cache)
        context.send(ended)
        if context.rank == 1:
            os._exit(9)
        try:
            for iteration in range(8, 100):
                cache.step(iteration)
        except KvpactError as error:
            return [type(error).__name__, list(error.ranks)]
    return []


def start_once(context: RankContext, port: int) -> str:
    with join(context, port) as cache:
        use(cache)
    return "in good order"


@pytest.mark.ranks
def test_whatever_ended_a_run_the_next_one_is_clean(port: int) -> None:
    first, second = launch(f"{__name__}:start_again_and_again", 2, [port] * 2, env=ENV).ranks
    assert first.result == ["RankStalled", [1]], first.error or first.output
    assert second.ended == "exited"
    for rank in launch(f"{__name__}:start_once", 2, [port] * 2, env=ENV).ranks:
        assert rank.result == "in good order", rank.error or rank.output


def fail_to_start(context: RankContext, port: int) -> dict[str, Any]:
    """What each start that cannot succeed says, and how long it took; then one that does."""
    said: dict[str, Any] = {}

    def attempt(what: str, **more: Any) -> None:
        began_s = time.monotonic()
        try:
            join(context, port, **more).close()
            said[what] = "joined"
        except KvpactError as error:
            took_s = time.monotonic() - began_s
            said[what] = [type(error).__name__, error.message, list(error.ranks), took_s]
        context.send(what)
        context.receive(START_S)  # all have come so far

    with_storage = {"open_storage": partial(open_backend, "memory")} if context.rank else {}
    attempt("storage", **with_storage)
    if context.rank:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    attempt("interface")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    attempt("twins", rank=0)
    with join(context, port) as cache:
        attempt("second replica")
        use(cache)
    said["threads"] = [t.name for t in threading.enumerate() if "kvpact-watch" in t.name]
    return said


@pytest.mark.ranks
def test_what_cannot_start_fails_at_once_with_one_error_and_leaves_nothing(port: int) -> None:
    from kvpact.harness.rank.launch import Launch

    with Launch(f"{__name__}:fail_to_start", 2, [port] * 2) as ranks:
        for _ in range(4):
            for rank in range(2):
                ranks.receive(rank, 60.0)
            for rank in range(2):
                ranks.send(rank, "go on")
        reports = ranks.join().ranks
    first, second = (rank.result for rank in reports)
    assert first is not None, reports[0].error
    assert second is not None, reports[1].error
    for what in ("storage", "interface", "twins"):
        assert first[what][:3] == second[what][:3]
        assert max(first[what][3], second[what][3]) < START_S / 3
    assert first["storage"][1].startswith("rank 1 has storage tier = yes, rank 0 has no")
    assert "GLOO_SOCKET_IFNAME=nosuch0: there is no such interface" in first["interface"][1]
    assert "two processes say that they are rank 0" in first["twins"][1]
    assert first["second replica"][0] == "Misuse"
    assert "runs already in this store" in first["second replica"][1]
    assert first["threads"] == second["threads"] == []


@pytest.mark.parametrize(
    "rank, ranks",
    [(5, range(1)), (0, []), (0, [0, 0]), (-1, [-1, 0]), (0, [0, 1.0]), (True, [0, 1]), ("0", [0])],
)
def test_impossible_ranks_are_a_misuse_at_once(rank: Any, ranks: Any) -> None:
    began_s = time.monotonic()
    with pytest.raises(Misuse, match="rank"):
        join_cache(CONFIG, "127.0.0.1", 1, rank=rank, ranks=ranks)
    assert time.monotonic() - began_s < 5.0
