"""What stands in the store was written by this run, or is named as not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpact.cache.config import CacheConfig
from kvpact.cache.join import join_cache
from kvpact.consensus.core.errors import RankStalled, StoreForged
from kvpact.consensus.epoch.report import Report, Seal
from kvpact.consensus.transport.calls import Calls
from kvpact.consensus.transport.envelope import SignedStore, decode, scope_of
from kvpact.consensus.transport.gloo import connect_tcp_store, serve_tcp_store
from kvpact.harness.rank.launch import Launch, RankContext, launch
from kvpact.harness.rank.store import MemoryStore


def pair() -> tuple[MemoryStore, SignedStore]:
    bare = MemoryStore()
    return bare, SignedStore(bare, b"our secret")


def test_what_is_written_is_read_by_who_has_the_secret_only() -> None:
    bare, store = pair()
    store.set("a", b"1")
    assert store.get("a") == SignedStore(bare, b"our secret").get("a") == b"1"
    assert bare.get("a") != b"1"
    for other in (b"", b"another", b"our secret "):
        with pytest.raises(StoreForged, match="'a' in the store was not written by this run"):
            SignedStore(bare, other).get("a")
    assert store.get("b") is None


def test_compare_set_works_on_what_is_signed() -> None:
    _, store = pair()
    assert store.compare_set("a", b"0", b"1") == b""
    assert store.compare_set("a", None, b"1") == b"1"
    assert store.compare_set("a", None, b"2") == b"1"
    assert store.compare_set("a", b"1", b"2") == b"2"
    store.delete("a")
    assert store.get("a") is None


@pytest.mark.parametrize("garbage", [b"", b"x", b"\xc1" * 15, b"\x93garbage" * 9])
def test_a_value_that_is_not_ours_is_never_taken(garbage: bytes) -> None:
    bare, store = pair()
    bare.set("a", garbage)
    with pytest.raises(StoreForged):
        store.get("a")
    if garbage:
        with pytest.raises(StoreForged):
            store.compare_set("a", None, b"1")


def test_a_value_of_another_key_or_changed_in_one_bit_is_not_taken() -> None:
    bare, store = pair()
    store.set("a", b"good")
    value = bare.get("a")
    assert value is not None
    bare.set("b", value)
    with pytest.raises(StoreForged, match="'b'"):
        store.get("b")
    for at in range(len(value)):
        bare.set("a", value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        with pytest.raises(StoreForged, match="'a'"):
            store.get("a")


def test_a_long_secret_counts_whole() -> None:
    bare = MemoryStore()
    SignedStore(bare, b"s" * 200 + b"1").set("a", b"1")
    with pytest.raises(StoreForged):
        SignedStore(bare, b"s" * 200 + b"2").get("a")


def test_runs_with_different_secrets_do_not_meet() -> None:
    scopes = {scope_of("r", secret) for secret in (b"", b"one", b"two")}
    assert len(scopes) == 3
    assert scope_of("r", b"") == "r"
    assert not any("one" in scope or "two" in scope for scope in scopes)


DEEP = b"\x91" * 100_000 + b"\x90"


@pytest.mark.parametrize("kind", [Report, Seal, dict[str, int], list[int]])
@pytest.mark.parametrize("value", [b"", b"\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1", DEEP])
def test_what_cannot_be_decoded_is_named(kind: Any, value: bytes) -> None:
    with pytest.raises(StoreForged, match="'epoch/0/seal' in the store cannot be read"):
        decode("epoch/0/seal", value, kind)


def test_a_field_nobody_knows_may_be_deep_and_is_still_no_other_error() -> None:
    value = msgspec.msgpack.encode({"error": 1})[:-1] + DEEP
    with pytest.raises(StoreForged):
        decode("a", value, Seal)


# -- a stranger at the store of a running replica -------------------------------------------------

CASES: dict[str, dict[str, bytes]] = {
    "closing as it would be": {"epoch/0/closing": b"=0 0"},
    "seal": {"epoch/0/seal": b"=\x93garbage", "epoch/0/closing": b"=0 0"},
    "report": {"epoch/0/report/1": b"=" + DEEP, "epoch/0/closing": b"=0 0"},
}


def step_until_told(context: RankContext, _: Any) -> list[str]:
    """One replica per case; what each rank raises."""
    config = CacheConfig(page_size=4, device_pages=16, host_pages=16, deadline_s=10.0)
    said: list[str] = []
    for number in range(len(CASES)):
        with join_cache(
            config,
            context.store_host,
            context.store_port,
            name=f"r{number}",
            rank=context.rank,
            ranks=range(2),
        ) as cache:
            context.send(number)
            try:
                for iteration in range(1, 2000):
                    cache.step(iteration)
                    # The other rank waits, and looks at the store meanwhile.
                    time.sleep(0.3 * context.rank)
                said.append("nothing happened")
            except StoreForged as error:
                said.append(error.message)
            except Exception as error:  # noqa: BLE001  named by the test
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.ranks
def test_a_stranger_at_the_store_is_named_the_same_on_all_ranks() -> None:
    secret = "of this test"
    target = f"{__name__}:step_until_told"
    with Launch(target, 2, env={"KVPACT_SECRET": secret}) as ranks:
        for number, values in enumerate(CASES.values()):
            for rank in range(2):
                assert ranks.receive(rank, 60.0) == number
            stranger = connect_tcp_store("127.0.0.1", ranks.store_port, 10.0)
            for key, value in values.items():
                stranger.set(f"{scope_of(f'r{number}', secret.encode())}/1/{key}", value)
        first, second = ranks.join().ranks
    assert first.result is not None, first.error
    assert first.result == second.result
    for said, values in zip(first.result, CASES.values(), strict=True):
        assert "in the store was not written by this run" in said
        assert any(key in said for key in values), said


def join_with(context: RankContext, secret: str) -> str:
    """What a rank raises that brings its own secret."""
    os.environ["KVPACT_SECRET"] = secret
    config = CacheConfig(page_size=4, device_pages=8, host_pages=8)
    try:
        join_cache(
            config, "127.0.0.1", context.store_port, name="r", rank=context.rank, ranks=range(2),
            start_timeout_s=2.0,
        )  # fmt: skip
    except RankStalled as error:
        return error.message
    return "it joined"


@pytest.mark.ranks
@pytest.mark.parametrize("secrets", [["one", "two"], ["", "two"]])
def test_a_rank_with_another_secret_is_told_so(secrets: list[str]) -> None:
    told = [one.result for one in launch(f"{__name__}:join_with", 2, secrets).ranks]
    for rank, other in enumerate((1, 0)):
        assert told[rank] is not None
        assert f"ranks [{other}] have not introduced themselves" in told[rank]
        assert f"but ranks [{other}] call with another KVPACT_SECRET" in told[rank]
        assert "give KVPACT_SECRET one value on all ranks" in told[rank]


def test_a_note_that_a_dead_process_left_says_nothing() -> None:
    store = MemoryStore()
    Calls(store, "r", 1, "r.of an older run").show()
    ours = Calls(store, "r", 0, "r.ours")
    for _ in range(5):
        ours.show()
        ours.look(range(2))
    assert not ours.strangers
    theirs = Calls(store, "r", 1, "r.theirs")
    for _ in range(2):
        theirs.show()
        ours.look(range(2))
    assert ours.strangers == {1}
    theirs.hide()
    assert store.get("r/calls/1") is None


def test_the_store_listens_on_loopback_only() -> None:
    """By its docstring; on all interfaces only where that is asked for."""
    for host, is_local in (("127.0.0.1", True), ("", False)):
        store, port = serve_tcp_store(host=host)
        lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        bound = [
            fields[1].split(":")[0]
            for line in lines.splitlines()
            if (fields := line.split()) and fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
        ]
        assert bound
        assert (bound == ["0100007F"]) is is_local, bound
        client = connect_tcp_store("127.0.0.1", port, 10.0)
        client.set("a", "b")
        assert client.check(["a"])
        del store
