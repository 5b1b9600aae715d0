"""What of the cache survives the end of an epoch.

``reset``: nothing but the pages that live requests hold; those are *orphaned*: out of use, in no
tree, given back when their request ends. ``detach``: the device tier stays, everything else goes.
Copies of the old epoch may still run; the pages they touch stay in limbo until they have ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import xxhash

from cache.node import Node, Presence, Residency, Tier
from cache.requests import Request
from cache.storing import STORAGE
from consensus.report import Seal

if TYPE_CHECKING:
    from cache.hierarchical_cache import HierarchicalCache

__all__ = ["Carryover"]


class Carryover:
    """The cache's :class:`consensus.step.Carrier`."""

    def __init__(self, cache: HierarchicalCache) -> None:
        self._cache = cache
        self._orphans: Counter[int] = Counter()  # device page -> live requests that hold it
        self._side_orphans: Counter[tuple[str, int]] = Counter()
        self._lost: dict[str, Request] = {}
        self._keeps_device = False
        self.is_detached = False
        self.lost: tuple[str, ...] = ()

    # -- what the others must know ---------------------------------------------------------------

    def live(self) -> dict[str, int]:
        """Pages of each live request."""
        return {
            request.name: request.held_pages + len(request.private)
            for request in self._cache.requests
        }

    def kept(self) -> int:
        """A digest of the device tier: nodes, recency, requests and headroom, without page ids."""
        lines = [
            f"{node.node_id} {node.namespace} {node.last_access} {node.tokens.tobytes().hex()}"
            for node in self._resident()
        ]
        lines += [f"{name} {pages}" for name, pages in sorted(self.live().items())]
        lines.append(f"{self._cache.tree.clock} {self._cache.engine_pages.headroom}")
        return xxhash.xxh3_64_intdigest("\n".join(lines).encode()) >> 2

    def _resident(self) -> list[Node]:
        """Nodes whose whole path has arrived on DEVICE, parents first."""
        found: list[Node] = []
        known: set[int] = set()  # membership only
        for node in self._cache.tree.nodes():
            above = node.parent
            is_reached = above is None or above.parent is None or above.node_id in known
            if node.device.state is Residency.RESIDENT and is_reached:
                known.add(node.node_id)
                found.append(node)
        return found

    def usable(self) -> dict[str, int]:
        """Pages per pool that this rank can use: capacity less limbo and orphans."""
        storage = self._cache.storage
        usable = {tier.value: self.usable_of(tier) for tier in Tier}
        for name in self._cache.tiers.side.pool_names():
            usable[name] = self.usable_side(name)
        usable[STORAGE] = storage.usable if storage is not None else 0
        return usable

    def usable_of(self, tier: Tier) -> int:
        """See :meth:`usable`."""
        pool = self._cache.tiers.pools[tier]
        if tier is Tier.DEVICE:
            return pool.usable - len(self._orphans)
        return 0 if self.is_detached else pool.usable

    def usable_side(self, name: str) -> int:
        """Pages of a side pool that this rank can use."""
        base, _, tier = name.rpartition(".")
        orphans = sum(1 for owner, _ in self._side_orphans if owner == base)
        usable = self._cache.tiers.side.usable(name)
        if tier == Tier.DEVICE.value:
            return usable - orphans
        return 0 if self.is_detached else usable

    def side_orphans(self, name: str) -> list[int]:
        """Device pages of a side pool that only requests of an earlier epoch hold."""
        return [page for owner, page in self._side_orphans if owner == name]

    def pools(self) -> dict[str, dict[str, int]]:
        """What is in each pool."""
        cache = self._cache
        return {
            tier.value: {
                "pages": pool.num_pages,
                "free": pool.num_free,
                "limbo": pool.num_limbo,
                "pinned": cache.tree.num_pinned[tier],
                "evictable": cache.tree.num_evictable[tier],
                "charged": cache.manager.ledger.charged(tier.value),
            }
            for tier, pool in cache.tiers.pools.items()
        }

    # -- the end of an epoch ---------------------------------------------------------------------

    def drop(self, seal: Seal | None) -> None:
        """Drop what ``seal.then`` says (``None``: an ordered reset, which loses nobody)."""
        cache = self._cache
        self._keeps_device = seal is not None and seal.then == "detach"
        self.is_detached |= self._keeps_device
        self.lost = seal.lost if seal is not None else ()
        parts = [cache.insertion, cache.insert_line, cache.load_back, cache.backup]
        parts += [cache.engine_pages]
        parts += [part for part in (cache.storage, cache.staged_loads) if part is not None]
        for part in parts:
            part.clear(keeps_stock=self._keeps_device)
        for tier in Tier:
            cache.event_log.cleared(tier.value)
        if self._keeps_device:
            self._keep_device_tier()
        else:
            self._orphan_requests()
            cache.tree.clear()
        for name in self.lost:
            request = cache.requests.get(name)
            if request is not None:
                self._lost[name] = request
                cache.requests.forget(request)

    def _orphan_requests(self) -> None:
        for request in self._cache.requests:
            held = [] if request.held is None else request.held.path()
            request.orphans += [page for node in held for page in node.device.pages]
            request.side_orphans += [
                (name, page)
                for node in held
                for name, pages in node.device.side.items()
                for _, page in pages
            ]
            request.orphans += request.private
            request.held, request.private = None, []
        alive = [*self._cache.requests, *self._lost.values()]
        self._orphans = Counter(page for request in alive for page in request.orphans)
        self._side_orphans = Counter(pair for one in alive for pair in one.side_orphans)
        self._cache.tiers.pools[Tier.DEVICE].reset(keep=self._orphans)
        self._cache.tiers.pools[Tier.HOST].reset()
        self._reset_side_pools(list(self._side_orphans))

    def _reset_side_pools(self, kept: list[tuple[str, int]]) -> None:
        for side in self._cache.tiers.side:
            pages = [page for name, page in kept if name == side.spec.name]
            side.pools[Tier.DEVICE].reset(keep=pages)
            side.pools[Tier.HOST].reset()

    def _keep_device_tier(self) -> None:
        """Only what is RESIDENT on DEVICE stays; pins are those of live requests."""
        cache = self._cache
        nodes = list(cache.tree.nodes())
        resident = [(node, node.device.pages, node.device.side) for node in self._resident()]
        cache.tree.forget_presence()
        kept: list[int] = list(self._orphans)
        side_kept: list[tuple[str, int]] = list(self._side_orphans)
        for node in nodes:
            node.device, node.host = Presence(), Presence()
            node.carriages.clear()
            node.is_queued, node.built_on = False, ()
        for node, pages, side in resident:
            node.device.side = side
            cache.tree.place(node, Tier.DEVICE, Residency.RESIDENT, pages)
            kept += pages
            side_kept += [(name, page) for name in side for _, page in side[name]]
        for request in cache.requests:
            held, request.held = request.held, None
            present = [] if held is None else [n for n in held.path() if n.device.is_published]
            if held is not None and (not present or present[-1] is not held):
                request.must_recompute = True  # its loads may never arrive
                cache.withdrawal.must_recompute.append(request.name)
            cache.requests.hold(request, present[-1] if present else None)
            kept += request.private
        kept += cache.engine_pages.held_pages()
        cache.tiers.hollow(nodes)
        cache.tiers.prune()
        cache.tiers.pools[Tier.DEVICE].reset(keep=kept)
        cache.tiers.pools[Tier.HOST].reset()
        self._reset_side_pools(side_kept)

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """Begin ``epoch`` with ``usable`` pages; what was kept is charged again."""
        cache = self._cache
        cache.manager.begin_epoch(epoch, usable)
        pages = sum(len(node.device.pages) for node in cache.tree.nodes())
        pages += cache.engine_pages.headroom
        pages += sum(len(request.private) for request in cache.requests)
        cache.manager.ledger.charge(Tier.DEVICE.value, pages)
        for name, owned in cache.tiers.side.owned(list(cache.tree.nodes()), []).items():
            cache.manager.ledger.charge(name, len(owned))

    # -- requests of the old epoch ---------------------------------------------------------------

    def release(self, request: Request) -> None:
        """A request ends: the orphaned pages that nobody else holds are free."""
        for page in request.orphans:
            self._orphans[page] -= 1
        gone = [page for page in dict.fromkeys(request.orphans) if self._orphans[page] == 0]
        for page in gone:
            del self._orphans[page]
        request.orphans = []
        self._release_side(request)
        self._cache.tiers.pools[Tier.DEVICE].free(gone)

    def _release_side(self, request: Request) -> None:
        pairs, request.side_orphans = request.side_orphans, []
        for pair in pairs:
            self._side_orphans[pair] -= 1
        gone = [pair for pair in dict.fromkeys(pairs) if self._side_orphans[pair] == 0]
        for side in self._cache.tiers.side:
            side.pools[Tier.DEVICE].free([page for name, page in gone if name == side.spec.name])
        for pair in gone:
            del self._side_orphans[pair]

    def release_lost(self, name: str) -> None:
        """A lost request was aborted by the engine."""
        request = self._lost.pop(name, None)
        if request is not None:
            self.release(request)

    @property
    def orphaned_pages(self) -> list[int]:
        """Device pages that only requests of an earlier epoch hold."""
        return list(self._orphans)
