"""The closed choices of a configuration: each word once, with what it means."""

from __future__ import annotations

import enum

__all__ = ["Eviction", "Mode", "PrefetchPolicy", "SideNeed"]


class Mode(enum.StrEnum):
    """How pages come to the other tiers."""

    WRITE_THROUGH = "write_through"  # each node is backed up after its insert
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # after its second use
    WRITE_BACK = "write_back"  # when it is evicted from the device
    BUFFER_ONLY = "buffer_only"  # the host is only staging towards the storage


class Eviction(enum.StrEnum):
    """The order of eviction, in both tiers (:mod:`kvpact.cache.tree.eviction`)."""

    LRU = "lru"  # the least recently used
    LFU = "lfu"  # the least often used
    SLRU = "slru"  # what was used once before what was used again
    PRIORITY = "priority"  # the lowest priority


class PrefetchPolicy(enum.StrEnum):
    """When a prefetch is done."""

    WAIT_COMPLETE = "wait_complete"  # when all has been read
    BEST_EFFORT = "best_effort"  # when admission does not wait any longer
    TIMEOUT = "timeout"  # after ``prefetch_timeout_s`` of the agreed clock


class SideNeed(enum.StrEnum):
    """Which positions of a node have a page in a side pool."""

    PER_PAGE = "per_page"  # all
    PER_NODE = "per_node"  # the last one: the state after the node's last token
    WINDOW = "window"  # the last ones, as far as the window reaches
