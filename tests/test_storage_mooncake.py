"""Mooncake: its wrapper against the real master, one test for each thing the store does oddly.

Skipped, and loudly, where the wheel or its system library is not installed. CI that must have it
sets KVPACT_REQUIRE_MOONCAKE=1.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpact.cache.storage import Identity, open_backend, seal
from kvpact.cache.storage.mooncake import MooncakeBackend
from kvpact.consensus.core.errors import BadInput, Misuse
from tests.storage_conformance import check_calls, check_conformance
from tests.storage_pages import IDENTITY, key_of, page_of, sealed

LONG_S = 30.0
MIB = 1 << 20
ROOT = Path(__file__).parent.parent


def _missing() -> str:
    """Why Mooncake cannot be tested here; empty: it can."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"{error} (install the extra `mooncake`, and Debian's libibverbs1)"
    return "" if _master_program() else "mooncake_master is not there"


def _master_program() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


MISSING = _missing()
if MISSING and os.environ.get("KVPACT_REQUIRE_MOONCAKE"):
    raise RuntimeError(f"KVPACT_REQUIRE_MOONCAKE is set, but {MISSING}")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(MISSING), reason=f"MOONCAKE IS NOT TESTED: {MISSING}"),
]


class Master:
    """The real master on ports that were free."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags
        self.port, self.metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program = _master_program()
        assert program is not None
        # The program of that name is a script that starts the real one: run that, to end it by id.
        module = importlib.import_module("mooncake")
        real = Path(next(iter(module.__path__))) / "mooncake_master"
        self.process = subprocess.Popen(
            [
                str(real if real.exists() else program),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.metrics_port}",
                "--enable_metric_reporting=false",
                *self.flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: listens(self.port))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(LONG_S)
            self.process = None


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def wait_for(done: Callable[[], bool], seconds: float = LONG_S) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """One for all tests that do not end it."""
    started = Master()
    yield started
    started.kill()


@pytest.fixture
def mortal() -> Iterator[Master]:
    started = Master()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def shared(master: Master) -> Iterator[MooncakeBackend]:
    opened = open_here(master)
    yield opened
    assert opened.close()


@pytest.fixture
def backend(shared: MooncakeBackend) -> MooncakeBackend:
    """Without pages, and nothing counted: a client takes seconds to close."""
    shared._client.remove_all(True)
    shared.counters = dict.fromkeys(shared.counters, 0)
    return shared


def open_here(
    master: Master, *, lent_bytes: int = 64 * MIB, identity: Identity = IDENTITY
) -> MooncakeBackend:
    return MooncakeBackend(master.address, identity, lent_bytes=lent_bytes, buffer_bytes=4 * MIB)


def raw(backend: MooncakeBackend, number: int) -> str:
    return backend._names([key_of(number)])[0]


def test_conformance(backend: MooncakeBackend) -> None:
    check_conformance(
        lambda: backend,
        roomy=True,
        reopens=False,
        wipe=backend.clear,
        keeps_open=True,
        max_examples=15,
    )


def test_calls(mortal: Master) -> None:
    check_calls(open_here(mortal))


def test_a_missing_key_is_a_miss_also_beside_others(backend: MooncakeBackend) -> None:
    assert backend._client.get(raw(backend, 1)) == b""  # what the store itself says
    assert backend.get([key_of(1)]) == [None]
    assert backend.put([sealed(2)]) == [True]
    assert backend.get([key_of(1), key_of(2), key_of(1)]) == [None, page_of(2), None]


def test_an_empty_value_of_someone_else_is_a_miss(backend: MooncakeBackend) -> None:
    assert backend._client.put(raw(backend, 1), b"") == -600  # refused: ours are never empty
    assert backend._client.put(raw(backend, 1), b"x") == 0  # too short for an envelope
    assert backend.put([sealed(2)]) == [True]
    assert backend.get([key_of(1), key_of(2)]) == [None, page_of(2)]


def test_a_page_larger_than_the_buffer_is_refused_alone(
    backend: MooncakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    assert backend.put([sealed(1), sealed(2, 0, 5 * MIB), sealed(3)]) == [True, False, True]
    assert "more than the buffer holds" in caplog.text
    assert backend.get([key_of(n) for n in (1, 2, 3)]) == [page_of(1), None, page_of(3)]


def test_a_batch_larger_than_the_buffer_goes_in_parts(backend: MooncakeBackend) -> None:
    numbers = range(20)
    assert backend.put([sealed(n, 0, MIB) for n in numbers]) == [True] * 20
    assert backend.get([key_of(n) for n in numbers]) == [page_of(n, 0, MIB) for n in numbers]


def test_pages_of_different_size_are_all_read(backend: MooncakeBackend, master: Master) -> None:
    sizes = [10, 100 * 1024, 3000, MIB]
    assert all(backend.put([sealed(n, 0, size) for n, size in enumerate(sizes)]))
    other = open_here(master, lent_bytes=0)  # it has met no page yet
    assert other.get([key_of(n) for n in range(4)]) == [
        page_of(n, 0, size) for n, size in enumerate(sizes)
    ]
    assert other.close()


def test_a_second_put_replaces(backend: MooncakeBackend) -> None:
    plain = [backend._client.put("plain", value) for value in (b"old", b"new")]
    assert (plain, backend._client.get("plain")) == ([0, 0], b"old")  # what the store itself does
    assert backend.put([sealed(1, 0)]) == [True]
    assert backend.get([key_of(1)]) == [page_of(1, 0)]
    assert backend.put([sealed(1, 1)]) == [True]  # leased by the get, and of another length
    assert backend.get([key_of(1)]) == [page_of(1, 1)]


def test_what_was_just_read_can_be_removed(backend: MooncakeBackend) -> None:
    backend.put([sealed(1)])
    backend.get([key_of(1)])
    assert backend._client.remove(raw(backend, 1)) == -706  # what the store itself says
    assert backend.remove([key_of(1), key_of(2)]) == [True, False]
    assert backend.exists([key_of(1)]) == [False]


def test_a_full_store_takes_new_pages_or_says_no(mortal: Master) -> None:
    backend = open_here(mortal, lent_bytes=16 * MIB)
    kept: list[bool] = []
    for first in range(0, 96, 3):
        kept += backend.put([sealed(n, 0, MIB) for n in range(first, first + 3)])
    assert kept.count(True) > 16, "it evicts, and is tried again meanwhile"
    pages = backend.get([key_of(n) for n in range(96)])
    assert all(page in (None, page_of(n, 0, MIB)) for n, page in enumerate(pages))
    assert 0 < len(pages) - pages.count(None) <= 16
    assert not any(page for page, is_kept in zip(pages, kept, strict=True) if not is_kept)
    assert backend.close()


def test_a_store_without_memory_refuses(mortal: Master) -> None:
    backend = open_here(mortal, lent_bytes=0)
    started = time.monotonic()
    assert backend.put([sealed(1), sealed(2)]) == [False, False]
    assert time.monotonic() - started < 5, "the tries are few"
    assert backend.counters["refused"] == 2
    assert backend.close()


def test_wrong_bytes_in_the_store_are_a_miss(backend: MooncakeBackend) -> None:
    value = bytearray(16) + page_of(1)
    assert backend._client.put(raw(backend, 1), bytes(value)) == 0
    assert backend.exists([key_of(1)]) == [True]
    assert backend.get([key_of(1)]) == [None]
    assert backend.counters["wrong"] == 1
    assert backend.put([sealed(1)]) == [True]
    assert backend.get([key_of(1)]) == [page_of(1)]


def test_tenants_do_not_see_or_clear_each_other(backend: MooncakeBackend, master: Master) -> None:
    other = open_here(master, identity=Identity(model="other", layout="test", page_size=4))
    backend.put([sealed(1)])
    other.put([sealed(1, 1), sealed(2)])
    assert backend.get([key_of(1), key_of(2)]) == [page_of(1), None]
    assert other.clear()
    assert other.exists([key_of(1)]) == [False]
    assert backend.get([key_of(1)]) == [page_of(1)]
    assert other.close()


OWNER = """
import sys, time
from tests.storage_pages import IDENTITY, sealed
from cache.storage.mooncake import MooncakeBackend
backend = MooncakeBackend(sys.argv[1], IDENTITY, lent_bytes=64 << 20, buffer_bytes=4 << 20)
print(backend.put([sealed(1), sealed(2)]), flush=True)
time.sleep(100)
"""


def test_pages_of_an_owner_that_was_killed_exist_and_are_misses(mortal: Master) -> None:
    reader = open_here(mortal, lent_bytes=0)
    command = [sys.executable, "-c", OWNER, mortal.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "[True, True]\n"
            assert reader.get([key_of(1)]) == [page_of(1)]
        finally:
            owner.kill()
            owner.wait(LONG_S)
    assert reader.exists([key_of(1), key_of(2)]) == [True, True]  # the store does not know yet
    started = time.monotonic()
    assert reader.get([key_of(1), key_of(2)]) == [None, None]
    assert time.monotonic() - started < 15
    assert reader.close()


def test_a_dead_master_costs_hits_at_once_and_a_restart_is_used_again(
    mortal: Master, caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_here(mortal)
    assert backend.put([sealed(1)]) == [True]
    mortal.kill()
    time.sleep(0.2)  # longer than a good answer is trusted
    started = time.monotonic()
    for _ in range(20):
        assert backend.get([key_of(1)]) == [None]
        assert backend.put([sealed(2)]) == [False]
        assert backend.exists([key_of(1)]) == [False]
        assert backend.remove([key_of(1)]) == [False]
        assert not backend.clear()
    assert time.monotonic() - started < 2, "the store itself takes four seconds a call"
    assert "nobody listens" in caplog.text
    mortal.start()
    wait_for(lambda: backend.put([sealed(3)]) == [True])
    assert backend.get([key_of(3), key_of(1)]) == [page_of(3), None]  # it forgot what it had
    assert backend.close()


def test_a_master_that_dies_under_a_call_is_a_miss(mortal: Master) -> None:
    backend = open_here(mortal)
    backend.put([sealed(1)])
    backend._answered = time.monotonic() + 3600  # as if it had answered just before
    mortal.kill()
    started = time.monotonic()
    assert backend.get([key_of(1)]) == [None]
    assert time.monotonic() - started < 20
    assert backend.counters["errors"] == 1
    started = time.monotonic()
    assert backend.get([key_of(1)]) == [None]
    assert time.monotonic() - started < 1, "once it is known, nothing is asked"
    started = time.monotonic()
    assert backend.close(), "the store itself blocks for 20 s, and keeps the GIL"
    assert time.monotonic() - started < 3
    with pytest.raises(Misuse, match="closed"):
        backend.get([key_of(1)])


def test_without_a_master_it_says_so_at_once() -> None:
    (port,) = free_ports(1)
    started = time.monotonic()
    with pytest.raises(BadInput, match=f"nobody listens at 127.0.0.1:{port}"):
        open_backend("mooncake", IDENTITY, master=f"127.0.0.1:{port}")
    assert time.monotonic() - started < 5, "setup itself would block for 90 s"


@pytest.mark.parametrize("address", ["here", ":1", "here:", "here:0", "here:99999", "here:x"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(BadInput, match="host:port"):
        MooncakeBackend(address, IDENTITY, lent_bytes=0)


def test_a_port_of_something_else_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens, but it is no master: the client is not waited for without end."""
    monkeypatch.setattr("kvpact.cache.storage.mooncake.SETUP_TIMEOUT_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadInput, match=r"no answer within 1.0 s: is it a mooncake_master"):
            MooncakeBackend(f"127.0.0.1:{other.getsockname()[1]}", IDENTITY, lent_bytes=0)


def test_a_little_memory_cannot_be_lent(master: Master) -> None:
    with pytest.raises(BadInput, match="lend no memory or at least 16777216"):
        open_here(master, lent_bytes=MIB)


def test_close_waits_for_calls_and_later_ones_do_not_reach_the_store(master: Master) -> None:
    """A call of the store itself after its close ends the process."""
    backend = open_here(master)
    entered, leave = threading.Event(), threading.Event()
    inner = backend._load

    def slow(keys: object) -> object:
        entered.set()
        assert leave.wait(LONG_S)
        return inner(keys)  # pyright: ignore[reportArgumentType]

    backend._load = slow  # pyright: ignore[reportAttributeAccessIssue]
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(backend.get([key_of(999)])))
    thread.start()
    assert entered.wait(LONG_S)
    assert not backend.close(0.05)
    leave.set()
    thread.join(LONG_S)
    assert results == [[None]]
    assert backend.close()
    assert backend.close()


def test_that_it_listens_everywhere_is_told(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_here(master, lent_bytes=0)
    assert "listens on ports on all its interfaces" in caplog.text
    assert backend.close()


def test_memory_reused_while_it_is_put_is_never_served(backend: MooncakeBackend) -> None:
    memory = bytearray(page_of(1))
    before = seal(key_of(1), memory)
    memory[3] ^= 1
    assert backend.put([before]) == [False]
    assert backend.get([key_of(1)]) == [None]
