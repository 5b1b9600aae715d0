"""Load-backs, host -> device: the participant, the requests in line, and how they are planned."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_radix_cache import _OngoingLoadBack

from kvpact.consensus import Intent, SharedPool, Ticket, Tickets, TicketState

__all__ = ["DEVICE", "LOAD_BACK", "LoadBacks", "Wish"]

DEVICE = "device"
LOAD_BACK = "load_back"


class Wish(msgspec.Struct):
    """A request's wish: the node to load down to, and what it pins."""

    req: Any
    node: int
    lock: Any
    host_lock: Any


class _Copy(msgspec.Struct):
    """One load: what is to be copied, and what this rank reserved for it."""

    ticket: Ticket[Wish]
    spec: Any
    transfers: dict[Any, Any]
    prepared: Any = None
    operation: Any = None


class LoadBacks:
    """Participant and line. The key of an intent is the node; its payload a ``_Copy``."""

    def __init__(self, cache: Any, manager: Any, pool: SharedPool[torch.Tensor]) -> None:
        self.cache = cache
        self.controller = cache.cache_controller
        self.manager = manager
        self.pool = pool
        self.tickets: Tickets[Wish] = Tickets(manager, self._release)

    # -- the request's side ----------------------------------------------------------------------

    def ask(self, req: Any, node: int) -> Ticket[Wish] | None:
        """A ticket for the host part of the path to ``node``; ``None``: it has asked enough."""

        def pin() -> Wish:
            host_lock = self.cache.inc_host_lock_ref(node).to_dec_params()
            return Wish(req, node, self.cache.inc_lock_ref(node).to_dec_params(), host_lock)

        return self.tickets.ask(req.rid, pin)

    def _release(self, wish: Wish) -> None:
        if wish.lock is not None:
            self.cache.dec_lock_ref(wish.node, wish.lock)
        if wish.host_lock is not None:
            self.cache.dec_host_lock_ref(wish.node, wish.host_lock)

    # -- the plan's side -------------------------------------------------------------------------

    def plan(self) -> None:
        """Open what is in line and has room, with one eviction for the sum. Agreed."""
        copies, claimed = list[_Copy](), self._loading()
        for ticket in self.tickets.in_line():
            node = ticket.wish.node
            spec, transfers = self.cache.tree_core.build_load_back_spec(node, req=ticket.wish.req)
            nodes, num_tokens = set(spec.nodes_to_load or ()), len(spec.host_indices)
            if nodes & claimed or self.manager.find(LOAD_BACK, node) is not None:
                continue  # another request loads some of it: then there is less to load, or nothing
            if not num_tokens:
                self.tickets.ready(ticket, 0)
            elif num_tokens < max(1, self.cache.load_back_threshold):
                self.tickets.refuse(ticket)
            else:
                claimed |= nodes
                copies.append(_Copy(ticket, spec, transfers))
        short = sum(len(copy.spec.host_indices) for copy in copies) - self.pool.room()
        if copies and short > 0:
            self.cache._evict(EvictParams(num_tokens=short))
        room = self.pool.room()
        for copy in copies:
            num_tokens, node = len(copy.spec.host_indices), copy.ticket.wish.node
            if num_tokens > room:
                continue  # it waits in line, for a bounded number of steps
            intent = self.manager.open(LOAD_BACK, node, {DEVICE: num_tokens}, self, payload=copy)
            if intent is None:
                break
            self.tickets.voting(copy.ticket, intent)
            room -= num_tokens

    def _loading(self) -> set[int]:
        return {
            node
            for intent in self.manager.open_intents
            if intent.kind == LOAD_BACK
            for node in intent.payload.spec.nodes_to_load or ()
        }

    def collect(self) -> None:
        """Tell the manager which loads have ended here."""
        for ack in self.controller.ack_load_queue:
            for node in ack.node_ids if ack.finish_event.query() else ():
                intent = self.manager.find(LOAD_BACK, node)
                if intent is not None and not intent.local_ended:
                    self.manager.mark_ended(intent)

    # -- the participant -------------------------------------------------------------------------

    def reserve_all(self, intent: Intent) -> bool:
        """Allocate device memory; the copy is taken off the queue again until its verdict."""
        copy, cache = intent.payload, self.cache
        wish = copy.ticket.wish
        copy.prepared = {
            one.component_type: one.prepare_load_back(wish.node, req=wish.req)
            for one in cache._components_tuple
        }
        side = [one for some in copy.transfers.values() for one in some]
        side += cache._build_sidecar_transfers(
            CacheTransferPhase.LOAD_BACK, copy.spec, copy.transfers
        )
        loaded = self.controller.load(
            host_indices=copy.spec.host_indices, node_id=intent.key, extra_pools=side or None
        )
        if loaded is None:
            self.pool.refused(intent)
            return False
        copy.operation = self.controller.load_queue.pop()
        return True

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """Everything is reserved by :meth:`reserve_all`."""
        raise NotImplementedError

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Everything is reserved by :meth:`reserve_all`, or nothing."""
        raise NotImplementedError

    def start(self, intent: Intent) -> None:
        """A load begins with its verdict: it would overwrite what a forward pass may still read."""

    def commit(self, intent: Intent) -> None:
        """Publish on the device, and queue the copy."""
        cache, copy = self.cache, intent.payload
        if self.manager.lag:
            self._fit(intent.key, copy)
        cache._apply_cache_actions(
            cache.tree_core.commit_load_back(
                intent.key, copy.operation.device_indices, copy.spec, copy.transfers
            )
        )
        wish = copy.ticket.wish
        lock = cache.inc_lock_ref(intent.key).to_dec_params()
        cache.ongoing_load_back[intent.key] = _OngoingLoadBack(intent.key, lock, wish.host_lock)
        wish.host_lock = None  # it goes with the load now
        self.controller.load_queue.append(copy.operation)
        self._finalize(copy, success=True)
        self.tickets.ready(copy.ticket, len(copy.spec.host_indices))

    def _fit(self, node: Any, copy: _Copy) -> None:
        """With lag the path may have been split, or computed again, since it was reserved."""
        now, _ = self.cache.tree_core.build_load_back_spec(node, req=copy.ticket.wish.req)
        if list(now.nodes_to_load or ()) == list(copy.spec.nodes_to_load or ()):
            return
        operation = copy.operation
        still = torch.isin(operation.host_indices.cpu(), now.host_indices.cpu())
        if not bool(still.all()):
            self._free(operation.device_indices[~still])
            operation.device_indices = operation.device_indices[still]
            operation.host_indices = operation.host_indices[still]
        assert torch.equal(operation.host_indices.cpu(), now.host_indices.cpu())
        copy.spec = now

    def abort(self, intent: Intent) -> None:
        """Give back what was reserved: nothing was copied yet."""
        copy = intent.payload
        if copy.operation is not None:
            self._free(copy.operation.device_indices)
            self.manager.mark_ended(intent)
        self.pool.decided(intent)
        if copy.prepared is not None:
            self._finalize(copy, success=False)
        self.tickets.refuse(copy.ticket)

    def _finalize(self, copy: _Copy, *, success: bool) -> None:
        for one in self.cache._components_tuple:
            one.finalize_load_back(copy.ticket.wish.req, copy.prepared[one.component_type], success)

    def _free(self, indices: torch.Tensor) -> None:
        allocator = self.cache.token_to_kv_pool_allocator
        getattr(allocator, "full_attn_allocator", allocator).free(indices)

    def ended(self, intent: Intent) -> None:
        """Unpin. The engine's allocator is the account of the device pool, not the ledger."""
        if not intent.is_committed:
            return
        cache = self.cache
        self.manager.give_back(DEVICE, intent.result)
        self.controller.ack_load_queue[:] = [
            ack for ack in self.controller.ack_load_queue if intent.key not in ack.node_ids
        ]
        node, lock, host_lock = cache.ongoing_load_back.pop(intent.key)
        cache.dec_lock_ref(node, lock)
        cache.dec_host_lock_ref(node, host_lock)
        cache.tree_core.finish_load_back(node)

    def is_pending(self, request: str) -> bool:
        """Whether the vote of ``request`` is open, or it waits for one."""
        ticket = self.tickets.of(request)
        return ticket is not None and ticket.is_pending

    def is_refused(self, request: str) -> bool:
        """Whether the vote of ``request`` went against it."""
        ticket = self.tickets.of(request)
        return ticket is not None and ticket.state is TicketState.REFUSED
