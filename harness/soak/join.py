"""Puts one rank of a soak together: joins the replica, with the seams for faults filled."""

from __future__ import annotations

import os
from contextlib import ExitStack

from kvpact.cache.config import schema_of
from kvpact.cache.copies.mover import Mover, PlanPart
from kvpact.cache.join import join_replica, make_mover
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.storage import BackendBase, StorageWorkers, open_backend
from kvpact.cache.tree.node import Tier
from kvpact.consensus.membership import Membership
from kvpact.consensus.transport.gloo import Group, NcclGroup, open_tcp_store
from kvpact.consensus.transport.store import Store
from kvpact.harness.faults.board import FaultyPool
from kvpact.harness.rank.rank import Rank, identity_of
from kvpact.harness.soak.config import SoakConfig, cache_config
from kvpact.harness.soak.coverage import Coverage, CoveringJournal
from kvpact.harness.soak.feed import Feed
from kvpact.harness.soak.own_votes import OwnVotes
from kvpact.harness.soak.process_faults import ProcessFaults
from kvpact.harness.verify.journals import journal_path

__all__ = ["Joined", "faulty_pools", "join", "make_backend"]

LEAVE_S = 20.0


class Joined:
    """A rank that is in its replica, and what harms and watches it.

    ``store`` carries the wish to stop early; ``None``: there is nobody to wish for it.
    """

    def __init__(
        self, rank: Rank, process_faults: ProcessFaults, coverage: Coverage, store: Store | None
    ) -> None:
        self.rank = rank
        self.process_faults = process_faults
        self.coverage = coverage
        self.store = store


def faulty_pools(
    config: SoakConfig, rank: int, process_faults: ProcessFaults
) -> dict[Tier, PagePool]:
    """The pools of ``rank``, whose reservations the plan may refuse."""
    host = "staging" if config.mode == "buffer_only" else "host"
    return {
        Tier.DEVICE: FaultyPool("device", config.device_pages[rank], process_faults.board),
        Tier.HOST: FaultyPool(host, config.host_pages[rank], process_faults.board),
    }


def make_backend(config: SoakConfig, rank: int) -> BackendBase | None:
    """The storage of ``rank``."""
    if config.storage == "none":
        return None
    identity = identity_of(cache_config(config, rank), rank, config.num_ranks)
    capacity = config.storage_mb << 20
    return open_backend(config.storage, identity, capacity_bytes=capacity, path=config.storage_dir)


def join(
    config: SoakConfig, feed: Feed, host: str, port: int, start_timeout_s: float, stack: ExitStack
) -> Joined:
    """Meet the other ranks through the store at ``host:port``; ``stack`` takes it all back.

    Raises what :meth:`kvpact.consensus.membership.Membership.join` raises.
    """
    coverage = Coverage()
    cached = cache_config(config, feed.rank)
    membership = join_replica(
        cached,
        host,
        port,
        name="soak",
        rank=feed.rank,
        ranks=range(config.num_ranks),
        start_timeout_s=start_timeout_s,
    )
    feed.begin_clock()
    stack.callback(membership.close)
    process_faults = ProcessFaults(
        config.plan, feed.rank, config.fault_seed, feed.events.append, feed.now_s
    )
    stack.callback(process_faults.close)
    backend = make_backend(config, feed.rank)
    first_slot = schema_of(cached).first_slot

    def regroup(epoch: int) -> Group:
        group = membership.regroup(epoch)
        return OwnVotes(group, first_slot) if config.unsafe_no_votes else group

    rank = Rank(
        cached,
        group=_group(config, membership, host, port, first_slot),
        store=membership.store,
        pools=faulty_pools(config, feed.rank, process_faults),
        usable=membership.usable,
        make_mover=_make_mover,
        locator=membership.locator,
        journal=CoveringJournal(feed.rank, coverage, journal_path(config.journal, feed.rank)),
        beacon=membership.watch,
        regroup=None if config.backend == "nccl" else regroup,
        plan_part=process_faults.board.plan_part,
        device=config.device,
        workers=None
        if backend is None
        else StorageWorkers(backend, plan_page=process_faults.board.plan_page),
        backend=backend,
    )
    stack.callback(rank.close)
    # First of all on the way out: nobody breaks off while another waits for the last verdict.
    stack.callback(membership.leave, LEAVE_S)
    if config.backend == "gloo":
        membership.watch_over(rank.cache.stepper)
    return Joined(rank, process_faults, coverage, membership.store)


def _make_mover(device: PagedMemory, host: PagedMemory, plan: PlanPart | None) -> Mover:
    mover = make_mover(device, host)
    mover.plan_part = plan
    return mover


def _group(
    config: SoakConfig, membership: Membership, host: str, port: int, first_slot: int
) -> Group:
    group: Group = membership.group
    if config.backend == "nccl":
        # Or torch ends the process when a peer dies, before anybody could say so.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        group = NcclGroup.form(
            open_tcp_store(host, port, config.deadline_s),
            "soak/nccl",
            range(config.num_ranks),
            group.rank,
            group.width,
            4 * config.deadline_s,
        )
    return OwnVotes(group, first_slot) if config.unsafe_no_votes else group
