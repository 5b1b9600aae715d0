"""Loads in buffer-only mode: STORAGE to staging to DEVICE; the host keeps nothing.

A prefetch brings the agreed pages into staging, a load-back takes them to the device, and when that
has ended on all ranks the staging is free. Both are ordinary intents; this only leads one into the
other and clears the staging behind them.
"""

from __future__ import annotations

from itertools import takewhile

from kvpact.cache.paths.load_back import LoadBack
from kvpact.cache.requests.table import Request
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.residency.path import Path
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.storing.prefetch import Prefetch
from kvpact.cache.tree.node import Node, Tier, Tokens

__all__ = ["StagedLoads"]


class _Staged:
    """One load on its way: the ticket that was given out, and those of its two halves."""

    __slots__ = ("fetch", "load", "namespace", "ticket", "tokens")

    def __init__(self, ticket: Ticket, fetch: Ticket, tokens: Tokens, namespace: str) -> None:
        self.ticket = ticket
        self.fetch = fetch
        self.load: Ticket | None = None
        self.tokens = tokens
        self.namespace = namespace


class StagedLoads(Path):
    """Follows loads from storage through staging; every call is agreed."""

    def __init__(self, tiers: Tiers, prefetch: Prefetch, load_back: LoadBack) -> None:
        self._tiers = tiers
        self._prefetch = prefetch
        self._load_back = load_back
        self._loads: list[_Staged] = []

    def request(self, request: Request, tokens: Tokens, namespace: str, path: list[Node]) -> Ticket:
        """Propose to bring to DEVICE what of ``tokens`` is in storage and not cached."""
        fetch = self._prefetch.request(request, tokens, namespace, path)
        ticket = Ticket(request, None, 0)
        self._loads.append(_Staged(ticket, fetch, tokens, namespace))
        self.settled()
        return ticket

    def settled(self) -> None:
        """A step was settled: go on from staging to the device, and clear what nobody needs."""
        for staged in list(self._loads):
            self._go_on(staged)
            if staged.ticket.state is not TicketState.PENDING:
                self._loads.remove(staged)
        self._clear_staging()

    def _go_on(self, staged: _Staged) -> None:
        ticket, fetch = staged.ticket, staged.fetch
        if fetch.state is TicketState.REFUSED:
            ticket.refuse(fetch.why)
        elif fetch.state is TicketState.READY and staged.load is None:
            # Matched, not walked: a node that another prompt brought meanwhile is cut where this
            # one parts from it, or the request would hold pages of the other.
            path = self._tiers.tree.match(staged.tokens, staged.namespace)
            served = takewhile(lambda n: n.device.is_published or n.host.is_published, path)
            staged.load = self._load_back.request(ticket.request, list(served), None)
        load = staged.load
        if load is not None and load.state is not TicketState.PENDING:
            ticket.state, ticket.num_pages, ticket.why = load.state, load.num_pages, load.why

    def _clear_staging(self) -> None:
        """Free the staging pages that nobody reads or is about to read, leaves first."""
        order = self._tiers.tree.order[Tier.HOST]
        while (node := order.pop()) is not None:
            self._tiers.drop(node, Tier.HOST)
        self._tiers.prune()

    @property
    def is_pending(self) -> bool:
        """Some load is not decided."""
        return bool(self._loads)

    def clear(self) -> None:
        """The epoch is over."""
        for staged in self._loads:
            staged.ticket.give_up("the epoch was closed")
        self._loads.clear()
