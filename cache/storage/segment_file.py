"""One segment on disk: how it is laid out, written whole or not at all, and read again.

::

    head    magic, number of entries, identity (32 bytes), sequence, checksum of head and table
    table   one entry a page: key, offset, length, checksum; length 0: this key was removed
    pages   each at a multiple of 4 KiB

All numbers are little-endian. A segment is written under another name, made durable where that is
asked for, and only then given its own; so a segment that has its name is complete, unless power
failed before the disk had it. Then the checksums say so.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from kvpact.cache.storage.checksum import Page, SealedPage

__all__ = [
    "ALIGN_BYTES",
    "FORMAT",
    "TableEntry",
    "Unreadable",
    "create",
    "name_of",
    "on_disk_bytes",
    "open_to_read",
    "read_pages",
    "read_table",
    "segment_bytes",
    "sequence_of",
    "sync_directory",
    "write_segment",
]

ALIGN_BYTES = 4096
FORMAT = 1
MAX_ENTRIES = 1 << 16
MAX_RUN_BYTES = 64 << 20
"""Neighbouring pages are read together up to here."""

_MAGIC = b"kvpseg\0" + bytes([FORMAT])
_HEAD = struct.Struct("<8sI32sQQ")
_ENTRY = struct.Struct("<32sQIQ")
_PARTS_PER_CALL = 512  # below every system's IOV_MAX
_SUFFIX, _TEMPORARY = ".seg", ".tmp"


class Unreadable(Exception):
    """A segment's head or table is not what was written: none of its pages can be used."""


class TableEntry(msgspec.Struct, frozen=True, gc=False):
    """One line of the table. ``length_bytes`` 0: the key was removed when this was written."""

    key: bytes
    offset: int
    length_bytes: int
    checksum: int


def name_of(sequence: int) -> str:
    """The file name; names sort as their sequence does."""
    return f"{sequence:016x}{_SUFFIX}"


def sequence_of(name: str) -> int | None:
    """The sequence of a segment's file name; None: it is no segment's name."""
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix != _SUFFIX or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


def on_disk_bytes(num_bytes: int) -> int:
    """Return the bytes on disk of a file of that length."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def segment_bytes(lengths: Iterable[int], num_removed: int = 0) -> int:
    """Return the size of a segment with pages of these ``lengths``, and with removed keys."""
    sizes = [on_disk_bytes(length) for length in lengths]
    return on_disk_bytes(_HEAD.size + _ENTRY.size * (len(sizes) + num_removed)) + sum(sizes)


def write_segment(
    directory: Path,
    sequence: int,
    identity: bytes,
    pages: Sequence[SealedPage],
    removed: Sequence[bytes] = (),
    *,
    durable: bool,
) -> list[TableEntry]:
    """Write one segment and give it its name; returns its table.

    Raises `OSError`, and then nothing has the name and nothing is left behind.
    """
    table = _lay_out(pages, removed)
    path = directory / name_of(sequence)
    temporary = path.with_suffix(_TEMPORARY)
    try:
        file = create(temporary)
        try:
            _write_all(file, _parts(sequence, identity, table, pages))
            if durable:
                os.fdatasync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(directory)
    return table


def read_table(path: Path, identity: bytes) -> tuple[list[TableEntry], int]:
    """The table of a segment, checked, and the bytes that its file takes.

    Raises `Unreadable` where it cannot be trusted, `OSError` where it cannot be read.
    """
    with os.fdopen(open_to_read(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(ALIGN_BYTES)
        if len(head) < _HEAD.size:
            raise Unreadable(f"only {len(head)} bytes long")
        magic, number, owner, sequence, checksum = _HEAD.unpack_from(head)
        if magic != _MAGIC:
            raise Unreadable(f"it does not start as a segment of format {FORMAT} does")
        if owner != identity:
            raise Unreadable("its pages are of another model, layout or rank")
        if number > MAX_ENTRIES:
            raise Unreadable(f"{number} entries")
        if sequence != sequence_of(path.name):
            raise Unreadable(f"it was written as {name_of(sequence)}")
        end = _HEAD.size + _ENTRY.size * number
        if end > len(head):
            head += file.read(end - len(head))
    table = head[_HEAD.size : end]
    if _table_checksum(sequence, identity, number, table) != checksum:
        raise Unreadable("its table of pages is damaged")
    entries = [TableEntry(*fields) for fields in _ENTRY.iter_unpack(table)]
    if entries and max(entry.offset + entry.length_bytes for entry in entries) > size:
        raise Unreadable(f"it was cut to {size} bytes")
    return entries, on_disk_bytes(size)


def read_pages(path: Path, entries: Sequence[TableEntry]) -> list[SealedPage]:
    """The bytes of pages of one segment, in the order of ``entries``, not checked.

    A page that is cut comes back short. Raises `OSError`.
    """
    pages: dict[int, Page] = {}
    file = open_to_read(path)
    try:
        for run in _runs(sorted(entries, key=lambda entry: entry.offset)):
            start = run[0].offset
            # numpy, because a bytearray is filled with zeros first
            buffer = np.empty(run[-1].offset + run[-1].length_bytes - start, np.uint8).data
            got = _read_all(file, buffer, start)
            for entry in run:
                at = entry.offset - start
                pages[entry.offset] = buffer[at : min(at + entry.length_bytes, got)]
    finally:
        os.close(file)
    return [SealedPage(entry.key, pages[entry.offset], entry.checksum) for entry in entries]


def create(path: Path) -> int:
    """A new file of this name, open to write. What had the name goes; a link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o600)


