"""Values of any size: in pieces that are there before what names them, and gone at the end."""

from __future__ import annotations

import os

import pytest

from kvpact.consensus.core.ballot import Header
from kvpact.consensus.core.errors import StoreForged
from kvpact.consensus.epoch.closing import Closer
from kvpact.consensus.epoch.report import Policy, Report, packed_report
from kvpact.consensus.transport import pieces
from kvpact.consensus.transport.pieces import (
    PIECE_BYTES,
    WHOLE_BYTES_MAX,
    read_whole,
    remove_pieces,
    write_pieces,
)
from kvpact.consensus.transport.store import MAX_VALUE_BYTES
from kvpact.harness.rank.store import MemoryStore
from tests.test_seal import Nobody


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_what_was_written_is_read(size: int) -> None:
    store, value = MemoryStore(), os.urandom(size)
    told = write_pieces(store, "k", 1, value)
    assert len(store.keys()) == (0 if size <= PIECE_BYTES else -(-size // PIECE_BYTES))
    assert len(told) <= PIECE_BYTES < MAX_VALUE_BYTES
    assert read_whole(store, "k", told) == value
    remove_pieces(store, "k", told)
    assert store.keys() == []


def test_writers_of_one_key_do_not_meet() -> None:
    store = MemoryStore()
    ours, theirs = bytes(PIECE_BYTES + 1), b"x" * (PIECE_BYTES + 2)
    told = [write_pieces(store, "k", writer, value) for writer, value in enumerate((ours, theirs))]
    assert [read_whole(store, "k", one) for one in told] == [ours, theirs]


@pytest.mark.parametrize(
    "told", [b"in pieces ", b"in pieces 1", b"in pieces 1 999", b"in pieces 0 2"]
)
def test_what_names_no_pieces_is_told(told: bytes) -> None:
    with pytest.raises(StoreForged, match="'k' in the store cannot be read"):
        read_whole(MemoryStore(), "k", b"in pieces " + told)


def report(rank: int, kept: int) -> Report:
    return Report(
        rank=rank,
        cause="mismatch",
        at_step=3,
        posted=3,
        settled=2,
        headers={3: Header(1, 0, 3, 3, 0, fingerprint=rank, live=0)},
        tail=[],
        held={},
        kept=list(range(1 << 60, (1 << 60) + kept)),
    )


def close(store: MemoryStore, kept: int) -> tuple[list[Closer], list[list[int]]]:
    closers = [
        Closer(
            store=store, rank=r, ranks=(0, 1), epoch=0, locator=Nobody(), policy=Policy("detach")
        )
        for r in (0, 1)
    ]
    for rank, closer in enumerate(closers):
        closer.file(report(rank, kept), 0.0, 1.0)
    seals = [closer.poll(0.1) for closer in closers]
    return closers, [[] if seal is None else seal.kept for seal in seals]


def pieces_in(store: MemoryStore) -> list[str]:
    keys = store.keys()
    return [key for key in keys if "/piece/" in key]


def test_a_report_of_any_size_ends_the_epoch_and_leaves_nothing() -> None:
    store = MemoryStore()
    num_pages = MAX_VALUE_BYTES // 4
    assert len(packed_report(report(0, num_pages))) > 2 * MAX_VALUE_BYTES
    closers, kept = close(store, num_pages)
    assert [len(one) for one in kept] == [num_pages] * 2
    assert pieces_in(store)
    for closer in closers:
        closer.tidy()
    assert not pieces_in(store)


def test_a_report_beyond_the_bound_is_told_without_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert WHOLE_BYTES_MAX > 20 * 10_000_000, "ten million kept pages fit"
    monkeypatch.setattr("kvpact.consensus.epoch.closing.WHOLE_BYTES_MAX", 50_000)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    closers, kept = close(MemoryStore(), 10_000)
    assert kept == [[], []]
    seal = closers[0].poll(0.2)
    assert seal is not None
    assert seal.error.kind == "Divergence", "the error is the one that happened"
