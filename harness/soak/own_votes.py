"""The positive control of a soak: a group whose votes do not count.

``kvpact soak --unsafe-no-votes`` wraps each rank's group in :class:`OwnVotes`. Every rank then
settles with its own votes and its own endings, as an engine without votes does, while headers are
still compared. A soak that does not end in divergence with this could not have failed at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.transport.gloo import Group, Work

__all__ = ["OwnVotes"]

Vector = NDArray[np.int64]


class OwnVotes:
    """A group that puts this rank's own slots into every result.

    ``first_slot``: where the slots begin in a ballot
    (:attr:`kvpact.consensus.core.ballot.Schema.first_slot`).
    """

    def __init__(self, group: Group, first_slot: int) -> None:
        self._group = group
        self._first_slot = first_slot
        self.rank = group.rank
        self.ranks = group.ranks
        self.size = group.size
        self.width = group.width

    def min(self, vector: Vector) -> Work:
        """See :meth:`kvpact.consensus.transport.gloo.Group.min`."""
        own = vector[self._first_slot :].copy()
        return _OwnWork(self._group.min(vector), own)

    def now(self) -> float:
        """See :meth:`kvpact.consensus.transport.gloo.Group.now`."""
        return self._group.now()

    def close(self) -> None:
        """See :meth:`kvpact.consensus.transport.gloo.Group.close`."""
        self._group.close()


class _OwnWork:
    """One collective in flight, whose result has this rank's slots."""

    __slots__ = ("_own", "_work")

    def __init__(self, work: Work, own: Vector) -> None:
        self._work = work
        self._own = own

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout_s: float) -> bool:
        return self._work.wait(timeout_s)

    def result(self) -> Vector:
        reduced = self._work.result().copy()
        reduced[-len(self._own) :] = self._own
        reduced.flags.writeable = False
        return reduced
