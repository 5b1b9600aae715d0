"""Side pools: pages that a node keeps beside its KV, in pools of their own (indexer, SWA, Mamba).

They are reserved, voted, copied and freed in the transaction of the KV pages. Each side page
belongs to a page position of its node, so a split divides them without a word to anybody:

    per_page   one at every position
    window     one at each of the last positions, as far as the window reaches
    per_node   one, at the last position: the state after the node's last token

A prefix can only be used up to where the state of every side pool is there: it is *complete*. What
a prefix needs at its end, and where that is looked for, is said here once, for all paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvpact.cache.copies.mover import Mover
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.tree.node import Carriage, Node, Presence, SidePages, Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.ledger import Ledger

__all__ = ["SidePool", "SidePools"]


class SidePool:
    """One side pool on this rank: its pages in both tiers, and what copies between them."""

    def __init__(self, spec: SideSpec, pools: Mapping[Tier, PagePool], mover: Mover) -> None:
        self.spec = spec
        self.pools = dict(pools)
        self.mover = mover


class SidePools:
    """All side pools of this rank, in canonical order of their names."""

    def __init__(self, pools: Sequence[SidePool]) -> None:
        self._pools = sorted(pools, key=lambda pool: pool.spec.name)

    def __bool__(self) -> bool:
        return bool(self._pools)

    def __iter__(self) -> Iterator[SidePool]:
        return iter(self._pools)

    def pool_names(self) -> list[str]:
        """The names of all their pools."""
        return [side.spec.pool(tier) for side in self._pools for tier in Tier]

    def usable(self, name: str) -> int:
        """Pages of a pool that this rank can use."""
        return self._pool(name).usable

    def _pool(self, name: str) -> PagePool:
        base, _, tier = name.rpartition(".")
        return next(side.pools[Tier(tier)] for side in self._pools if side.spec.name == base)

    # -- needs -----------------------------------------------------------------------------------

    def wanted(self, nodes: Sequence[Node], source: Tier | None) -> dict[str, list[int]]:
        """By side pool, the positions (from the start of ``nodes``) that need a side page.

        Of nodes that are there already in tier ``source`` those that have one there; else
        (``None``: they are computed anew) those that a new node has.
        """
        wanted: dict[str, list[int]] = {}
        for side in self._pools:
            start = 0
            found = wanted.setdefault(side.spec.name, [])
            for node in nodes:
                found += [start + position for position in _positions(side.spec, node, source)]
                start += node.num_pages
        return wanted

    def need(self, carriage: Carriage) -> dict[str, int]:
        """Pages per pool that ``carriage`` needs beside its KV pages."""
        return {
            side.spec.pool(carriage.tier): len(carriage.side_wanted[side.spec.name])
            for side in self._pools
            if carriage.side_wanted.get(side.spec.name)
        }

    # -- pages of a carriage ---------------------------------------------------------------------

    def reserve(self, carriage: Carriage, name: str, num_pages: int) -> int:
        """All or nothing, for one pool of an intent."""
        pages = self._pool(name).reserve(num_pages)
        if pages is None:
            return 0
        base = name.rpartition(".")[0]
        carriage.side[base] = list(zip(carriage.side_wanted[base], pages, strict=True))
        return num_pages

    def unreserve(self, carriage: Carriage, name: str) -> None:
        """Exactly undo :meth:`reserve`."""
        self._pool(name).free([page for _, page in carriage.side.pop(name.rpartition(".")[0])])

    def free_carriage(self, carriage: Carriage) -> None:
        """Free the side pages that ``carriage`` holds: nothing of it is kept."""
        for side in self._pools:
            pages = [page for _, page in carriage.side.pop(side.spec.name, [])]
            side.pools[carriage.tier].free(pages)

    def publish(self, carriage: Carriage, node: Node) -> None:
        """The side pages for ``node`` are to be found with it."""
        start = carriage.position_of(node)
        end = start + node.num_pages
        node.at(carriage.tier).side = {
            name: [(position - start, page) for position, page in pages if start <= position < end]
            for name, pages in carriage.side.items()
        }

    def copies(
        self, nodes: Sequence[Node], carriage: Carriage, inserts: Sequence[Carriage]
    ) -> dict[str, tuple[list[int], list[int]]]:
        """By side pool, source and target pages of the copy that fills ``carriage``."""
        source_tier = Tier.DEVICE if carriage.tier is Tier.HOST else Tier.HOST
        copies: dict[str, tuple[list[int], list[int]]] = {}
        for side in self._pools:
            name = side.spec.name
            source: dict[int, int] = {}
            start = 0
            for node in nodes:
                own = node.at(source_tier).side.get(name, [])
                source.update({start + position: page for position, page in own})
                for insert in inserts:
                    source.update(_of_insert(insert, node, name, start))
                start += node.num_pages
            pairs = carriage.side.get(name, [])
            copies[name] = ([source[position] for position, _ in pairs], [p for _, p in pairs])
        return {name: pair for name, pair in copies.items() if pair[1]}

    def complete(self, carriage: Carriage) -> None:
        """Give its pages to nodes that lack them; what finds no place stays with ``carriage``."""
        start = 0
        for node in carriage.nodes:
            presence = node.at(carriage.tier)
            if presence.is_published and presence.carriage is None:
                for name, pages in carriage.side.items():
                    there = dict(presence.side.get(name, ()))
                    mine = [
                        (position, page)
                        for position, page in pages
                        if 0 <= position - start < node.num_pages and position - start not in there
                    ]
                    there |= {position - start: page for position, page in mine}
                    presence.side[name] = sorted(there.items())
                    carriage.side[name] = [pair for pair in pages if pair not in mine]
            start += node.num_pages

    # -- what is complete ------------------------------------------------------------------------

    def lacking(self, path: Sequence[Node]) -> dict[str, list[int]]:
        """By side pool, the positions (from the start of ``path``) that a prefix which ends here
        needs, and that have no side page on DEVICE, nor one on its way."""
        found: dict[str, list[int]] = {}
        for side in self._pools:
            spec, start = side.spec, sum(node.num_pages for node in path)
            left, missing = spec.reach, list[int]()
            for node in reversed(path):
                start -= node.num_pages
                there = set(_positions(spec, node, Tier.DEVICE))  # membership only
                reached = range(max(0, node.num_pages - left), node.num_pages)
                missing[:0] = [start + at for at in reached if at not in there]
                left -= len(reached)
            if missing:
                found[spec.name] = missing
        return found

    def not_on_host(self, node: Node) -> dict[str, list[int]]:
        """By side pool, the positions that have a side page on DEVICE and none on HOST."""
        found: dict[str, list[int]] = {}
        for name, pages in node.device.side.items():
            there = {position for position, _ in node.host.side.get(name, ())}  # membership only
            if missing := [position for position, _ in pages if position not in there]:
                found[name] = missing
        return found

    # -- pages of nodes --------------------------------------------------------------------------

    def drop(self, presence: Presence, tier: Tier, ledger: Ledger, *, owned: bool) -> None:
        """A node leaves ``tier``; its side pages are free where it owned them itself."""
        taken, presence.side = presence.side, {}
        if not owned:
            return
        for side in self._pools:
            pages = [page for _, page in taken.get(side.spec.name, [])]
            side.pools[tier].free(pages)
            ledger.refund(side.spec.pool(tier), len(pages))

    def usable_end(
        self, path: Sequence[Node], tiers: Sequence[Tier], shared: int | None = None
    ) -> int:
        """How many nodes of ``path`` can be used: up to the last after which every state is there.

        A state counts where its node is used from: on the first of ``tiers`` that the node is in.
        So what lies on HOST beside an incomplete node on DEVICE does not count: nothing would load
        it. Of the last node ``shared`` pages are meant (``None``: all).
        """
        sizes = [node.num_pages for node in path]
        if shared is not None and sizes:
            sizes[-1] = shared
        for count in range(len(path), 0, -1):
            parts = list(zip(path[:count], sizes[:count], strict=True))
            if all(self._is_complete(side.spec, parts, tiers) for side in self._pools):
                return count
        return 0

    def _is_complete(
        self, spec: SideSpec, parts: Sequence[tuple[Node, int]], tiers: Sequence[Tier]
    ) -> bool:
        """Whether the last positions, as far as the pool's need reaches, have their side pages."""
        left = spec.reach
        for node, num_pages in reversed(parts):
            used = next((node.at(tier) for tier in tiers if node.at(tier).is_published), None)
            pages = used.side.get(spec.name, ()) if used is not None else ()
            there = {position for position, _ in pages}  # membership only
            for position in range(num_pages - 1, -1, -1):
                if left == 0:
                    return True
                if position not in there:
                    return False
                left -= 1
        return True

    def on_path(self, path: Sequence[Node]) -> SidePages:
        """Side pages on DEVICE of ``path``, with positions from its start."""
        found: SidePages = {side.spec.name: [] for side in self._pools}
        start = 0
        for node in path:
            for name, pages in node.device.side.items():
                found[name] += [(start + position, page) for position, page in pages]
            start += node.num_pages
        return found

    def owned(self, nodes: Sequence[Node], carriages: Sequence[Carriage]) -> dict[str, list[int]]:
        """By pool, the pages that nodes and open carriages own, for the audit."""
        owned: dict[str, list[int]] = {name: [] for name in self.pool_names()}
        for side in self._pools:
            name = side.spec.name
            for node in nodes:
                for tier in Tier:
                    if node.at(tier).carriage is None:
                        pages = node.at(tier).side.get(name, [])
                        owned[side.spec.pool(tier)] += [page for _, page in pages]
            for carriage in carriages:
                pages = carriage.side.get(name, [])
                owned[side.spec.pool(carriage.tier)] += [page for _, page in pages]
        return owned


def _positions(spec: SideSpec, node: Node, source: Tier | None) -> Sequence[int]:
    """The positions of ``node`` that have a side page in ``source``, or will have one there."""
    if source is None:
        return spec.positions(node.num_pages)
    presence = node.at(source)
    if presence.is_published or presence.carriage is None:
        return [position for position, _ in presence.side.get(spec.name, [])]
    first = presence.carriage.position_of(node)
    wanted = presence.carriage.side_wanted.get(spec.name, [])
    return [at - first for at in wanted if first <= at < first + node.num_pages]


def _of_insert(insert: Carriage, node: Node, name: str, start: int) -> dict[int, int]:
    if node not in insert.nodes:
        return {}
    first = insert.position_of(node)
    return {
        start + position - first: page
        for position, page in insert.side.get(name, [])
        if first <= position < first + node.num_pages
    }
