"""An engine in miniature, for scenario entries that take the scheduler's own way into the cache.

It matches, takes pages, waits for loads, computes and inserts. What it computes depends on what
lies below: where a page of the prefix does not hold the right bytes, what is computed on top is
wrong too, as in a real forward pass. So a load that failed unnoticed shows as wrong bytes.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Tier
from kvpact.harness.rank.rank import Rank
from kvpact.harness.scenario.model import Admit, expand
from kvpact.harness.verify.agreement import by_weights
from kvpact.harness.verify.content import fill_pages, matches_pages

__all__ = ["Engine"]

PENDING = TicketState.PENDING
_WRONG = 0x5EED  # what a page's hash is changed by where its prefix was wrong


class _Running:
    """One admitted request: its prompt, and the tickets it waits for."""

    __slots__ = ("hashes", "namespace", "tickets", "tokens")

    def __init__(self, tokens: NDArray[np.int32], namespace: str, hashes: list[int]) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.hashes = hashes
        self.tickets: list[Ticket] = []


class Engine:
    """The requests that one rank's engine runs. Every call is made on every rank, in one order."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._cache = rank.cache
        self._running: dict[str, _Running] = {}
        self.admissions: dict[str, Ticket] = {}  # the last of each request that was one wish

    def admit(self, entry: Admit) -> None:
        """Match and pin; ask for the part on HOST where ``load`` says so, or all as one wish."""
        name, namespace, tokens = entry.request, entry.namespace, expand(entry.tokens)
        if name in self._running or self._cache.core.requests.get(name) is not None:
            return
        inner = self._cache.core.namespaces.inner(namespace)
        hashes = page_hashes(tokens, self._cache.config.page_size, namespace=inner)
        running = self._running[name] = _Running(tokens, namespace, hashes)
        if entry.whole:
            ticket = self._cache.admit(
                name,
                tokens,
                namespace=namespace,
                extra_pages=entry.extra,
                minimum_pages=entry.least,
                priority=entry.priority,
            )
            running.tickets.append(ticket)
            self.admissions[name] = ticket
            return
        match = self._cache.match_prefix(tokens, namespace=namespace, request=name)
        if entry.load:
            running.tickets.append(self._cache.request_load_back(name, match))

    def take(self, name: str, num_pages: int) -> None:
        """Pages at once where the headroom has them, by ticket otherwise."""
        if name not in self._running or self._is_in_line(name):
            return
        if self._cache.allocate(name, num_pages) is None:
            self._running[name].tickets.append(self._cache.request_pages(name, num_pages))

    def _is_in_line(self, name: str) -> bool:
        """It has nothing yet, and must not take anything piecemeal."""
        ticket = self.admissions.get(name)
        live = self._cache.core.requests.get(name)
        return ticket is not None and ticket.request is live and ticket.state is PENDING

    def compute(self, name: str) -> None:
        """Forward over what the request's own pages can hold, then insert it."""
        running = self._running.get(name)
        if running is None or any(t.state is PENDING for t in running.tickets):
            return
        request = self._cache.core.requests.require(name)
        held = request.held_pages
        end = min(held + len(request.private), len(running.hashes))
        if end <= held or request.must_recompute:
            return
        loads = self._cache.start_loading([name])
        layers = len(self._rank.tensors[Tier.DEVICE].layer_planes)
        has_arrived = self._cache.wait_layer(layers - 1, loads, 0.0)
        device = self._rank.tensors[Tier.DEVICE]
        nodes = request.held.path() if request.held is not None else []
        prefix = [page for node in nodes for page in node.device.pages]
        # Whatever was loaded when it was admitted, it computes with the weights of now.
        hashes = by_weights(running.hashes, self._cache.weights)
        right = matches_pages(device, prefix, hashes[:held], self._cache.rank)
        own, hashes = request.private[: end - held], hashes[held:end]
        # A forward that has to wait longer computes the right bytes if the load ends well at last;
        # if it does not, what it computed is withdrawn whatever it is.
        wrong = _WRONG if has_arrived and not all(right) else 0
        fill_pages(device, own, [page_hash ^ wrong for page_hash in hashes], self._cache.rank)
        size = self._cache.config.page_size
        self._cache.insert(
            name,
            running.tokens[: end * size],
            namespace=running.namespace,
            fill_side=partial(self._rank.compute_side, wrong=wrong),
        )

    def free(self, name: str, num_pages: int) -> None:
        """Give back some of the request's own pages, the last ones first."""
        if name in self._running:
            own = len(self._cache.core.requests.require(name).private)
            self._cache.free(name, min(num_pages, own))

    def forget(self, name: str) -> bool:
        """The request is over; False: it was not admitted here."""
        return self._running.pop(name, None) is not None

    def recompute(self, names: tuple[str, ...]) -> None:
        """The bytes these requests built on are void: they end, and would be admitted anew."""
        for name in names:
            if self.forget(name):
                self._cache.abort(name)
