"""The content that a page must have, computed from its prefix, so that any copy can be checked.

The bytes of a page follow from (hash, rank, K or V, layer, place), where the hash is that of
`kvpact.cache.memory.hashes`; so a page that holds another prefix's, another rank's, another
layer's bytes does not match.

The pattern is an arithmetic sequence of 64-bit words over the page, plane after plane::

    word[j] = base + j * STEP  (mod 2**64)      base = mix(page_hash, rank)

``mix`` is a bijection of the hash, so two different hashes of a rank differ in *every* word, for
certain. The odd STEP makes all words of a page differ from each other, so layers and K and V
cannot be swapped unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpact.cache.memory.paged import PageBytes, PagedMemory
from kvpact.cache.memory.shape import KVShape
from kvpact.consensus.core.errors import Misuse

__all__ = [
    "expected_bytes",
    "expected_page",
    "fill_pages",
    "matches_pages",
]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_RANK_STEP = 0xD1B54A32D192ED03
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fill_pages(
    tensors: PagedMemory, pages: Sequence[int], hashes: Sequence[int], rank: int
) -> None:
    """Overwrite ``pages`` with the contents that belong to ``hashes``, page by page, on ``rank``.

    Raises `Misuse` where the two differ in length or a page does not exist.
    """
    _require_pairs(pages, hashes)
    if pages:
        tensors.scatter(pages, _pattern(tensors.bytes_per_page, hashes, rank))


def matches_pages(
    tensors: PagedMemory, pages: Sequence[int], hashes: Sequence[int], rank: int
) -> list[bool]:
    """Page by page: is every byte of every layer, K and V, what ``hashes`` demand on ``rank``?"""
    _require_pairs(pages, hashes)
    if not pages:
        return []
    equal = tensors.gather(pages) == _pattern(tensors.bytes_per_page, hashes, rank)
    return [bool(value) for value in equal.all(axis=1)]


def expected_page(shape: KVShape, page_size: int, page_hash: int, rank: int) -> bytes:
    """The bytes of one page as `PagedMemory.read_page` returns them once it is filled."""
    return expected_bytes(shape.bytes_per_page(page_size), page_hash, rank)


def expected_bytes(bytes_per_page: int, page_hash: int, rank: int) -> bytes:
    """The same for a page of so many bytes, whatever they stand for."""
    return _pattern(bytes_per_page, [page_hash], rank).tobytes()


def _pattern(bytes_per_page: int, hashes: Sequence[int], rank: int) -> PageBytes:
    """``[len(hashes), bytes_per_page]``."""
    base = np.array(hashes, dtype=np.uint64)
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers.
    base += np.uint64((rank + 1) * _RANK_STEP & 0xFFFF_FFFF_FFFF_FFFF)
    base = (base ^ (base >> np.uint64(30))) * _MIX_1
    base = (base ^ (base >> np.uint64(27))) * _MIX_2
    base ^= base >> np.uint64(31)
    pattern = base[:, None] + _steps(-(-bytes_per_page // 8))
    return pattern.astype("<u8", copy=False).view(np.uint8)[:, :bytes_per_page]


@functools.lru_cache(maxsize=4)
def _steps(num_words: int) -> NDArray[np.uint64]:
    return np.arange(num_words, dtype=np.uint64) * _STEP


def _require_pairs(pages: Sequence[int], hashes: Sequence[int]) -> None:
    if len(pages) != len(hashes):
        raise Misuse(f"{len(pages)} pages but {len(hashes)} hashes")
