"""One configuration, validated once; units are in the names."""

from __future__ import annotations

from typing import Final

import msgspec

from kvpact.cache.choices import Eviction, Mode, PrefetchPolicy
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.tree.node import STORAGE, Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.ballot import MASK62, Schema
from kvpact.consensus.core.border import as_choice, as_count, as_flag, as_seconds, as_text
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.epoch.report import PolicyKind

__all__ = ["CacheConfig", "config_facts", "schema_of"]


_POSITIVE = (
    "copy_timeout_s",
    "warn_s",
    "deadline_s",
    "grace_s",
    "reset_window_s",
)
_SECONDS = (*_POSITIVE, "prefetch_timeout_s", "progress_timeout_s")
#: Whole numbers, and the least that each can be.
_LEAST: Final = {
    "page_size": 1,
    "device_pages": 1,
    "host_pages": 0,
    "lag": 0,
    "pipeline_stages": 1,
    "num_slots": 16,
    "headroom_pages": 0,
    "low_water_pages": 0,
    "load_back_minimum_pages": 1,
    "prefetch_minimum_pages": 1,
    "storage_queue_pages": 1,
    "events_max": 0,
    "write_queue_nodes_max": 1,
    "waiting_tickets_max": 1,
    "max_resets": 0,
    "integrity_every_steps": 0,
}
_FLAGS = ("evicts_whole_nodes", "verifies_copies", "freezes_gc")
_CHOICES: Final = {
    "mode": Mode,
    "eviction": Eviction,
    "prefetch_policy": PrefetchPolicy,
    "policy": PolicyKind,
}


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one rank's cache.

    ``device_pages`` and ``host_pages`` are this rank's own and may differ between ranks (0 host
    pages: no host tier), and so are ``side_pages`` (device and host pages of each side pool);
    everything else must be equal on all ranks.

    ``policy`` (:class:`~kvpact.consensus.epoch.report.PolicyKind`) says what follows a divergence,
    ``mode`` how pages come to the other tiers, ``eviction`` who goes first in both tiers, and
    ``prefetch_policy`` with ``prefetch_timeout_s`` (agreed clock) when a prefetch is done: each is
    one of the words of :mod:`kvpact.cache.choices`, as a text or as a member.
    ``low_water_pages``: write-back demotes ahead of need to keep so many device pages free.
    ``storage_queue_pages`` bounds what is on its way to storage. ``events_max`` bounds the events
    kept for :meth:`HierarchicalCache.events` (0: none are made).
    ``weights`` is the version of the weights that the ranks start with; see
    :meth:`HierarchicalCache.new_weights`. A rank that starts with another is refused.
    ``headroom_pages`` are kept reserved and voted for :meth:`HierarchicalCache.allocate`.
    ``evicts_whole_nodes``: an eviction takes whole nodes instead of trimming the last one.
    ``load_back_minimum_pages``: shorter load-backs are not worth it, their tokens are recomputed.
    ``verifies_copies``: compare the bytes of each copy at its end; what differs counts as failed.
    ``progress_timeout_s`` (agreed clock): what is open or waits in line for longer ends the epoch
    on all ranks with ``ProgressLost``; 0 means ten times ``copy_timeout_s``, at least 300 s.
    ``freezes_gc``: once joined, collect garbage and take all that is there by then (``gc.freeze``)
    out of what Python's collector walks from now on; see docs/operating.md.
    ``integrity_every_steps``: how often a step ends with a full self-check (0: never).
    """

    page_size: int
    device_pages: int
    host_pages: int
    kv_shape: KVShape = KVShape(layers=2, heads=1, dim=8)
    lag: int = 0
    pipeline_stages: int = 1
    weights: str = ""
    num_slots: int = 256
    headroom_pages: int = 0
    evicts_whole_nodes: bool = False
    mode: str = Mode.WRITE_THROUGH
    eviction: str = Eviction.LRU
    low_water_pages: int = 0
    load_back_minimum_pages: int = 1
    prefetch_minimum_pages: int = 1
    prefetch_policy: str = PrefetchPolicy.WAIT_COMPLETE
    prefetch_timeout_s: float = 1.0
    storage_queue_pages: int = 4096
    events_max: int = 0
    verifies_copies: bool = True
    side_pools: tuple[SideSpec, ...] = ()
    side_pages: dict[str, tuple[int, int]] = {}
    copy_timeout_s: float = 30.0
    warn_s: float = 10.0
    deadline_s: float = 30.0
    grace_s: float = 0.5
    progress_timeout_s: float = 0.0
    policy: str = PolicyKind.RAISE
    max_resets: int = 3
    reset_window_s: float = 600.0
    write_queue_nodes_max: int = 1 << 16
    waiting_tickets_max: int = 4096
    integrity_every_steps: int = 0
    freezes_gc: bool = False

    def __post_init__(self) -> None:
        as_text("weights", self.weights)
        for name, kind in _CHOICES.items():
            self._set(name, as_choice(name, kind, getattr(self, name)))
        for name, least in _LEAST.items():
            self._set(name, as_count(name, getattr(self, name), least, MASK62))
        for name in _FLAGS:
            self._set(name, as_flag(name, getattr(self, name)))
        for name in _SECONDS:
            self._set(name, as_seconds(name, getattr(self, name)))
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise Misuse(f"{name} must be positive, got {getattr(self, name)}")
        if self.low_water_pages >= self.device_pages:
            raise Misuse(
                f"low_water_pages must be below device_pages ({self.device_pages}), or nothing"
                f" could stay on the device, got {self.low_water_pages}"
            )
        if self.headroom_pages > self.device_pages:
            raise Misuse(
                f"headroom_pages must not be more than device_pages ({self.device_pages}), it could"
                f" never be had, got {self.headroom_pages}"
            )
        self._check_side_pools()
        if self.progress_timeout_s and not self.progress_timeout_s > self.copy_timeout_s:
            raise Misuse(
                f"progress_timeout_s must exceed copy_timeout_s ({self.copy_timeout_s:g} s),"
                f" got {self.progress_timeout_s:g}"
            )

    def _check_side_pools(self) -> None:
        names = {spec.name for spec in self.side_pools}
        if names != self.side_pages.keys() or len(names) != len(self.side_pools):
            raise Misuse(f"side_pages must name each of the side pools {sorted(names)} once")
        for name, pages in self.side_pages.items():
            as_text("the name of a side pool", name)
            if len(pages) != 2:
                raise Misuse(f"side_pages of {name!r} must be (device, host), got {pages}")
            for num_pages in pages:
                as_count(f"side_pages of {name!r}", num_pages)
        if self.side_pools and self.mode == Mode.BUFFER_ONLY:
            raise Misuse("side pools are not staged: mode buffer_only cannot have any")

    def _set(self, name: str, value: object) -> None:
        """Put a field into the form that the inside works with, once, while it is being made."""
        msgspec.structs.force_setattr(self, name, value)


def schema_of(config: CacheConfig) -> Schema:
    """The ballot's shape for this configuration: equal on all ranks."""
    pools = [spec.pool(tier) for spec in config.side_pools for tier in Tier]
    pools += [*(tier.value for tier in Tier), STORAGE]
    return Schema(tuple(sorted(pools)), config.num_slots)


def config_facts(config: CacheConfig) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, for the introduction."""
    own = ("device_pages", "host_pages", "side_pages")
    return {
        name: str(value)
        for name, value in msgspec.structs.asdict(config).items()
        if name not in own
    }
