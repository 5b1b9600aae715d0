"""The cache as a scheduler sees it. Wiring only: every path has its own file.

Once per loop ``step(iteration)``, the only call that communicates. Everything else here is either
a *call that changes replicated state* (insert, match, request, allocate, free, abort, finish,
evict), which every rank makes in the same order between two steps, or reads agreed state.

    insert  -> tree -> write_through ---\\
    match   -> tree                      \\   step: collect endings, plan, reserve, start copies,
    request_load_back -> load_back -------+-> post one ballot, settle: publish or give back
    request_pages     -> engine_pages ---/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Self

import msgspec

from cache.audit import audit
from cache.carryover import Carryover
from cache.buffer_flush import BufferFlush
from cache.config import CacheConfig
from cache.copy_desk import CopyDesk
from cache.engine_pages import EnginePages
from cache.events import CacheEvent, EventLog
from cache.eviction import POLICIES
from cache.insert_line import InsertLine
from cache.insertion import Fill, Insertion, open_loads
from cache.load_back import LoadBack
from cache.mover import Direction, Mover
from cache.node import Node, Residency, Tier, Tokens
from cache.page_pool import PagePool
from cache.radix_tree import RadixTree
from cache.requests import Request, RequestReport, RequestTable
from cache.side_pools import SidePool, SidePools
from cache.staged_load import StagedLoads
from cache.storage_desk import StorageDesk
from cache.storage_tier import STORAGE, StorageTier
from cache.tensors import KVTensors
from cache.ticket import Ticket
from cache.tiers import Tiers
from cache.withdrawal import Withdrawal
from cache.write_back import WriteBack
from cache.write_through import WriteThrough
from consensus.ballot import Schema
from consensus.epoch import Locator
from consensus.errors import Misuse
from consensus.group import Group
from consensus.journal import Journal
from consensus.manager import TransactionManager
from consensus.participant import Outcome
from consensus.report import Policy
from consensus.step import Beacon, StepLimits, Stepper
from consensus.store import Store

__all__ = [
    "HierarchicalCache",
    "InsertResult",
    "Match",
    "StepResult",
    "config_facts",
    "schema_of",
]


class Match(msgspec.Struct, frozen=True):
    """A prefix that can be served. Lengths in pages: ``host_pages`` lie beyond ``device_pages``.

    ``pages`` are the device page indices of this rank, in order.
    """

    node: Node | None
    pages: list[int]
    device_pages: int
    host_pages: int
    storage_pages: int = 0
    tokens: Tokens | None = None
    namespace: str = ""


class InsertResult(msgspec.Struct, frozen=True):
    """``pages``: device page indices of the whole inserted prefix, for the engine's rows.

    ``new_pages`` entered the tree; ``duplicate_pages`` of the request's own were there already and
    have been freed. The request pins the prefix; what it owns beyond stays its own.
    """

    pages: list[int]
    new_pages: int
    duplicate_pages: int


class StepResult(msgspec.Struct, frozen=True):
    """What a step settled.

    ``must_recompute``: requests whose loaded bytes turned out void. ``was_reset``: the step ended
    an epoch and began another (policy reset or detach); ``lost`` are the live requests that were
    not the same on all ranks: the engine aborts them, the others go on with the pages they hold.
    """

    outcomes: list[Outcome]
    must_recompute: tuple[str, ...]
    lost: tuple[str, ...] = ()
    was_reset: bool = False


def schema_of(config: CacheConfig) -> Schema:
    """The ballot's shape for this configuration: equal on all ranks."""
    pools = [spec.pool(tier) for spec in config.side_pools for tier in Tier]
    pools += [*(tier.value for tier in Tier), STORAGE]
    return Schema(tuple(sorted(pools)), config.num_slots)


def config_facts(config: CacheConfig) -> dict[str, str]:
    """What must be equal on all ranks, for :func:`consensus.membership.introduce`."""
    own = ("device_pages", "host_pages", "side_pages")
    return {
        name: str(value)
        for name, value in msgspec.structs.asdict(config).items()
        if name not in own
    }


