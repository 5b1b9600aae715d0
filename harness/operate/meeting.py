"""A real meeting of all hosts: one store, a group, and what a collective between them takes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from kvpact.consensus.core.errors import BadInput, KvpactError
from kvpact.consensus.membership import Membership
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.consensus.transport.store import TcpStore
from kvpact.harness.operate.finding import Finding, good, note, wrong

__all__ = ["meet", "parse_address"]

ROUNDS = 200
#: About the width of a ballot with two pools and 256 slots.
WIDTH = 531
SLOW_MS = 5.0
DEADLINE_S = 10.0
_SETTLE_S = 5.0


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, also ``[IPv6]:PORT``. Raises BadInput."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not host
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise BadInput(f"expected HOST:PORT like 10.0.0.1:29400, got {text!r}")
    return host, int(port)


def meet(address: str, num_ranks: int, wait_s: float) -> list[Finding]:
    """Meet ``num_ranks - 1`` others at ``address`` and measure; ends within ``wait_s``.

    The host that owns the address serves the store, unless somebody listens there already. Each
    caller takes the next free number. Raises BadInput where the address cannot be read.
    """
    host, port = parse_address(address)
    try:
        with _served(host, port) as said:
            findings = [good("store", said)]
            return findings + _meet(host, port, num_ranks, wait_s)
    except KvpactError as error:
        return [wrong("meeting", error.message, _todo(host, port))]


@contextmanager
def _served(host: str, port: int) -> Generator[str]:
    """Serve the store where the address is this host's and free; say who serves it."""
    if _is_open(host, port):
        yield f"{host}:{port} answers"
        return
    if not _is_ours(host):
        yield f"{host}:{port} is waited for"
        return
    store, served = serve_tcp_store(port, host="")
    yield f"served here on port {served}"
    del store


def _is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _is_ours(host: str) -> bool:
    """Whether a server here could listen on ``host``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _meet(host: str, port: int, num_ranks: int, wait_s: float) -> list[Finding]:
    end_s = time.monotonic() + wait_s
    rank = _take_number(host, port, num_ranks, end_s)
    membership = Membership.join(
        host,
        port,
        name=f"doctor-{num_ranks}",
        rank=rank,
        ranks=range(num_ranks),
        width=WIDTH,
        facts={"rounds": str(ROUNDS)},
        usable={},
        deadline_s=DEADLINE_S,
        start_timeout_s=max(1.0, end_s - time.monotonic()),
    )
    try:
        times_ms = sorted(_collectives(membership))
    finally:
        membership.leave(_SETTLE_S)
    median_ms, late_ms = times_ms[len(times_ms) // 2], times_ms[int(len(times_ms) * 0.99)]
    text = (
        f"rank {rank} of {num_ranks}: {ROUNDS} collectives, median {median_ms:.2f} ms,"
        f" p99 {late_ms:.2f} ms"
    )
    if median_ms > SLOW_MS:
        todo = "use the interface between the hosts (GLOO_SOCKET_IFNAME), and lag 1 or more"
        return [note("meeting", text, todo)]
    return [good("meeting", text)]


def _take_number(host: str, port: int, num_ranks: int, end_s: float) -> int:
    """Return the lowest number that nobody has taken. Raises BadInput where all are taken."""
    store = TcpStore(host, port, call_timeout_s=max(1.0, end_s - time.monotonic()))
    me = f"{socket.gethostname()} {os.getpid()} {time.monotonic_ns()}".encode()
    try:
        for rank in range(num_ranks):
            if store.compare_set(f"doctor-{num_ranks}/number/{rank}", None, me) == me:
                return rank
    finally:
        store.close()
    raise BadInput(
        f"{host}:{port}: all {num_ranks} numbers are taken: --ranks is too small, or an earlier"
        " meeting was held in the same store; use another port"
    )


def _collectives(membership: Membership) -> list[float]:
    vector = np.arange(WIDTH, dtype=np.int64)
    times_ms: list[float] = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        if not membership.group.min(vector).wait(DEADLINE_S):
            raise BadInput(f"a collective took longer than {DEADLINE_S:g} s")
        times_ms.append((time.perf_counter() - began_s) * 1000)
    return times_ms


def _todo(host: str, port: int) -> str:
    return (
        f"see that TCP port {port} of {host} and high ports between the hosts are open, that all"
        " were started in time, and that GLOO_SOCKET_IFNAME names the interface between them"
    )
