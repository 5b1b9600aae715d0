"""The envelope of a page: a checksum bound to its key, made before the page is handed over.

A page that was torn, swapped, cut or written from memory that was reused meanwhile does not fit
its envelope: it is a miss. xxh3 finds accidents, not attacks; who may write to a storage is trusted
(tenants are kept apart by their keys, see `kvpact.cache.storage.keys`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import xxhash

from kvpact.cache.storage.keys import KEY_BYTES
from kvpact.consensus.core.errors import Misuse

__all__ = ["Page", "SealedPage", "fits", "page_checksum", "seal"]

Page: TypeAlias = bytes | bytearray | memoryview
"""The bytes of one page: contiguous, one dimension."""


class SealedPage(msgspec.Struct, frozen=True, gc=False):
    """A page with its key and the checksum that it must still have when it is read again."""

    key: bytes
    page: Page
    checksum: int


def page_checksum(key: bytes, page: Page) -> int:
    """64 bits over the page, seeded with its key: the same bytes under another key do not fit."""
    return xxhash.xxh3_64_intdigest(page, xxhash.xxh3_64_intdigest(key))


def seal(key: bytes, page: Page) -> SealedPage:
    """Bind the bytes that ``page`` has *now* to ``key``; the page itself is not copied.

    Raises `Misuse` for an empty page or something that is no key.
    """
    if len(key) != KEY_BYTES:
        raise Misuse(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    if not page:
        raise Misuse("an empty page cannot be stored")
    flat = memoryview(page).cast("B") if isinstance(page, memoryview) else page
    return SealedPage(key, flat, page_checksum(key, flat))


def fits(sealed: SealedPage) -> bool:
    """Are the bytes still those that were sealed?"""
    return page_checksum(sealed.key, sealed.page) == sealed.checksum
