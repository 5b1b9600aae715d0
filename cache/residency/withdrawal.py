"""Taking back what was published: the agreed failure of a copy takes along what builds on it.

A backed-up child without its backed-up parent cannot be reached, so a failed backup retracts its
descendants from HOST. A load that failed after the engine computed on top of it makes that void.
"""

from __future__ import annotations

from kvpact.cache.requests.table import RequestTable
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Carriage, Node, Residency, Tier

__all__ = ["Withdrawal"]


class Withdrawal:
    """Called while settling, in agreed order; frees what nobody copies, withdraws what is open."""

    def __init__(self, tiers: Tiers, requests: RequestTable) -> None:
        self._tiers = tiers
        self._requests = requests
        self.must_recompute: list[str] = []

    def nothing_builds_on(self, node: Node, tier: Tier) -> None:
        """``node`` does not come into ``tier`` after all: nor can what is undecided on top."""
        for below in _leaves_first(node):
            carriage = below.at(tier).carriage
            intent = carriage.intent if carriage is not None else None
            if intent is not None and intent.is_undecided:
                self._tiers.manager.withdraw(intent)

    def retract_host(self, node: Node) -> None:
        """Unpublish ``node`` and all its descendants on HOST, leaves first."""
        for below in _leaves_first(node):
            self._retract(below, Tier.HOST)

    def retract_source(self, node: Node, *, is_read: bool) -> None:
        """Take ``node`` off HOST on every rank: a load of it failed, so it is not offered again.

        What lies below it could not be reached any more, and goes with it. ``is_read``: some rank
        has given the copy up, and it may still read the pages there. The next insert that touches
        a node backs it up again.
        """
        for below in _leaves_first(node):
            self._retract(below, Tier.HOST, is_read=is_read)

    def retract_load(self, node: Node, load: Carriage) -> None:
        """The load that brought ``node`` to DEVICE failed: take it and what is below it off again.

        What the engine computed on top of the load is void in every tier, and requests that hold
        any of it, or have finished on it, must recompute.
        """
        self.must_recompute += self._requests.void(node)
        self.must_recompute += [name for name, held in load.readers if node in held.path()]
        for below in _leaves_first(node):
            if load in below.built_on:
                _void(below)
                if below.host.state:
                    self.retract_host(below)  # with older copies below it: nobody could reach them
            self._retract(below, Tier.DEVICE)

    def _retract(self, node: Node, tier: Tier, *, is_read: bool = False) -> None:
        presence = node.at(tier)
        carriage = presence.carriage
        if carriage is not None and carriage.intent is not None:
            self._tiers.manager.withdraw(carriage.intent)
        if presence.is_published:
            self._tiers.manager.note("retract", tier.value, node.node_id)
            self._tiers.drop(node, tier, is_read=is_read)
            presence.carriage = None
            if tier is Tier.HOST:
                _void(node)
        elif presence.state is Residency.ABSENT:
            self._tiers.hollow([node])


def _void(node: Node) -> None:
    """Withdraw what is under way from ``node`` to elsewhere: it has lost its source."""
    for carriage in node.carriages:
        carriage.is_void = True


def _leaves_first(top: Node) -> list[Node]:
    """``top`` and all that is below it, children before parents."""
    nodes = [top]
    for node in nodes:  # grows while it is read
        nodes.extend(node.children.values())
    nodes.reverse()
    return nodes
