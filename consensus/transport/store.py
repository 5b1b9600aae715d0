"""The store: a small dictionary that all ranks reach, outside the collectives.

Used when groups form, when an epoch closes, and by the watch; never on the normal path of a step.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvpact.consensus.core.errors import Misuse, StoreForged, StoreSilent
from kvpact.consensus.transport.bounded import inside
from kvpact.consensus.transport.gloo import RawStore, connect_tcp_store, open_tcp_store

__all__ = [
    "MAX_VALUE_BYTES",
    "NamedStore",
    "Store",
    "TcpStore",
    "check_compare",
    "check_key",
    "check_value",
]

#: Torch's server takes 8 MiB and drops the connection of a client that sends more.
MAX_VALUE_BYTES = 4 << 20
#: Connections of one TcpStore: calls in flight, those that hang included.
MAX_LINES = 4

# What stands in torch's store for a value: never empty, and never the text that asks for it.
_HELD = b"="
_ASK = b"?"


class Store(Protocol):
    """Every call ends within a bound, or raises :class:`StoreSilent` naming the store's host.

    A write that raised may still land later, when the host goes on: write once what must not
    change (``compare_set``), and under names that no later attempt uses.
    """

    def get(self, key: str) -> bytes | None:
        """Return the value at ``key``; ``None``: nothing. Never waits for a key to appear."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Write; it stands when the call returns."""
        ...

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """Write only where ``expected`` stands (``None``: nothing); returns what stands after.

        ``value`` must not be empty, so that ``b""`` can say: nothing stands, nothing was written
        (only with an ``expected`` that is not ``None``). The first writer wins: who gets another
        value back than its own has lost.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens where it is absent."""
        ...


def check_key(key: str) -> None:
    """Raise `Misuse` for an empty key."""
    if not key:
        raise Misuse("a key of the store must not be empty")


def check_value(key: str, value: bytes) -> None:
    """Raise `Misuse` for a value of more than `MAX_VALUE_BYTES`."""
    if len(value) > MAX_VALUE_BYTES:
        raise Misuse(f"{key}: a value has at most {MAX_VALUE_BYTES} bytes, got {len(value)}")


def check_compare(key: str, value: bytes) -> None:
    """Raise `Misuse` for a value that `Store.compare_set` cannot write."""
    check_value(key, value)
    if not value:
        raise Misuse(f"{key}: compare_set cannot write an empty value")


class NamedStore:
    """One replica's part of a store that several share: every key behind its name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        return self._store.get(f"{self._name}/{key}")

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        self._store.set(f"{self._name}/{key}", value)

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :meth:`Store.compare_set`."""
        return self._store.compare_set(f"{self._name}/{key}", expected, value)

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._store.delete(f"{self._name}/{key}")


class _Call:
    """One call on its way: what to run, and what became of it."""

    __slots__ = ("ended", "error", "run", "value")

    def __init__(self, run: Callable[[RawStore], bytes | None]) -> None:
        self.run = run
        self.ended = threading.Event()
        self.value: bytes | None = None
        self.error: Exception | None = None


class _Line:
    """One connection with its daemon thread, so that whoever waits for a call can walk away."""

    __slots__ = ("_calls", "_store")

    def __init__(self, store: TcpStore) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._run, name=f"kvpact-store {store.address}", daemon=True
        ).start()

    def post(self, call: _Call | None) -> None:
        """Run ``call`` next; ``None``: end."""
        self._calls.put(call)

    def _run(self) -> None:
        client: RawStore | None = None
        while (call := self._calls.get()) is not None:
            try:
                with inside():
                    if client is None:
                        client = self._store.connect()
                    call.value = call.run(client)
            except Exception as error:  # noqa: BLE001  raised again by whoever waits for the call
                call.error = error
            # Back in the pool before the caller goes on: its next call finds this connection.
            stays = self._store.give_back(self, usable=call.error is None)
            call.ended.set()
            if not stays:
                return


