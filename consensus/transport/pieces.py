"""Values of any size in a store that takes small ones: in pieces, up to a bound.

The pieces stand before the value that names them is written, so whoever reads the value finds
them. Each writer has pieces of its own: of two who write one key at once, the one who loses spoils
nothing.
"""

from __future__ import annotations

from kvpact.consensus.core.errors import StoreForged
from kvpact.consensus.transport.store import Store

__all__ = ["WHOLE_BYTES_MAX", "read_whole", "remove_pieces", "write_pieces"]

PIECE_BYTES = 2 << 20
PIECES_MAX = 128
#: What a value may have: 256 MiB.
WHOLE_BYTES_MAX = PIECE_BYTES * PIECES_MAX

#: How a value begins that stands for pieces; no packed record does.
_MARK = b"in pieces "


def write_pieces(store: Store, key: str, writer: int, value: bytes) -> bytes:
    """Write what is too large of ``value``; returns what is to be written at ``key`` for it.

    ``value`` has at most :data:`WHOLE_BYTES_MAX` bytes: that is the caller's to see to.
    """
    if len(value) <= PIECE_BYTES:
        return value
    starts = range(0, len(value), PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(_piece(key, writer, number), value[start : start + PIECE_BYTES])
    return _MARK + f"{writer} {len(starts)}".encode()


def read_whole(store: Store, key: str, value: bytes) -> bytes:
    """Put together what the ``value`` at ``key`` stands for. Raises :class:`StoreForged`."""
    if not value.startswith(_MARK):
        return value
    pieces = [store.get(piece) for piece in _pieces(key, value)]
    if any(piece is None for piece in pieces):
        raise StoreForged(f"what stands at '{key}' in the store cannot be read: a piece is missing")
    return b"".join(piece for piece in pieces if piece is not None)


def remove_pieces(store: Store, key: str, value: bytes) -> None:
    """Delete the pieces that ``value`` names, once nobody reads them any more."""
    if value.startswith(_MARK):
        for piece in _pieces(key, value):
            store.delete(piece)


def _pieces(key: str, value: bytes) -> list[str]:
    writer, _, count = value.removeprefix(_MARK).partition(b" ")
    if not (writer.isdigit() and count.isdigit() and int(count) <= PIECES_MAX):
        raise StoreForged(f"what stands at '{key}' in the store cannot be read: no pieces")
    return [_piece(key, int(writer), number) for number in range(int(count))]


def _piece(key: str, writer: int, number: int) -> str:
    return f"{key}/piece/{writer}/{number}"
