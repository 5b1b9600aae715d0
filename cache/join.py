"""One rank put together: from a configuration and the store's address to a cache that can step.

:func:`join_cache` is all that an engine needs. Its parts are here by name for those who bring one
of their own: pools that refuse, a mover with faults, a group that is simulated.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.cpu import CpuMover
from kvpact.cache.copies.cuda import CudaMover
from kvpact.cache.copies.mover import Mover
from kvpact.cache.copies.side_pools import SidePool
from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.hierarchical_cache import HierarchicalCache, config_facts, schema_of
from kvpact.cache.memory.engine_tensors import EngineTensors, host_pages_for
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.memory.tensors import KVTensors
from kvpact.cache.storage import BackendBase, Identity, PageKeys, StorageWorkers
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.border import as_count, as_text
from kvpact.consensus.core.errors import KvpactError, Misuse
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.report import Incident
from kvpact.consensus.membership import DEFAULT_NAME, Membership, check_ranks
from kvpact.consensus.provenance import require_installed_files

__all__ = ["join_cache", "join_replica", "make_mover", "make_pools", "make_tensors"]

_log = logging.getLogger("kvpact")


def join_cache(
    config: CacheConfig,
    host: str,
    port: int,
    *,
    name: str = DEFAULT_NAME,
    rank: int,
    ranks: Sequence[int],
    device: torch.device | str = "cpu",
    device_tensors: EngineTensors | None = None,
    forward_stream: torch.cuda.Stream | None = None,
    open_storage: Callable[[Identity], BackendBase] | None = None,
    model: str = "",
    side: Sequence[SidePool] = (),
    journal_path: Path | None = None,
    start_timeout_s: float = 60.0,
    leave_timeout_s: float = 5.0,
    on_incident: Callable[[Incident], None] | None = None,
    on_alarm: Callable[[KvpactError], None] | None = None,
) -> HierarchicalCache:
    """Build this rank's tensors, pools and copies, join replica ``name``, return its cache.

    ``host:port`` is the store (:func:`kvpact.consensus.transport.gloo.serve_tcp_store`, or any
    TCPStore of torch, as torchrun's agent has one at MASTER_ADDR:MASTER_PORT). ``ranks`` are all
    ranks of the replica; where several replicas share a store, each has a ``name`` of its own. An
    earlier run of that name in this store does not matter. K and V of the device tier live on
    ``device``, in tensors of ``config.kv_shape``; or they are ``device_tensors``, an engine's own,
    and ``device`` and ``kv_shape`` say nothing. With CUDA the host tier is page-locked and copies
    wait for ``forward_stream``, by default the stream that is current on the calling thread. The
    journal is written to
    ``journal_path`` where one is given.

    With ``open_storage`` there is a storage tier: it is called with whose pages they are (``model``
    names the weights) and returns a backend, e.g. by :func:`kvpact.cache.storage.open_backend`.
    ``side`` are the pools of ``config.side_pools``, over tensors of the engine's.
    ``on_incident`` is called inside ``step()`` with each end of an epoch and each observed finding:
    :class:`kvpact.consensus.IncidentFiles` writes them where ``kvpact explain`` reads them.
    ``on_alarm`` is called from a thread of its own, with the error that the next ``step()`` will
    raise, where ranks differ or give up while this rank's scheduler is somewhere else, as in a
    forward pass that waits for them; not where the policy lets all ranks go on. It may log, or
    end the process; it must not use the cache.

    The cache owns all else: ``close()`` (or leaving its ``with`` block) waits at most
    ``leave_timeout_s`` for the other ranks, so that none loses a verdict that is under way.

    Raises :class:`Misuse` where ranks are configured differently, two processes have one number or
    such a replica runs already, :class:`RankStalled` or :class:`PeerLost` where one does not come
    within ``start_timeout_s`` or cannot be reached, :class:`StoreSilent` without a store,
    :class:`ResourceError` where the memory cannot be had, :class:`BadInput` where the storage
    cannot be used. Nothing is left behind.
    """
    require_installed_files()
    ranks = check_ranks(rank, ranks)
    as_text("model", model)
    as_text("name", name)
    as_count("port", port, 1, 65535)
    _check_side(config, side)
    with ExitStack() as parts:
        # What can fail on this rank alone comes before the others hear of it.
        tensors: Mapping[Tier, PagedMemory] = (
            make_tensors(config, device)
            if device_tensors is None
            else tiers_of(config, device_tensors)
        )
        mover = make_mover(tensors[Tier.DEVICE], tensors[Tier.HOST], forward_stream)
        parts.callback(mover.close)
        journal = Journal(rank, path=journal_path)
        parts.callback(journal.close)
        pools = make_pools(config)
        storage: StorageIo | None = None
        if open_storage is not None:
            layout = tensors[Tier.HOST].described
            identity = _identity(config, model, layout, ranks.index(rank), len(ranks))
            backend = open_storage(identity)
            parts.callback(backend.close)
            workers = StorageWorkers(backend)
            parts.callback(workers.close)
            keys = PageKeys(identity, config.weights)
            storage = StorageIo(workers, keys, pools[Tier.HOST], tensors[Tier.HOST])
        membership = join_replica(
            config,
            host,
            port,
            name=name,
            rank=rank,
            ranks=ranks,
            start_timeout_s=start_timeout_s,
            has_storage=storage is not None,
        )
        parts.callback(membership.close)
        closing = ExitStack()
        cache = HierarchicalCache(
            config,
            group=membership.group,
            store=membership.store,
            pools=pools,
            mover=mover,
            usable=membership.usable,
            journal=journal,
            locator=membership.locator,
            beacon=membership.watch,
            regroup=membership.regroup,
            on_close=closing.close,
            storage=storage,
            side=side,
        )
        cache.stepper.change.on_incident = on_incident
        cache.store_health = membership.watch
        membership.watch_over(cache.stepper, on_alarm)
        closing.enter_context(parts.pop_all())
        closing.callback(membership.leave, leave_timeout_s)
        if config.freezes_gc:
            gc.collect()
            gc.freeze()
            _log.info("gc.freeze: %d objects are not walked any more", gc.get_freeze_count())
        return cache


def join_replica(
    config: CacheConfig,
    host: str,
    port: int,
    *,
    name: str = DEFAULT_NAME,
    rank: int,
    ranks: Sequence[int],
    start_timeout_s: float = 60.0,
    has_storage: bool = False,
) -> Membership:
    """Meet the other ranks for a cache of this configuration; see :meth:`Membership.join`."""
    return Membership.join(
        host,
        port,
        name=name,
        rank=rank,
        ranks=ranks,
        width=schema_of(config).width,
        facts={**config_facts(config), "storage tier": "yes" if has_storage else "no"},
        usable={
            **{tier.value: num_pages for tier, num_pages in _num_pages(config).items()},
            **{
                spec.pool(tier): config.side_pages[spec.name][index]
                for spec in config.side_pools
                for index, tier in enumerate((Tier.DEVICE, Tier.HOST))
            },
        },
        deadline_s=config.deadline_s,
        start_timeout_s=start_timeout_s,
    )


def _check_side(config: CacheConfig, side: Sequence[SidePool]) -> None:
    given, wanted = {pool.spec for pool in side}, set(config.side_pools)
    if given != wanted:
        names = sorted(spec.name for spec in given ^ wanted)
        raise Misuse(f"side and config.side_pools must name the same pools, they differ in {names}")


def make_pools(config: CacheConfig) -> dict[Tier, PagePool]:
    """The pages of each tier of this rank, all free."""
    return {tier: PagePool(tier.value, number) for tier, number in _num_pages(config).items()}


def make_tensors(config: CacheConfig, device: torch.device | str = "cpu") -> dict[Tier, KVTensors]:
    """K and V of each tier: DEVICE on ``device``, HOST on the CPU, page-locked where CUDA copies.

    Raises :class:`ResourceError` where the memory cannot be had.
    """
    shape, size = config.kv_shape, config.page_size
    is_cuda = torch.device(device).type == "cuda"
    return {
        Tier.DEVICE: KVTensors(shape, config.device_pages, size, device),
        Tier.HOST: KVTensors(shape, config.host_pages, size, pin_memory=is_cuda),
    }


def tiers_of(config: CacheConfig, device_tensors: EngineTensors) -> dict[Tier, PagedMemory]:
    """The engine's tensors, and a host tier for their pages.

    Raises as :func:`make_tensors`, and :class:`Misuse` where they do not fit the configuration.
    """
    if (
        device_tensors.page_size != config.page_size
        or device_tensors.num_pages < config.device_pages
    ):
        raise Misuse(
            f"device_tensors have {device_tensors.num_pages} pages of {device_tensors.page_size}"
            f" tokens, the configuration wants {config.device_pages} of {config.page_size}"
        )
    is_cuda = device_tensors.device.type == "cuda"
    host = host_pages_for(device_tensors, config.host_pages, pin_memory=is_cuda)
    return {Tier.DEVICE: device_tensors, Tier.HOST: host}


def make_mover(
    device: PagedMemory, host: PagedMemory, forward_stream: torch.cuda.Stream | None = None
) -> Mover:
    """Copies on side streams where the device tier is on CUDA, else on a thread."""
    if device.device.type == "cuda":
        return CudaMover(device, host, forward_stream=forward_stream)
    return CpuMover(device, host)


def _num_pages(config: CacheConfig) -> dict[Tier, int]:
    return {Tier.DEVICE: config.device_pages, Tier.HOST: config.host_pages}


def _identity(config: CacheConfig, model: str, layout: str, place: int, num_ranks: int) -> Identity:
    """Name the owner of the storage's pages: nothing of another model, layout or rank fits."""
    return Identity(
        model=model,
        layout=layout,
        page_size=config.page_size,
        rank=place,
        tp=num_ranks,
    )
