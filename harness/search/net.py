"""The network and the store of the search: collectives are paired by count, as raw gloo does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpact.consensus.core.ballot import Vector
from kvpact.consensus.core.errors import Misuse, PeerLost
from kvpact.consensus.epoch.report import LastSeen
from kvpact.consensus.transport.collective import Work

__all__ = ["Crash", "SearchGroup", "SearchNet"]

_CALLS_KEPT = 8  # more than any rank can be behind


class Crash(BaseException):
    """The process of this rank ends here: no code of ours can catch it."""


class SearchNet:
    """Pairs the k-th call of every rank in each epoch, as raw gloo does, and is the store.

    Counts what becomes visible to others, and ends the process of who has said enough. ``left``
    are ranks that closed the group of an epoch: who still waits for them there learns it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.now_s = 0.0
        self.dead: list[int] = []
        self.left: list[tuple[int, int]] = []
        self.calls: dict[tuple[int, int], dict[int, Vector]] = {}
        self.values: dict[str, bytes] = {}
        self.num_visible = 0
        self.visible_max = -1

    def shows(self) -> None:
        """Something is about to become visible to others."""
        if self.num_visible == self.visible_max:
            raise Crash
        self.num_visible += 1

    def put(self, rank: int, index: tuple[int, int], vector: Vector) -> None:
        """A call of ``rank``: its epoch, and which one it is there."""
        self.shows()
        self.calls.setdefault(index, {})[rank] = vector.copy()
        self.calls.pop((index[0], index[1] - _CALLS_KEPT), None)

    def take(self, index: tuple[int, int]) -> Vector | None:
        """The minimum over all ranks. Raises :class:`PeerLost` where it cannot come any more."""
        found = self.calls[index]
        if len(found) == self.size:
            return np.minimum.reduce([found[rank] for rank in sorted(found)])
        gone = [*self.dead, *(rank for rank, epoch in self.left if epoch == index[0])]
        if any(rank not in found for rank in gone):
            raise PeerLost("the connection was closed by a peer", ranks=tuple(sorted(gone)))
        return None

    # Out of band (consensus.epoch.Locator).

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended."""
        return rank in self.dead

    def is_paused(self, rank: int) -> bool:
        """Nobody pauses here."""
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        """Only whether they live."""
        return {rank: LastSeen(0, "", 0.0, dead=rank in self.dead) for rank in ranks}

    # The store (consensus.store.Store); a process may end before each write.

    def get(self, key: str) -> bytes | None:
        """See :class:`kvpact.consensus.transport.store.Store`."""
        return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """See :class:`kvpact.consensus.transport.store.Store`."""
        self.shows()
        self.values[key] = value

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :class:`kvpact.consensus.transport.store.Store`."""
        self.shows()
        if self.values.get(key) == expected:
            self.values[key] = value
        return self.values.get(key, b"")

    def delete(self, key: str) -> None:
        """See :class:`kvpact.consensus.transport.store.Store`."""
        self.values.pop(key, None)


class SearchGroup:
    """One rank's group (:class:`kvpact.consensus.transport.collective.Group`) of one epoch."""

    def __init__(self, net: SearchNet, rank: int, width: int, epoch: int = 0) -> None:
        self.rank = rank
        self.size = net.size
        self.ranks = tuple(range(net.size))
        self.width = width
        self._net = net
        self._epoch = epoch
        self._num_calls = 0

    def min(self, vector: Vector) -> Work:
        """See :class:`kvpact.consensus.transport.collective.Group`."""
        index = self._epoch, self._num_calls
        self._num_calls += 1
        self._net.put(self.rank, index, vector)
        return SearchWork(self._net, index)

    def now(self) -> float:
        """Virtual seconds."""
        return self._net.now_s

    def close(self) -> None:
        """Peers that still wait see it."""
        if (self.rank, self._epoch) not in self._net.left:
            self._net.left.append((self.rank, self._epoch))


class SearchWork:
    """One collective in flight."""

    def __init__(self, net: SearchNet, index: tuple[int, int]) -> None:
        self._net = net
        self._index = index

    def done(self) -> bool:
        """See :class:`kvpact.consensus.transport.collective.Work`."""
        return self._net.take(self._index) is not None

    def wait(self, timeout_s: float) -> bool:
        """See :class:`kvpact.consensus.transport.collective.Work`."""
        return self.done()

    def result(self) -> Vector:
        """See :class:`kvpact.consensus.transport.collective.Work`."""
        reduced = self._net.take(self._index)
        if reduced is None:
            raise Misuse("result() before the collective is done")
        return reduced
