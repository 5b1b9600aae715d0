"""The cache as a scheduler sees it. Wiring only: every path has its own file.

Once per loop ``step(iteration)``, the only call that communicates. Everything else here is either
a *call that changes replicated state* (insert, match, request, allocate, free, abort, finish,
evict), which every rank makes in the same order between two steps, or reads agreed state.

    match_prefix      -> lookup
    insert            -> own_insert -> write_through -\\
    propose_insert    -> insert_line -> insertion ------+-> step: collect endings, plan, reserve,
    request_load_back -> load_back ---------------------|   start copies, post one ballot,
    admit             -> admission --------------------|
    request_pages     -> engine_pages -----------------/    settle: publish or give back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from kvpact.cache.audit import audit
from kvpact.cache.border import as_call, as_match, as_tier, as_tokens
from kvpact.cache.carryover import Carryover
from kvpact.cache.choices import PrefetchPolicy
from kvpact.cache.config import CacheConfig, config_facts, schema_of
from kvpact.cache.copies.mover import Mover
from kvpact.cache.copies.side_pools import SidePool
from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.core import CacheCore
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.tensors import KVTensors
from kvpact.cache.paths.insert_voted import open_loads
from kvpact.cache.requests.results import InsertResult, Match, StepResult
from kvpact.cache.requests.table import Request, RequestReport
from kvpact.cache.requests.ticket import Ticket
from kvpact.cache.status import CacheStatus, status_of
from kvpact.cache.storing.tier import StorageTier
from kvpact.cache.tree.events import CacheEvent
from kvpact.cache.tree.node import STORAGE, Fill, FillSide, SidePages, Tier, Tokens
from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.border import (
    as_count,
    as_counts,
    as_flag,
    as_names,
    as_seconds,
    as_text,
)
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.closing import Locator
from kvpact.consensus.epoch.report import Policy
from kvpact.consensus.step.step import Beacon, StepLimits, Stepper
from kvpact.consensus.transport.gloo import Group
from kvpact.consensus.transport.store import Store

__all__ = [
    "HierarchicalCache",
    "InsertResult",
    "Match",
    "StepResult",
    "config_facts",
    "schema_of",
]


class StoreHealth(Protocol):
    """A watch over the store. Another thread writes it, one value at a time."""

    @property
    def silent_since_s(self) -> float | None:
        """When the store fell silent, by the clock of the watch; ``None``: it answers."""
        ...

    @property
    def num_silences(self) -> int:
        """How often it fell silent."""
        ...


class StepObserver(Protocol):
    """Hears of every step, on the scheduler's thread; decides nothing."""

    def began(self) -> None:
        """A step begins."""
        ...

    def ended(self, result: StepResult) -> None:
        """The step has ended well."""
        ...


