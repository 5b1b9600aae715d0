"""Hashes of pages are chained over the prefix, and the same in every process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpact.cache.memory.hashes import page_hashes
from kvpact.consensus.core.errors import Misuse


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def test_hashes_are_chained_over_whole_pages():
    base = page_hashes(tokens(*range(12)), 4)
    assert len(base) == len(set(base)) == 3
    assert page_hashes(tokens(*range(15)), 4) == base, "a part of a page has no hash"
    assert page_hashes(tokens(), 4) == []
    changed = page_hashes(tokens(0, 1, 2, 9, *range(4, 12)), 4)
    assert all(ours != theirs for ours, theirs in zip(base, changed, strict=True))
    later = page_hashes(tokens(*range(8), 8, 9, 10, 12), 4)
    assert later[:2] == base[:2]
    assert later[2] != base[2]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=24), st.integers(0, 6))
def test_a_chain_can_be_computed_piece_by_piece(ids: list[int], cut: int):
    page_size = 4
    whole = page_hashes(tokens(*ids), page_size, namespace="tenant")
    head = page_hashes(tokens(*ids[: cut * page_size]), page_size, namespace="tenant")
    if head:
        tail = page_hashes(tokens(*ids[cut * page_size :]), page_size, previous=head[-1])
        assert head + tail == whole


def test_namespaces_share_nothing():
    ids = tokens(*range(8))
    found = [page_hashes(ids, 4, namespace=name) for name in ("", "a", "b")]
    assert len({value for hashes in found for value in hashes}) == 6
    with pytest.raises(Misuse, match="a namespace starts a chain"):
        page_hashes(ids, 4, previous=1, namespace="a")


def test_hashes_are_the_same_in_every_process_and_memory_layout():
    ids = np.arange(16, dtype=np.int32)
    # Written down once: stored pages outlive the process that named them.
    assert page_hashes(ids[:8], 4) == [11660027832386793900, 2615516339191896381]
    assert page_hashes(np.repeat(ids, 2)[::2], 4) == page_hashes(ids, 4)
    assert page_hashes(ids.astype(">i4"), 4) == page_hashes(ids, 4)


def test_tokens_must_be_one_row():
    with pytest.raises(Misuse, match="tokens must be 1-D"):
        page_hashes(np.zeros((2, 4), dtype=np.int32), 4)
