"""Prefetch: from STORAGE to HOST, the longest run of pages that every rank has.

At the call each rank asks its storage what is there; the vote is what it has and can hold, so the
verdict is the agreed number of hits. The pages are published when all ranks have read theirs: as
many leading ones as arrived everywhere.

    request -> reserve host pages, read -> vote -> ended on all -> published on HOST
"""

from __future__ import annotations

import numpy as np

from kvpact.cache.choices import PrefetchPolicy
from kvpact.cache.copies.storage_io import StorageIo
from kvpact.cache.requests.table import Request
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Node, Residency, Tier, Tokens
from kvpact.consensus.core.participant import Intent

__all__ = ["Prefetch"]


class _Fetch:
    """One prefetch: ``tokens`` from page ``start`` on, into host ``pages``."""

    __slots__ = (
        "anchor",
        "hits",
        "intent",
        "is_discarded",
        "is_stopped",
        "keys",
        "namespace",
        "pages",
        "start",
        "storage_ticket",
        "ticket",
        "tokens",
    )

    def __init__(
        self, ticket: Ticket, tokens: Tokens, namespace: str, start: int, anchor: Node | None
    ) -> None:
        self.ticket = ticket
        self.tokens = tokens
        self.namespace = namespace
        self.start = start
        self.anchor = anchor
        self.keys: list[bytes] = []
        self.pages: list[int] = []
        self.hits: int | None = None
        self.intent: Intent | None = None
        self.storage_ticket = 0
        self.is_stopped = False
        self.is_discarded = False


