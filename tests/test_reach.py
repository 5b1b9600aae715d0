"""Whether ranks reach one another: each fault has its name, its address and its variable."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from kvpact.consensus.transport import reach as reach_module
from kvpact.consensus.transport.reach import Reach, Where, apart

VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(VARIABLE, "lo")
    return monkeypatch


def reach(rank: int) -> Reach:
    return Reach(rank, f"key {rank}", "127.0.0.1", 1)


def left() -> float:
    return 5.0


def test_ranks_that_reach_one_another_have_no_complaint() -> None:
    with reach(0) as first, reach(1) as second:
        places = [first.where, second.where]
        assert first.where.address == "127.0.0.1"
        assert apart(places) == ""
        assert first.try_all(places, left) == second.try_all(places, left) == ""


def test_without_the_variable_it_is_the_way_to_the_store(interface: pytest.MonkeyPatch) -> None:
    interface.delenv(VARIABLE)
    with reach(0) as one:
        assert one.where.address == "127.0.0.1"
        assert one.where.source == "the way to the store at 127.0.0.1"


def test_a_missing_interface_is_named_on_all_ranks(interface: pytest.MonkeyPatch) -> None:
    with reach(0) as first:
        interface.setenv(VARIABLE, "nosuch0")
        with reach(1) as second:
            text = apart([first.where, second.where])
    assert text.startswith(
        f"rank 1 on host {socket.gethostname()}: {VARIABLE}=nosuch0: there is no"
    )
    assert "lo" in text


def test_a_name_that_cannot_be_looked_up_is_a_trouble(interface: pytest.MonkeyPatch) -> None:
    interface.delenv(VARIABLE)
    with Reach(0, "key", "nobody.invalid", 1) as one:
        assert "rank 0" in apart([one.where])
        assert one.where.trouble


def test_a_loopback_address_is_no_way_to_another_host() -> None:
    with reach(0) as first:
        far = msgspec.structs.replace(first.where, rank=1, address="10.9.9.9", network="another")
        text = apart([first.where, far])
    assert text.startswith(f"rank 0 is at 127.0.0.1 (from {VARIABLE}=lo, host ")
    assert f"set {VARIABLE} on every rank" in text


def place(address: str, port: int, key: str = "key 1") -> Where:
    return Where(1, address, port, f"{VARIABLE}=eth7", "far", "net", key)


def complaint(other: Where) -> tuple[str, float]:
    with reach(0) as mine:
        began_s = time.monotonic()
        return mine.try_all([mine.where, other], left), time.monotonic() - began_s


def test_who_refuses_is_named_with_address_and_variable() -> None:
    with reach(1) as gone:
        port = gone.where.port
    text, _ = complaint(place("127.0.0.1", port))
    assert "rank 0 at 127.0.0.1" in text
    assert f"cannot reach rank 1 at 127.0.0.1 (from {VARIABLE}=eth7, host far): " in text
    assert "Connection refused" in text
    assert f"set {VARIABLE}" in text


def test_who_swallows_packets_costs_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_module, "CONNECT_S", 0.2)
    with socket.socket() as full:  # its line is full: the kernel answers no further call
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        text, took_s = complaint(place("127.0.0.1", full.getsockname()[1]))
        for one in waiting:
            one.close()
    assert "no answer within 0.2 s" in text
    assert took_s < 3.0


def test_somebody_else_at_that_address_is_not_the_rank() -> None:
    with reach(1) as stranger:
        text, _ = complaint(place("127.0.0.1", stranger.where.port, "another key"))
    assert "somebody else answers there" in text