def open_to_read(path: Path) -> int:
    """A regular file, open to read; `OSError` for all else: a link, or a pipe that would hang."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return file


def sync_directory(directory: Path) -> None:
    """Make names durable: those given and those taken away."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lay_out(pages: Sequence[SealedPage], removed: Sequence[bytes]) -> list[TableEntry]:
    offset = on_disk_bytes(_HEAD.size + _ENTRY.size * (len(pages) + len(removed)))
    table = [TableEntry(key, 0, 0, 0) for key in removed]
    for page in pages:
        table.append(TableEntry(page.key, offset, len(page.page), page.checksum))
        offset += on_disk_bytes(len(page.page))
    return table


def _parts(
    sequence: int, identity: bytes, table: Sequence[TableEntry], pages: Sequence[SealedPage]
) -> list[Page]:
    """Yield the parts of the file, piece by piece; the pages are not copied."""
    packed = b"".join(
        _ENTRY.pack(entry.key, entry.offset, entry.length_bytes, entry.checksum) for entry in table
    )
    checksum = _table_checksum(sequence, identity, len(table), packed)
    head = _HEAD.pack(_MAGIC, len(table), identity, sequence, checksum) + packed
    parts: list[Page] = [head]
    last = len(head)
    for page in pages:
        if padding := -last % ALIGN_BYTES:
            parts.append(bytes(padding))
        parts.append(page.page)
        last = len(page.page)
    return parts


def _table_checksum(sequence: int, identity: bytes, number: int, table: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_HEAD.pack(_MAGIC, number, identity, sequence, 0) + table)


def _write_all(file: int, parts: list[Page]) -> None:
    at = 0
    while at < len(parts):
        done = os.writev(file, parts[at : at + _PARTS_PER_CALL])
        while at < len(parts) and done >= len(parts[at]):
            done -= len(parts[at])
            at += 1
        if done:
            parts[at] = memoryview(parts[at])[done:]


def _read_all(file: int, buffer: memoryview, offset: int) -> int:
    got = 0
    while got < len(buffer):
        number = os.preadv(file, [buffer[got:]], offset + got)
        if number == 0:
            break
        got += number
    return got


def _runs(entries: Sequence[TableEntry]) -> list[list[TableEntry]]:
    """Pages that lie side by side, but for padding."""
    runs: list[list[TableEntry]] = []
    for entry in entries:
        if runs:
            first, last = runs[-1][0], runs[-1][-1]
            gap = entry.offset - last.offset - last.length_bytes
            end = entry.offset + entry.length_bytes
            if gap < ALIGN_BYTES and end - first.offset <= MAX_RUN_BYTES:
                runs[-1].append(entry)
                continue
        runs.append([entry])
    return runs
