"""Backups of nodes, device -> host: the participant, and how they are planned."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

import msgspec

from kvpact.consensus import ChainFate, ChainPlan, Intent, Link

__all__ = ["BACK_UP", "HOST", "BackUps"]

HOST = "host"
BACK_UP = "back_up"


class _Copy(msgspec.Struct):
    """One node's copy: its tokens on the device, and what this rank reserved for it."""

    device: Any
    transfers: dict[Any, Any]
    host: Any = None
    operation: Any = None


class BackUps:
    """Participant and queue. The key of an intent is the node; its payload a ``_Copy``."""

    def __init__(self, cache: Any, manager: Any) -> None:
        self.cache = cache
        self.controller = cache.cache_controller
        self.manager = manager
        self.queue: dict[int, Any] = {}  # leaf -> its lock, in the order of insertion
        self.plan_chains: ChainPlan[int] = ChainPlan(
            manager,
            BACK_UP,
            self,
            lambda pool, num_tokens: cache.evict_host(num_tokens),
            spare_slots=manager.schema.num_slots // 4,  # for load-backs: requests wait for them
        )

    def add(self, leaf: int) -> None:
        """Queue the chain that ends in ``leaf``: its ancestors are found when it is planned."""
        if leaf not in self.queue:
            self.queue[leaf] = self.cache.inc_lock_ref(leaf).to_dec_params()

    def plan(self) -> None:
        """Open what is queued, with one eviction for all of it. Agreed."""
        fates = self.plan_chains.open(list(self.queue), self._links)
        for leaf, fate in fates.items():
            if fate is not ChainFate.WAITS:
                self.cache.dec_lock_ref(leaf, self.queue.pop(leaf))

    def _links(self, leaf: int) -> list[Link]:
        core, links = self.cache.tree_core, list[Link]()
        for node in core.build_backup_kv_action(leaf).node_ids:
            if self.manager.find(BACK_UP, node) is not None:
                links.append(Link(node, {}))
                continue
            device, transfers = core.build_backup_spec(node)
            if device.numel():
                links.append(Link(node, {HOST: len(device)}, _Copy(device, transfers)))
        return links

    def collect(self) -> None:
        """Tell the manager which copies have ended here: in any order, one blocks nobody."""
        running = []
        for ack in self.controller.ack_write_queue:
            if not ack.finish_event.query():
                running.append(ack)
                continue
            for node in ack.node_ids:
                intent = self.manager.find(BACK_UP, node)
                if intent is not None and intent.key == node and not intent.local_ended:
                    self.manager.mark_ended(intent)
        self.controller.ack_write_queue[:] = running

    def was_split(self, node: int, new_nodes: list[int]) -> None:
        """Find the intent of ``node`` under its parts too."""
        intent = self.manager.find(BACK_UP, node)
        if intent is not None:
            for part in new_nodes:
                if part != intent.key:
                    self.manager.alias(intent, part)

    # -- the participant -------------------------------------------------------------------------

    def opened(self, intent: Intent) -> None:
        """Pin the node, and mark that a copy is on its way."""
        cache = self.cache
        lock = cache.inc_lock_ref(intent.key).to_dec_params()
        nodes = cache._backup_publish_node_ids(intent.key, intent.payload.transfers)
        cache._track_write_through_node(intent.key, lock, publish_node_ids=nodes)

    def reserve_all(self, intent: Intent) -> bool:
        """Allocate host memory; the copy is taken off the queue again until it may start."""
        copy = intent.payload
        side = [one for some in copy.transfers.values() for one in some]
        side += self.cache._build_backup_sidecar(copy.device, copy.transfers)
        copy.host = self.controller.write(
            copy.device, node_id=intent.key, extra_pools=side or None, flush=False
        )
        if copy.host is not None:
            copy.operation = self.controller.write_queue.pop()
        return copy.host is not None

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """Everything is reserved by :meth:`reserve_all`."""
        raise NotImplementedError

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Everything is reserved by :meth:`reserve_all`, or nothing."""
        raise NotImplementedError

    def start(self, intent: Intent) -> None:
        """Queue the copy: all of one step are submitted as one."""
        self.controller.write_queue.append(intent.payload.operation)

    def commit(self, intent: Intent) -> None:
        """Publish on the host; a node that was split since gets its parts, front to back."""
        core, copy = self.cache.tree_core, intent.payload
        nodes = self.cache.ongoing_write_through[intent.key].publish_node_ids
        if len(nodes) == 1:
            core.commit_backup(intent.key, copy.host, copy.transfers)
            return
        done = 0
        for node in nodes:
            length = len(core.build_backup_spec(node)[0])
            part = copy.host[done : done + length].clone()
            core.commit_backup(node, part, copy.transfers if node == intent.key else {})
            done += length
        assert done == len(copy.host), "the parts of a node are the node"

    def abort(self, intent: Intent) -> None:
        """The copy may still run: its memory is kept until it has ended everywhere."""

    def ended(self, intent: Intent) -> None:
        """Unpin; what was not committed gives its host memory back."""
        cache, copy = self.cache, intent.payload
        if intent.is_committed:
            cache._finish_write_through_ack(intent.key)
            return
        if copy.operation is not None:
            self.controller.mem_pool_host.free(copy.host)
            self.controller.mem_pool_host.release_transfers(copy.operation.pool_transfers)
        entry = cache.ongoing_write_through.pop(intent.key)
        cache.tree_core.finish_write_through(entry.publish_node_ids, intent.key)
        cache.dec_lock_ref(entry.node_id, entry.lock_params)
