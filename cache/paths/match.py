"""Finding what is cached: which part of a prompt can be served, and from where."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from kvpact.cache.requests.namespaces import Namespaces
from kvpact.cache.requests.results import Match
from kvpact.cache.requests.table import RequestTable
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Node, Tier, Tokens
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.journal import Journal

__all__ = ["Lookup"]


class Lookup:
    """Matches prompts against the tree. Only what is published in a tier is ever found."""

    def __init__(
        self, tiers: Tiers, requests: RequestTable, namespaces: Namespaces, journal: Journal
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._requests = requests
        self._namespaces = namespaces
        self._journal = journal

    def match(self, tokens: Tokens, namespace: str, request: str | None) -> Match:
        """See :meth:`kvpact.cache.hierarchical_cache.HierarchicalCache.match_prefix`."""
        inner = self._namespaces.inner(namespace)
        owner = None if request is None else self._requests.get(request)
        if owner is not None and owner.held is not None and owner.private:
            raise Misuse(
                f"request {request!r} owns pages that follow the prefix it holds: insert or free"
                " them before it matches again"
            )
        if owner is not None:
            owner.requires(tokens, inner, "matches")
        path = self.served(self._tree.match(tokens, inner))
        device = self._on_device(path)
        num_device = sum(node.num_pages for node in device)
        if self._journal.is_written:
            self._journal.fact("serve", len(device), *(node.node_id for node in path))
        if request is not None:
            live = self._requests.open(request)
            live.prompt_pages = len(tokens) // self._tree.page_size
            live.device_hit_pages = num_device
            self._requests.hold(live, device[-1] if device else None)
        return Match(
            node=path[-1] if path else None,
            pages=[page for node in device for page in node.device.pages],
            device_pages=num_device,
            host_pages=sum(node.num_pages for node in path) - num_device,
            epoch=self._tiers.manager.epoch,
            tokens=tokens.copy(),  # the caller's array may become another prompt's
            namespace=namespace,
        )

    def path_of(self, match: Match) -> list[Node]:
        """Return the part of ``match`` to serve now: its own nodes, or those in their place.

        A match of an earlier epoch, of nodes that have left the tree, or of a namespace that was
        dropped since, is looked up anew.
        """
        node, inner = match.node, self._namespaces.inner(match.namespace)
        is_known = match.epoch == self._tiers.manager.epoch
        if is_known and node is None:
            return []
        if is_known and node is not None and node.namespace == inner and self._tree.has(node):
            return self.served(node.path())
        return self.served(self._tree.match(match.tokens, inner))

    def peek(self, tokens: Tokens, namespace: str) -> dict[str, int]:
        """See :meth:`kvpact.cache.hierarchical_cache.HierarchicalCache.peek`."""
        nodes, shared = self._tree.walk(tokens, self._namespaces.inner(namespace))
        side = self._tiers.side

        def length(is_there: Callable[[Node], bool], tiers: list[Tier]) -> int:
            run = list(takewhile(is_there, nodes))
            last = shared if len(run) == len(nodes) else None
            count = side.usable_end(run, tiers, last) if side else len(run)
            sizes = [node.num_pages for node in run]
            if last is not None and run:
                sizes[-1] = last
            return sum(sizes[:count])

        return {
            "device": length(lambda node: node.device.is_published, [Tier.DEVICE]),
            "host": length(lambda node: node.host.is_published, [Tier.HOST]),
            "usable": length(_is_served, list(Tier)),
        }

    def served(self, path: list[Node]) -> list[Node]:
        """The leading nodes that can be served, up to where every side pool's state is there."""
        served = list(takewhile(_is_served, path))
        side = self._tiers.side
        return served[: side.usable_end(served, list(Tier))] if side else served

    def _on_device(self, path: list[Node]) -> list[Node]:
        """The leading nodes that can be used on the device as they are."""
        device = list(takewhile(lambda node: node.device.is_published, path))
        side = self._tiers.side
        return device[: side.usable_end(device, [Tier.DEVICE])] if side else device


def _is_served(node: Node) -> bool:
    return node.device.is_published or node.host.is_published
