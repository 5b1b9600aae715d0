"""Chains of nodes, parents first, planned with one eviction for all of them.

A node's backup builds on its parent's. So what is planned is a chain from the root down, and the
order is: count what all chains need, evict once for the sum, then open. Evicting in between would
let one rank's failed reservation leave it more room than the others have.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from kvpact.consensus.core.journal import Value
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent, Participant

__all__ = ["ChainFate", "ChainPlan", "Link"]

Node = TypeVar("Node", bound=Hashable)


class Link(msgspec.Struct, frozen=True):
    """One node of a chain: its key among intents, what it needs by pool, and the payload."""

    key: Value
    need: dict[str, int]
    payload: object = None


class ChainFate(enum.Enum):
    """The fate of a chain in this plan."""

    OPENED = "opened"  # every link is open, or was before
    WAITS = "waits"  # an ancestor drains, or no slot is free: ask again with the next step
    REFUSED = "refused"  # there is no room for it, with everything evicted that may go


class ChainPlan(Generic[Node]):
    """Opens chains of ``kind`` with ``participant``.

    ``evict(pool, num_pages)`` makes room in agreed state; it may free less. ``spare_slots`` are
    left for others: what runs in the background must not starve a request that waits.
    """

    def __init__(
        self,
        manager: TransactionManager,
        kind: str,
        participant: Participant,
        evict: Callable[[str, int], None],
        *,
        spare_slots: int = 0,
    ) -> None:
        self._manager = manager
        self._kind = kind
        self._participant = participant
        self._evict = evict
        self._spare_slots = spare_slots

    def open(
        self, nodes: Sequence[Node], links_of: Callable[[Node], Sequence[Link]]
    ) -> dict[Node, ChainFate]:
        """Open the chains that end in ``nodes``, each root first; what became of each. Agreed.

        ``links_of(node)`` gives the links that are missing, root first. It is asked twice: what is
        evicted may be an ancestor's copy. A link whose key has an open intent is not opened again.
        One that was aborted and still drains keeps its whole chain waiting.
        """
        fates: dict[Node, ChainFate] = {}
        needs: dict[Value, Link] = {}
        for node in nodes:
            for link in links_of(node):
                if self._drains(link.key):
                    fates[node] = ChainFate.WAITS
                elif self._find(link.key) is None:
                    needs.setdefault(link.key, link)
        self._make_room(needs.values())
        for node in nodes:
            if node not in fates:
                fates[node] = self._open(links_of(node))
        return fates

    def _make_room(self, links: Iterable[Link]) -> None:
        wanted: dict[str, int] = {}
        for link in links:
            for pool, num_pages in link.need.items():
                wanted[pool] = wanted.get(pool, 0) + num_pages
        for pool in sorted(wanted):
            short = wanted[pool] - self._manager.room(pool)
            if short > 0:
                self._evict(pool, short)

    def _open(self, links: Sequence[Link]) -> ChainFate:
        parent: Intent | None = None
        for link in links:
            intent = self._find(link.key)
            if intent is None:
                if any(need > self._manager.room(pool) for pool, need in link.need.items()):
                    return ChainFate.REFUSED
                if self._manager.num_free_slots <= self._spare_slots:
                    return ChainFate.WAITS
                intent = self._manager.open(
                    self._kind,
                    link.key,
                    link.need,
                    self._participant,
                    parents=[parent] if parent is not None else [],
                    payload=link.payload,
                )
                if intent is None:
                    return ChainFate.WAITS
            parent = intent
        return ChainFate.OPENED

    def _find(self, key: Value) -> Intent | None:
        return self._manager.find(self._kind, key)

    def _drains(self, key: Value) -> bool:
        found = self._find(key)
        return found is not None and not (found.is_undecided or found.is_committed)
