"""Inserts by vote, in the order of asking: at once where they can be planned, else in line.

An insert waits where its room is on its way (write-back moves victims to the host first) or where
no slot is free. What comes after one that waits waits behind it, because it may build on it.
"""

from __future__ import annotations

from collections import deque

from kvpact.cache.paths.backup import Backup
from kvpact.cache.paths.completion import Completion
from kvpact.cache.paths.insert_voted import Insertion, Proposal
from kvpact.cache.requests.table import Request, RequestTable
from kvpact.cache.residency.path import Path
from kvpact.cache.tree.node import Fill, FillSide, Node, Tokens
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.errors import Misuse

__all__ = ["InsertLine"]


class _Wish:
    """One insert that was asked for. ``holder`` pins the path until its request ends."""

    __slots__ = ("fill", "fill_side", "holder", "namespace", "priority", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        namespace: str,
        fill: Fill | None,
        holder: Request | None,
        priority: int,
        fill_side: FillSide | None,
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.fill = fill
        self.fill_side = fill_side
        self.holder = holder
        self.priority = priority


class InsertLine(Path):
    """Turns inserted tokens into nodes whose pages are voted. Bounded by ``waiting_max``."""

    def __init__(
        self,
        tree: RadixTree,
        requests: RequestTable,
        insertion: Insertion,
        backup: Backup,
        completion: Completion,
        *,
        waiting_max: int,
    ) -> None:
        self._tree = tree
        self._requests = requests
        self._insertion = insertion
        self._backup = backup
        self._completion = completion
        self._waiting_max = waiting_max
        self._line: deque[_Wish] = deque()

    def propose(
        self,
        tokens: Tokens,
        namespace: str,
        fill: Fill | None,
        holder: Request | None,
        priority: int = 0,
        fill_side: FillSide | None = None,
    ) -> bool:
        """Insert whole pages of ``tokens``; False: refused at once, on every rank."""
        if len(tokens) < self._tree.page_size:
            raise Misuse(f"{len(tokens)} tokens are less than one page")
        wish = _Wish(tokens.copy(), namespace, fill, holder, priority, fill_side)
        proposal = Proposal.WAITS if self._line else self._try(wish)
        if proposal is Proposal.WAITS:
            if len(self._line) >= self._waiting_max:
                self._insertion.refuse(0)
                return False
            self._line.append(wish)
        return proposal is not Proposal.REFUSED

    def plan(self) -> None:
        """Try again what waits, in order, up to the first that still has to."""
        while self._line and self._try(self._line[0]) is not Proposal.WAITS:
            self._line.popleft()

    @property
    def num_waiting(self) -> int:
        """Inserts in line: agreed."""
        return len(self._line)

    @property
    def is_pending(self) -> bool:
        """Some insert waits in line."""
        return bool(self._line)

    def waits(self) -> dict[str, str]:
        """Name the waiting, and what each waits for: agreed."""
        return {
            f"insert {place} in line ({len(wish.tokens)} tokens)": "a demotion has not ended"
            for place, wish in enumerate(self._line)
        }

    def clear(self) -> None:
        """The epoch is over: nobody waits any more."""
        self._line.clear()

    def _try(self, wish: _Wish) -> Proposal:
        holder = wish.holder
        if holder is not None and self._requests.get(holder.name) is not holder:
            holder = None  # it was aborted while it waited: what it computed is cached all the same
        path = self._tree.insert(wish.tokens, wish.namespace, wish.priority)

        def refused() -> None:
            if holder is not None and self._requests.get(holder.name) is holder:
                holder.why = "its insert was refused"
                self._requests.hold(holder, None)

        proposal = self._insertion.propose(path, wish.fill, refused, wish.fill_side)
        if proposal is Proposal.REFUSED:
            refused()
        elif proposal is Proposal.OPENED:
            if holder is not None:
                self._requests.hold(holder, path[-1])
            self._backup.add_path(path)
            self._completion.add(path, wish.fill_side, _nothing)
        return proposal


def _nothing(_: list[Node]) -> None:
    """The backup of a voted insert rides its ballot: it does not wait for side pages."""
