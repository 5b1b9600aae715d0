"""SGLang's radix cache with its decisions taken by all ranks together.

What decides is replaced: backups, load-backs, and the acknowledgement of both. The tree, the pools
and the copies stay SGLang's.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvpact.cache.adapters.sglang.back_up import HOST, BackUps
from kvpact.cache.adapters.sglang.load_back import DEVICE, LoadBacks
from kvpact.cache.adapters.sglang.settings import Settings, join_ranks, not_covered
from kvpact.consensus import Replica, SharedPool

__all__ = ["DecidingRadixCache"]


class DecidingRadixCache(UnifiedRadixCache):
    """``replica`` is ``None`` with one rank or without a host tier: then it is SGLang's own."""

    replica: Replica | None = None

    # -- life ------------------------------------------------------------------------------------

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Join the other ranks. Ends the process where a feature in use is not covered."""
        super().init_hicache(server_args, params)
        if self.cache_controller is None or self.tp_world_size == 1:
            return
        if missing := not_covered(self, server_args):
            raise SystemExit(
                f"kvpact: mode decide does not cover {', '.join(missing)}. Start without these, or"
                " with KVPACT_MODE=observe"
            )
        allocator = self.token_to_kv_pool_allocator
        pools = {
            DEVICE: allocator.available_size(),
            HOST: self.cache_controller.mem_pool_host.available_size(),
        }
        self.replica = join_ranks(
            self,
            Settings.from_environ(lag=0),
            pools,
            "raise",
            plan=self._plan,
            submit=self.cache_controller.start_writing,
            live=self._digest_of_waiting,
            waits=self._waiting,
        )
        self.shared = SharedPool(
            DEVICE,
            take=allocator.alloc,
            free=allocator.free,
            available=lambda: self._component_available_size(ComponentType.FULL),
        )
        self.shared.adopt(pools[DEVICE], self.replica.agreed[DEVICE])
        clear = allocator.clear

        def clear_and_hold() -> None:  # flush_cache clears the allocator after reset()
            clear()
            self.shared.cleared()

        allocator.clear = clear_and_hold
        self._begin()

    def _begin(self) -> None:
        assert self.replica is not None
        self.back_ups = BackUps(self, self.replica.manager)
        self.load_backs = LoadBacks(self, self.replica.manager, self.shared)
        self._load_slot = -1

    def _reset_full(self) -> None:
        super()._reset_full()
        if self.replica is not None:
            self.replica.renew()
            self._begin()

    def shutdown(self) -> None:
        """Close, without waiting for others: the engine may end them in any order."""
        super().shutdown()
        if self.replica is not None:
            self.replica.close(at_once=True)

    def attach_storage_backend(self, *args: Any, **how: Any) -> tuple[bool, str]:
        """Refuse: what storage decides is not covered."""
        if self.replica is None:
            return super().attach_storage_backend(*args, **how)
        return False, "kvpact: mode decide does not cover a storage backend"

    # -- the step --------------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Once a round of the scheduler: the one collective, and what it decides."""
        if self.replica is None:
            super().check_hicache_events()
            return
        self._drain_async_work()
        self.replica.step()
        # Not with the next batch: it may never come, and what is loaded is pinned.
        if self.cache_controller.load_queue and self.has_free_load_back_slot():
            self._load_slot = self.cache_controller.start_loading()

    def _digest_of_waiting(self) -> int:
        return self.load_backs.tickets.digest

    def _waiting(self) -> dict[str, str]:
        return self.load_backs.tickets.waits()

    def _plan(self) -> None:
        self.back_ups.collect()
        self.load_backs.collect()
        self.load_backs.plan()
        self.back_ups.plan()

    def ready_to_load_host_cache(self) -> int:
        """The counter of the loads that the next forward pass waits for; -1: none runs."""
        if self.replica is None:
            return super().ready_to_load_host_cache()
        return self._load_slot if self.cache_controller.ack_load_queue else -1

    def flush_pending_backups(self) -> None:
        """Nothing: what is queued is reserved, voted and submitted by the next step."""
        if self.replica is None:
            super().flush_pending_backups()

    # -- between steps: the same calls in the same order on every rank ----------------------------

    def _note(self, tag: str, *values: int | str) -> None:
        if self.replica is not None:
            self.replica.manager.note(tag, *values)

    def insert(self, params: Any) -> Any:
        """Insert, and note what it found."""
        result = super().insert(params)
        self._note("insert", len(params.key), result.prefix_len)
        return result

    def _evict(self, params: Any, *args: Any, **how: Any) -> Any:
        result = super()._evict(params, *args, **how)
        self._note("evict", params.num_tokens, result.num_tokens_evicted)
        return result

    def _match_tree(self, params: Any) -> Any:
        result = super()._match_tree(params)
        self._note("match", len(params.key), result.full_kv_hit_length)
        return result

    def _drain_host_frees(self, host_frees: dict[Any, list[Any]]) -> None:
        """Host pages leave the tree here, and only here."""
        freed = sum(len(value) for value in host_frees.get(ComponentType.FULL, ()))
        super()._drain_host_frees(host_frees)
        if freed and self.replica is not None:
            self.replica.manager.give_back(HOST, freed)

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        if self.replica is None:
            return super()._execute_and_commit_kv_backup(action, write_back)
        self.back_ups.add(action.node_ids[-1])
        return 0

    def _replace_pending_write_through_node(
        self, ack_id: int, old_node_id: int, new_node_ids: list[int]
    ) -> None:
        super()._replace_pending_write_through_node(ack_id, old_node_id, new_node_ids)
        if self.replica is not None:
            self.back_ups.was_split(ack_id, new_node_ids)

    # -- requests --------------------------------------------------------------------------------

    def must_wait_for_vote(self, req: Any) -> bool:
        """Whether ``req`` must be skipped this round; asks for its load-back the first time."""
        if self.replica is None or not req.needs_host_load_back():
            return False
        if self.load_backs.is_refused(req.rid):
            return False  # it computes what could not be loaded
        self.load_backs.ask(req, req.best_match_node)
        return self.load_backs.is_pending(req.rid)

    def init_load_back(self, params: Any) -> tuple[int, int] | None:
        """``None`` while the vote is open. What was loaded is on the device by the next match."""
        if self.replica is None:
            return super().init_load_back(params)
        return None if self.must_wait_for_vote(params.req) else (0, params.req.last_node)

    def checkpoint(self, req: Any, *, up_to: int, **how: Any) -> None:
        """The request has a lock of its own by now: its ticket is taken."""
        if self.replica is not None:
            self.load_backs.tickets.drop(req.rid)
        super().checkpoint(req, up_to=up_to, **how)

    def release_aborted_request(self, request: Any) -> None:
        """An aborted request waits for nothing; legal while its vote is open."""
        if self.replica is not None:
            self.load_backs.tickets.drop(request.rid)
        super().release_aborted_request(request)
