"""The embedded storage: real files in one directory a rank, one segment a batch.

A put writes one new file (`kvpact.cache.storage.segment_file`); nothing is ever changed in place,
so a process that is killed at any moment loses what it had not acknowledged, and no more. The index
is in memory, made again from the segments' tables at start. Of two entries of a key the later
segment's counts.

**Room.** Whole segments go, oldest first. A page of theirs that was used since the next segment
was written is younger than that one's untouched pages, and would outlive them if pages went one by
one; so it is written anew with the batch that needs the room. So this is LRU over pages, as near
as whole segments allow. Oldest first also means that what a segment says of older ones (a key was
removed, or replaced) is never lost before them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpact.cache.storage.checksum import SealedPage, fits
from kvpact.cache.storage.directory import DISK_FULL, open_directory
from kvpact.cache.storage.keys import Identity
from kvpact.cache.storage.protocol import MAX_BATCH_PAGES, BackendBase, log
from kvpact.cache.storage.segment_file import (
    ALIGN_BYTES,
    TableEntry,
    Unreadable,
    name_of,
    on_disk_bytes,
    read_pages,
    read_table,
    segment_bytes,
    sequence_of,
    sync_directory,
    write_segment,
)
from kvpact.consensus.core.errors import BadInput, InternalError

__all__ = ["SegmentBackend"]

#: Segments in a row that cannot be read and are still taken for ours: a name far above all that
#: can be read is not, and must not decide the next number.
MAX_LOST = 1 << 20
_NO_ROOM = (*DISK_FULL, errno.EFBIG)


class _Place:
    """The place of a page, and when it was last used."""

    __slots__ = ("entry", "segment", "used")

    def __init__(self, segment: _Segment, entry: TableEntry, used: int) -> None:
        self.segment = segment
        self.entry = entry
        self.used = used


class _Segment:
    """One file. ``live`` are its pages that the index points to; it may tell of removed keys."""

    __slots__ = ("live", "sequence", "size_bytes", "tells", "written")

    def __init__(self, sequence: int, size_bytes: int, written: int) -> None:
        self.sequence = sequence
        self.size_bytes = size_bytes
        self.written = written
        self.tells = False
        self.live: dict[bytes, _Place] = {}


class SegmentBackend(BackendBase):
    """Files under ``path``, a directory that no other process may use meanwhile.

    All files together take at most ``capacity_bytes``; only while hot pages are written anew may
    the segments that they come from stand beside the new one for a moment, so that a kill there
    loses none. ``durable``: acknowledged means that it outlives a power failure, not only the
    process. Raises `BadInput` as `open_directory` says.
    """

    name = "file"

    def __init__(
        self, path: str | os.PathLike[str], identity: Identity, *, capacity_bytes: int,
        durable: bool = False,
    ) -> None:  # fmt: skip
        if capacity_bytes < 2 * ALIGN_BYTES:
            raise BadInput(
                f"storage file: capacity_bytes must be at least {2 * ALIGN_BYTES} (a table and a"
                f" page), not {capacity_bytes}"
            )
        super().__init__()
        self.path = Path(path).absolute()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._durable = durable
        self._identity = identity.digest
        self._writing = threading.Lock()  # one put, remove or clear at a time; taken before _lock
        self._lock = threading.Lock()  # the index and the list of segments; never held over I/O
        self._index: dict[bytes, _Place] = {}
        self._segments: dict[int, _Segment] = {}  # oldest first
        self._next_sequence = 0
        self._now = 0  # counts calls: no clock decides what goes
        self._directory_lock = open_directory(self.path, identity, durable=durable)
        try:
            self._find_segments()
            self._retire(self._oldest_until(self.used_bytes - capacity_bytes))
        except OSError as error:
            os.close(self._directory_lock)
            raise BadInput(f"storage directory {self.path}: {error.strerror or error}") from error

    def __len__(self) -> int:
        """Pages that are there."""
        return len(self._index)

    def check_integrity(self) -> None:
        """Raises `InternalError` unless index, segments and bytes agree with each other."""
        with self._writing, self._lock:
            live = {
                key: place for one in self._segments.values() for key, place in one.live.items()
            }
            if live != self._index or len(live) != sum(
                len(one.live) for one in self._segments.values()
            ):
                raise InternalError(
                    f"{len(live)} pages in segments, {len(self._index)} in the index"
                )
            total = sum(one.size_bytes for one in self._segments.values())
            if total != self.used_bytes or total > self.capacity_bytes:
                raise InternalError(
                    f"segments of {total} bytes, counted {self.used_bytes},"
                    f" of {self.capacity_bytes}"
                )
            if list(self._segments) != sorted(self._segments):
                raise InternalError(f"segments out of order: {list(self._segments)}")

    # -- the hooks of BackendBase ------------------------------------------------------------

    def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        found: dict[bytes, SealedPage] = {}
        for segment, entries in self._touched(keys):
            try:
                for page in read_pages(self.path / name_of(segment), entries):
                    found[page.key] = page
            except FileNotFoundError:
                continue  # it had to go meanwhile
            except OSError as error:
                self._trouble(f"reading {name_of(segment)}", error)
        return [found.get(key) for key in keys]

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        with self._writing:
            with self._lock:
                self._now += 1
                fresh = {page.key: page for page in pages if not self._holds(page, self._now)}
            if fresh:
                self._append(list(fresh.values()))
            with self._lock:
                return [self._holds(page) for page in pages]

    def _remove(self, keys: Sequence[bytes]) -> list[bool]:
        with self._writing:
            with self._lock:
                places = {key: place for key in keys if (place := self._index.get(key))}
            kept = self._remove_places(places)
        return [key in places and key not in kept for key in keys]

    def _clear(self) -> bool:
        with self._writing:
            return self._retire(list(self._segments.values()), evicts=False)

    def _drop_wrong(self, wrong: Sequence[SealedPage]) -> None:
        with self._writing:
            with self._lock:
                places = {page.key: self._index[page.key] for page in wrong if self._holds(page)}
            self._remove_places(places)

    def _release(self) -> None:
        os.close(self._directory_lock)

    # -- the start ---------------------------------------------------------------------------

    def _find_segments(self) -> None:
        numbers = sorted(
            number
            for entry in os.scandir(self.path)
            if entry.is_file(follow_symlinks=False)
            and (number := sequence_of(entry.name)) is not None
        )
        tables = {number: table for number in numbers if (table := self._table_of(number))}
        highest = max(tables, default=-1)
        for number in numbers:
            path = self.path / name_of(number)
            if number in tables:
                entries, size = tables[number]
            elif number <= highest + MAX_LOST:
                # Kept as a segment without pages: it is counted, and goes when it is the oldest.
                entries, size = [], _size_of(path)
            else:
                log.warning("storage file: %s is ignored: nothing here wrote it", path)
                continue
            self._next_sequence = number + 1
            self._publish(number, size, entries)

    def _table_of(self, number: int) -> tuple[list[TableEntry], int] | None:
        path = self.path / name_of(number)
        try:
            return read_table(path, self._identity)
        except (Unreadable, OSError) as error:
            log.warning("storage file: segment %s is skipped: %s", path, error)
            self._count("skipped")
            return None

    # -- reading -----------------------------------------------------------------------------

    def _touched(self, keys: Sequence[bytes]) -> list[tuple[int, list[TableEntry]]]:
        """The entries of ``keys`` by segment; they count as used now."""
        by_segment: dict[int, list[TableEntry]] = {}
        with self._lock:
            self._now += 1
            for key in dict.fromkeys(keys):
                place = self._index.get(key)
                if place is not None:
                    place.used = self._now
                    by_segment.setdefault(place.segment.sequence, []).append(place.entry)
        return list(by_segment.items())

    def _holds(self, page: SealedPage, used: int = 0) -> bool:
        place = self._index.get(page.key)
        if place is None or place.entry.checksum != page.checksum:
            return False
        place.used = max(place.used, used)
        return True

    # -- writing, with _writing held ---------------------------------------------------------

    def _append(self, fresh: list[SealedPage]) -> None:
        """One new segment with ``fresh``, or with its leading pages where there is no room."""
        fresh = _leading(fresh, self.capacity_bytes)
        if not fresh:
            return
        victims, hot = self._make_room(fresh)
        try:
            self._write(hot + fresh)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._retire(victims)
            self._append_what_fits(fresh, error)
            return
        self._count("stored", len(fresh))
        self._retire(victims)

    def _make_room(self, fresh: list[SealedPage]) -> tuple[list[_Segment], list[SealedPage]]:
        """Plan evictions for ``fresh``; returns the segments to retire after it, and hot pages.

        Segments that leave nothing behind, and are older than all that do, are retired at once.
        """
        replaced = {page.key for page in fresh}
        need = self.used_bytes + _size(fresh) - self.capacity_bytes
        hot: list[SealedPage] = []
        late: list[_Segment] = []
        segments = list(self._segments.values())
        for place, victim in enumerate(segments):
            after = segments[place + 1] if place + 1 < len(segments) else None
            if need <= 0:
                break
            kept = self._hot_pages(victim, after, replaced)
            need -= victim.size_bytes
            if kept:
                hot += kept
                need += segment_bytes(len(page.page) for page in kept)
            if hot:
                late.append(victim)
            else:
                self._retire([victim])
        return late, hot[:MAX_BATCH_PAGES] if need <= 0 else []

    def _hot_pages(
        self, victim: _Segment, after: _Segment | None, replaced: set[bytes]
    ) -> list[SealedPage]:
        """Pages used since ``after`` was written, the latest first, up to half of the victim."""
        if after is None:
            return []
        with self._lock:
            places = [place for place in victim.live.values() if place.used > after.written]
        places.sort(key=lambda place: (-place.used, place.entry.offset))
        entries: list[TableEntry] = []
        for place in places:
            if place.entry.key in replaced:
                continue
            entries.append(place.entry)
            # Half, so that each eviction makes room even where every page is in use.
            if 2 * segment_bytes(entry.length_bytes for entry in entries) > victim.size_bytes:
                entries.pop()
                break
        if not entries:
            return []
        try:
            pages = read_pages(self.path / name_of(victim.sequence), entries)
        except OSError as error:
            self._trouble(f"reading {name_of(victim.sequence)}", error)
            return []
        return [page for page in pages if fits(page)]

    def _append_what_fits(self, fresh: list[SealedPage], error: OSError) -> None:
        """The disk is full, or a file may not be so large: room first, then ever smaller parts."""
        self._trouble("put: writing less, the disk says", error)
        if error.errno in DISK_FULL:
            # Others fill the disk too. A cache gives way: its own oldest go for what is new.
            self._retire(self._oldest_until(_size(fresh)))
        at, number = 0, len(fresh)
        while at < len(fresh) and number:
            try:
                self._write(fresh[at : at + number])
                self._count("stored", len(fresh[at : at + number]))
                at += number
            except OSError as again:
                if again.errno not in _NO_ROOM:
                    raise
                number //= 2

    def _write(self, pages: Sequence[SealedPage], removed: Sequence[bytes] = ()) -> None:
        sequence = self._next_sequence
        self._next_sequence += 1
        table = write_segment(
            self.path, sequence, self._identity, pages, removed, durable=self._durable
        )
        self._publish(sequence, _size(pages, len(removed)), table)

    def _publish(self, sequence: int, size_bytes: int, table: Iterable[TableEntry]) -> None:
        with self._lock:
            self._now += 1
            segment = _Segment(sequence, size_bytes, self._now)
            self._segments[sequence] = segment
            self.used_bytes += size_bytes
            for entry in table:
                before = self._forget(entry.key)
                segment.tells |= not entry.length_bytes
                if entry.length_bytes:
                    # A page that was only moved is not younger for it.
                    moved = before is not None and before.entry.checksum == entry.checksum
                    used = before.used if before is not None and moved else self._now
                    place = _Place(segment, entry, used)
                    segment.live[entry.key] = self._index[entry.key] = place

    def _remove_places(self, places: dict[bytes, _Place]) -> set[bytes]:
        """Forget them, and write that down, or a restart would find them in their segments.

        Returns those for which neither was possible: a restart will find them.
        """
        if not places:
            return set()
        with self._lock:
            for key in places:
                self._forget(key)
        keys = list(places)
        touched = {place.segment.sequence: place.segment for place in places.values()}
        try:
            self._retire(
                self._oldest_until(self.used_bytes + _size([], len(keys)) - self.capacity_bytes)
            )
            self._write([], keys)
        except OSError as error:
            self._trouble("remove: their whole segments go", error)
            self._retire(list(touched.values()))
            return {
                key for key, place in places.items() if place.segment.sequence in self._segments
            }
        self._retire([one for one in touched.values() if not one.live and not one.tells])
        return set()

    def _oldest_until(self, num_bytes: int) -> list[_Segment]:
        """The oldest segments that take at least ``num_bytes`` together, or all."""
        chosen: list[_Segment] = []
        for segment in self._segments.values():
            if num_bytes <= 0:
                break
            chosen.append(segment)
            num_bytes -= segment.size_bytes
        return chosen

    def _retire(self, segments: Sequence[_Segment], *, evicts: bool = True) -> bool:
        """Delete these, and the oldest ones that hold nothing any more. False: not all of them."""
        done, before = True, len(self._segments)
        for segment in segments:
            done &= self._delete(segment, evicts)
        while self._segments and (oldest := next(iter(self._segments.values()))):
            if oldest.live or not self._delete(oldest, evicts):
                break
        if self._durable and len(self._segments) < before:
            try:
                sync_directory(self.path)
            except OSError as error:
                self._trouble("making deletions durable", error)
                return False
        return done

    def _delete(self, segment: _Segment, evicts: bool) -> bool:
        with self._lock:
            keys = list(segment.live)
            for key in keys:
                self._forget(key)
        if evicts:
            self._count("evicted", len(keys))
        try:
            (self.path / name_of(segment.sequence)).unlink(missing_ok=True)
        except OSError as error:
            self._trouble(f"deleting {name_of(segment.sequence)}", error)
            return False
        with self._lock:
            if self._segments.pop(segment.sequence, None) is not None:
                self.used_bytes -= segment.size_bytes
        return True

    def _forget(self, key: bytes) -> _Place | None:
        place = self._index.pop(key, None)
        if place is not None:
            del place.segment.live[key]
        return place


def _size(pages: Sequence[SealedPage], num_removed: int = 0) -> int:
    return segment_bytes((len(page.page) for page in pages), num_removed)


def _leading(pages: list[SealedPage], num_bytes: int) -> list[SealedPage]:
    """As many of the first pages as a segment of ``num_bytes`` can hold."""
    while pages and (excess := _size(pages) - num_bytes) > 0:
        number = len(pages)
        while number and excess > 0:
            number -= 1
            excess -= on_disk_bytes(len(pages[number].page))
        pages = pages[:number]
    return pages


def _size_of(path: Path) -> int:
    try:
        return on_disk_bytes(path.stat().st_size)
    except OSError:
        return ALIGN_BYTES
