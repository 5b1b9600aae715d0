"""How many files and Python calls of the product one engine's call passes through, counted.

Counts, not times: they are the same on a busy machine, so a test can hold them. One rank alone in a
real gloo group of one, with a copy thread that is waited for between the steps; only the thread
that steps is counted, and only functions of ``kvpact.consensus`` and ``kvpact.cache``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np

import kvpact.cache
import kvpact.consensus
from kvpact.cache.config import CacheConfig
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import join_cache
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Divergence, InternalError
from kvpact.consensus.transport.collective import Group, Vector, Work
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.rank.child import RankContext
from kvpact.harness.rank.launch import launch

__all__ = ["Passage", "count_failure", "count_life"]

_PRODUCT = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (kvpact.consensus, kvpact.cache)
)
_PAGE_SIZE = 16
_PAGES = 4
_TOKENS = np.arange(_PAGES * _PAGE_SIZE, dtype=np.int32)
_CONFIG = CacheConfig(
    page_size=_PAGE_SIZE, device_pages=64, host_pages=64, verifies_copies=False, deadline_s=10.0
)
_COPY_S = 10.0


class Passage(msgspec.Struct, frozen=True):
    """What one phase passed: its ``calls``, the ``files`` they are in, and the ``moves``.

    A move is a call in another file than the call before it.
    """

    name: str
    calls: int
    moves: int
    files: tuple[str, ...]


class _Counter:
    """Counts what this thread calls while it is :meth:`counting`."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self._files: list[str] = []

    @contextmanager
    def counting(self, name: str) -> Generator[None]:
        self._files = []
        sys.setprofile(self._saw)
        try:
            yield
        finally:
            sys.setprofile(None)
        moves = sum(a != b for a, b in zip(self._files, self._files[1:], strict=False))
        files = tuple(sorted(set(self._files)))
        self.passages.append(Passage(name, len(self._files), moves, files))

    def total(self, name: str) -> Passage:
        """All phases so far together."""
        files = {file for passage in self.passages for file in passage.files}
        calls = sum(passage.calls for passage in self.passages)
        moves = sum(passage.moves for passage in self.passages)
        return Passage(name, calls, moves, tuple(sorted(files)))

    def _saw(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_PRODUCT):
            self._files.append(file.rpartition("/kvpact/")[2])


def count_life() -> list[Passage]:
    """One request's life on one rank: phase by phase, then an idle step, then all but that."""
    store, port = serve_tcp_store()
    counter = _Counter()
    with join_cache(_CONFIG, "127.0.0.1", port, name="counts", rank=0, ranks=[0]) as cache:
        clock = iter(range(1, 1000))
        _wait_uncounted(cache.stepper.group)
        _warm_up(cache, clock.__next__)
        _live(cache, clock.__next__, counter)
        life = counter.total("a request's life")
        for _ in range(3):
            cache.step(next(clock))
        with counter.counting("an idle step"):
            cache.step(next(clock))
    del store
    return [*counter.passages, life]


def _wait_uncounted(group: Group) -> None:
    """Each collective is over once it is posted: how often a rank looks is left to chance."""
    post = group.min

    def patient(vector: Vector) -> Work:
        work = post(vector)
        hook = sys.getprofile()
        sys.setprofile(None)
        _require(work.wait(_COPY_S))
        sys.setprofile(hook)
        return work

    setattr(group, "min", patient)  # noqa: B010 - one object, and no part of its class


def _live(cache: HierarchicalCache, tick: Callable[[], int], counter: _Counter) -> None:
    """Match, pages, insert, backup; then, the device copy gone, match and load-back."""
    with counter.counting("match, cold"):
        cache.match_prefix(_TOKENS, request="a")
    with counter.counting("pages: asked"):
        cache.request_pages("a", _PAGES)
    with counter.counting("pages: step"):
        cache.step(tick())
    with counter.counting("insert"):
        cache.insert("a", _TOKENS)
    with counter.counting("finish"):
        cache.finish_request("a")
    with counter.counting("backup: step, voted"):
        cache.step(tick())
    _copied(cache)
    with counter.counting("backup: step, ended"):
        cache.step(tick())
    _require(cache.peek(_TOKENS) == {"device": _PAGES, "host": _PAGES, "usable": _PAGES})
    _require(cache.evict(Tier.DEVICE, 2 * _PAGES) == 2 * _PAGES)
    cache.step(tick())
    with counter.counting("match, on the host"):
        match = cache.match_prefix(_TOKENS, request="b")
    with counter.counting("load-back: asked"):
        ticket = cache.request_load_back("b", match)
    with counter.counting("load-back: step, voted"):
        cache.step(tick())
    _copied(cache)
    with counter.counting("load-back: step, ended"):
        cache.step(tick())
    _require(ticket.state is TicketState.READY)
    with counter.counting("finish, loaded"):
        cache.finish_request("b")
    _require(not cache.has_pending())


def _warm_up(cache: HierarchicalCache, tick: Callable[[], int]) -> None:
    """What happens only once is over: other tokens have gone every way."""
    tokens = _TOKENS + 1000
    cache.request_pages("w", _PAGES)
    cache.step(tick())
    cache.finish_request("w", tokens)
    for _ in range(3):
        cache.step(tick())
        _copied(cache)
    cache.evict(Tier.DEVICE, _PAGES)
    cache.request_load_back("w", cache.match_prefix(tokens, request="w"))
    for _ in range(3):
        cache.step(tick())
        _copied(cache)
    cache.finish_request("w")
    cache.step(tick())


def _copied(cache: HierarchicalCache) -> None:
    _require(cache.core.tiers.copier.mover.wait_all(_COPY_S))


def _require(holds: bool) -> None:
    if not holds:
        raise InternalError("the counted request did not go the way that is counted")


def count_failure(num_ranks: int = 3) -> list[Passage]:
    """Ranks of which the last inserts another prompt, until all have raised: one passage a rank.

    The files are the way of the failure; the calls also tell how long a rank waited for others.
    """
    report = launch("kvpact.harness.bench.path_counts:fail", num_ranks)
    for rank in report.ranks:
        if rank.result is None:
            raise InternalError(f"rank {rank.rank} did not count its failure: {rank.output}")
    return [msgspec.convert(rank.result, Passage) for rank in report.ranks]


def fail(context: RankContext, _: object = None) -> dict[str, Any]:
    """One rank of :func:`count_failure`."""
    counter = _Counter()
    tokens = _TOKENS + (context.rank == context.num_ranks - 1)
    with join_cache(
        _CONFIG,
        context.store_host,
        context.store_port,
        name="failing",
        rank=context.rank,
        ranks=range(context.num_ranks),
    ) as cache:
        cache.step(1)
        cache.request_pages("a", _PAGES)
        cache.step(2)
        cache.insert("a", tokens)
        with counter.counting(f"rank {context.rank}, until it raised"), suppress(Divergence):
            for iteration in range(3, 10):
                cache.step(iteration)
        _require(isinstance(cache.stepper.error, Divergence))
    return msgspec.to_builtins(counter.passages[0])
