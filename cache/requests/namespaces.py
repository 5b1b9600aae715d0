"""Namespaces: what callers call them, and under which names their pages are kept.

Pages of two namespaces never meet: the name is part of the tree, of the storage's keys and of the
events' hashes. A namespace that was dropped goes on under a new *inner* name, so nothing that was
computed under the old one is ever found again, wherever it is or still comes from.
"""

from __future__ import annotations

import xxhash

from kvpact.cache.requests.table import Request, RequestTable
from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.border import as_text
from kvpact.consensus.core.errors import Misuse

__all__ = ["Namespaces"]


class Namespaces:
    """How often each was dropped: agreed, and kept over the end of an epoch."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._drops: dict[str, int] = {}
        self._requests_before: dict[str, int] = {}
        self._all_before = 0
        self._since = 0

    def inner(self, namespace: object) -> str:
        """The name under which its pages are kept now. Raises :class:`Misuse` for what is none."""
        name = as_text("namespace", namespace)
        if "\0" in name:
            raise Misuse(f"namespace {name!a} holds a zero character: it is kept for the inside")
        drops = self._drops.get(name, 0)
        since = f"\0since {self._since}" if self._since else ""
        return f"{name}{since}\0{drops}" if drops else f"{name}{since}"

    def drop(self, namespace: str) -> str:
        """Its pages are kept under another name from now on; returns the one before."""
        before = self.inner(namespace)
        self._drops[namespace] = self._drops.get(namespace, 0) + 1
        self._requests_before[namespace] = self._requests.num_opened
        return before

    def is_older(self, request: Request, namespace: str) -> bool:
        """Whether ``request`` has lived since before the last drop: what it computes is void."""
        return request.number <= max(self._all_before, self._requests_before.get(namespace, 0))

    def start_anew(self) -> None:
        """Count all live requests as older than every drop: ranks may differ in what came first."""
        self._requests_before = dict.fromkeys(self._requests_before, self._requests.num_opened)

    @property
    def digest(self) -> int:
        """Equal on two ranks that have dropped the same, as often."""
        state = repr((self._since, sorted(self._drops.items())))
        return xxhash.xxh3_64_intdigest(state.encode("utf-8", "backslashreplace")) & MASK62

    def drop_all(self, epoch: int) -> None:
        """Drop every namespace: ranks that do not agree on what was dropped begin ``epoch`` so."""
        self._since = epoch
        self._drops.clear()
        self._requests_before.clear()
        self._all_before = self._requests.num_opened
