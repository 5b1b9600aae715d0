"""A router in miniature: what is resident, known from events alone, against what really is.

It shares no code with the cache's bookkeeping. ``storage`` says what was stored, so it is held
against the backend itself: each page that an event names must be there, with the right bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.storage import BackendBase
from kvpact.cache.storage.keys import PageKeys
from kvpact.cache.tree.events import CacheEvent
from kvpact.cache.tree.node import Node, Tier
from kvpact.harness.rank.rank import Rank
from kvpact.harness.verify.agreement import by_weights, hashes_of
from kvpact.harness.verify.content import expected_bytes

__all__ = ["Listener"]


class Listener:
    """Hears the events of one rank. ``digest``: of all since the device was cleared, in order."""

    def __init__(
        self,
        rank: Rank,
        prompts: Iterable[tuple[NDArray[np.int32], str]],
        stored: Iterable[int] = (),
    ) -> None:
        self.digest = 0
        self.stored = set(stored)  # membership only, like all sets here
        self._rank = rank
        self._resident: dict[str, set[int]] = {tier.value: set() for tier in Tier}
        self._known: dict[tuple[int, int], Sequence[int]] = {}
        self._epoch = rank.cache.core.manager.epoch
        self._prompts = list(prompts)
        self._keys: dict[int, bytes] = {}
        self._learn_keys()

    def _learn_keys(self) -> None:
        """What the pages of known prompts are called: other weights, other names."""
        self._weights = self._rank.cache.weights
        self._keys.clear()
        if self._rank.keys is not None:
            for tokens, namespace in self._prompts:
                self._keys |= _pairs(self._rank.keys, tokens, namespace)

    def hear(self, events: Sequence[CacheEvent]) -> list[str]:
        """Take note of ``events``; what of them cannot be."""
        for one in events:
            # What ranks told of an epoch that they do not remember alike ends when all is cleared.
            before = 0 if (one.kind, one.tier) == ("cleared", "device") else self.digest
            self.digest = xxhash.xxh3_64_intdigest(msgspec.json.encode(one), before) >> 1
        return [
            f"rank {self._rank.cache.rank}: {line}" for one in events for line in self._one(one)
        ]

    def _one(self, event: CacheEvent) -> list[str]:
        if event.tier not in self._resident:
            return self._stored(event)
        resident = self._resident[event.tier]
        if event.kind == "cleared":
            resident.clear()
            return []
        is_there = [page in resident for page in event.pages]
        if event.kind == "stored":
            resident.update(event.pages)
            return [f"{event} names what is there already"] if any(is_there) else []
        resident.difference_update(event.pages)
        return [] if all(is_there) else [f"{event} names what is not there"]

    def _stored(self, event: CacheEvent) -> list[str]:
        """Every page of it was stored on every rank, so on this one."""
        if event.kind == "cleared" and self._rank.cache.weights != self._weights:
            self._learn_keys()
            self.stored.clear()
        if event.kind == "cleared":
            self.stored.clear()
        if event.kind != "stored":
            return []
        self.stored.update(event.pages)
        return [
            f"page {page:x} is said to be stored, but the backend has it {how}"
            for page in event.pages
            if (how := self._in_backend(page)) not in ("right", "dropped")
        ]

    def _in_backend(self, page_hash: int) -> str:
        backend = self._backend
        if backend is None or page_hash not in self._keys:
            return "right"
        page = backend.get([self._keys[page_hash]])[0]
        if page is None:
            # A page that a fault spoilt on read was dropped, and may be stored again.
            return "dropped" if backend.counters["wrong"] else "not at all"
        (content,) = by_weights([page_hash], self._weights)
        num_bytes = self._rank.tensors[Tier.HOST].bytes_per_page
        right = expected_bytes(num_bytes, content, self._rank.cache.rank)
        return "right" if bytes(page) == right else "wrong"

    @property
    def _backend(self) -> BackendBase | None:
        return self._rank.backend

    # -- against what is -------------------------------------------------------------------------

    def differences(self, nodes: Iterable[Node]) -> list[str]:
        """Where the events have led to another belief than what is published."""
        cache = self._rank.cache
        if cache.core.manager.epoch != self._epoch:
            self._epoch = cache.core.manager.epoch
            self._known.clear()
        really: dict[str, set[int]] = {name: set() for name in self._resident}
        for node in nodes:
            for name, presence in (("device", node.device), ("host", node.host)):
                if presence.is_published:
                    really[name].update(self._hashes(node))
        return [
            f"rank {cache.rank}, after step {cache.core.manager.step}: by its events {name} has"
            f" {len(self._resident[name])} pages, it has {len(pages)}"
            for name, pages in really.items()
            if pages != self._resident[name]
        ]

    def _hashes(self, node: Node) -> Sequence[int]:
        # A split takes pages from the front of a node, so these two say which pages are left.
        place = (node.node_id, node.num_pages)
        if place not in self._known:
            self._known[place] = hashes_of(self._rank.cache, node)
        return self._known[place]

    def wrong_in_storage(self) -> list[str]:
        """Pages of known prompts that the backend has with wrong bytes, told of or not."""
        return [
            f"rank {self._rank.cache.rank}: storage has wrong bytes under the key of page {page:x}"
            for page in self._keys
            if self._in_backend(page) == "wrong"
        ]


def _pairs(keys: PageKeys, tokens: NDArray[np.int32], namespace: str) -> dict[int, bytes]:
    """The key of each page, by its hash."""
    hashes = page_hashes(tokens, keys.identity.page_size, namespace=namespace)
    return dict(zip(hashes, keys.of(tokens, namespace), strict=True))
