"""A few ranks of the cache in one thread, for tests of its paths.

Prompts are strings: every letter is one page, so "abc" and "abd" share two pages. Each call is made
on all ranks in the same order and must give the same answer on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.copies.mover import PlanPart
from kvpact.cache.hierarchical_cache import (
    HierarchicalCache,
    InsertResult,
    Match,
    StepResult,
    schema_of,
)
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.storage import DeferredWorkers
from kvpact.cache.storage.memory import MemoryBackend
from kvpact.cache.tree.events import CacheEvent
from kvpact.cache.tree.node import Node, Tier, Tokens
from kvpact.consensus.core.errors import KvpactError
from kvpact.consensus.core.journal import Journal
from kvpact.harness.faults.board import FaultBoard, FaultyPool
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import SimBeacon, SimClock, SimGroup, SimNet
from kvpact.harness.rank.store import MemoryStore
from kvpact.harness.scenario.model import Fault
from kvpact.harness.verify.agreement import Snapshot, compare, snapshot
from kvpact.harness.verify.content import expected_page, fill_pages
from kvpact.harness.verify.promises import broken_promises

PAGE_SIZE = 4
STEP_S = 0.01
T = TypeVar("T")


def prompt(text: str) -> Tokens:
    """One page per letter."""
    return np.repeat(np.array([ord(letter) for letter in text], dtype=np.int32), PAGE_SIZE)


class World:
    """``ranks`` ranks over one simulated network; ``config`` goes into each one's CacheConfig.

    ``storage``: each rank has a memory backend. ``side`` gives the device and host pages of each
    of ``config["side_pools"]``.
    """

    def __init__(
        self,
        ranks: int = 2,
        *,
        device_pages: int | Sequence[int] = 16,
        host_pages: int | Sequence[int] = 16,
        storage: bool = False,
        side: Mapping[str, tuple[int, int]] | None = None,
        **config: Any,
    ) -> None:
        device = [device_pages] * ranks if isinstance(device_pages, int) else list(device_pages)
        host = [host_pages] * ranks if isinstance(host_pages, int) else list(host_pages)
        config.setdefault("kv_shape", KVShape(layers=2, heads=1, dim=2))
        configs = [
            CacheConfig(
                page_size=PAGE_SIZE,
                device_pages=d,
                host_pages=h,
                side_pages=dict(side or {}),
                **config,
            )
            for d, h in zip(device, host, strict=True)
        ]
        self.clock = SimClock()
        self.net = SimNet(ranks, schema_of(configs[0]).width, self.clock)
        self.boards = [FaultBoard() for _ in range(ranks)]
        self.iteration = 0
        self.checks = True
        self.snapshots: list[list[Snapshot]] = []
        store = MemoryStore()
        usable = {"device": min(device), "host": min(host)}
        usable |= {f"{name}.device": pages[0] for name, pages in (side or {}).items()}
        usable |= {f"{name}.host": pages[1] for name, pages in (side or {}).items()}
        self.backends = [MemoryBackend(1 << 20) for _ in range(ranks)]
        self.ranks = [
            Rank(
                config,
                group=SimGroup(self.net, rank),
                store=store,
                pools={
                    Tier.DEVICE: FaultyPool("device", config.device_pages, board),
                    Tier.HOST: FaultyPool("host", config.host_pages, board),
                },
                usable=usable,
                make_mover=_deferred,
                locator=self.net,
                journal=Journal(rank),
                beacon=SimBeacon(self.net, rank),
                regroup=partial(SimGroup, self.net, rank),
                plan_part=board.plan_part,
                workers=DeferredWorkers(backend, plan_page=board.plan_page) if storage else None,
                backend=backend if storage else None,
                side_pools={
                    name: _side_pools(name, *pages, board) for name, pages in (side or {}).items()
                },
            )
            for rank, (config, board, backend) in enumerate(
                zip(configs, self.boards, self.backends, strict=True)
            )
        ]
        self.caches = [rank.cache for rank in self.ranks]

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> list[StepResult]:
        """One step of all ranks, then every promise that can be checked from outside."""
        self.iteration += 1
        self.clock.now_s += STEP_S
        for cache in self.caches:
            cache.begin_step(self.iteration)
        results = self.finish_step()
        if self.checks:
            self.check()
        return results

    def finish_step(self) -> list[StepResult]:
        """Poll all ranks until the step is over; raises what they raise, once all have raised."""
        results: dict[int, StepResult] = {}
        errors: dict[int, KvpactError] = {}
        while len(results) + len(errors) < len(self.caches):
            for rank, cache in enumerate(self.caches):
                if rank in results or rank in errors:
                    continue
                try:
                    result = cache.poll_step()
                except KvpactError as error:
                    errors[rank] = error
                    continue
                if result is not None:
                    results[rank] = result
            self.clock.now_s += 0.001
        if errors:
            assert len(errors) == len(self.caches), f"an error on some ranks only: {errors}"
            raise errors[0]
        return [results[rank] for rank in range(len(self.caches))]

    def step_all(self, times: int = 1) -> list[StepResult]:
        """So many steps; the results of the last."""
        results: list[StepResult] = []
        for _ in range(times):
            results = self.step()
        return results

    def drain(self, steps_max: int = 60) -> None:
        """Step until nothing is pending; not idle by then is a failure."""
        for _ in range(steps_max):
            if not any(cache.has_pending() for cache in self.caches):
                return
            self.step()
        raise AssertionError(f"not idle: {[c.core.manager.open_intents for c in self.caches]}")

    def check(self) -> None:
        """Conservation, agreement and right bytes."""
        for rank in self.ranks:
            rank.cache.check_integrity()
            found = rank.wrong_bytes() + broken_promises(rank.cache)
            assert not found, found
        snapshots = [snapshot(cache) for cache in self.caches]
        differences = compare(snapshots)
        assert not differences, differences
        self.snapshots.append(snapshots)

    # -- calls, the same on every rank -----------------------------------------------------------

    def each(self, call: Callable[[HierarchicalCache], T]) -> list[T]:
        """``call`` on every rank."""
        return [call(cache) for cache in self.caches]

    def same(self, call: Callable[[HierarchicalCache], T]) -> T:
        """``call`` on every rank; the answer, which must be the same."""
        answers = self.each(call)
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def put(
        self, text: str, request: str = "put", *, hold: bool = False, namespace: str = ""
    ) -> bool:
        """``propose_insert`` with the bytes that belong to the prompt."""
        tokens = prompt(text)
        answers = [
            rank.cache.propose_insert(
                request,
                tokens,
                fill=rank.compute,
                fill_side=rank.compute_side,
                hold=hold,
                namespace=namespace,
            )
            for rank in self.ranks
        ]
        assert len(set(answers)) == 1
        return answers[0]

    def store(self, *texts: str) -> None:
        """Insert prompts and drain: they are on DEVICE and backed up."""
        for text in texts:
            assert self.put(text)
        self.drain()

    def host_only(self, text: str) -> None:
        """Insert a prompt, back it up, and take everything off the device."""
        self.store(text)
        self.evict(Tier.DEVICE, 10_000)
        assert self.peek(text)["device"] == 0

    def match(self, text: str, request: str | None = None, namespace: str = "") -> list[Match]:
        """``match_prefix`` everywhere; the lengths must be the same."""
        matches = self.each(
            lambda cache: cache.match_prefix(prompt(text), request=request, namespace=namespace)
        )
        assert len({(one.device_pages, one.host_pages) for one in matches}) == 1
        return matches

    def load(
        self, text: str, request: str = "load", *, pages_max: int | None = None
    ) -> list[Ticket]:
        """Match, and ask for the load-back of what is on HOST only."""
        matches = self.match(text, request)
        return [
            cache.request_load_back(request, match, pages_max=pages_max)
            for cache, match in zip(self.caches, matches, strict=True)
        ]

    def own(self, text: str, request: str) -> None:
        """Get device pages for what of the prompt the request does not hold, and compute them."""
        live = self.caches[0].core.requests.require(request)
        held = live.held_pages + len(live.private)
        missing = len(text) - held
        if missing > 0:
            tickets = self.each(lambda cache: cache.request_pages(request, missing))
            self.step_all(1 + self.caches[0].config.lag)
            assert outcome(tickets) == (TicketState.READY, missing)
        self.compute(text, request)

    def compute(self, text: str, request: str) -> None:
        """Write the bytes of the prompt into the pages that the request owns."""
        hashes = page_hashes(prompt(text), PAGE_SIZE)
        for rank in self.ranks:
            live = rank.cache.core.requests.require(request)
            mine = hashes[live.held_pages : live.held_pages + len(live.private)]
            fill_pages(rank.tensors[Tier.DEVICE], live.private[: len(mine)], mine, rank.cache.rank)

    def insert(self, text: str, request: str) -> list[InsertResult]:
        """``insert`` everywhere; the counts must be the same."""
        results = [
            rank.cache.insert(request, prompt(text), fill_side=rank.compute_side)
            for rank in self.ranks
        ]
        assert len({(r.new_pages, r.duplicate_pages, len(r.pages)) for r in results}) == 1
        return results

    def abort(self, request: str) -> None:
        """``abort`` everywhere."""
        self.each(lambda cache: cache.abort(request))

    def finish(self, request: str) -> None:
        """``finish_request`` everywhere, without inserting."""
        self.each(lambda cache: cache.finish_request(request))

    def fetch(self, text: str, request: str = "fetch") -> list[Ticket]:
        """``prefetch`` everywhere."""
        return self.each(lambda cache: cache.prefetch(request, prompt(text)))

    def hear(self) -> list[CacheEvent]:
        """The events since the last call, the same on all ranks."""
        return self.same(lambda cache: cache.events())

    def in_storage(self, text: str) -> list[int]:
        """Per rank, how many leading pages of the prompt its backend has with the right bytes."""
        hashes = page_hashes(prompt(text), PAGE_SIZE)
        found: list[int] = []
        for rank in self.ranks:
            assert rank.keys is not None
            assert rank.backend is not None
            shape = rank.cache.config.kv_shape
            pages = rank.backend.get(rank.keys.of(prompt(text)))
            right = [
                page is not None
                and bytes(page) == expected_page(shape, PAGE_SIZE, one, rank.cache.rank)
                for page, one in zip(pages, hashes, strict=True)
            ]
            assert right == [page is not None for page in pages], "storage has wrong bytes"
            found.append(right.index(False) if False in right else len(right))
        return found

    def evict(self, tier: Tier, num_pages: int) -> int:
        """``evict`` everywhere; how many pages went."""
        return self.same(lambda cache: cache.evict(tier, num_pages))

    def peek(self, text: str) -> dict[str, int]:
        """Pages by tier, the same on all ranks."""
        return self.same(lambda cache: cache.peek(prompt(text)))

    def metrics(self) -> dict[str, int]:
        """Counters, the same on all ranks but for the copies submitted."""
        first = self.caches[0].metrics()
        return {
            **first,
            "writes_submitted": max(c.metrics()["writes_submitted"] for c in self.caches),
        }

    def free_pages(self, tier: Tier) -> list[int]:
        """Physically free pages of each rank."""
        return self.each(lambda cache: cache.core.tiers.pools[tier].num_free)

    def pinned(self) -> dict[Tier, int]:
        """Pages pinned, the same on all ranks."""
        return self.same(lambda cache: dict(cache.core.tree.num_pinned))

    def node(self, text: str, rank: int = 0) -> Node:
        """The node that the prompt ends in."""
        nodes, _ = self.caches[rank].core.tree.walk(prompt(text))
        return nodes[-1]

    # -- faults ----------------------------------------------------------------------------------

    def fault(
        self,
        rank: int,
        site: str,
        action: str,
        *,
        times: int = 1,
        after: int = 0,
        steps: int | None = None,
    ) -> None:
        """Arm a fault on one rank."""
        self.boards[rank].arm(
            Fault(
                number=0,
                rank=rank,
                site=site,
                action=action,
                times=times,
                after=after,
                steps=steps,
            )
        )

    def heal(self) -> None:
        """Disarm everything; what hangs ends at the next step."""
        for rank, board in zip(self.ranks, self.boards, strict=True):
            board.heal()
            rank.heal()

    def is_empty(self) -> None:
        """Nothing is pinned, and each page is in the tree or free: the counters' baseline."""
        assert self.pinned() == {Tier.DEVICE: 0, Tier.HOST: 0}
        for cache in self.caches:
            for tier in Tier:
                pool = cache.core.tiers.pools[tier]
                in_tree = sum(len(node.at(tier).pages) for node in cache.core.tree.nodes())
                stock = cache.core.engine_pages.headroom if tier is Tier.DEVICE else 0
                assert pool.num_limbo == 0
                assert pool.num_free + in_tree + stock == pool.num_pages


def outcome(tickets: Sequence[Ticket]) -> tuple[TicketState, int]:
    """What came of a ticket: the same on all ranks."""
    found = {(ticket.state, ticket.num_pages) for ticket in tickets}
    assert len(found) == 1, found
    return found.pop()


def no_note(tag: str, *values: object) -> None:
    """For a tree without a journal."""


def _side_pools(name: str, device: int, host: int, board: FaultBoard) -> dict[Tier, FaultyPool]:
    return {
        Tier.DEVICE: FaultyPool(f"{name}.device", device, board),
        Tier.HOST: FaultyPool(f"{name}.host", host, board),
    }


def _deferred(device: PagedMemory, host: PagedMemory, plan: PlanPart | None) -> DeferredMover:
    return DeferredMover(device, host, plan_part=plan)
