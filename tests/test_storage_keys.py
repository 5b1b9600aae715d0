"""Keys: equal exactly where prefix, namespace and identity are; chained piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpact.cache.storage import Identity, PageKeys, seal
from kvpact.cache.storage.checksum import fits
from kvpact.consensus.core.errors import Misuse

HERE = Identity(model="m", layout="l", page_size=4, rank=1, tp=2, pp=2)
TOKENS = st.lists(st.integers(0, 3), max_size=24)
PINNED = "60e9e79fcb749822bec357ff0f56e1523953d90b3f34db84c0b64f6d745e0ff9"


def tokens_of(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@given(tokens=TOKENS, cut=st.integers(0, 6))
def test_a_chain_may_be_made_piece_by_piece(tokens: list[int], cut: int) -> None:
    keys = PageKeys(HERE)
    whole = keys.of(tokens_of(tokens))
    assert len(whole) == len(tokens) // 4
    cut = min(cut, len(whole))
    first = keys.of(tokens_of(tokens[: 4 * cut]))
    rest = keys.extend(first[-1] if first else keys.start(), tokens_of(tokens[4 * cut :]))
    assert first + rest == whole


@given(one=TOKENS, other=TOKENS)
def test_keys_are_equal_where_the_prefixes_are(one: list[int], other: list[int]) -> None:
    keys = PageKeys(HERE)
    pairs = zip(keys.of(tokens_of(one)), keys.of(tokens_of(other)), strict=False)
    for page_index, (left, right) in enumerate(pairs):
        end = 4 * (page_index + 1)
        assert (left == right) == (one[:end] == other[:end])


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"layout": "k"}, {"rank": 0}, {"tp": 4}, {"pp": 4}, {"tp": 4, "pp": 1}],
)
def test_every_field_of_the_identity_counts(change: dict[str, Any]) -> None:
    tokens = tokens_of(range(16))
    other = msgspec.structs.replace(HERE, **change)
    assert not set(PageKeys(HERE).of(tokens)) & set(PageKeys(other).of(tokens))


def test_page_size_and_namespace_count() -> None:
    tokens = tokens_of(range(16))
    smaller = msgspec.structs.replace(HERE, page_size=2)
    assert not set(PageKeys(HERE).of(tokens)) & set(PageKeys(smaller).of(tokens))
    keys = PageKeys(HERE)
    chains = [keys.of(tokens, namespace) for namespace in ("", "a", "b", "ab")]
    assert len({key for chain in chains for key in chain}) == 4 * 4


def test_texts_do_not_run_into_each_other() -> None:
    left = Identity(model="ab", layout="c", page_size=4)
    right = Identity(model="a", layout="bc", page_size=4)
    assert left.digest != right.digest


def test_keys_are_the_same_in_every_process_and_version() -> None:
    # Pinned: a change makes every stored page unreachable, so it must be meant (_DOMAIN).
    (key,) = PageKeys(HERE).of(tokens_of([1, 2, 3, 4]), "tenant")
    assert key.hex() == PINNED
    # The type of the tokens does not matter, only what they are.
    assert PageKeys(HERE).of(np.array([1, 2, 3, 4], dtype=np.int64), "tenant") == [key]  # pyright: ignore[reportArgumentType]


def test_mistakes_are_refused() -> None:
    keys = PageKeys(HERE)
    with pytest.raises(Misuse, match="32 bytes"):
        keys.extend(b"short", tokens_of([1]))
    with pytest.raises(Misuse, match="1-D"):
        keys.of(tokens_of([[1, 2], [3, 4]]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(Misuse, match="integers"):
        keys.of(np.zeros(4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(Misuse, match="rank 4 is not in a world of 2 x 2"):
        msgspec.structs.replace(HERE, rank=4)
    with pytest.raises(Misuse, match="page_size"):
        msgspec.structs.replace(HERE, page_size=0)


@given(page=st.binary(min_size=1, max_size=300), bit=st.integers(0, 2399))
def test_an_envelope_fits_its_own_bytes_and_key_only(page: bytes, bit: int) -> None:
    key, other = PageKeys(HERE).of(tokens_of(range(8)))
    whole = seal(key, page)
    assert fits(whole)
    assert not fits(msgspec.structs.replace(whole, key=other))
    assert not fits(msgspec.structs.replace(whole, page=page[:-1]))
    wrong = bytearray(page)
    wrong[bit // 8 % len(page)] ^= 1 << bit % 8
    assert not fits(msgspec.structs.replace(whole, page=wrong))
    assert not fits(msgspec.structs.replace(whole, page=b""))


def test_what_cannot_be_sealed() -> None:
    with pytest.raises(Misuse, match="empty page"):
        seal(bytes(32), b"")
    with pytest.raises(Misuse, match="32 bytes"):
        seal(bytes(31), b"x")
