"""The protocols of a group, and the checks that real ones share before anything reaches torch.

:mod:`kvpact.consensus.transport.gloo` has the real ones.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.core.errors import Misuse, PeerLost, ResourceError
from kvpact.consensus.transport.bounded import entrust

__all__ = [
    "MAX_OUTSTANDING",
    "Group",
    "LostWork",
    "ProcessGroup",
    "RawStore",
    "Vector",
    "Work",
    "first_line",
]

Vector = NDArray[np.int64]

#: Collectives in flight in one group; the protocol keeps lag + 1 of them.
MAX_OUTSTANDING = 256


class Work(Protocol):
    """One collective in flight. Any thread may ask; asking changes nothing."""

    def done(self) -> bool:
        """Whether the result is here. Never blocks; raises :class:`PeerLost` where it failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s``; ``False``: not yet, ask again. Raises :class:`PeerLost`."""
        ...

    def result(self) -> Vector:
        """The minimum over all ranks, shape ``(width,)``, read-only. Before done: Misuse."""
        ...


class LostWork:
    """A collective that could not be started, since its transport is broken: a :class:`Work`."""

    def __init__(self, error: PeerLost) -> None:
        self._error = error

    def done(self) -> bool:
        """Raise the error that the transport gave."""
        raise self._error

    def wait(self, timeout_s: float) -> bool:
        """Raise the error that the transport gave."""
        raise self._error

    def result(self) -> Vector:
        """Raise the error that the transport gave."""
        raise self._error


class Group(Protocol):
    """A fixed set of ranks that reduce vectors of one fixed width."""

    @property
    def rank(self) -> int:
        """This rank's number in the replica (not its place among the ranks of a subset)."""
        ...

    @property
    def size(self) -> int:
        """How many ranks take part."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, sorted."""
        ...

    @property
    def width(self) -> int:
        """How many int64 numbers every vector has."""
        ...

    def min(self, vector: Vector) -> Work:
        """Start the MIN over all ranks. ``vector``: int64, shape ``(width,)``; it is copied.

        All ranks must call it equally often, each from one thread. Raises :class:`Misuse` before
        anything is sent, and may raise :class:`PeerLost` where the transport is known to be broken;
        a lost peer shows in the returned work at the latest.
        """
        ...

    def now(self) -> float:
        """Monotonic seconds (virtual in a simulated group)."""
        ...

    def close(self) -> None:
        """End the use of the group; never blocks. Peers that still wait see PeerLost."""
        ...


class RawStore(Protocol):
    """The calls of torch's store clients that are used. One client serves one call at a time."""

    def set(self, key: str, value: bytes | str, /) -> None:
        """Write, without waiting for an answer: succeeds while the host is stopped."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Whether the key was there."""
        ...

    def compare_set(self, key: str, expected: bytes | str, value: bytes | str, /) -> bytes:
        """See :class:`~kvpact.consensus.transport.store.TcpStore` for absent keys."""
        ...


class ProcessGroup:
    """The base of the real groups: who takes part, the checks, the way out."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, width: int) -> None:
        members = tuple(ranks)
        if not members or members != tuple(sorted(set(members))):
            raise Misuse(f"group {name}: ranks must be sorted and distinct, got {members}")
        if rank not in members:
            raise Misuse(f"group {name}: rank {rank} is not one of {members}")
        if width < 1:
            raise Misuse(f"group {name}: width must be at least 1, got {width}")
        self.name = name
        self.ranks = members
        self.rank = rank
        self.width = width
        self._owner: threading.Thread | None = None
        self._group: Any = None
        self._outstanding: collections.deque[Any] = collections.deque()
        self._release: Callable[[], object] | None = None

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def close(self) -> None:
        """See :meth:`Group.close`. May be called again, from any thread."""
        release, self._group, self._release = self._release, None, None
        if release is not None:
            release()

    def _take(self, process_group: Any) -> None:
        self._group = process_group
        self._release = entrust(self, process_group, self._outstanding)

    def _check(self, vector: object) -> None:
        """Raise :class:`Misuse` unless this thread may post exactly this vector now."""
        if self._group is None:
            raise Misuse(f"group {self.name} is closed: form a new one")
        thread = threading.current_thread()
        if self._owner is None:
            self._owner = thread
        elif self._owner is not thread:
            raise Misuse(
                f"group {self.name} belongs to thread {self._owner.name}, not {thread.name}:"
                " two threads would pair their collectives at random"
            )
        dtype, shape = getattr(vector, "dtype", None), getattr(vector, "shape", None)
        is_numpy = isinstance(vector, np.ndarray)
        if not is_numpy or dtype != np.int64:
            kind = f"numpy {dtype}" if is_numpy else type(vector).__name__
            raise Misuse(f"group {self.name} reduces numpy int64 vectors, got {kind}")
        if shape != (self.width,):
            raise Misuse(f"group {self.name} reduces shape ({self.width},), got {shape}")

    def _admit(self) -> None:
        """Room for one more collective in flight, or :class:`ResourceError`."""
        outstanding = self._outstanding
        while outstanding and outstanding[0].is_completed():
            outstanding.popleft()
        if len(outstanding) >= MAX_OUTSTANDING:
            raise ResourceError(f"group {self.name}: {MAX_OUTSTANDING} collectives in flight")

    def lost(self, error: BaseException) -> PeerLost:
        """The error for a collective of this group that failed with ``error``."""
        return PeerLost(f"group {self.name}: a collective failed: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return torch's own words, without its stack."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