class HierarchicalCache:
    """One rank's part of the replica's cache.

    ``pools`` and ``mover`` are this rank's pages and copies. ``usable`` are the pages per pool that
    all ranks agreed on at start (:class:`consensus.membership.Membership`). ``on_close`` comes
    first in :meth:`close`. Not thread-safe: the scheduler's thread makes every call.

    :func:`cache.assembly.join_cache` builds all of this for an ordinary rank.
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
        storage: StorageDesk | None = None,
        side: Sequence[SidePool] = (),
    ) -> None:
        self.config = config
        self._on_close = on_close
        self.rank = group.rank
        self.journal = journal
        self.tree = RadixTree(config.page_size, POLICIES[config.eviction](), journal.note)
        sides = SidePools(side)
        self.manager = TransactionManager(
            rank=group.rank,
            schema=schema_of(config),
            lag=config.lag,
            copy_timeout_s=config.copy_timeout_s,
            journal=journal,
            usable={
                **{tier.value: partial(self._usable, tier) for tier in pools},
                **{name: partial(self._usable_side, name) for name in sides.pool_names()},
                STORAGE: self._usable_storage,
            },
        )
        desk = CopyDesk(mover, pools, verifies=config.verifies_copies, side=side)
        whole = config.evicts_whole_nodes
        self.tiers = Tiers(self.tree, pools, self.manager, desk, trims=not whole, side=sides)
        self.requests = RequestTable(self.tree)
        self.withdrawal = Withdrawal(self.tiers, self.requests)
        self.insertion = Insertion(self.tiers)
        self.event_log = EventLog(
            config.page_size, events_max=config.events_max, enabled=config.events_max > 0
        )
        self.tree.on_place = self._placed
        self.storage: StorageTier | None = None
        if storage is not None:
            self.storage = StorageTier(self.tiers, storage, self.event_log, config)
        self.backup = self._make_backup()
        self.insert_line = InsertLine(
            self.tree,
            self.requests,
            self.insertion,
            self.backup,
            waiting_max=config.waiting_tickets_max,
        )
        self.load_back = LoadBack(
            self.tiers,
            self.requests,
            self.withdrawal,
            minimum_pages=config.load_back_minimum_pages,
            waiting_max=config.waiting_tickets_max,
        )
        self.staged_loads: StagedLoads | None = None
        if config.mode == "buffer_only" and self.storage is not None:
            self.staged_loads = StagedLoads(self.tiers, self.storage.prefetch, self.load_back)
        self.engine_pages = EnginePages(
            self.tiers,
            headroom_pages=config.headroom_pages,
            waiting_max=config.waiting_tickets_max,
        )
        self.carryover = Carryover(self)
        self._num_resets = self._num_ordered = 0
        self.manager.begin_epoch(0, {**usable, STORAGE: self._usable_storage()})
        self.stepper = Stepper(
            self.manager,
            group,
            store,
            limits=StepLimits(
                warn_s=config.warn_s, deadline_s=config.deadline_s, grace_s=config.grace_s
            ),
            prepare=self._prepare,
            settled=self._settled,
            live=lambda: self.requests.digest,
            locator=locator,
            carrier=self.carryover,
            policy=Policy(config.policy, config.max_resets, config.reset_window_s),
            regroup=regroup,
            beacon=beacon,
        )

    def _make_backup(self) -> WriteThrough | WriteBack | BufferFlush:
        """The path by which this mode brings nodes to the other tiers."""
        config, storage = self.config, self.storage
        if config.mode == "buffer_only":
            if storage is None:
                raise Misuse("mode buffer_only needs a storage: the host is staging only")
            return BufferFlush(
                self.tiers,
                self.insertion,
                storage,
                queue_nodes_max=config.write_queue_nodes_max,
            )
        if config.mode == "write_back":
            return WriteBack(
                self.tiers,
                self.insertion,
                self.withdrawal,
                low_water_pages=config.low_water_pages,
                on_backed_up=storage.backed_up if storage is not None else None,
            )
        return WriteThrough(
            self.tiers,
            self.insertion,
            self.withdrawal,
            queue_nodes_max=config.write_queue_nodes_max,
            hits_needed=2 if config.mode == "write_through_selective" else 1,
            on_backed_up=storage.backed_up if storage is not None else None,
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
        self.stepper.begin(iteration)

    def poll_step(self) -> StepResult | None:
        """Go on with the step; its result once it is over. Never blocks."""
        outcomes = self.stepper.poll()
        if outcomes is None:
            return None
        every = self.config.integrity_every_steps
        if every and self.manager.step % every == 0:
            self.check_integrity()
        void, self.withdrawal.must_recompute = self.withdrawal.must_recompute, []
        lost, self.carryover.lost = self.carryover.lost, ()
        resets, self._num_resets = self._num_resets, self.stepper.succession.num_resets
        return StepResult(
            outcomes, tuple(dict.fromkeys(void)), lost, was_reset=resets != self._num_resets
        )

    def _usable(self, tier: Tier) -> int:
        return self.carryover.usable_of(tier)

    def _usable_side(self, name: str) -> int:
        return self.carryover.usable_side(name)

    def _usable_storage(self) -> int:
        return self.storage.usable if self.storage is not None else 0

    def _placed(self, node: Node, tier: Tier) -> None:
        if self.event_log.enabled:
            is_there = node.at(tier).is_published
            (self.event_log.stored if is_there else self.event_log.removed)(node, tier.value)

    def _prepare(self) -> None:
        """Before the ballot: hear of endings, plan everything, then reserve, then start copies."""
        self.tiers.desk.collect()
        if self.storage is not None:
            self.storage.desk.collect()
        self.engine_pages.plan()
        self.insert_line.plan()
        self.load_back.plan()
        self.backup.plan()
        if self.storage is not None:
            self.storage.plan()
        self.manager.reserve_open()
        self.insertion.end_unread()
        self.tiers.desk.submit()

    def _settled(self, outcomes: list[Outcome]) -> None:
        self.backup.requeue()
        self.tiers.prune()
        self.load_back.resolve()
        if self.staged_loads is not None:
            self.staged_loads.resolve()

    # -- at ingest and admission -----------------------------------------------------------------

    def match_prefix(
        self, tokens: Tokens, *, namespace: str = "", request: str | None = None
    ) -> Match:
        """The longest prefix of whole pages that can be served; touches it (agreed call).

        With ``request`` the part on DEVICE is pinned until the request ends.
        """
        owner = None if request is None else self.requests.get(request)
        if owner is not None and owner.held is not None and owner.private:
            raise Misuse(
                f"request {request!r} owns pages that follow the prefix it holds: insert or free"
                " them before it matches again"
            )
        path = self._served(self.tree.match(tokens, namespace))
        device = self._on_device(path)
        match = _match(path, device, tokens, namespace)
        if request is not None:
            live = self.requests.open(request)
            live.prompt_pages = len(tokens) // self.config.page_size
            live.device_hit_pages = match.device_pages
            self.requests.hold(live, device[-1] if device else None)
        return match

    def peek(self, tokens: Tokens, *, namespace: str = "") -> dict[str, int]:
        """Pages from the start of ``tokens`` by tier, and ``usable`` over both. Changes nothing."""
        nodes, shared = self.tree.walk(tokens, namespace)
        sizes = [node.num_pages for node in nodes[:-1]] + [shared] * bool(nodes)
        sized = list(zip(nodes, sizes, strict=True))

        def length(is_there: Callable[[Node], bool]) -> int:
            return sum(size for _, size in takewhile(lambda pair: is_there(pair[0]), sized))

        return {
            "device": length(lambda node: node.device.is_published),
            "host": length(lambda node: node.host.is_published),
            "usable": length(_is_served),
        }

    def request_load_back(
        self, request: str, match: Match, *, pages_max: int | None = None
    ) -> Ticket:
        """Ask for what of ``match`` is on HOST only; ``step`` decides the length for all ranks."""
        path = self._served(match.node.path() if match.node is not None else [])
        self.journal.note("request_load_back", request)
        if self.staged_loads is not None and match.tokens is not None:
            live = self.requests.open(request)
            return self.staged_loads.request(live, match.tokens, match.namespace, path)
        return self.load_back.request(self.requests.open(request), path, pages_max)

    def request_pages(self, request: str, num_pages: int) -> Ticket:
        """Ask for device pages beyond the headroom; ``step`` decides."""
        if num_pages < 1:
            raise Misuse(f"request {request!r} asks for {num_pages} pages; ask for at least 1")
        self.journal.note("request_pages", request, num_pages)
        return self.engine_pages.request(self.requests.open(request), num_pages)

    def allocate(self, request: str, num_pages: int) -> list[int] | None:
        """Device pages for ``request`` at once, out of the voted headroom; ``None``: too many."""
        if num_pages < 1:
            raise Misuse(f"request {request!r} allocates {num_pages} pages; ask for at least 1")
        return self.engine_pages.allocate(self.requests.open(request), num_pages)

    def pages(self, request: str) -> list[int]:
        """This rank's device pages of ``request``, in the order of its prompt.

        First the path that it pins, loaded pages included, then those that it owns itself.
        """
        live = self.requests.require(request)
        held = [] if live.held is None else live.held.path()
        return [page for node in held for page in node.device.pages] + live.private

    def expect_pages(self, num_pages: int) -> None:
        """Keep a headroom of so many pages: what the engine may need within lag + 1 steps."""
        self.journal.note("expect_pages", num_pages)
        self.engine_pages.expect(num_pages)

    def room(self, tier: Tier = Tier.DEVICE) -> int:
        """Pages that can be had, evicting what may go: agreed, O(1), no communication."""
        return self.tiers.room(tier)

    # -- around the forward pass -----------------------------------------------------------------

    def start_loading(self, requests: Sequence[str]) -> tuple[int, ...]:
        """The open loads on the paths of a batch, whoever asked for them; for ``wait_layer``."""
        tickets: list[int] = []
        for name in requests:
            held = self.requests.require(name).held
            for carriage in open_loads(held.path() if held is not None else []):
                tickets += [ticket for ticket in carriage.copy_tickets if ticket not in tickets]
        return tuple(tickets)

    def wait_layer(self, layer: int, loads: Sequence[int], timeout_s: float) -> bool:
        """Wait until ``layer`` of these loads has arrived; False: not within ``timeout_s``."""
        return not loads or self.tiers.desk.mover.wait_layer(layer, timeout_s, loads)

    # -- when tokens were computed ---------------------------------------------------------------

    def insert(self, request: str, tokens: Tokens, *, namespace: str = "") -> InsertResult:
        """Put what the request computed into the tree, out of its own pages; queue its backup.

        Only whole pages enter. Raises :class:`Misuse` where the request has fewer pages, or holds
        another prefix.
        """
        if self.tiers.side:
            raise Misuse("with side pools the engine's pages are voted: use propose_insert")
        live = self.requests.require(request)
        num_pages = len(tokens) // self.config.page_size
        held = live.held_pages
        if live.must_recompute or live.orphans:
            return InsertResult([], 0, 0)
        if num_pages > held + len(live.private):
            raise Misuse(
                f"request {request!r} inserts {num_pages} pages but holds {held} and owns"
                f" {len(live.private)}"
            )
        live.requires(tokens, namespace)
        if num_pages < held and live.held is not None:
            pages = [page for node in live.held.path() for page in node.device.pages]
            return InsertResult(pages[:num_pages], 0, 0)
        self.load_back.cancel(live, "the request computed it itself")
        path = self.tree.insert(tokens, namespace)
        placed, new, duplicate = self._place_private(live, path, held)
        self.tiers.hollow(path[len(placed) :])
        self.tiers.prune()
        self.requests.hold(live, placed[-1] if placed else None)
        self.journal.note("insert_own", request, new, duplicate)
        self.backup.add_path(placed)
        pages = [page for node in placed for page in node.device.pages]
        return InsertResult(pages, new, duplicate)

    def _place_private(
        self, request: Request, path: list[Node], held: int
    ) -> tuple[list[Node], int, int]:
        """Give the request's own pages to the nodes of ``path`` that have none."""
        placed: list[Node] = []
        spare: list[int] = []
        position = taken = 0
        for node in path:
            position += node.num_pages
            if position > held:
                if node.device.state is Residency.RESERVED:
                    break  # its pages are another vote's: nothing can build on it yet
                own = request.private[taken : taken + node.num_pages]
                taken += node.num_pages
                if node.device.is_published:
                    spare += own
                else:
                    node.built_on = open_loads(placed)
                    self.tree.place(node, Tier.DEVICE, Residency.RESIDENT, own)
            placed.append(node)
        del request.private[:taken]
        self.tiers.free(Tier.DEVICE, spare)
        return placed, taken - len(spare), len(spare)

    def propose_insert(
        self,
        request: str,
        tokens: Tokens,
        *,
        namespace: str = "",
        fill: Fill | None = None,
        hold: bool = False,
        priority: int = 0,
    ) -> bool:
        """Insert tokens whose pages are voted together with their backup in the next step.

        False: refused at once, on every rank. ``fill(nodes, pages)`` writes the bytes as soon as
        this rank holds the pages. With ``hold`` the path stays pinned until the request ends.
        """
        if len(tokens) < self.config.page_size:
            raise Misuse(f"request {request!r} inserts less than one page")
        self.journal.note("propose_insert", request, priority)
        holder = self.requests.open(request) if hold else None
        return self.insert_line.propose(tokens, namespace, fill, holder, priority)

    def free(self, request: str, num_pages: int) -> None:
        """Give back the last ``num_pages`` of the pages that the request owns itself."""
        live = self.requests.require(request)
        if not 0 <= num_pages <= len(live.private):
            raise Misuse(f"request {request!r} owns {len(live.private)} pages, not {num_pages}")
        self.engine_pages.free(live, num_pages)

    def finish_request(
        self, request: str, tokens: Tokens | None = None, *, namespace: str = ""
    ) -> RequestReport:
        """The request ends well: insert ``tokens``, unpin its path, free what it still owns."""
        live = self.requests.require(request)
        if tokens is not None:
            self.insert(request, tokens, namespace=namespace)
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

    def abort(self, request: str) -> None:
        """End the request in whatever state it is: tickets, pins and pages all come back."""
        self.journal.note("abort_request", request)
        self.carryover.release_lost(request)
        live = self.requests.get(request)
        if live is not None:
            self._release(live)

    def _release(self, live: Request) -> None:
        self.load_back.cancel(live)
        if self.storage is not None:
            self.storage.prefetch.cancel(live)
        self.engine_pages.cancel(live)
        self.engine_pages.free(live, len(live.private))
        self.carryover.release(live)
        self.requests.close(live)

    # -- admin -----------------------------------------------------------------------------------

    def evict(self, tier: Tier, num_pages: int) -> int:
        """Evict at least ``num_pages`` where as many may go; how many went."""
        self.journal.note("evict_call", tier.value, num_pages)
        return self.tiers.evict(tier, num_pages)

    def prefetch(self, request: str, tokens: Tokens, *, namespace: str = "") -> Ticket:
        """Fetch from STORAGE to HOST what of ``tokens`` is not cached; ``step`` decides.

        In buffer-only mode it goes on to DEVICE. Without storage the ticket is refused.
        """
        self.journal.note("prefetch", request)
        live = self.requests.open(request)
        path = self._served(self.tree.match(tokens, namespace))
        if self.storage is None or not self.storage.is_attached:
            ticket = Ticket(live, None, 0)
            ticket.refuse("no storage is attached")
            return ticket
        if self.staged_loads is not None:
            return self.staged_loads.request(live, tokens, namespace, path)
        return self.storage.prefetch.request(live, tokens, namespace, path)

    def settle_for_prefetch(self, request: str) -> bool:
        """Whether admission may go on (agreed call): the request's prefetch has ended.

        With the policy ``best_effort`` this ends it with what has arrived.
        """
        live = self.requests.get(request)
        if live is None or self.storage is None:
            return True
        if self.config.prefetch_policy == "best_effort":
            self.storage.prefetch.settle_for(live)
        return not self.storage.prefetch.is_pending(live)

    def attach_storage(self) -> None:
        """An agreed call: writes and prefetches may begin again."""
        if self.storage is None:
            raise Misuse("this cache was built without a storage")
        self.storage.attach()

    def detach_storage(self, *, complete: bool = True) -> None:
        """An agreed call: nothing new begins, what is open is completed, then storage is off.

        With ``complete=False`` open operations make it a :class:`Misuse`, and nothing changes.
        Copies between device and host go on in any case.
        """
        if self.storage is None:
            raise Misuse("this cache was built without a storage")
        self.storage.detach(complete=complete)

    def events(self) -> list[CacheEvent]:
        """What was stored and removed since the last call, in the same order on every rank."""
        return self.event_log.take()

    def reset(self) -> None:
        """An agreed call: every rank drops to an empty cache in a new epoch, between two steps.

        What live requests hold stays out of use until they end; their later inserts do nothing.
        """
        ledger = self.manager.ledger
        usable = {pool: ledger.usable(pool) for pool in self.manager.schema.pools}
        self.carryover.drop(None)
        usable[Tier.DEVICE.value] -= len(self.carryover.orphaned_pages)
        self.stepper.renew(usable)
        self._num_ordered += 1

    def paused(self, reason: str) -> AbstractContextManager[None]:
        """While it lasts the others wait beyond their deadline, and no copy times out."""
        return self.stepper.paused(reason)

    def leave(self) -> None:
        """Go on stepping until ``PeerLeft`` is raised: then all ranks have heard of it."""
        self.stepper.leave()

    def has_pending(self) -> bool:
        """Something waits for a step: an idle engine keeps stepping. Agreed."""
        return (
            not self.manager.is_idle
            or self.backup.num_queued > 0
            or (self.storage is not None and self.storage.is_busy)
            or (self.staged_loads is not None and self.staged_loads.num_open > 0)
            or self.load_back.num_waiting > 0
            or self.engine_pages.num_waiting > 0
            or self.insert_line.num_waiting > 0
        )

    def report(self, request: str) -> RequestReport:
        """What a live request hit, loaded and must compute, in pages, and why."""
        live = self.requests.require(request)
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
        """Counters since the start; pages, intents and copies. Cheap."""
        submitted = self.tiers.desk.mover.submitted
        write, load = self.backup, self.load_back
        fetch = self.storage.prefetch if self.storage is not None else None
        return {
            "commits": write.num_commits + load.num_commits + (fetch.num_commits if fetch else 0),
            "aborts": write.num_aborts
            + write.num_no_room
            + load.num_aborts
            + load.num_no_room
            + (fetch.num_aborts + fetch.num_no_room if fetch else 0),
            "deferred": write.num_deferred,
            "prefetches": fetch.num_commits if fetch else 0,
            "prefetched_pages": fetch.num_pages if fetch else 0,
            "stored_pages": self.storage.storing.num_stored if self.storage is not None else 0,
            "backups": write.num_commits,
            "backups_aborted": write.num_aborts,
            "backups_no_room": write.num_no_room,
            "loads": load.num_commits,
            "loads_aborted": load.num_aborts,
            "loads_no_room": load.num_no_room,
            "refused": self.insertion.num_refused,
            "pages_refused": self.engine_pages.num_refused,
            "writes_submitted": submitted[Direction.TO_HOST],
            "loads_submitted": submitted[Direction.TO_DEVICE],
            "collectives": self.stepper.num_collectives,
            "divergences": self.stepper.succession.endings["Divergence"],
            "stalls": self.stepper.succession.endings["RankStalled"],
            "resets": self.stepper.succession.num_resets + self._num_ordered,
            "copies_wrong": self.tiers.desk.num_wrong,
            "evicted_device": self.tiers.num_evicted[Tier.DEVICE],
            "evicted_host": self.tiers.num_evicted[Tier.HOST],
        }

    def check_integrity(self) -> None:
        """Prove that every page has one owner and every count holds; raises ``InternalError``."""
        audit(self)

    def tensors(self, tier: Tier) -> KVTensors:
        """K and V of this rank's pages in ``tier``: what the engine's kernels read and write."""
        mover = self.tiers.desk.mover
        return mover.device if tier is Tier.DEVICE else mover.host

    def close(self) -> None:
        """Leave the replica; end copies, group and journal. Bounded; may be called again."""
        leave, self._on_close = self._on_close, None
        try:
            if leave is not None:
                leave()
        finally:
            self.tiers.desk.mover.close()
            self.stepper.group.close()
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _served(self, path: list[Node]) -> list[Node]:
        """The leading nodes that can be served, up to where every side pool's state is there."""
        served = list(takewhile(_is_served, path))
        side = self.tiers.side
        return served[: side.usable_end(served, list(Tier))] if side else served

    def _on_device(self, path: list[Node]) -> list[Node]:
        """The leading nodes that can be used on the device as they are."""
        device = list(takewhile(lambda node: node.device.is_published, path))
        side = self.tiers.side
        return device[: side.usable_end(device, [Tier.DEVICE])] if side else device


def _is_served(node: Node) -> bool:
    return node.device.is_published or node.host.is_published


def _match(path: list[Node], device: list[Node], tokens: Tokens, namespace: str) -> Match:
    num_device = sum(node.num_pages for node in device)
    return Match(
        node=path[-1] if path else None,
        pages=[page for node in device for page in node.device.pages],
        device_pages=num_device,
        host_pages=sum(node.num_pages for node in path) - num_device,
        tokens=tokens,
        namespace=namespace,
    )
