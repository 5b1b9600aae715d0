"""One conformance suite for both stores, what torch's own store really does, and a silent host."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.consensus.core.errors import Misuse, StoreForged, StoreSilent
from kvpact.consensus.transport.collective import ProcessGroup
from kvpact.consensus.transport.gloo import (
    GlooGroup,
    RawStore,
    connect_tcp_store,
    open_tcp_store,
    serve_tcp_store,
)
from kvpact.consensus.transport.rendezvous import announce
from kvpact.consensus.transport.store import MAX_LINES, MAX_VALUE_BYTES, Store, TcpStore
from kvpact.harness.rank.launch import Launch, RankContext
from kvpact.harness.rank.store import MemoryStore

_TEXT = b"\x00\xff any bytes"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server, number = serve_tcp_store()
    yield number
    del server


@pytest.fixture(params=["memory", "tcp"])
def store(request: pytest.FixtureRequest, port: int) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    tcp = TcpStore("127.0.0.1", port)
    for key in ("a", "b", "c"):
        tcp.delete(key)
    yield tcp
    tcp.close()


def test_get_set_delete(store: Store) -> None:
    began_s = time.monotonic()
    assert store.get("a") is None
    assert time.monotonic() - began_s < 1.5  # an absent key is not waited for
    store.set("a", _TEXT)
    assert store.get("a") == _TEXT
    store.set("a", b"")
    assert store.get("a") == b""
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None


def test_compare_set_on_nothing_lets_the_first_writer_win(store: Store) -> None:
    assert store.compare_set("a", None, b"first") == b"first"
    assert store.compare_set("a", None, b"second") == b"first"
    assert store.get("a") == b"first"


def test_compare_set_never_takes_an_empty_value_for_nothing(store: Store) -> None:
    store.set("a", b"")
    assert store.compare_set("a", None, b"late") == b""
    assert store.get("a") == b""


def test_compare_set_on_something(store: Store) -> None:
    assert store.compare_set("a", b"old", b"new") == b""  # absent: nothing written
    assert store.get("a") is None
    assert store.compare_set("a", b"same", b"same") == b""
    assert store.get("a") is None
    store.set("a", b"old")
    assert store.compare_set("a", b"other", b"new") == b"old"
    assert store.compare_set("a", b"old", b"new") == b"new"
    assert store.compare_set("a", b"new", b"new") == b"new"
    assert store.get("a") == b"new"


def test_limits_are_the_callers_fault_and_change_nothing(store: Store) -> None:
    with pytest.raises(Misuse, match="at most"):
        store.set("a", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(Misuse, match="empty value"):
        store.compare_set("a", None, b"")
    with pytest.raises(Misuse, match="key"):
        store.get("")
    assert store.get("a") is None
    store.set("a", bytes(MAX_VALUE_BYTES))
    assert len(store.get("a") or b"") == MAX_VALUE_BYTES


def test_many_threads_one_winner(store: Store) -> None:
    seen: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write(number: int) -> None:
        seen.put(store.compare_set("c", None, b"%d" % number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert {seen.get(timeout=1.0) for _ in threads} == {store.get("c")}


_KEYS = st.sampled_from(["a", "b"])
_VALUES = st.sampled_from([b"", b"1", b"2", b"?", b"="])
_CALLS = st.one_of(
    st.tuples(st.just("get"), _KEYS),
    st.tuples(st.just("set"), _KEYS, _VALUES),
    st.tuples(st.just("delete"), _KEYS),
    st.tuples(
        st.just("compare_set"),
        _KEYS,
        st.none() | _VALUES,
        _VALUES.filter(lambda value: value != b""),
    ),
)


@pytest.fixture(scope="module")
def twin(port: int) -> Iterator[TcpStore]:
    tcp = TcpStore("127.0.0.1", port)
    yield tcp
    tcp.close()


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(_CALLS, max_size=12))
def test_both_stores_answer_alike(twin: TcpStore, calls: list[tuple[Any, ...]]) -> None:
    memory = MemoryStore()
    for key in ("a", "b"):
        twin.delete(key)
    for name, *arguments in calls:
        assert getattr(twin, name)(*arguments) == getattr(memory, name)(*arguments)


def test_memory_store_can_fall_silent() -> None:
    memory = MemoryStore("memory:7")
    memory.set("a", b"1")
    memory.silent = True
    for call in (lambda: memory.get("a"), lambda: memory.set("a", b"2")):
        with pytest.raises(StoreSilent, match="memory:7"):
            call()
    memory.silent = False
    assert memory.get("a") == b"1"
    assert memory.keys() == ["a"]


# ------------------------------------------------------------------------------------- TCPStore


def test_what_torch_does_with_compare_set(port: int) -> None:
    """TcpStore is built on this; a torch that differs must fail here and not in an epoch."""
    raw = connect_tcp_store("127.0.0.1", port, 5.0)
    raw.delete_key("raw")
    assert raw.compare_set("raw", "x", "y") == b"x"  # absent: returns what was expected
    assert not raw.check(["raw"])  # and writes nothing
    assert raw.compare_set("raw", "", "y") == b"y"
    assert raw.compare_set("raw", "", "z") == b"y"
    assert raw.compare_set("raw", "wrong", "z") == b"y"
    assert raw.compare_set("raw", "y", "y") == b"y"
    raw.set("raw", b"")
    assert raw.compare_set("raw", "", "z") == b"z"  # emptiness that stands is overwritten
    raw.delete_key("raw")


def test_a_foreign_value_is_not_mistaken_for_ours(port: int) -> None:
    tcp = TcpStore("127.0.0.1", port)
    tcp.raw().set("foreign", "text")
    with pytest.raises(StoreForged, match="was not written by this run"):
        tcp.get("foreign")
    tcp.delete("foreign")
    tcp.close()


def test_a_closed_store_refuses(port: int) -> None:
    tcp = TcpStore("127.0.0.1", port)
    tcp.set("a", b"1")
    tcp.close()
    with pytest.raises(Misuse, match="closed"):
        tcp.get("a")


def serve(context: RankContext, args: Any) -> None:
    server, number = serve_tcp_store()
    context.send(number)
    time.sleep(60)
    del server


def _silent_within(call: Callable[[], object], address: str, bound_s: float) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreSilent, match=address):
        call()
    assert time.monotonic() - began_s < bound_s


@pytest.mark.ranks
def test_a_stopped_host_is_silent_within_the_bound_and_comes_back() -> None:
    with Launch(f"{__name__}:serve", 1, grace_s=0.1, serve_store=False) as host:
        number: int = host.receive(0, 90.0)
        address = f"127.0.0.1:{number}"
        tcp = TcpStore("127.0.0.1", number, call_timeout_s=0.3)
        tcp.set("a", b"1")
        host.signal(0, signal.SIGSTOP)
        calls: list[Callable[[], object]] = [
            lambda: tcp.get("a"),
            lambda: tcp.set("a", b"2"),
            lambda: tcp.compare_set("a", None, b"3"),
            lambda: tcp.delete("b"),
            lambda: tcp.get("a"),  # more calls than connections
            lambda: tcp.get("a"),
            tcp.raw,
            lambda: GlooGroup.form(tcp.raw(), "g", [0, 1], 0, 4, 0.1),
        ]
        assert len(calls) > MAX_LINES
        for call in calls:
            _silent_within(call, address, 5.0)
        host.signal(0, signal.SIGCONT)
        end_s = time.monotonic() + 10.0
        value: bytes | None = None
        while value != b"2" and time.monotonic() < end_s:
            try:
                value = tcp.get("a")
            except StoreSilent:
                time.sleep(0.05)
        assert value == b"2"  # the write that was given up landed after all
        host.signal(0, signal.SIGKILL)
        assert host.join().ranks[0].exit_code == -signal.SIGKILL
        for _ in range(MAX_LINES + 1):
            _silent_within(lambda: tcp.get("a"), address, 5.0)
        tcp.close()


CALLS: dict[str, Callable[[TcpStore], object]] = {
    "get": lambda tcp: tcp.get("a"),
    "set": lambda tcp: tcp.set("a", b"2"),
    "compare_set": lambda tcp: tcp.compare_set("a", b"1", b"2"),
    "delete": lambda tcp: tcp.delete("a"),
}


def ready(port: int) -> dict[str, TcpStore]:
    """A client for each call, with one connection that is open and idle."""
    clients = {name: TcpStore("127.0.0.1", port, call_timeout_s=0.3) for name in CALLS}
    for client in clients.values():
        client.set("a", b"1")
    return clients


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_each_call_on_an_open_connection_finds_its_host_silent(how: signal.Signals) -> None:
    with Launch(f"{__name__}:serve", 1, grace_s=0.1, serve_store=False) as host:
        number: int = host.receive(0, 90.0)
        clients = ready(number)
        host.signal(0, how)
        for name, client in clients.items():
            _silent_within(lambda: CALLS[name](client), f"127.0.0.1:{number}", 5.0)  # noqa: B023
            client.close()


class Link:
    """A TCP link to ``port`` that can be cut: both hosts live, and hear nothing of it at first."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()

    def cut(self) -> None:
        """End all connections; new ones may be made."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def close(self) -> None:
        """Take no new connection either."""
        self._server.close()
        self.cut()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)


def test_each_call_on_a_connection_that_was_cut_says_so_and_writes_nothing(port: int) -> None:
    """The first write into a cut connection succeeds for the kernel; it is not done for us."""
    there = TcpStore("127.0.0.1", port)
    for name, call in CALLS.items():
        link = Link(port)
        client = TcpStore("127.0.0.1", link.port, call_timeout_s=0.5)
        client.set("a", b"1")
        link.cut()
        _silent_within(lambda: call(client), f"127.0.0.1:{link.port}", 5.0)  # noqa: B023
        assert there.get("a") == b"1", name
        call(client)  # on a new connection
        assert there.get("a") == {"get": b"1", "delete": None}.get(name, b"2")
        client.close()
        link.close()
    there.delete("a")
    there.close()


def test_a_host_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    tcp = TcpStore("127.0.0.1", number, call_timeout_s=0.2)
    _silent_within(lambda: tcp.get("a"), f"127.0.0.1:{number}", 5.0)
    _silent_within(lambda: open_tcp_store("127.0.0.1", number, 0.2), f"127.0.0.1:{number}", 5.0)
    tcp.close()


class _Cut:
    """A raw client whose connection was cut, as torch says it."""

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("Broken pipe\nException raised from sendBytes\nframe #0: c10::Error")


def test_torchs_frames_are_kept_out_of_the_way() -> None:
    """What torch says takes one line; its stack of C++ frames is not dragged along as a cause."""
    with pytest.raises(StoreSilent, match="Broken pipe") as caught:
        announce(cast("RawStore", _Cut()), ProcessGroup("g", [0], 0, 1))
    assert "frame #" not in "".join(traceback.format_exception(caught.value))


def test_who_finds_nobody_says_so_in_one_line_without_frames_of_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]  # bound, and nobody listens
        with pytest.raises(StoreSilent, match="cannot be reached") as caught:
            open_tcp_store("127.0.0.1", port, 0.5)
    assert "\n" not in caught.value.message
    assert capfd.readouterr().err == ""
