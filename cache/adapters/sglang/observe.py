"""SGLang's own cache, watched: says which decision of which rank differs first, changes nothing.

One more collective a step, applied a step later, hidden behind the forward pass. Whatever goes
wrong in watching is logged and ends the watching: it never raises in the scheduler.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvpact.cache.adapters.sglang.settings import Settings, join_ranks
from kvpact.consensus import Replica

__all__ = ["ObservingRadixCache"]

_log = logging.getLogger("kvpact")


class ObservingRadixCache(UnifiedRadixCache):
    """``watching`` is ``None`` with one rank, and once the watching has ended."""

    watching: Replica | None = None

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Join the other ranks, where there are any."""
        super().init_hicache(server_args, params)
        if self.cache_controller is None or self.tp_world_size == 1:
            return
        try:
            # Pools of 1: nothing is reserved, so nothing can differ in them.
            settings = Settings.from_environ(lag=1)
            self.watching = join_ranks(self, settings, {"none": 1}, "observe")
        except Exception:  # noqa: BLE001 - looking on must never end an engine
            _log.exception("kvpact: cannot observe; the engine goes on without")

    def _see(self, tag: str, *values: int | str) -> None:
        if self.watching is not None:
            self.watching.manager.note(tag, *values)

    def check_hicache_events(self) -> None:
        """SGLang's own, then one look at all ranks."""
        super().check_hicache_events()
        if self.watching is None:
            return
        try:
            self.watching.step()
        except Exception:  # noqa: BLE001 - looking on must never end an engine
            _log.exception("kvpact: observing ends here; the engine goes on without")
            watching, self.watching = self.watching, None
            watching.close(at_once=True)

    def _reset_full(self) -> None:
        super()._reset_full()
        self._see("reset")

    def insert(self, params: Any) -> Any:
        """Insert, and note what it found."""
        result = super().insert(params)
        self._see("insert", len(params.key), result.prefix_len)
        return result

    def _match_tree(self, params: Any) -> Any:
        result = super()._match_tree(params)
        self._see("match", len(params.key), result.full_kv_hit_length)
        return result

    def _evict(self, params: Any, *args: Any, **how: Any) -> Any:
        result = super()._evict(params, *args, **how)
        self._see("evict", params.num_tokens, result.num_tokens_evicted)
        return result

    def evict_host(self, num_tokens: int, *args: Any) -> int:
        """Evict, and note how much."""
        evicted = super().evict_host(num_tokens, *args)
        self._see("evict_host", num_tokens, evicted)
        return evicted

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        written = super()._execute_and_commit_kv_backup(action, write_back)
        self._see("back_up", len(action.node_ids), written)
        return written

    def init_load_back(self, params: Any) -> tuple[int, int] | None:
        """Load back, and note how much."""
        result = super().init_load_back(params)
        self._see("load_back", params.host_hit_length, result[0] if result else -1)
        return result
