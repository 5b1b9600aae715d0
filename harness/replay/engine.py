"""A small inference scheduler: turns a trace of requests into the calls a real one makes.

Several lanes run at once. One iteration is: results of the last forward pass (insert, finish), then
new requests (match, load-back, pages), then one ``step``, then the forward pass of what has all its
pages. Every decision is made from agreed state, so every rank makes the same calls in one order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from kvpact.cache.hierarchical_cache import Match, StepResult
from kvpact.cache.memory.content import fill_pages, matches_pages, page_hashes
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Tier, Tokens
from kvpact.consensus.core.errors import InternalError
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import Pause, Program
from kvpact.harness.trace.mooncake import BLOCK_TOKENS, TraceRequest, prompt_tokens

__all__ = ["Engine", "Totals"]

_LOAD_TIMEOUT_S = 30.0


class Phase(enum.Enum):
    """Where a lane's request stands."""

    FREE = "free"
    WAITS = "waits for its load-back and its pages"
    RUNS = "its forward pass runs"


class Totals(msgspec.Struct):
    """What the requests got; pages of ``page_size`` tokens, blocks of the trace.

    ``at_once`` counts calls for pages that the headroom answered, ``asked`` those that were voted,
    ``rounds`` the extra rounds for them.
    """

    requests: int = 0
    blocks: int = 0
    pages: int = 0
    device_hits: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    retries: int = 0
    recomputed: int = 0
    at_once: int = 0
    asked: int = 0
    rounds: int = 0


class Lane:
    """One place in the running batch."""

    __slots__ = (
        "computed",
        "fetch",
        "fetched",
        "load",
        "match",
        "name",
        "pages",
        "phase",
        "request",
        "tokens",
    )

    def __init__(self) -> None:
        self.phase = Phase.FREE
        self.request: TraceRequest | None = None
        self.name = ""
        self.tokens: Tokens = np.empty(0, dtype=np.int32)
        self.match: Match | None = None
        self.load: Ticket | None = None
        self.pages: Ticket | None = None
        self.fetch: Ticket | None = None
        self.fetched = 0
        self.computed: list[int] = []


