"""Settings by environment variables; the same on every rank, which the start checks."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvpact.consensus import Policy, Replica, StepLimits, join, share_store

__all__ = ["Settings", "join_ranks", "not_covered"]


class Settings(msgspec.Struct, frozen=True):
    """``lag`` steps, ``num_slots`` open intents, ``deadline_s`` of a step, where journals go."""

    lag: int = 0
    num_slots: int = 256
    deadline_s: float = 30.0
    journal: str = ""

    @classmethod
    def from_environ(cls, lag: int) -> Settings:
        """KVPACT_LAG (default ``lag``), KVPACT_SLOTS, KVPACT_DEADLINE_S, KVPACT_JOURNAL."""
        env = os.environ
        try:
            return cls(
                lag=int(env.get("KVPACT_LAG", lag)),
                num_slots=int(env.get("KVPACT_SLOTS", "256")),
                deadline_s=float(env.get("KVPACT_DEADLINE_S", "30")),
                journal=env.get("KVPACT_JOURNAL", ""),
            )
        except ValueError as error:
            raise SystemExit(f"kvpact: a KVPACT_ variable is not a number: {error}") from error


def join_ranks(
    cache: Any, settings: Settings, pools: dict[str, int], policy: str, **hooks: Any
) -> Replica:
    """Join the ranks of this cache's tensor-parallel group. ``pools`` are tokens by pool."""
    shared = share_store(cache.tp_group)
    replica = join(
        shared.host,
        shared.port,
        name="sglang",
        rank=shared.rank,
        ranks=range(shared.size),
        pools=pools,
        lag=settings.lag,
        num_slots=settings.num_slots,
        # SGLang has no call that takes a published host copy back: a copy is never given up.
        copy_timeout_s=1e6,
        limits=StepLimits(deadline_s=settings.deadline_s),
        policy=Policy(policy),
        facts={"page_size": str(cache.page_size)},
        journal_path=Path(settings.journal) / f"rank{shared.rank}.jsonl"
        if settings.journal
        else None,
        **hooks,
    )
    cache.kvpact_store = shared  # it is served as long as the cache lives
    return replica


def not_covered(cache: Any, server_args: Any) -> list[str]:
    """Features in use whose decisions this plugin does not take: each by its option or name."""
    found = {
        "--hicache-write-policy write_back": cache.is_write_back,
        "--hicache-host-memory-mode buffer_only": cache.buffer_pipeline is not None,
        "--hicache-storage-backend": cache.enable_storage,
        "--enable-unified-cache-external-linker": cache.linker is not None,
        "pipeline parallelism": cache.pp_size > 1,
        "sliding-window, Mamba or other side pools": len(cache.tree_components) > 1
        or bool(cache.sidecar_pool_specs),
        "context parallelism": _size(cache.attn_cp_group) > 1,
        "--disaggregation-decode-retraction-backup host_pool": getattr(
            server_args, "disaggregation_decode_retraction_backup", None
        )
        == "host_pool",
    }
    return [name for name, is_used in found.items() if is_used]


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())
