"""Whether ranks can reach one another, before gloo tries: gloo itself says so minutes later.

Each rank publishes the address that it will be bound to and listens there for a moment; the others
connect. So a wrong or missing interface has a name within a second or two, with the variable that
sets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

import msgspec

from kvpact.consensus.core.errors import Misuse

__all__ = ["Reach", "Where", "apart"]

VARIABLE = "GLOO_SOCKET_IFNAME"
#: How long one connection may take: a lost packet is sent again after one second.
CONNECT_S = 2.0
_SIOCGIFADDR = 0x8915
_IFNAME_BYTES = 15


class Where(msgspec.Struct, frozen=True):
    """The address of a rank. ``trouble``: why it has none; ``source`` chose the address.

    ``key`` is what its listener says to who connects.
    """

    rank: int
    address: str
    port: int
    source: str
    host: str
    network: str
    key: str
    trouble: str = ""

    def __str__(self) -> str:
        return f"{self.address} (from {self.source}, host {self.host})"


class Reach:
    """This rank's address, and a listener there, until it is closed."""

    def __init__(self, rank: int, key: str, store_host: str, store_port: int) -> None:
        self._listener: socket.socket | None = None
        address, port, source, trouble = "", 0, "", ""
        try:
            address, source = _own_address(store_host, store_port)
            port = self._listen(address, key.encode())
        except OSError as error:
            trouble = f"it cannot listen at {address} (from {source}): {error.strerror or error}"
        except Misuse as error:
            trouble = error.message
        self.where = Where(
            rank, address, port, source, socket.gethostname(), _network(), key, trouble
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. May be called again."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            listener.close()

    def _listen(self, address: str, key: bytes) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(
            target=_greet, args=(listener, key), name="kvpact-reach", daemon=True
        ).start()
        return int(listener.getsockname()[1])

    def try_all(self, others: list[Where], left_s: Callable[[], float]) -> str:
        """Connect to each of ``others``; what is wrong with the first that is out of reach."""
        for other in others:
            if other.rank == self.where.rank:
                continue
            error = _try(other, left_s)
            if error:
                return (
                    f"rank {self.where.rank} at {self.where} cannot reach rank {other.rank} at"
                    f" {other}: {error}; {_advice()}"
                )
        return ""


def apart(everyone: list[Where]) -> str:
    """Name the trouble that the addresses alone show, the same on every rank."""
    for one in everyone:
        if one.trouble:
            return f"rank {one.rank} on host {one.host}: {one.trouble}"
    networks = {one.network for one in everyone}
    for one in everyone:
        if len(networks) > 1 and ipaddress.ip_address(one.address).is_loopback:
            return (
                f"rank {one.rank} is at {one}, where ranks of other hosts cannot reach it;"
                f" {_advice()}"
            )
    return ""


def _advice() -> str:
    return f"set {VARIABLE} on every rank to its interface of the network that all share"


def _try(other: Where, left_s: Callable[[], float]) -> str:
    try:
        with socket.create_connection((other.address, other.port), CONNECT_S) as connection:
            # The kernel has let us in; its thread may be slow to greet on a busy machine.
            connection.settimeout(max(CONNECT_S, left_s()))
            said = connection.recv(64)
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if said == other.key.encode() else "somebody else answers there"


def _greet(listener: socket.socket, key: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        with connection, contextlib.suppress(OSError):
            connection.sendall(key)


def _own_address(store_host: str, store_port: int) -> tuple[str, str]:
    """The address that gloo will be bound to here, and what chose it."""
    named = os.environ.get(VARIABLE, "")
    if named:
        interface = named.split(",")[0]
        return _address_of(interface), f"{VARIABLE}={named}"
    # Where packets to the store leave from: this host's own name need not be known for it.
    failed = OSError(f"no way to {store_host}")
    found = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]), f"the way to the store at {store_host}"
        except OSError as error:
            failed = error
    raise failed


def _network() -> str:
    """Equal where a loopback address means the same host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _address_of(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise Misuse(
            f"{VARIABLE}={interface}: there is no such interface, only {', '.join(sorted(names))}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:_IFNAME_BYTES])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            address = _ipv6_of(interface)
    if not address:
        raise Misuse(f"{VARIABLE}={interface}: this interface has no address")
    return address


def _ipv6_of(interface: str) -> str:
    """Its first IPv6 address that is not of the link alone; empty: none."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for digits, *_, name in lines:
        address = ipaddress.IPv6Address(int(digits, 16))
        if name == interface and not address.is_link_local:
            return str(address)
    return ""
