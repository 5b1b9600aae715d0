"""What of the cache survives the end of an epoch.

``reset``: nothing but the pages that live requests hold; those are *orphaned*: out of use, in no
tree, given back when their request ends. ``detach``: the device tier stays, everything else goes.
Copies of the old epoch may still run; the pages they touch stay in limbo until they have ended.
"""

from __future__ import annotations

import xxhash

from cache.node import Node, Presence, Residency, Tier
from cache.parts import Parts
from consensus.report import Seal

__all__ = ["Carryover"]


class Carryover:
    """The cache's :class:`consensus.step.Carrier`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._keeps_device = False
        self.lost: tuple[str, ...] = ()

    # -- what the others must know ---------------------------------------------------------------

    def live(self) -> dict[str, int]:
        """Pages of each live request."""
        return {
            request.name: request.held_pages + len(request.private)
            for request in self._parts.requests
        }

    def kept(self) -> int:
        """A digest of the device tier: nodes, recency, requests and headroom, without page ids."""
        lines = [
            f"{node.node_id} {node.namespace} {node.last_access} {node.tokens.tobytes().hex()}"
            for node in self._resident()
        ]
        lines += [f"{name} {pages}" for name, pages in sorted(self.live().items())]
        lines.append(f"{self._parts.tree.clock} {self._parts.engine_pages.headroom}")
        return xxhash.xxh3_64_intdigest("\n".join(lines).encode()) >> 2

    def _resident(self) -> list[Node]:
        """Nodes whose whole path has arrived on DEVICE, parents first."""
        found: list[Node] = []
        known: set[int] = set()  # membership only
        for node in self._parts.tree.nodes():
            above = node.parent
            is_reached = above is None or above.parent is None or above.node_id in known
            if node.device.state is Residency.RESIDENT and is_reached:
                known.add(node.node_id)
                found.append(node)
        return found

    def usable(self) -> dict[str, int]:
        """Pages per pool that this rank can use: capacity less limbo and orphans."""
        pools = self._parts.manager.schema.pools
        return {pool: self._parts.usable(pool) for pool in pools}

    def pools(self) -> dict[str, dict[str, int]]:
        """What is in each pool."""
        parts = self._parts
        return {
            tier.value: {
                "pages": pool.num_pages,
                "free": pool.num_free,
                "limbo": pool.num_limbo,
                "pinned": parts.tree.num_pinned[tier],
                "evictable": parts.tree.num_evictable[tier],
                "charged": parts.manager.ledger.charged(tier.value),
            }
            for tier, pool in parts.tiers.pools.items()
        }

    # -- the end of an epoch ---------------------------------------------------------------------

    def drop(self, seal: Seal | None) -> None:
        """Drop what ``seal.then`` says (``None``: an ordered reset, which loses nobody)."""
        parts = self._parts
        self._keeps_device = seal is not None and seal.then == "detach"
        parts.is_detached |= self._keeps_device
        self.lost = seal.lost if seal is not None else ()
        for path in parts.paths():
            path.clear(keeps_stock=self._keeps_device)
        for tier in Tier:
            parts.event_log.cleared(tier.value)
        if self._keeps_device:
            self._keep_device_tier()
        else:
            parts.orphans.take(parts.requests)
            parts.tiers.pools[Tier.DEVICE].reset(keep=parts.orphans.pages)
            parts.tiers.pools[Tier.HOST].reset()
            self._reset_side_pools(parts.orphans.side_pages)
            parts.tree.clear()
        for name in self.lost:
            request = parts.requests.get(name)
            if request is not None:
                parts.orphans.lose(request)
                parts.requests.forget(request)

    def _reset_side_pools(self, kept: list[tuple[str, int]]) -> None:
        for side in self._parts.tiers.side:
            pages = [page for name, page in kept if name == side.spec.name]
            side.pools[Tier.DEVICE].reset(keep=pages)
            side.pools[Tier.HOST].reset()

    def _keep_device_tier(self) -> None:
        """Only what is RESIDENT on DEVICE stays; pins are those of live requests."""
        parts = self._parts
        nodes = list(parts.tree.nodes())
        resident = [(node, node.device.pages, node.device.side) for node in self._resident()]
        parts.tree.forget_presence()
        kept: list[int] = parts.orphans.pages
        side_kept: list[tuple[str, int]] = parts.orphans.side_pages
        for node in nodes:
            node.device, node.host = Presence(), Presence()
            node.carriages.clear()
            node.is_queued, node.built_on = False, ()
        for node, pages, side in resident:
            node.device.side = side
            parts.tree.place(node, Tier.DEVICE, Residency.RESIDENT, pages)
            kept += pages
            side_kept += [(name, page) for name in side for _, page in side[name]]
        for request in parts.requests:
            held, request.held = request.held, None
            present = [] if held is None else [n for n in held.path() if n.device.is_published]
            if held is not None and (not present or present[-1] is not held):
                request.must_recompute = True  # its loads may never arrive
                parts.withdrawal.must_recompute.append(request.name)
            parts.requests.hold(request, present[-1] if present else None)
            kept += request.private
        kept += parts.engine_pages.held_pages()
        parts.tiers.hollow(nodes)
        parts.tiers.prune()
        parts.tiers.pools[Tier.DEVICE].reset(keep=kept)
        parts.tiers.pools[Tier.HOST].reset()
        self._reset_side_pools(side_kept)

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """Begin ``epoch`` with ``usable`` pages; what was kept is charged again."""
        parts = self._parts
        parts.manager.begin_epoch(epoch, usable)
        pages = sum(len(node.device.pages) for node in parts.tree.nodes())
        pages += parts.engine_pages.headroom
        pages += sum(len(request.private) for request in parts.requests)
        parts.manager.ledger.charge(Tier.DEVICE.value, pages)
        for name, owned in parts.tiers.side.owned(list(parts.tree.nodes()), []).items():
            parts.manager.ledger.charge(name, len(owned))
