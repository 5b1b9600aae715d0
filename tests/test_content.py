"""Contents follow from the prefix, the rank, the layer, K or V; anything else does not match."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.consensus.core.errors import Misuse
from kvpact.harness.verify.content import expected_page, fill_pages, matches_pages

SMALLEST = KVShape(1, 1, 1, "float16")  # with 4 tokens a page: 8 bytes in a plane
SHAPES = [
    (SMALLEST, 4),
    (SMALLEST, 512),
    (KVShape(3, 2, 5, "bfloat16"), 4),
    (KVShape(2, 1, 3, "float8_e4m3fn"), 1),  # 3 bytes in a plane: no whole words
    (KVShape(2, 3, 1, "float32"), 3),  # 36 bytes in a plane: half a word too many
]
HASHES = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("shape, page_size", SHAPES)
def test_filled_pages_match_and_nothing_else_does(shape: KVShape, page_size: int):
    tensors = KVTensors(shape, 6, page_size)
    hashes = page_hashes(np.arange(3 * page_size, dtype=np.int32), page_size)
    fill_pages(tensors, [4, 0, 2], hashes, rank=1)
    assert matches_pages(tensors, [4, 0, 2], hashes, 1) == [True] * 3
    assert matches_pages(tensors, [4, 0, 2], hashes, 0) == [False] * 3, "another rank's bytes"
    assert matches_pages(tensors, [0, 2, 4], hashes, 1) == [False] * 3, "other prefixes' bytes"
    assert matches_pages(tensors, [1, 3, 5], hashes, 1) == [False] * 3, "pages never written"
    assert not tensors.words[:, [1, 3, 5]].any(), "other pages were touched"
    assert tensors.read_page(0) == expected_page(shape, page_size, hashes[1], 1)


@pytest.mark.parametrize("shape, page_size", SHAPES)
def test_every_byte_counts(shape: KVShape, page_size: int):
    tensors = KVTensors(shape, 2, page_size)
    fill_pages(tensors, [1], [12345], 0)
    good = tensors.read_page(1)
    stride = max(1, len(good) // 64)
    for place in {*range(0, len(good), stride), len(good) - 1}:
        bad = bytearray(good)
        bad[place] ^= 0x10
        tensors.write_page(1, bad)
        assert not matches_pages(tensors, [1], [12345], 0)[0], f"byte {place} of {len(good)}"
    tensors.write_page(1, good)
    assert matches_pages(tensors, [1], [12345], 0)[0]


def test_layers_and_k_and_v_cannot_be_swapped():
    shape = KVShape(3, 1, 2, "float16")
    tensors = KVTensors(shape, 1, 4)
    fill_pages(tensors, [0], [99], 0)
    filled = tensors.words.clone()
    for one in range(6):
        for two in range(one):
            tensors.words.copy_(filled)
            tensors.words[[one, two]] = tensors.words[[two, one]]
            assert not matches_pages(tensors, [0], [99], 0)[0], (
                f"planes {one} and {two} were swapped"
            )


@given(HASHES, HASHES, st.integers(0, 63), st.integers(0, 63))
def test_different_pages_differ_in_every_word(one: int, two: int, rank: int, other_rank: int):
    def words(page_hash: int, of_rank: int) -> NDArray[np.uint64]:
        return np.frombuffer(expected_page(SMALLEST, 4, page_hash, of_rank), dtype=np.uint64)

    if one != two:
        assert (words(one, rank) != words(two, rank)).all()
    if rank != other_rank:
        assert (words(one, rank) != words(one, other_rank)).all()
    assert words(one, rank)[0] != words(one, rank)[1], "K and V differ"


@given(st.lists(HASHES, min_size=1, max_size=5), st.integers(0, 7))
def test_a_batch_is_the_same_as_one_by_one(hashes: list[int], rank: int):
    shape = KVShape(2, 1, 3, "float8_e4m3fn")
    together, single = KVTensors(shape, 5, 1), KVTensors(shape, 5, 1)
    pages = list(range(len(hashes)))[::-1]
    fill_pages(together, pages, hashes, rank)
    for page_index, page_hash in zip(pages, hashes, strict=True):
        fill_pages(single, [page_index], [page_hash], rank)
        assert single.read_page(page_index) == expected_page(shape, 1, page_hash, rank)
    assert together.same_pages(pages, single, pages) == [True] * len(pages)


def test_lengths_must_agree_and_nothing_is_written_otherwise():
    tensors = KVTensors(SMALLEST, 2, 4)
    with pytest.raises(Misuse, match="2 pages but 1 hashes"):
        fill_pages(tensors, [0, 1], [7], 0)
    with pytest.raises(Misuse, match="1 pages but 0 hashes"):
        matches_pages(tensors, [0], [], 0)
    with pytest.raises(Misuse, match="page 2 does not exist"):
        fill_pages(tensors, [0, 2], [7, 8], 0)
    assert not tensors.words.any()
    fill_pages(tensors, [], [], 0)
    assert matches_pages(tensors, [], [], 0) == []
