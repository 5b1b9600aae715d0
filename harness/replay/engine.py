"""A small inference scheduler: turns a trace of requests into the calls a real one makes.

Several lanes run at once. One iteration is: results of the last forward pass (insert, finish), then
new requests (one wish each for load-back and pages), then one ``step``, then the forward pass of
what has all its pages. Every decision is made from agreed state, so every rank makes the same calls
in one order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from kvpact.cache.hierarchical_cache import StepResult
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Tier, Tokens
from kvpact.consensus.core.errors import InternalError
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import Pause, Program
from kvpact.harness.trace.mooncake import TraceRequest, prompt_tokens
from kvpact.harness.verify.content import fill_pages, matches_pages

__all__ = ["Engine", "Totals"]

_LOAD_TIMEOUT_S = 30.0


class Phase(enum.Enum):
    """Where a lane's request stands."""

    FREE = "free"
    WAITS = "waits for its admission"
    RUNS = "its forward pass runs"


class Totals(msgspec.Struct):
    """What the requests got; pages of ``page_size`` tokens, blocks of the trace.

    ``retries`` counts verdicts against a request that started anew after it. ``at_once`` counts
    requests that the headroom answered, ``asked`` those that were voted, ``rounds`` the extra
    rounds for them.
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
        "admission",
        "computed",
        "fetch",
        "fetched",
        "load",
        "name",
        "phase",
        "request",
        "tokens",
    )

    def __init__(self) -> None:
        self.phase = Phase.FREE
        self.request: TraceRequest | None = None
        self.name = ""
        self.tokens: Tokens = np.empty(0, dtype=np.int32)
        self.load: Ticket | None = None
        self.admission: Ticket | None = None
        self.fetch: Ticket | None = None
        self.fetched = 0
        self.computed: list[int] = []


class Engine:
    """Replays ``requests`` on one rank. ``after_step`` is called after each step with its result.

    A request that finds no room waits in line; the oldest goes first, so somebody always gets on.
    Only one that was refused, or whose loaded bytes are void, starts anew. With ``decides`` what is
    asked for is decided in an extra round of the same iteration, as for an engine that cannot wait.
    With ``flushes`` backups begin right after the requests that finish, else in the step. Raises
    :class:`InternalError` where loaded bytes are not right.
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
        self._settle_copies = settle_copies
        self._after_step = after_step
        self._iteration = 0
        self._decides = decides
        self._has_asked = False
        self._flushes = flushes
        self._num_refused = 0
        storage = rank.cache.core.storage is not None
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
        self.totals.retries = self._num_refused + self.cache.core.admission.num_tries
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
            self._go_on(lane)
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
        lane.load = lane.admission = None
        lane.phase = Phase.WAITS
        if self._stages:
            match = cache.match_prefix(lane.tokens, request=lane.name)
            lane.load = cache.request_load_back(lane.name, match)
        else:
            self._ask(lane)

    def _go_on(self, lane: Lane) -> None:
        """What storage has of its prompt is known: now it asks for the rest."""
        load = lane.load
        if lane.phase is not Phase.WAITS or load is None or lane.admission is not None:
            return
        if load.state is not TicketState.PENDING:
            lane.fetched = load.num_pages if load.state is TicketState.READY else 0
            self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        """All that it needs, as one wish: at once, by the next verdict, or in line for room."""
        before = self.cache.core.admission.num_at_once
        lane.admission = self.cache.admit(lane.name, lane.tokens)
        if self.cache.core.admission.num_at_once > before:
            self.totals.at_once += 1
            return
        self.totals.asked += 1
        self._has_asked = self._has_asked or lane.admission.state is TicketState.PENDING

    # -- after the step --------------------------------------------------------------------------

    def _run(self, lane: Lane, result: StepResult) -> None:
        if lane.phase is Phase.FREE:
            return
        if lane.name in result.must_recompute:
            self.totals.recomputed += 1
            self._give_up(lane)
        elif lane.phase is Phase.WAITS:
            if lane.admission is not None and lane.admission.state is TicketState.REFUSED:
                self._num_refused += 1
                self._give_up(lane)
            elif self._has_all(lane):
                self._forward(lane)

    def _has_all(self, lane: Lane) -> bool:
        return lane.admission is not None and lane.admission.state is TicketState.READY

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
        live = cache.core.requests.require(lane.name)
        held = [] if live.held is None else live.held.path()
        hashes = page_hashes(lane.tokens, self._page_size)
        cached = [page for node in held for page in node.device.pages]
        device = self.rank.tensors[Tier.DEVICE]
        right = matches_pages(device, cached, hashes[: len(cached)], cache.rank)
        if not all(right):
            raise InternalError(
                f"request {lane.name}: page {right.index(False)} of its prompt has wrong bytes",
                rank=cache.rank,
                step=cache.core.manager.step,
            )
        fill_pages(device, live.private, hashes[len(cached) :], cache.rank)
        lane.phase = Phase.RUNS


def _age(lane: Lane) -> int:
    return -1 if lane.request is None else lane.request.index
