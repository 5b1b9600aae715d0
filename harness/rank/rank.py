"""One rank put together: tensors, pools, mover and cache, for simulated and real groups alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.mover import Mover, PlanPart
from kvpact.cache.copies.side_pools import SidePool
from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import make_tensors, tiers_of
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.memory.tensors import KVTensors
from kvpact.cache.storage import BackendBase, Identity, PageKeys, Workers
from kvpact.cache.tree.node import Node, SidePages, Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.closing import Locator
from kvpact.consensus.step.step import Beacon
from kvpact.consensus.transport.gloo import Group
from kvpact.consensus.transport.store import Store
from kvpact.harness.rank.layouts import LAYOUTS
from kvpact.harness.verify.agreement import by_weights, hashes_of, wrong_bytes
from kvpact.harness.verify.content import fill_pages

__all__ = ["MakeMover", "Rank", "identity_of"]

MakeMover = Callable[[PagedMemory, PagedMemory, PlanPart | None], Mover]


class Rank:
    """A rank's cache with real tensors behind it, and the bytes that belong into them."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        group: Group,
        store: Store,
        pools: Mapping[Tier, PagePool],
        usable: Mapping[str, int],
        make_mover: MakeMover,
        locator: Locator,
        journal: Journal,
        beacon: Beacon | None = None,
        regroup: Callable[[int], Group] | None = None,
        plan_part: PlanPart | None = None,
        device: str = "cpu",
        workers: Workers | None = None,
        backend: BackendBase | None = None,
        side_pools: Mapping[str, Mapping[Tier, PagePool]] | None = None,
        layout: str = "own",
    ) -> None:
        self.tensors = _tensors(config, device, layout)
        self.mover = make_mover(self.tensors[Tier.DEVICE], self.tensors[Tier.HOST], plan_part)
        self.workers = workers
        self.backend = backend
        self._io: StorageIo | None = None
        copier: StorageIo | None = None
        if workers is not None:
            keys = PageKeys(identity_of(config, group.rank, group.size), config.weights)
            copier = StorageIo(workers, keys, pools[Tier.HOST], self.tensors[Tier.HOST])
            self._io = copier
        self.side = [
            self._side_pool(config, spec, (side_pools or {})[spec.name], make_mover)
            for spec in config.side_pools
        ]
        self.cache = HierarchicalCache(
            config,
            group=group,
            store=store,
            pools=pools,
            mover=self.mover,
            usable=usable,
            journal=journal,
            locator=locator,
            beacon=beacon,
            regroup=regroup,
            storage=copier,
            side=self.side,
        )

    def _side_pool(
        self,
        config: CacheConfig,
        spec: SideSpec,
        pools: Mapping[Tier, PagePool],
        make_mover: MakeMover,
    ) -> SidePool:
        """A side pool has one small page of its own bytes per KV page that needs one."""
        device, host = config.side_pages[spec.name]
        tensors = [KVTensors(config.kv_shape, number, 1) for number in (device, host)]
        return SidePool(spec, pools, make_mover(tensors[0], tensors[1], None))

    @property
    def keys(self) -> PageKeys | None:
        """What pages are called in this rank's storage now."""
        return None if self._io is None else self._io.keys

    def heal(self) -> None:
        """What a fault withheld ends at the next step."""
        for mover in self.movers:
            mover.heal()
        if self.workers is not None:
            self.workers.heal()

    @property
    def movers(self) -> list[Mover]:
        """Of the KV pages, and of each side pool."""
        return [self.mover, *(side.mover for side in self.side)]

    def close(self) -> None:
        """End the cache and all threads; bounded."""
        self.cache.close()
        for mover in self.movers:
            mover.close()
        if self.workers is not None:
            self.workers.close()

    def compute(self, nodes: list[Node], pages: list[int]) -> None:
        """Write what an engine would compute for ``nodes`` into device ``pages``, in order."""
        fill_pages(self.tensors[Tier.DEVICE], pages, self._contents(nodes), self.cache.rank)

    def compute_side(self, nodes: list[Node], side_pages: SidePages, wrong: int = 0) -> None:
        """Write their state into side pages; other bytes where ``wrong`` is not 0."""
        contents = self._contents(nodes)
        for side in self.side:
            held = side_pages.get(side.spec.name, [])
            own = [contents[position] ^ wrong for position, _ in held]
            fill_pages(side.mover.device, [page for _, page in held], own, self.cache.rank)

    def _contents(self, nodes: list[Node]) -> list[int]:
        hashes = [page_hash for node in nodes for page_hash in hashes_of(self.cache, node)]
        return by_weights(hashes, self.cache.weights)

    def wrong_bytes(self, nodes: list[Node] | None = None) -> list[str]:
        """See :func:`kvpact.harness.verify.agreement.wrong_bytes`."""
        side = {
            one.spec.name: {Tier.DEVICE: one.mover.device, Tier.HOST: one.mover.host}
            for one in self.side
        }
        return wrong_bytes(self.cache, self.tensors, nodes, side)


def _tensors(config: CacheConfig, device: str, layout: str) -> Mapping[Tier, PagedMemory]:
    if layout == "own":
        return make_tensors(config, device)
    return tiers_of(config, LAYOUTS[layout](config.device_pages, config.page_size).memory)


def identity_of(config: CacheConfig, rank: int, num_ranks: int) -> Identity:
    """Whose pages the storage holds: nothing of another model, layout or rank fits."""
    shape = config.kv_shape
    return Identity(
        model="kvpact-harness",
        layout=f"{shape.layers}x{shape.heads}x{shape.dim} {shape.dtype}",
        page_size=config.page_size,
        rank=rank,
        tp=num_ranks,
    )
