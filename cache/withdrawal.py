"""Taking back what was published: the agreed failure of a copy takes along what builds on it.

A backed-up child without its backed-up parent cannot be reached, so a failed backup retracts its
descendants from HOST. A load that failed after the engine computed on top of it makes that void.
"""

from __future__ import annotations

from cache.carriage import Carriage
from cache.node import Node, Residency, Tier
from cache.requests import RequestTable
from cache.tiers import Tiers

__all__ = ["Withdrawal"]


class Withdrawal:
    """Called while settling, in agreed order; frees what nobody copies, withdraws what is open."""

    def __init__(self, tiers: Tiers, requests: RequestTable) -> None:
        self._tiers = tiers
        self._requests = requests
        self.must_recompute: list[str] = []

    def retract_host(self, node: Node) -> None:
        """Unpublish ``node`` and all its descendants on HOST, leaves first."""
        for child in list(node.children.values()):
            self.retract_host(child)
        self._retract(node, Tier.HOST)

    def retract_load(self, node: Node, load: Carriage) -> None:
        """The load that brought ``node`` to DEVICE failed: take it and what is below it off again.

        What the engine computed on top of the load is void in every tier, and requests that hold
        any of it must recompute.
        """
        self.must_recompute += self._requests.void(node)
        self._retract_device(node, load)

    def _retract_device(self, node: Node, load: Carriage) -> None:
        for child in list(node.children.values()):
            self._retract_device(child, load)
        if load in node.built_on:
            self._retract(node, Tier.HOST)
        self._retract(node, Tier.DEVICE)

    def _retract(self, node: Node, tier: Tier) -> None:
        presence = node.at(tier)
        carriage = presence.carriage
        if carriage is not None and carriage.intent is not None:
            self._tiers.manager.withdraw(carriage.intent)
        if presence.is_published:
            self._tiers.manager.note("retract", tier.value, node.node_id)
            self._tiers.drop(node, tier)
            presence.carriage = None
        elif presence.state is Residency.ABSENT:
            self._tiers.hollow([node])