class Prefetch:
    """Participant for reads from storage into host pages.

    ``policy``: ``wait_complete`` (the ticket is ready when all has been read), ``best_effort``
    (:meth:`settle_for` ends it early), ``timeout`` (after ``timeout_s`` of the agreed clock it ends
    with what has arrived).
    """

    kind = "prefetch"

    def __init__(
        self,
        tiers: Tiers,
        io: StorageIo,
        *,
        minimum_pages: int,
        policy: str,
        timeout_s: float,
    ) -> None:
        self._tiers = tiers
        self._io = io
        self._minimum_pages = minimum_pages
        self._policy = policy
        self._timeout_ms = round(timeout_s * 1000)
        self._fetches: dict[int, _Fetch] = {}
        self.num_commits = 0
        self.num_aborts = 0
        self.num_no_room = 0
        self.num_pages = 0

    # -- calls -----------------------------------------------------------------------------------

    def request(self, request: Request, tokens: Tokens, namespace: str, path: list[Node]) -> Ticket:
        """Propose to fetch what of ``tokens`` is not cached; the tree has ``path`` of it."""
        ticket = Ticket(request, None, 0)
        cached = [node for node in path if node.device.is_published or node.host.is_published]
        total = len(tokens) // self._tiers.tree.page_size
        if _count(cached) >= total:
            ticket.refuse("all of it is cached")
            return ticket
        on_host = _leading_on_host(path)
        anchor = on_host[-1] if on_host else None
        self._open(ticket, tokens, namespace, _count(on_host), total, anchor)
        return ticket

    def _open(
        self,
        ticket: Ticket,
        tokens: Tokens,
        namespace: str,
        start: int,
        total: int,
        anchor: Node | None,
    ) -> None:
        tiers = self._tiers
        tiers.tree.pin_path(anchor, Tier.HOST)
        num_pages = min(total - start, tiers.room(Tier.HOST))
        end = (start + max(0, num_pages)) * tiers.tree.page_size
        fetch = _Fetch(ticket, np.array(tokens[:end]), namespace, start, anchor)
        fetch.keys = self._io.keys_from(fetch.tokens, namespace)[start:]
        intent: Intent | None = None
        if num_pages >= self._minimum_pages and tiers.make_room(Tier.HOST, num_pages):
            intent = tiers.manager.open(
                self.kind,
                ticket.request.name,
                {Tier.HOST.value: num_pages},
                self,
                minimum=self._minimum_pages,
            )
        if intent is None:
            tiers.tree.unpin_path(anchor, Tier.HOST)
            self.num_no_room += 1
            tiers.manager.note("no room", Tier.HOST.value, ticket.request.name)
            ticket.refuse("no host pages can be had")
            return
        fetch.intent = intent
        self._fetches[intent.serial] = fetch

        def found(hits: int) -> None:
            fetch.hits = hits

        self._io.ask(fetch.keys, found)

    def plan(self) -> None:
        """End early what the policy ends."""
        clock_ms = self._tiers.manager.clock_ms
        for fetch in list(self._fetches.values()):
            intent = fetch.intent
            if intent is None or intent.is_undecided or self._policy is not PrefetchPolicy.TIMEOUT:
                continue
            if clock_ms - intent.opened_ms > self._timeout_ms:
                self._stop(fetch)

    def settle_for(self, request: Request) -> None:
        """Admission does not wait any longer: end with what has arrived (agreed call)."""
        for fetch in list(self._fetches.values()):
            if fetch.ticket.request is request:
                self._stop(fetch)

    def cancel(self, request: Request) -> None:
        """The request was aborted: everything of its prefetches comes back."""
        for fetch in list(self._fetches.values()):
            if fetch.ticket.request is request and fetch.intent is not None:
                fetch.ticket.give_up("the request was aborted")
                fetch.is_discarded = True
                if fetch.intent.is_undecided:
                    self._tiers.manager.withdraw(fetch.intent)
                self._stop(fetch)

    @property
    def num_open(self) -> int:
        """Prefetches that have not ended on all ranks."""
        return len(self._fetches)

    def is_pending(self, request: Request) -> bool:
        """Whether one of its prefetches has not ended on all ranks: agreed."""
        return any(fetch.ticket.request is request for fetch in self._fetches.values())

    def _stop(self, fetch: _Fetch) -> None:
        if not fetch.is_stopped:
            fetch.is_stopped = True
            self._tiers.manager.note("stop", fetch.ticket.request.name)
            if fetch.storage_ticket:
                self._io.stop(fetch.storage_ticket)

    # -- participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """As many as there are, and no more than the storage has."""
        fetch = self._fetches[intent.serial]
        if fetch.hits is not None:
            num_pages = min(num_pages, fetch.hits)
        if self._io.room < 1 or num_pages < 1:
            return 0
        fetch.pages = self._tiers.pools[Tier.HOST].reserve_up_to(num_pages)
        return len(fetch.pages)

    def unreserve(self, intent: Intent, pool: str) -> None:
        """Give the pages back; nothing has used them."""
        fetch = self._fetches[intent.serial]
        self._tiers.pools[Tier.HOST].free(fetch.pages)
        fetch.pages = []

    def start(self, intent: Intent) -> None:
        """Read into the reserved pages, before the verdict: so the read hides the vote."""
        fetch = self._fetches[intent.serial]

        def on_end(leading: int) -> None:
            fetch.storage_ticket = 0
            self._tiers.manager.mark_ended(intent, leading)

        keys = fetch.keys[: len(fetch.pages)]
        fetch.storage_ticket = self._io.get(keys, fetch.pages, on_end)
        if not fetch.storage_ticket:
            on_end(0)
        elif fetch.is_stopped:
            self._io.stop(fetch.storage_ticket)

    def commit(self, intent: Intent) -> None:
        """So many pages every rank has; they are published when all have read them."""
        self.num_commits += 1

    def abort(self, intent: Intent) -> None:
        """Some rank has not a single page of it, or no room."""
        self.num_aborts += 1
        fetch = self._fetches[intent.serial]
        fetch.ticket.give_up("some rank has no page of it")

    def ended(self, intent: Intent) -> None:
        """Publish what arrived on every rank; everything else is free again."""
        fetch = self._fetches.pop(intent.serial)
        good = intent.result if intent.is_committed else 0
        if good:
            self._publish(fetch, good)
        self._tiers.tree.unpin_path(fetch.anchor, Tier.HOST)
        self._tiers.pools[Tier.HOST].free(fetch.pages[good:])
        ticket = fetch.ticket
        if ticket.state is TicketState.PENDING:
            if good:
                ticket.num_pages = good
                ticket.grant()
            else:
                ticket.refuse("nothing arrived on every rank")

    def _publish(self, fetch: _Fetch, good: int) -> None:
        """Put the pages into the tree where they still have a place; the others are surplus."""
        tiers = self._tiers
        surplus: list[int] = fetch.pages[:good]
        if not fetch.is_discarded:
            end = (fetch.start + good) * tiers.tree.page_size
            path = tiers.tree.insert(fetch.tokens[:end], fetch.namespace)
            surplus = self._place(fetch, path, good)
            tiers.hollow(path)
            self.num_pages += good
        tiers.free(Tier.HOST, surplus)

    def _place(self, fetch: _Fetch, path: list[Node], good: int) -> list[int]:
        """Publish what has a place below what is on HOST; returns the pages that have none."""
        placed: set[int] = set()  # membership only
        position = 0
        is_reached = True
        for node in path:
            first = position - fetch.start
            position += node.num_pages
            is_free = node.host.state is Residency.ABSENT and node.host.carriage is None
            if is_reached and is_free and first >= 0:
                pages = fetch.pages[first : first + node.num_pages]
                self._tiers.tree.place(node, Tier.HOST, Residency.RESIDENT, pages)
                node.is_stored = True
                placed.update(pages)
            is_reached = is_reached and node.host.is_published
        return [page for page in fetch.pages[:good] if page not in placed]

    def held_pages(self) -> list[int]:
        """Host pages of this rank that open prefetches own."""
        return [page for fetch in self._fetches.values() for page in fetch.pages]

    def clear(self) -> None:
        """The epoch is over: nothing of it is open, and who waits need not wait."""
        for fetch in self._fetches.values():
            fetch.ticket.give_up("the epoch was closed")
        self._fetches.clear()


def _count(nodes: list[Node]) -> int:
    return sum(node.num_pages for node in nodes)


def _leading_on_host(path: list[Node]) -> list[Node]:
    leading: list[Node] = []
    for node in path:
        if not node.host.is_published:
            break
        leading.append(node)
    return leading
