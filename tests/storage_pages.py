"""Keys and pages for the tests of storage; light, for processes that are started often."""

from __future__ import annotations

import hashlib

from kvpact.cache.storage import Identity, SealedPage, seal

IDENTITY = Identity(model="tiny", layout="test", page_size=4)


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def page_of(number: int, version: int = 0, page_bytes: int = 600) -> bytes:
    """Different for each key and version, and not all of one length."""
    start = hashlib.sha256(f"page {number} {version}".encode()).digest()
    return (start * (page_bytes // len(start) + 1))[: page_bytes + 3 * version]


def sealed(number: int, version: int = 0, page_bytes: int = 600) -> SealedPage:
    return seal(key_of(number), page_of(number, version, page_bytes))