class Engine:
    """Replays ``requests`` on one rank. ``after_step`` is called after each step with its result.

    A request that finds no pages gives back what it has and tries again; the oldest goes first, so
    somebody always gets on. With ``decides`` pages that are asked for are decided in an extra round
    of the same iteration, as for an engine that cannot wait. With ``flushes`` backups begin right
    after the requests that finish, else in the step. Raises :class:`InternalError` where
    loaded bytes are not right.
    """

    def __init__(
        self,
        rank: Rank,
        requests: Sequence[TraceRequest],
        *,
        lanes: int,
        settle_copies: Callable[[], None],
        after_step: Callable[[StepResult], None],
        decides: bool = False,
        flushes: bool = True,
    ) -> None:
        self.rank = rank
        self.cache = rank.cache
        self.totals = Totals()
        self._requests = requests
        self._next = 0
        self._lanes = [Lane() for _ in range(lanes)]
        self._page_size = rank.cache.config.page_size
        self._pages_per_block = BLOCK_TOKENS // self._page_size
        self._settle_copies = settle_copies
        self._after_step = after_step
        self._iteration = 0
        self._decides = decides
        self._has_asked = False
        self._flushes = flushes
        self._has_headroom = rank.cache.config.headroom_pages > 0
        storage = rank.cache.storage is not None
        self._stages = storage and rank.cache.config.mode == "buffer_only"
        self._prefetches = storage and not self._stages

    def program(self) -> Program:
        """All requests, then steps until nothing is pending. Yields wherever it has to wait."""
        while self._is_busy or self.cache.has_pending():
            self._finish()
            for lane in sorted(self._lanes, key=_age):
                self._admit(lane)
            if self._decides and self._has_asked:
                self.totals.rounds += 1
                yield from self._communicate(self.cache.begin_decide)
            self._has_asked = False
            self._iteration += 1
            yield from self._communicate(partial(self.cache.begin_step, self._iteration))

    def _communicate(self, begin: Callable[[], None]) -> Program:
        """A step, or an extra round."""
        self._settle_copies()
        begin()
        while (result := self.cache.poll_step()) is None:
            yield Pause()
        self._after_step(result)
        for lane in self._lanes:
            self._run(lane, result)

    @property
    def _is_busy(self) -> bool:
        left = self._next < len(self._requests)
        # One that gave up in this step is FREE, but is still to be tried again.
        return left or any(lane.request is not None for lane in self._lanes)

    # -- before the step -------------------------------------------------------------------------

    def _finish(self) -> None:
        """What the last forward pass computed enters the tree; its requests are done."""
        for lane in self._lanes:
            if lane.phase is Phase.RUNS and lane.request is not None:
                report = self.cache.finish_request(lane.name, lane.tokens)
                totals = self.totals
                totals.requests += 1
                totals.blocks += len(lane.request.hash_ids)
                totals.pages += report.prompt_pages
                totals.device_hits += report.device_hit_pages
                stored = min(lane.fetched, report.host_hit_pages)
                totals.storage_hits += stored
                totals.host_hits += report.host_hit_pages - stored
                lane.phase, lane.request = Phase.FREE, None
        if self._flushes:
            self.cache.flush()

    def _admit(self, lane: Lane) -> None:
        if lane.phase is not Phase.FREE:
            self._ask_for_pages(lane)
            return
        if lane.request is None:
            if self._next == len(self._requests):
                return
            lane.request = self._requests[self._next]
            lane.name = str(lane.request.index)
            lane.tokens = prompt_tokens(lane.request, self._page_size)
            self._next += 1
            lane.fetched = 0
            if self._prefetches:
                lane.fetch = self.cache.prefetch(lane.name, lane.tokens)
        cache = self.cache
        if lane.fetch is not None:
            if lane.fetch.state is TicketState.PENDING and not cache.settle_for_prefetch(lane.name):
                return
            lane.fetched += lane.fetch.num_pages
            lane.fetch = None
        lane.match = cache.match_prefix(lane.tokens, request=lane.name)
        lane.load = lane.pages = None
        if lane.match.host_pages or self._stages:
            lane.load = cache.request_load_back(lane.name, lane.match)
        lane.phase = Phase.WAITS
        self._ask_for_pages(lane)

    def _ask_for_pages(self, lane: Lane) -> None:
        """Pages for what is neither cached nor being loaded; more if a load brought less."""
        if lane.phase is not Phase.WAITS or lane.match is None:
            return
        if lane.pages is not None and lane.pages.state is TicketState.PENDING:
            return
        if self._stages and lane.load is not None and lane.load.state is TicketState.PENDING:
            return  # nobody knows yet how much of it storage has
        missing = len(lane.tokens) // self._page_size - self._covered(lane)
        if missing <= 0:
            return
        if self._has_headroom and self.cache.allocate(lane.name, missing) is not None:
            self.totals.at_once += 1
            return
        self.totals.asked += 1
        self._has_asked = True
        lane.pages = self.cache.request_pages(lane.name, missing)

    def _covered(self, lane: Lane) -> int:
        """Pages of the prompt that the request has, or that its load-back may bring."""
        live = self.cache.requests.require(lane.name)
        covered = live.held_pages + len(live.private)
        if lane.load is not None and lane.load.state is TicketState.PENDING and lane.match:
            covered += lane.match.host_pages
        return covered

    # -- after the step --------------------------------------------------------------------------

    def _run(self, lane: Lane, result: StepResult) -> None:
        if lane.phase is Phase.FREE:
            return
        if lane.name in result.must_recompute:
            self.totals.recomputed += 1
            self._give_up(lane)
        elif lane.phase is Phase.WAITS:
            if self._stages and lane.load is not None and lane.load.state is TicketState.READY:
                lane.fetched = lane.load.num_pages
            refused = lane.pages is not None and lane.pages.state is TicketState.REFUSED
            loading = lane.load is not None and lane.load.state is TicketState.PENDING
            if refused:
                self.totals.retries += 1
                self._give_up(lane)
            elif not loading and self._covered(lane) == len(lane.tokens) // self._page_size:
                self._forward(lane)

    def _give_up(self, lane: Lane) -> None:
        """Give everything back and start anew with the next iteration."""
        self.cache.abort(lane.name)
        lane.phase = Phase.FREE

    def _forward(self, lane: Lane) -> None:
        """Wait for what is loaded, check every byte that was cached, compute the rest."""
        cache = self.cache
        loads = cache.start_loading([lane.name])
        for layer in range(cache.config.kv_shape.layers):
            if not cache.wait_layer(layer, loads, _LOAD_TIMEOUT_S):
                raise InternalError(f"request {lane.name}: layer {layer} was not loaded in time")
        live = cache.requests.require(lane.name)
        held = [] if live.held is None else live.held.path()
        hashes = page_hashes(lane.tokens, self._page_size)
        cached = [page for node in held for page in node.device.pages]
        device = self.rank.tensors[Tier.DEVICE]
        right = matches_pages(device, cached, hashes[: len(cached)], cache.rank)
        if not all(right):
            raise InternalError(
                f"request {lane.name}: page {right.index(False)} of its prompt has wrong bytes",
                rank=cache.rank,
                step=cache.manager.step,
            )
        fill_pages(device, live.private, hashes[len(cached) :], cache.rank)
        lane.phase = Phase.RUNS


def _age(lane: Lane) -> int:
    return -1 if lane.request is None else lane.request.index
