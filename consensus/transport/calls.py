"""Notes of ranks outside their door: with which secret each calls while it waits there.

Runs with different secrets do not meet, so a rank with another secret would only be missed by the
others. This note is not signed, since it is for those who could not verify it. It is compared, and
never decoded; it enters no decision but the words of an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from kvpact.consensus.core.errors import StoreSilent
from kvpact.consensus.transport.store import Store

__all__ = ["Calls"]


class Calls:
    """The notes of replica ``name`` in a bare store; ``scope`` stands in that of this rank.

    ``strangers`` are the ranks that were seen to call with another secret. A note that does not
    change was left by a process that ended, and says nothing.
    """

    def __init__(self, store: Store, name: str, rank: int, scope: str) -> None:
        self.strangers: set[int] = set()
        self._store = store
        self._name = name
        self._rank = rank
        self._scope = scope.encode()
        self._num_shown = 0
        self._seen: dict[int, bytes] = {}

    def show(self) -> None:
        """Show the note of this rank anew; a silent store is for others to find."""
        self._num_shown += 1
        with contextlib.suppress(StoreSilent):
            self._store.set(self._key(self._rank), self._scope + b" %d" % self._num_shown)

    def look(self, ranks: Iterable[int]) -> None:
        """See which of ``ranks`` call with another secret now, or with none."""
        with contextlib.suppress(StoreSilent):
            for rank in ranks:
                note = self._store.get(self._key(rank))
                if note is None or note.startswith(self._scope + b" "):
                    continue
                if self._seen.setdefault(rank, note) != note:
                    self.strangers.add(rank)

    def hide(self) -> None:
        """Take the note away, whether the rank came in or not."""
        with contextlib.suppress(StoreSilent):
            note = self._store.get(self._key(self._rank))
            if note is not None and note.startswith(self._scope + b" "):
                self._store.delete(self._key(self._rank))

    def _key(self, rank: int) -> str:
        return f"{self._name}/calls/{rank}"