class HierarchicalCache:
    """One rank's part of the replica's cache.

    ``pools`` and ``mover`` are this rank's pages and copies. ``usable`` are the pages per pool that
    all ranks agreed on at start (:class:`kvpact.consensus.membership.Membership`). ``on_close``
    comes first in :meth:`close`. Not thread-safe: the scheduler's thread makes every call.

    :func:`kvpact.cache.join.join_cache` builds all of this for an ordinary rank.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        group: Group,
        store: Store,
        pools: Mapping[Tier, PagePool],
        mover: Mover,
        usable: Mapping[str, int],
        journal: Journal,
        locator: Locator,
        beacon: Beacon | None = None,
        regroup: Callable[[int], Group] | None = None,
        on_close: Callable[[], None] | None = None,
        storage: StorageIo | None = None,
        side: Sequence[SidePool] = (),
    ) -> None:
        self.config = config
        self._on_close = on_close
        #: Who measures the steps (:func:`kvpact.metrics`); ``None``: nobody.
        self.observer: StepObserver | None = None
        #: Who watches the store; ``None``: nobody.
        self.store_health: StoreHealth | None = None
        self.rank = group.rank
        #: The version of the weights that compute the pages: agreed.
        self.weights = config.weights
        self.journal = journal
        #: All that this rank's cache consists of: for tests and the harness, which look in.
        self.core = core = CacheCore(
            config, group.rank, journal, pools=pools, mover=mover, storage=storage, side=side
        )
        core.admission.capacity_pages = usable[Tier.DEVICE.value]
        self._carryover = Carryover(core)
        self._num_layers = len(mover.device.layer_planes)
        self._num_resets = self._num_ordered = 0
        self._device_pages = usable[Tier.DEVICE.value]
        self.core.manager.begin_epoch(0, {**usable, STORAGE: core.usable(STORAGE)})
        self.stepper = Stepper(
            self.core.manager,
            group,
            store,
            core,
            carrier=self._carryover,
            limits=StepLimits(
                warn_s=config.warn_s,
                deadline_s=config.deadline_s,
                grace_s=config.grace_s,
                progress_s=config.progress_timeout_s or max(300.0, 10 * config.copy_timeout_s),
            ),
            locator=locator,
            policy=Policy(config.policy, config.max_resets, config.reset_window_s),
            regroup=regroup,
            beacon=beacon,
        )

    # -- the step --------------------------------------------------------------------------------

    def step(self, iteration: int) -> StepResult:
        """One step of all ranks: the only call that communicates. Ends within its deadline.

        Raises the same error on every rank: ``Divergence``, ``RankStalled``, ``PeerError``.
        """
        self.begin_step(iteration)
        while (result := self.poll_step()) is None:
            self.stepper.pause()
        return result

    def begin_step(self, iteration: int) -> None:
        """The first half of :meth:`step`, for callers that must not block."""
        if type(iteration) is not int or not 0 <= iteration <= MASK62:
            iteration = as_count("iteration", iteration, most=MASK62)
        self.stepper.begin(iteration)
        if self.observer is not None:
            self.observer.began()

    def poll_step(self) -> StepResult | None:
        """Go on with the step; its result once it is over. Never blocks."""
        outcomes = self.stepper.poll()
        if outcomes is None:
            return None
        every = self.config.integrity_every_steps
        if every and self.core.manager.step % every == 0:
            self.check_integrity()
        void, self.core.withdrawal.must_recompute = self.core.withdrawal.must_recompute, []
        lost, self._carryover.lost = self._carryover.lost, ()
        resets, self._num_resets = self._num_resets, self.stepper.change.num_resets
        result = StepResult(
            outcomes, tuple(dict.fromkeys(void)), lost, was_reset=resets != self._num_resets
        )
        if self.observer is not None:
            self.observer.ended(result)
        return result

    def decide(self) -> StepResult:
        """An agreed call between two steps: decide now what was asked since the last one.

        For a caller that cannot wait, where agreed state says so on every rank; it costs a
        collective. With pipeline stages it would deadlock against the activations:
        :class:`Misuse`.
        """
        self.begin_decide()
        while (result := self.poll_step()) is None:
            self.stepper.pause()
        return result

    def begin_decide(self) -> None:
        """The first half of :meth:`decide`, for callers that must not block."""
        if self.config.pipeline_stages > 1:
            raise Misuse("decide() would deadlock against the activations of pipeline stages")
        self.stepper.begin_round()

    # -- at ingest and admission -----------------------------------------------------------------

    def match_prefix(
        self, tokens: Tokens, *, namespace: str = "", request: str | None = None
    ) -> Match:
        """The longest prefix of whole pages that can be served; touches it (agreed call).

        With ``request`` the part on DEVICE is pinned until the request ends. Raises
        :class:`Misuse` where the request holds another prompt, or owns pages of its own.
        """
        name = None if request is None else as_text("request", request)
        return self.core.lookup.match(as_tokens(tokens), namespace, name)

    def peek(self, tokens: Tokens, *, namespace: str = "") -> dict[str, int]:
        """Pages from the start of ``tokens`` by tier, and ``usable`` over both. Changes nothing.

        What a match would find: with side pools only as far as their state is there, too.
        """
        return self.core.lookup.peek(as_tokens(tokens), namespace)

    def request_load_back(
        self, request: str, match: Match, *, pages_max: int | None = None
    ) -> Ticket:
        """Ask for what of ``match`` is on HOST only; ``step`` decides the length for all ranks.

        The match may be of an earlier step, or epoch: what it found is looked up again where it
        has gone.
        """
        request, match = as_text("request", request), as_match(match)
        if pages_max is not None:
            pages_max = as_count("pages_max", pages_max)
        live = self.core.requests.get(request)
        if live is not None:
            live.requires(match.tokens, self.core.namespaces.inner(match.namespace), "loads")
        self.journal.note("request_load_back", request)
        path = self.core.lookup.path_of(match)
        if self.core.staged_loads is not None:
            live = self.core.requests.open(request)
            self.core.load_back.hold(live, path)
            inner = self.core.namespaces.inner(match.namespace)
            return self.core.staged_loads.request(live, match.tokens, inner, path)
        return self.core.load_back.request(self.core.requests.open(request), path, pages_max)

    def admit(
        self,
        request: str,
        tokens: Tokens,
        *,
        namespace: str = "",
        extra_pages: int = 0,
        minimum_pages: int | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Ask for all that ``tokens`` need on the device, as one wish; steps decide it.

        READY: the request pins what of the prompt is on DEVICE, loaded pages included, and owns
        pages for the rest and ``extra_pages`` beyond it. It gets all of that or nothing; with
        ``minimum_pages`` as few of its own as these will do. Until then it waits in line and holds
        nothing: by ``priority`` (more goes first), then first come. REFUSED at once where the
        smallest device could never hold it. :meth:`abort` ends it in every state. It waits for the
        request's prefetch. Raises :class:`Misuse` where the request waits or owns pages already.
        """
        request, namespace = as_text("request", request), as_text("namespace", namespace)
        tokens, priority = as_tokens(tokens), as_count("priority", priority)
        extra_pages = as_count("extra_pages", extra_pages)
        if minimum_pages is not None:
            minimum_pages = as_count("minimum_pages", minimum_pages, 1)
        if not len(tokens) + extra_pages:
            raise Misuse(f"request {request!r} asks to be admitted with no tokens and no pages")
        known = self.core.requests.get(request)
        if known is not None and (known.private or self.core.admission.is_wish(known)):
            raise Misuse(f"request {request!r} waits for its admission or owns pages already")
        self.journal.note("admit", request, len(tokens), extra_pages, minimum_pages or 0, priority)
        return self.core.admission.request(
            self.core.requests.open(request),
            tokens,
            namespace,
            extra_pages=extra_pages,
            minimum_pages=minimum_pages,
            priority=priority,
        )

    def request_pages(self, request: str, num_pages: int) -> Ticket:
        """Ask for device pages beyond the headroom; ``step`` decides."""
        request, num_pages = as_text("request", request), as_count("num_pages", num_pages, 1)
        self.journal.note("request_pages", request, num_pages)
        return self.core.engine_pages.request(self.core.requests.open(request), num_pages)

    def allocate(self, request: str, num_pages: int) -> list[int] | None:
        """Device pages for ``request`` at once, out of the voted headroom; ``None``: too many."""
        num_pages = as_count("num_pages", num_pages, 1)
        return self.core.engine_pages.allocate(self._live(request), num_pages)

    def pages(self, request: str) -> list[int]:
        """This rank's device pages of ``request``, in the order of its prompt.

        First the path that it pins, loaded pages included, then those that it owns itself.
        """
        live = self._live(request)
        held = [] if live.held is None else live.held.path()
        return [page for node in held for page in node.device.pages] + live.private

    def side_pages(self, request: str) -> SidePages:
        """This rank's device pages in side pools on the path that ``request`` pins.

        By pool, each with its position in the prompt, in pages: where its kernels find the state.
        """
        held = self._live(request).held
        return self.core.tiers.side.on_path([] if held is None else held.path())

    def expect_pages(self, num_pages: int) -> None:
        """Keep a headroom of so many pages: what the engine may need within lag + 1 steps.

        Raises :class:`Misuse` where that is more than the device has.
        """
        num_pages = as_count("num_pages (of the headroom)", num_pages, most=self._device_pages)
        self.journal.note("expect_pages", num_pages)
        self.core.engine_pages.expect(num_pages)

    def room(self, tier: Tier = Tier.DEVICE) -> int:
        """Pages that can be had, evicting what may go: agreed, O(1), no communication."""
        return self.core.tiers.room(as_tier(tier))

    # -- around the forward pass -----------------------------------------------------------------

    def start_loading(self, requests: Sequence[str]) -> tuple[int, ...]:
        """The open loads on the paths of a batch, whoever asked for them; for ``wait_layer``."""
        tickets: list[int] = []
        for live in [self._live(name) for name in as_names("requests", requests)]:
            held = live.held
            for carriage in open_loads(held.path() if held is not None else []):
                tickets += [ticket for ticket in carriage.copy_tickets if ticket not in tickets]
        return tuple(tickets)

    def wait_layer(self, layer: int, loads: Sequence[int], timeout_s: float) -> bool:
        """Wait until ``layer`` of these loads has arrived; False: not within ``timeout_s``.

        Loads of an earlier epoch are waited for as they were: they are never taken for newer ones.
        """
        layer = as_count("layer", layer, most=self._num_layers - 1)
        timeout_s = as_seconds("timeout_s", timeout_s)
        loads = as_counts("loads", loads)
        return not loads or self.core.tiers.copier.mover.wait_layer(layer, timeout_s, loads)

    # -- when tokens were computed ---------------------------------------------------------------

    def insert(
        self,
        request: str,
        tokens: Tokens,
        *,
        namespace: str = "",
        fill_side: FillSide | None = None,
    ) -> InsertResult:
        """Put what the request computed into the tree, out of its own pages; queue its backup.

        Only whole pages enter. With side pools ``fill_side(nodes, side)`` writes the state at the
        end of ``tokens`` into side pages that are voted in the next steps: keep the state until it
        was called. Until then, and without it, no match ends there. Raises :class:`Misuse` where
        the request has fewer pages, or holds another prefix.
        """
        tokens, inner = as_tokens(tokens), self.core.namespaces.inner(namespace)
        fill_side = as_call("fill_side", "nodes, side", fill_side)
        live = self._live(request)
        if self.core.namespaces.is_older(live, namespace):
            return InsertResult([], 0, 0)
        return self.core.own_insert.insert(live, tokens, inner, fill_side)

    def propose_insert(
        self,
        request: str,
        tokens: Tokens,
        *,
        namespace: str = "",
        fill: Fill | None = None,
        fill_side: FillSide | None = None,
        hold: bool = False,
        priority: int = 0,
    ) -> bool:
        """Insert tokens whose pages are voted together with their backup in the next step.

        False: refused at once, on every rank. ``fill(nodes, pages)`` writes the bytes as soon as
        this rank holds the pages, and ``fill_side(nodes, side)`` what belongs into side pages: by
        pool, (position, page), counted from the first page of ``nodes``. With ``hold`` the path
        stays pinned until the request ends.
        """
        request, inner = as_text("request", request), self.core.namespaces.inner(namespace)
        tokens, fill = as_tokens(tokens), as_call("fill", "nodes, pages", fill)
        fill_side = as_call("fill_side", "nodes, side", fill_side)
        hold, priority = as_flag("hold", hold), as_count("priority", priority)
        if len(tokens) < self.config.page_size:
            raise Misuse(f"request {request!r} inserts less than one page")
        self.journal.note("propose_insert", request, priority)
        live = self.core.requests.get(request)
        if live is not None and self.core.namespaces.is_older(live, namespace):
            return False
        holder = self.core.requests.open(request) if hold else None
        return self.core.insert_line.propose(tokens, inner, fill, holder, priority, fill_side)

    def free(self, request: str, num_pages: int) -> None:
        """Give back the last ``num_pages`` of the pages that the request owns itself."""
        live, num_pages = self._live(request), as_count("num_pages", num_pages)
        if num_pages > len(live.private):
            raise Misuse(f"request {request!r} owns {len(live.private)} pages, not {num_pages}")
        self.core.engine_pages.free(live, num_pages)

    def finish_request(
        self,
        request: str,
        tokens: Tokens | None = None,
        *,
        namespace: str = "",
        fill_side: FillSide | None = None,
    ) -> RequestReport:
        """The request ends well: :meth:`insert`, unpin its path, free what it still owns."""
        live = self._live(request)
        self.core.namespaces.inner(namespace)
        if tokens is not None:
            self.insert(request, tokens, namespace=namespace, fill_side=fill_side)
        report = self.report(request)
        self.journal.note(
            "finish",
            request,
            report.prompt_pages,
            report.device_hit_pages,
            report.host_hit_pages,
        )
        for load in open_loads(live.held.path() if live.held is not None else []):
            assert live.held is not None
            load.readers.append((request, live.held))
        self._release(live)
        return report

    def flush(self) -> None:
        """An agreed call between two steps: begin the backups of what has finished, now.

        They are planned and their copies start at once, so that vote and ending can share the next
        ballot; without it the step plans them, and the pages are pinned one step longer. What goes
        wrong here is met in the next step, by all ranks.
        """
        self.journal.note("flush_call")
        self.stepper.attempt(self.core.flush)

    def abort(self, request: str) -> None:
        """End the request in whatever state it is: tickets, pins and pages all come back."""
        self.journal.note("abort_request", as_text("request", request))
        self.core.orphans.release_lost(request)
        live = self.core.requests.get(request)
        if live is not None:
            self._release(live)

    def _live(self, request: str) -> Request:
        """The live request of this name. Raises :class:`Misuse` where there is none."""
        return self.core.requests.require(as_text("request", request))

    def _release(self, live: Request) -> None:
        self.core.admission.cancel(live)
        self.core.load_back.cancel(live)
        if self.core.storage is not None:
            self.core.storage.prefetch.cancel(live)
        self.core.engine_pages.cancel(live)
        self.core.engine_pages.free(live, len(live.private))
        self.core.orphans.release(live)
        self.core.requests.close(live)

    # -- admin -----------------------------------------------------------------------------------

    def evict(self, tier: Tier, num_pages: int) -> int:
        """Evict at least ``num_pages`` where as many may go; how many went."""
        tier, num_pages = as_tier(tier), as_count("num_pages", num_pages)
        self.journal.note("evict_call", tier.value, num_pages)
        return self.core.tiers.evict(tier, num_pages)

    def drop_namespace(self, namespace: str) -> None:
        """An agreed call: nothing that was computed under this name is ever served again.

        For an adapter that is loaded anew under the same name, or a tenant that leaves. What may
        go leaves device and host at once, the rest when its requests and copies have ended; in
        storage its pages are under keys that nobody asks for any more. Requests that live now keep
        what they hold; their later inserts do nothing. It counts for this run: where storage
        outlives the run, put the version of the adapter into the namespace.
        """
        before = self.core.namespaces.drop(as_text("namespace", namespace))
        self.journal.note("drop_namespace", namespace)
        self.core.tiers.evict_namespace(before)

    def prefetch(self, request: str, tokens: Tokens, *, namespace: str = "") -> Ticket:
        """Fetch from STORAGE to HOST what of ``tokens`` is not cached; ``step`` decides.

        In buffer-only mode it goes on to DEVICE. Without storage the ticket is refused, and with
        side pools: what they keep is not stored, and a prefix is of no use without it.
        """
        request, inner = as_text("request", request), self.core.namespaces.inner(namespace)
        tokens = as_tokens(tokens)
        self.journal.note("prefetch", request)
        live = self.core.requests.open(request)
        path = self.core.lookup.served(self.core.tree.match(tokens, inner))
        if self.core.storage is None or not self.core.storage.is_attached:
            ticket = Ticket(live, None, 0)
            ticket.refuse("no storage is attached")
            return ticket
        if self.core.tiers.side:
            ticket = Ticket(live, None, 0)
            ticket.refuse("side pools are not stored: their state must be computed")
            return ticket
        if self.core.staged_loads is not None:
            return self.core.staged_loads.request(live, tokens, inner, path)
        return self.core.storage.prefetch.request(live, tokens, inner, path)

    def settle_for_prefetch(self, request: str) -> bool:
        """Whether admission may go on (agreed call): the request's prefetch has ended.

        With the policy ``best_effort`` this ends it with what has arrived.
        """
        live = self.core.requests.get(as_text("request", request))
        if live is None or self.core.storage is None:
            return True
        if self.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            self.core.storage.prefetch.settle_for(live)
        return not self.core.storage.prefetch.is_pending(live)

    def attach_storage(self) -> None:
        """An agreed call: writes and prefetches may begin again.

        :class:`Misuse` where they may already, or while the storage is being cleared.
        """
        self._storage().attach()

    def detach_storage(self, *, complete: bool = True) -> None:
        """An agreed call: nothing new begins, what is open is completed, then storage is off.

        With ``complete=False`` open operations make it a :class:`Misuse`, and nothing changes.
        Copies between device and host go on in any case.
        """
        self._storage().detach(complete=as_flag("complete", complete))

    def clear_storage(self) -> None:
        """An agreed call: empty the storage of every rank; nothing is stored or fetched meanwhile.

        :class:`Misuse` while writes or prefetches are open. ``has_pending`` until all have done it.
        """
        self._storage().empty()

    def _storage(self) -> StorageTier:
        if self.core.storage is None:
            raise Misuse("this cache was built without a storage: hand open_storage to join_cache")
        return self.core.storage

    def events(self) -> list[CacheEvent]:
        """Return the events since the last call, in the same order on every rank."""
        return self.core.event_log.take()

    def reset(self) -> None:
        """An agreed call: every rank drops to an empty cache in a new epoch, between two steps.

        What live requests hold stays out of use until they end; their later inserts do nothing.
        """
        self.stepper.require_idle()
        ledger = self.core.manager.ledger
        usable = {pool: ledger.usable(pool) for pool in self.core.manager.schema.pools}
        usable[Tier.DEVICE.value] += len(self.core.orphans.pages)  # they are not usable already
        self._carryover.drop(None)
        usable[Tier.DEVICE.value] -= len(self.core.orphans.pages)
        self.stepper.renew(usable)
        self._num_ordered += 1

    def new_weights(self, version: str) -> None:
        """An agreed call: the engine computes with weights ``version`` from now on.

        Nothing that other weights computed is served again: device and host are emptied as by
        :meth:`reset`, and the keys of storage change. Call it when no forward of the old weights
        is under way. Raises :class:`Misuse` where ``version`` is empty or no text.
        """
        if not isinstance(version, str) or not version.isprintable() or not version:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Misuse(f"new_weights needs a version: printable text, not {version!r}")
        self.stepper.require_idle()
        self.core.weights = self.weights = version
        if self.core.storage is not None:
            self.core.storage.io.change_weights(version)
            self.core.event_log.cleared(STORAGE)
        self.reset()

    def paused(self, reason: str) -> AbstractContextManager[None]:
        """While it lasts the others wait beyond their deadline, and no copy times out."""
        return self.stepper.paused(as_text("reason", reason))

    def leave(self) -> None:
        """Go on stepping until ``PeerLeft`` is raised: then all ranks have heard of it."""
        self.stepper.leave()

    def has_pending(self) -> bool:
        """Something waits for a step: an idle engine keeps stepping. Agreed."""
        return self.core.has_pending

    def report(self, request: str) -> RequestReport:
        """Report what a live request hit, loaded and must compute, in pages, and why."""
        live = self._live(request)
        hit = live.device_hit_pages + live.host_hit_pages
        return RequestReport(
            request=request,
            prompt_pages=live.prompt_pages,
            device_hit_pages=live.device_hit_pages,
            host_hit_pages=live.host_hit_pages,
            computed_pages=live.prompt_pages - hit,
            why=live.why,
        )

    def metrics(self) -> dict[str, int]:
        """Counters since the start; pages, intents and copies. Cheap.

        ``store_silences`` counts how often the store stopped answering, and ``store_silent`` is 1
        while it does not: steps go on without it, but nobody could be named. Facts of this rank.
        """
        change, health = self.stepper.change, self.store_health
        is_silent = health is not None and health.silent_since_s is not None
        return {
            **self.core.counts(),
            "collectives": self.stepper.num_collectives,
            "divergences": change.endings["Divergence"],
            "stalls": change.endings["RankStalled"],
            "resets": change.num_resets + self._num_ordered,
            "store_silences": health.num_silences if health is not None else 0,
            "store_silent": int(is_silent),
        }

    def status(self) -> CacheStatus:
        """How this rank stands: pools, open intents, who waits, counters. Changes nothing."""
        return status_of(self.core, self.stepper, self.metrics())

    def check_integrity(self) -> None:
        """Prove that every page has one owner and every count holds; raises ``InternalError``."""
        audit(self.core)

    def tensors(self, tier: Tier) -> KVTensors:
        """K and V of this rank's pages in ``tier``: what the engine's kernels read and write.

        Raises :class:`Misuse` where the device tier is in tensors of the engine's.
        """
        mover = self.core.tiers.copier.mover
        memory = mover.device if as_tier(tier) is Tier.DEVICE else mover.host
        if not isinstance(memory, KVTensors):
            raise Misuse(f"the engine has the tensors of its pages itself: {memory.described}")
        return memory

    def close(self) -> None:
        """Leave the replica; end copies, group and journal. Bounded; may be called again."""
        leave, self._on_close = self._on_close, None
        try:
            if leave is not None:
                leave()
        finally:
            self.core.tiers.copier.mover.close()
            self.stepper.group.close()
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
