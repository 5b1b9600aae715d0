"""The hash of a page: chained over the pages of its prefix, it names all tokens up to its end.

It names the namespace too. Keys of the storage are made of other hashes (`cache/storage/keys.py`);
this one goes into events, and tells what lies in a page.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpact.consensus.core.errors import Misuse

__all__ = ["page_hashes"]


def page_hashes(
    tokens: NDArray[np.int32], page_size: int, previous: int = 0, namespace: str = ""
) -> list[int]:
    """The chained 64-bit hash of every whole page of ``tokens`` (1-D, int32).

    ``previous`` is the hash of the page before ``tokens[0]`` (0: they start the prompt), so a
    chain may be computed piece by piece. ``namespace`` keeps tenants apart; it belongs to the
    start of the prompt and is `Misuse` together with ``previous``. Tokens beyond the last whole
    page are left out.
    """
    if namespace:
        if previous:
            raise Misuse("a namespace starts a chain of hashes: it cannot follow `previous`")
        previous = xxhash.xxh3_64_intdigest(namespace.encode())
    if tokens.ndim != 1 or page_size < 1:
        raise Misuse(f"tokens must be 1-D and page_size >= 1, not {tokens.shape}, {page_size}")
    data = memoryview(tokens.astype("<i4").tobytes())
    stride = 4 * page_size
    hashes: list[int] = []
    for start in range(0, len(tokens) // page_size * stride, stride):
        previous = xxhash.xxh3_64_intdigest(data[start : start + stride], previous)
        hashes.append(previous)
    return hashes