class TcpStore:
    """Torch's TCPStore with a bound on every call; any thread may use it.

    A call to a host that has stopped hangs for as long as it is stopped, whatever the client's
    timeout says (measured: 9 s with a timeout of 1 s, connecting included). So every call runs on
    a connection with a daemon thread of its own, and is left alone after ``call_timeout_s``. A
    connection that hangs comes back by itself when its host goes on; at most ``MAX_LINES`` exist.

    What torch 2.13's TCPStore does, and what is made of it here:

    * ``set`` is not answered: it succeeds although the host has stopped. Here a ``check`` on the
      same connection follows, so that a write that returned stands.
    * ``get`` waits for an absent key. ``compare_set(key, expected, value)`` never waits: where the
      key is absent it writes if ``expected`` is empty, else it writes nothing *and returns
      ``expected``*; where something else stands it returns that; where ``expected`` stands it
      writes and returns ``value`` (so with ``value == expected`` an absent key and a present one
      look the same). Hence ``get`` is a ``compare_set`` whose expected value can never stand.
    * an empty value that stands is overwritten by a ``compare_set`` that expects emptiness. Hence
      every value is stored behind one byte, and "empty" means "absent".
    """

    def __init__(self, host: str, port: int, *, call_timeout_s: float = 2.0) -> None:
        self.host = host
        self.port = port
        self.call_timeout_s = call_timeout_s
        self._change = threading.Condition()
        self._idle: collections.deque[_Line] = collections.deque()
        self._num_lines = 0
        self._closed = False

    @property
    def address(self) -> str:
        """host:port, as every error names it."""
        return f"{self.host}:{self.port}"

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        check_key(key)
        return self._held(key, self._call(lambda raw: raw.compare_set(key, _ASK, _ASK)))

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        check_key(key)
        check_value(key, value)

        def write(raw: RawStore) -> None:
            raw.set(key, _HELD + value)
            raw.check([key])

        self._call(write)

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :meth:`Store.compare_set`."""
        check_key(key)
        check_compare(key, value)
        if expected == value:
            return self.get(key) or b""
        old = b"" if expected is None else _HELD + expected
        stands = self._call(lambda raw: raw.compare_set(key, old, _HELD + value))
        if expected is not None and stands == old:
            return b""  # it would have been replaced if it stood: the key is absent
        return self._held(key, stands) or b""

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        check_key(key)

        def remove(raw: RawStore) -> None:
            raw.delete_key(key)

        self._call(remove)

    def raw(self, timeout_s: float | None = None) -> RawStore:
        """A new raw client, to form a group with; within ``timeout_s`` (else of a call)."""
        limit_s = self.call_timeout_s if timeout_s is None else timeout_s
        return open_tcp_store(self.host, self.port, limit_s)

    def open_lines(self, number: int) -> None:
        """Have ``number`` connections open that are idle: a new one may take seconds."""
        end_s = time.monotonic() + self.call_timeout_s
        calls = [_Call(lambda raw: raw.compare_set("?", _ASK, _ASK)) for _ in range(number)]
        for line, call in zip([self._line(end_s) for _ in calls], calls, strict=True):
            line.post(call)
        for call in calls:
            self._await(call, end_s)

    def close(self) -> None:
        """End all connections that are idle; those that hang end when they can. Never blocks."""
        with self._change:
            self._closed = True
            for line in self._idle:
                line.post(None)
            self._idle.clear()
            self._change.notify_all()

    def connect(self) -> RawStore:
        """A raw client, on the thread of a connection (may hang)."""
        return connect_tcp_store(self.host, self.port, self.call_timeout_s)

    def give_back(self, line: _Line, *, usable: bool) -> bool:
        """Take back a connection whose call has ended; ``False``: it shall end."""
        with self._change:
            stays = usable and not self._closed
            if stays:
                self._idle.append(line)
            else:
                self._num_lines -= 1
            self._change.notify()
            return stays

    def _call(self, run: Callable[[RawStore], bytes | None]) -> bytes | None:
        end_s = time.monotonic() + self.call_timeout_s
        call = _Call(run)
        self._line(end_s).post(call)
        return self._await(call, end_s)

    def _await(self, call: _Call, end_s: float) -> bytes | None:
        if not call.ended.wait(max(0.0, end_s - time.monotonic())):
            raise StoreSilent(
                f"store {self.address} did not answer within {self.call_timeout_s:g} s"
            )
        if isinstance(call.error, RuntimeError):
            raise StoreSilent(f"store {self.address} failed: {_first_line(call.error)}")
        if call.error is not None:
            raise call.error
        return call.value

    def _line(self, end_s: float) -> _Line:
        with self._change:
            while True:
                if self._closed:
                    raise Misuse(f"store {self.address} is closed")
                if self._idle:
                    return self._idle.pop()
                if self._num_lines < MAX_LINES:
                    self._num_lines += 1
                    return _Line(self)
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._change.wait(left_s):
                    raise StoreSilent(f"store {self.address}: {MAX_LINES} calls hang already")

    def _held(self, key: str, stands: bytes | None) -> bytes | None:
        if stands == _ASK:
            return None
        if stands is None or not stands.startswith(_HELD):
            raise StoreForged(f"what stands at '{key}' in the store was not written by this run")
        return stands[len(_HELD) :]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
