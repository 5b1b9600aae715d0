"""A store for ranks that all live in one process: no server, no socket, and silent on demand."""

from __future__ import annotations

import threading

from kvpact.consensus.core.errors import StoreSilent
from kvpact.consensus.transport.store import check_compare, check_key, check_value

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dictionary in this process; any thread may use it.

    While ``silent`` is set, every call raises :class:`StoreSilent`, as if the host had stopped.
    """

    def __init__(self, address: str = "memory:0") -> None:
        self.address = address
        self.silent = False
        self._values: dict[str, bytes] = {}
        self._guard = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        self._check(key)
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        self._check(key)
        check_value(key, value)
        with self._guard:
            self._values[key] = bytes(value)

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :meth:`Store.compare_set`."""
        self._check(key)
        check_compare(key, value)
        with self._guard:
            if self._values.get(key) == expected:
                self._values[key] = bytes(value)
            return self._values.get(key, b"")

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._check(key)
        with self._guard:
            self._values.pop(key, None)

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self._values)

    def _check(self, key: str) -> None:
        check_key(key)
        if self.silent:
            raise StoreSilent(f"store {self.address} is silent")
