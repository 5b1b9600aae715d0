"""Events: what entered and left the cache, by tier, in one order on every rank."""

from __future__ import annotations

from collections import deque

import msgspec

from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.tree.node import Node

__all__ = ["CacheEvent", "EventLog"]


class CacheEvent(msgspec.Struct, frozen=True):
    """``kind`` is ``stored``, ``removed`` or ``cleared``; ``tier`` device, host or storage.

    ``pages`` are chained 64-bit hashes of token pages: equal prefixes have equal hashes, on every
    rank. ``parent`` is the hash of the page before (0: these start the prompt). After ``cleared``
    nothing is known of ``tier``: whoever listens starts anew there.
    """

    kind: str
    tier: str
    pages: tuple[int, ...] = ()
    parent: int = 0
    namespace: str = ""


class EventLog:
    """Bounded: when nobody takes the events, all are replaced by one ``cleared``."""

    def __init__(self, page_size: int, *, events_max: int, enabled: bool) -> None:
        self.enabled = enabled
        self._page_size = page_size
        self._events_max = events_max
        self._events: deque[CacheEvent] = deque()

    def take(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def stored(self, node: Node, tier: str, num_pages: int | None = None) -> None:
        """The first ``num_pages`` pages of ``node`` (default: all) are there now."""
        self._add("stored", node, tier, num_pages)

    def removed(self, node: Node, tier: str) -> None:
        """``node`` is not there any more."""
        self._add("removed", node, tier, None)

    def cleared(self, tier: str) -> None:
        """Nothing is there any more."""
        if self.enabled:
            self._events.append(CacheEvent("cleared", tier))

    def _add(self, kind: str, node: Node, tier: str, num_pages: int | None) -> None:
        if not self.enabled:
            return
        if len(self._events) >= self._events_max:
            self._events.clear()
            for name in ("device", "host", "storage"):
                self._events.append(CacheEvent("cleared", name))
        hashes = self._hashes(node)
        above = node.parent
        parent = above.hashes[-1] if above is not None and above.hashes else 0
        pages = tuple(hashes[:num_pages])
        self._events.append(CacheEvent(kind, tier, pages, parent, node.namespace))

    def _hashes(self, node: Node) -> list[int]:
        chain: list[Node] = []
        at = node
        while at.parent is not None and not at.hashes:
            chain.append(at)
            at = at.parent
        for below in reversed(chain):
            above = below.parent
            previous = above.hashes[-1] if above is not None and above.hashes else 0
            namespace = "" if previous else below.namespace
            below.hashes = tuple(page_hashes(below.tokens, self._page_size, previous, namespace))
        return list(node.hashes)
