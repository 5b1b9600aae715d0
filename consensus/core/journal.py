"""The decisions of this rank, in order: a bounded ring, a rolling fingerprint, optionally a file.

*Decisions* (calls that change replicated state, and verdicts) must be the same on every rank: each
enters the fingerprint, which every ballot carries, so a decision made on one rank only is found in
the next step. *Facts* (which page, when a copy ended) belong to one rank: they go to the file only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.errors import BadInput, Misuse
from kvpact.consensus.core.files import open_regular

__all__ = ["HEADER", "Entry", "Journal", "Value", "first_difference", "read_journal"]

Value = int | str

_encode = msgspec.msgpack.Encoder().encode
_encode_line = msgspec.json.Encoder().encode
_BUFFERED_LINES_MAX = 4096
#: The tag of the first line: run, rank, version, configuration, and all ranks of the replica.
HEADER = "journal"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One line of the journal. ``index`` counts decisions of this epoch; facts carry -1."""

    index: int
    epoch: int
    step: int
    tag: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        words = " ".join(str(value) for value in self.values)
        return f"#{self.index} step {self.step} {self.tag} {words}".rstrip()


class Journal:
    """The decisions of one rank. ``tail_entries_max`` bounds what is kept in memory."""

    def __init__(
        self,
        rank: int,
        *,
        tail_entries_max: int = 2048,
        path: Path | None = None,
    ) -> None:
        self.rank = rank
        self.epoch = 0
        self.step = 0
        self.fingerprint = 0
        self.count = 0
        self._tail: deque[Entry] = deque(maxlen=tail_entries_max)
        self._lines: list[Entry] = []
        self._file: BinaryIO | None = None
        self._has_begun = False
        #: There is a file: facts are worth the making.
        self.is_written = path is not None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("wb")
            except OSError as error:
                raise BadInput(f"cannot write the journal {path}: {error.strerror}") from error

    def note(self, tag: str, *values: Value) -> None:
        """A decision, the same on every rank: enters the ring, the fingerprint and the file.

        Raises :class:`Misuse`, and has changed nothing, for values that cannot be written.
        """
        try:
            line = _encode((tag, values))
        except (ValueError, TypeError, OverflowError) as error:
            raise Misuse(
                f"{tag} {values!a} cannot be written into the journal ({error}): decisions are"
                " told with texts and whole numbers of 64 bits"
            ) from None
        self.fingerprint = xxhash.xxh3_64_intdigest(line, seed=self.fingerprint) & MASK62
        entry = Entry(self.count, self.epoch, self.step, tag, values)
        self.count += 1
        self._tail.append(entry)
        if self._file is not None:
            self._write(entry)

    def fact(self, tag: str, *values: Value) -> None:
        """A fact of this rank alone: goes to the file, and enters no decision."""
        if self._file is not None:
            self._write(Entry(-1, self.epoch, self.step, tag, values))

    def begin(self, run: str, version: str, configuration: str, ranks: Sequence[int]) -> None:
        """Write the header, once: whose journal this is, and which others belong to it.

        It is the first line of the file, and there from now on, however the run may end: a journal
        without one proves nothing. ``run`` is the same text on all ``ranks``, and no other run's.
        """
        if self._file is None or self._has_begun:
            return
        values = (run, self.rank, version, configuration, *ranks)
        self._lines.insert(0, Entry(-1, 0, 0, HEADER, values))
        self.flush()
        self._has_begun = True

    def begin_epoch(self, epoch: int) -> None:
        """Start counting anew: nothing of an earlier epoch is in the fingerprint of this one."""
        self.epoch = epoch
        self.step = 0
        self.fingerprint = 0
        self.count = 0
        self._tail.clear()

    def start_anew(self) -> None:
        """Within an epoch: what was decided before no longer counts for the comparison.

        An agreed call, at the same place on all ranks: they differed, and that has been told.
        """
        self.fingerprint = 0
        self.count = 0
        self._tail.clear()
        self.note("observed", self.epoch, self.step)

    def tail(self, num_entries: int = 512) -> list[Entry]:
        """The last decisions, oldest first."""
        return list(self._tail)[-num_entries:]

    def story(self, key: Value, num_entries: int = 12) -> list[str]:
        """The last decisions that mention ``key`` (a node, an intent, a request), as lines."""
        return [str(entry) for entry in self._tail if key in entry.values][-num_entries:]

    def flush(self) -> None:
        """Write what is buffered to the file."""
        if self._file is not None and self._lines:
            self._file.write(b"\n".join(_encode_line(line) for line in self._lines) + b"\n")
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        """Flush and close the file; the ring stays readable."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
            self.is_written = False

    def _write(self, entry: Entry) -> None:
        self._lines.append(entry)
        if len(self._lines) >= _BUFFERED_LINES_MAX:
            self.flush()


def first_difference(ours: list[Entry], theirs: list[Entry]) -> tuple[Entry | None, Entry | None]:
    """The first decision that differs between two tails of one epoch (``None``: has no such).

    Tails may start at different decisions; what one ring has already dropped is not compared.
    """
    by_index = {entry.index: entry for entry in theirs}
    start = max(
        ours[0].index if ours else 0,
        theirs[0].index if theirs else 0,
    )
    mine = {entry.index: entry for entry in ours}
    for index in sorted(index for index in mine.keys() | by_index.keys() if index >= start):
        left, right = mine.get(index), by_index.get(index)
        if left is None or right is None or (left.tag, left.values) != (right.tag, right.values):
            return left, right
    return None, None


def read_journal(path: Path) -> Iterator[Entry]:
    """The entries of a journal file. Raises :class:`BadInput` naming the line that is broken."""
    decode = msgspec.json.Decoder(Entry).decode
    try:
        with open_regular(path, what="a journal") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decode(line)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise BadInput(f"{path} line {number}: not a journal entry: {error}") from error
    except OSError as error:
        raise BadInput(f"cannot read the journal {path}: {error.strerror}") from error
