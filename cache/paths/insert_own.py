"""Inserting what a request computed into pages of its own: nothing has to be voted for them.

What the nodes keep in side pools is: they are of use when that has come (see
:mod:`kvpact.cache.paths.completion`), and are backed up then, too.
"""

from __future__ import annotations

from kvpact.cache.paths.backup import Backup
from kvpact.cache.paths.completion import Completion
from kvpact.cache.paths.insert_voted import open_loads
from kvpact.cache.paths.load_back import LoadBack
from kvpact.cache.requests.results import InsertResult
from kvpact.cache.requests.table import Request, RequestTable
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import FillSide, Node, Residency, Tier, Tokens
from kvpact.consensus.core.errors import Misuse

__all__ = ["OwnInsert"]


class OwnInsert:
    """Puts a request's own pages into the tree, and queues their backup."""

    def __init__(
        self,
        tiers: Tiers,
        requests: RequestTable,
        load_back: LoadBack,
        backup: Backup,
        completion: Completion,
    ) -> None:
        self._tiers = tiers
        self._requests = requests
        self._load_back = load_back
        self._backup = backup
        self._completion = completion

    def insert(
        self, live: Request, tokens: Tokens, namespace: str, fill_side: FillSide | None = None
    ) -> InsertResult:
        """See :meth:`kvpact.cache.hierarchical_cache.HierarchicalCache.insert`."""
        tiers = self._tiers
        num_pages = len(tokens) // tiers.tree.page_size
        held = live.held_pages
        if live.must_recompute or live.orphans:
            return InsertResult([], 0, 0)
        if num_pages > held + len(live.private):
            raise Misuse(
                f"request {live.name!r} inserts {num_pages} pages but holds {held} and owns"
                f" {len(live.private)}"
            )
        live.requires(tokens, namespace)
        if num_pages < held and live.held is not None:
            pages = [page for node in live.held.path() for page in node.device.pages]
            return InsertResult(pages[:num_pages], 0, 0)
        self._load_back.cancel(live, "the request computed it itself")
        path = tiers.tree.insert(tokens, namespace)
        placed, new, duplicate = self._place(live, path, held)
        tiers.hollow(path[len(placed) :])
        tiers.prune()
        self._requests.hold(live, placed[-1] if placed else None)
        tiers.manager.note("insert_own", live.name, new, duplicate)
        self._completion.add(placed, fill_side, self._backup.add_path)
        pages = [page for node in placed for page in node.device.pages]
        return InsertResult(pages, new, duplicate)

    def _place(self, live: Request, path: list[Node], held: int) -> tuple[list[Node], int, int]:
        """Give the request's pages to the nodes of ``path`` that have none; free its doubles.

        Returns the nodes that can be built on, and how many pages were new and how many doubles.
        """
        placed: list[Node] = []
        spare: list[int] = []
        position = taken = 0
        for node in path:
            position += node.num_pages
            if position > held:
                if node.device.state is Residency.RESERVED:
                    break  # its pages are another vote's: nothing can build on it yet
                own = live.private[taken : taken + node.num_pages]
                taken += node.num_pages
                if node.device.is_published:
                    spare += own
                else:
                    node.built_on = open_loads(placed)
                    self._tiers.tree.place(node, Tier.DEVICE, Residency.RESIDENT, own)
            placed.append(node)
        del live.private[:taken]
        self._tiers.free(Tier.DEVICE, spare)
        return placed, taken - len(spare), len(spare)
