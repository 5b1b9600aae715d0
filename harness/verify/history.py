"""One rank's history, walked line by line against the rules: only what the journal says is known.

Nothing of the code that wrote it is imported, and the transition table stands here again, so that
a mistake in one of them shows as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.files import open_regular

__all__ = ["History", "Line", "Unreadable", "Violation", "read_lines"]


class Line(NamedTuple):
    """One line of a journal; ``number`` counts from 1. ``place`` -1: a fact of this rank."""

    number: int
    place: int
    epoch: int
    step: int
    tag: str
    values: list[Any]


class Violation(Exception):
    """A rule that does not hold."""


class Unreadable(Exception):
    """This is no journal."""


#: (where it stands, what happens) -> where it stands then.
_TABLE = {
    ("proposed", "reserve"): "reserved",
    ("proposed", "refuse"): "refused",
    ("reserved", "post"): "voted",
    ("refused", "post"): "voted no",
    ("voted", "commit"): "committed",
    ("voted", "abort"): "aborted",
    ("voted no", "abort"): "aborted",
    ("committed", "withdraw"): "withdrawn",
    ("committed", "end"): "done",
    ("aborted", "end"): "closed",
    ("withdrawn", "end"): "closed",
    ("committed", "quarantine"): "quarantined",
    ("aborted", "quarantine"): "quarantined",
    ("withdrawn", "quarantine"): "quarantined",
}
_UNDECIDED = ("proposed", "reserved", "refused", "voted", "voted no")
_OVER = ("done", "failed", "closed", "quarantined")
#: Intents that are over and may still be named as a parent.
_KEPT = 100_000
_DEVICE = "device"
_LINE_BYTES_MAX = 1 << 26


class _Intent:
    """What the journal has said of one intent."""

    def __init__(self, line: Line) -> None:
        kind, key, serial, slot, *shape = line.values
        at = shape.index("at least")
        self.name = f"{kind} {key} (#{serial})"
        self.slot = int(slot)
        self.total = sum(shape[1:at:2])
        self.minimum = int(shape[at + 1])
        self.ends_on_commit = shape[at + 2] == "ends on commit"
        self.parents: list[_Intent] = []
        self.bound: list[_Intent] = []
        self.parent_serials = [int(parent) for parent in shape[at + 3 :]]
        self.ballot = line.step + 1
        self.state = "proposed"
        self.held = 0
        self.agreed = 0
        self.result = 0
        self.went_well = 0  # pages, on this rank
        self.has_ended = False
        self.is_withdrawn = False

    def happens(self, event: str) -> None:
        """Walk the table."""
        after = _TABLE.get((self.state, event))
        if after is None:
            raise Violation(f"table: {self.name} is {self.state}, so it cannot {event}")
        self.state = after

    @property
    def is_whole(self) -> bool:
        pages = self.agreed if self.state == "committed" else self.result
        return self.state in ("committed", "done") and pages == self.total


class History:
    """The state of one rank as its journal tells it; :meth:`add` raises :class:`Violation`."""

    def __init__(self) -> None:
        self.epoch = -1
        self.part = 0  # of the epoch: how often counting began anew in it
        self.sealed: dict[int, str] = {}  # epoch -> the kind of error that ended it
        self.num_decisions = 0
        self.num_intents = 0
        self._intents: dict[int, _Intent] = {}  # those that are open
        self._over: dict[int, _Intent] = {}  # and the last of those that are not
        self._unposted: list[_Intent] = []
        self._num_opened = 0  # in this epoch
        self._slots: dict[int, int] = {}  # slot -> serial of who holds it
        self._freed: dict[int, int] = {}  # slot -> the step in which it was given back
        self._behind = 0  # a verdict comes so many steps after its ballot, less one
        self._just_reset: set[str] = set()
        self._fetched_in = (-1, -1)  # epoch and step in which a prefetch ended well
        self._owned: dict[str, set[int]] = {}
        self._limbo: dict[str, set[int]] = {}
        self._published: dict[tuple[str, int], list[int]] = {}
        self._holder: dict[tuple[str, int], int] = {}  # (tier, page) -> node
        self._rules: dict[str, Callable[[Line], None]] = {
            "open": self._open,
            "bind": self._bind,
            "alias": self._alias,
            "reserve": self._reserve,
            "refuse": self._refuse,
            "post": self._post,
            "withdraw": self._withdraw,
            "commit": self._commit,
            "abort": self._abort,
            "ended": self._ended,
            "end": self._end,
            "quarantine": self._quarantine,
            "sealed": self._seal,
            "take": self._take,
            "put back": self._put_back,
            "limbo": self._put_in_limbo,
            "out of limbo": self._out_of_limbo,
            "pool reset": self._pool_reset,
            "publish": self._publish,
            "unpublish": self._unpublish,
            "forget": self._forget,
            "split": self._split,
            "serve": self._serve,
        }

    def add(self, line: Line) -> None:
        """The next line of the file."""
        if line.epoch != self.epoch:
            if line.epoch < self.epoch:
                raise Violation(f"order: epoch {line.epoch} after epoch {self.epoch}")
            self._begin(line.epoch)
        if line.tag == "observed" and line.place == 0 and line.epoch in self.sealed:
            # A difference was told and, with policy observe, counting begins anew within the epoch.
            self.num_decisions = 0
            self.part += 1
        if line.place >= 0:
            if line.place != self.num_decisions:
                raise Violation(f"order: decision {line.place} follows {self.num_decisions - 1}")
            self.num_decisions += 1
        if line.tag not in ("take", "limbo"):
            self._just_reset.clear()
        if line.values[:1] == ["staging"]:  # what the host's pool is called in buffer-only mode
            line.values[0] = "host"
        rule = self._rules.get(line.tag)
        if rule is not None:
            try:
                rule(line)
            except (ValueError, TypeError, IndexError) as error:
                raise Violation(
                    f"order: {line.tag} {line.values} makes no sense: {error}"
                ) from None

    def open_intents(self) -> list[str]:
        """What has not ended, at the end of the file."""
        return [one.name for one in self._intents.values()]

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.num_decisions = 0
        self.part = 0
        self._intents.clear()
        self._over.clear()
        self._unposted.clear()
        self._num_opened = 0
        self._slots.clear()
        self._freed.clear()

    # -- transactions ----------------------------------------------------------------------------

    def _get(self, serial: int) -> _Intent:
        intent = self._intents.get(serial) or self._over.get(serial)
        if intent is None:
            raise Violation(f"table: intent #{serial} was never opened")
        return intent

    def _open(self, line: Line) -> None:
        intent = _Intent(line)
        serial = int(line.values[2])
        if serial < self._num_opened:
            raise Violation(f"table: {intent.name} is opened twice")
        if intent.slot in self._slots:
            holder = self._get(self._slots[intent.slot]).name
            raise Violation(f"slots: {intent.name} gets slot {intent.slot}, which {holder} holds")
        freed = self._freed.get(intent.slot)
        rest = 1 if not self._behind else self._behind + 3
        if freed is not None and intent.ballot < freed + rest:
            raise Violation(
                f"slots: {intent.name} gets slot {intent.slot} for ballot {intent.ballot}, but it"
                f" was freed in step {freed} only"
            )
        intent.parents = [self._get(parent) for parent in intent.parent_serials]
        self._slots[intent.slot] = serial
        self._intents[serial] = intent
        self._unposted.append(intent)
        self._num_opened = serial + 1
        self.num_intents += 1

    def _alias(self, line: Line) -> None:
        self._get(line.values[0])

    def _reserve(self, line: Line) -> None:
        intent = self._get(line.values[0])
        intent.happens("reserve")
        intent.held = line.values[1]
        if not intent.minimum <= intent.held <= intent.total:
            raise Violation(f"atomic: {intent.name} holds {intent.held} of {intent.total} pages")

    def _refuse(self, line: Line) -> None:
        intent = self._get(line.values[0])
        intent.happens("refuse")
        intent.has_ended = True

    def _post(self, line: Line) -> None:
        if not line.values[1]:
            return
        for intent in self._unposted:
            intent.happens("post")
        self._unposted.clear()

    def _withdraw(self, line: Line) -> None:
        intent = self._get(line.values[0])
        if intent.state in _UNDECIDED:
            intent.is_withdrawn = True
        else:
            intent.happens("withdraw")

    def _commit(self, line: Line) -> None:
        _, serial, pages = line.values
        intent = self._get(serial)
        intent.happens("commit")
        intent.agreed = pages
        self._behind = max(self._behind, line.step - intent.ballot)
        if not intent.minimum <= pages <= intent.held:
            raise Violation(
                f"verdict: {intent.name} is committed with {pages} pages, this rank holds"
                f" {intent.held}"
            )
        if intent.is_withdrawn:
            raise Violation(f"verdict: {intent.name} was withdrawn and is committed")
        for parent in intent.parents:
            if not parent.is_whole:
                raise Violation(
                    f"verdict: {intent.name} is committed, but its parent {parent.name} is"
                    f" {parent.state}"
                )
        self._check_bound(intent)

    def _abort(self, line: Line) -> None:
        intent = self._get(line.values[1])
        intent.happens("abort")
        self._check_bound(intent)

    def _bind(self, line: Line) -> None:
        intents = [self._get(serial) for serial in line.values]
        for intent in intents:
            intent.bound = [other for other in intents if other is not intent]

    def _check_bound(self, intent: _Intent) -> None:
        """They are decided one right after the other: the last of them sees what all became."""
        if any(other.state in _UNDECIDED for other in intent.bound):
            return
        for other in intent.bound:
            if (other.state == "committed") != (intent.state == "committed"):
                raise Violation(
                    f"verdict: {intent.name} is {intent.state}, but {other.name}, which is bound to"
                    f" it, is {other.state}"
                )

    def _ended(self, line: Line) -> None:
        intent = self._get(line.values[0])
        if intent.has_ended or intent.state in ("proposed", *_OVER):
            how = "has ended before" if intent.has_ended else f"is {intent.state}"
            raise Violation(f"table: {intent.name} ends on this rank, but it {how}")
        intent.has_ended = True
        intent.went_well = int(line.values[1])

    def _end(self, line: Line) -> None:
        serial, pages = line.values
        intent = self._get(serial)
        if not intent.has_ended and not (intent.ends_on_commit and intent.state == "committed"):
            raise Violation(f"ending: {intent.name} ended on all ranks, but not on this one")
        if intent.has_ended and intent.state == "committed" and pages > intent.went_well:
            raise Violation(
                f"ending: {pages} pages of {intent.name} went well on all ranks, on this one only"
                f" {intent.went_well}"
            )
        if pages > intent.agreed:
            raise Violation(f"ending: {pages} pages of {intent.name} went well of {intent.agreed}")
        intent.happens("end")
        intent.result = pages
        if intent.state == "done" and pages < intent.minimum:
            intent.state = "failed"
        if intent.state == "done" and intent.name.startswith("prefetch"):
            self._fetched_in = line.epoch, line.step
        self._give_back(intent, line)

    def _quarantine(self, line: Line) -> None:
        intent = self._get(line.values[0])
        intent.happens("quarantine")
        self._give_back(intent, line)

    def _give_back(self, intent: _Intent, line: Line) -> None:
        serial = self._slots.pop(intent.slot)
        self._over[serial] = self._intents.pop(serial)
        self._over[serial].parents.clear()
        if len(self._over) > _KEPT:
            del self._over[next(iter(self._over))]
        self._freed[intent.slot] = line.step

    def _seal(self, line: Line) -> None:
        self.sealed[line.epoch] = str(line.values[0])

    # -- pages -----------------------------------------------------------------------------------

    def _take(self, line: Line) -> None:
        pool, *pages = line.values
        owned, limbo = self._owned.setdefault(pool, set()), self._limbo.setdefault(pool, set())
        for page in pages:
            if page in owned or page in limbo:
                why = "has an owner already" if page in owned else "is still read or written"
                raise Violation(f"owner: page {page} of pool {pool} is taken, but it {why}")
            owned.add(page)

    def _put_back(self, line: Line) -> None:
        self._disown(line)

    def _put_in_limbo(self, line: Line) -> None:
        # After a reset of the pool, pages that a copy still touches come from nobody.
        if line.values[0] not in self._just_reset:
            self._disown(line)
        self._limbo.setdefault(line.values[0], set()).update(line.values[1:])

    def _disown(self, line: Line) -> None:
        pool, *pages = line.values
        for page in pages:
            if page not in self._owned.get(pool, ()):
                raise Violation(f"owner: page {page} of pool {pool} is freed, but nobody owns it")
            self._owned[pool].remove(page)

    def _out_of_limbo(self, line: Line) -> None:
        pool, *pages = line.values
        for page in pages:
            if page not in self._limbo.get(pool, ()):
                raise Violation(f"owner: page {page} of pool {pool} was not in limbo")
            self._limbo[pool].remove(page)

    def _pool_reset(self, line: Line) -> None:
        pool = line.values[0]
        self._owned[pool], self._limbo[pool] = set(), set()
        self._just_reset.add(pool)

    # -- what can be read ------------------------------------------------------------------------

    def _publish(self, line: Line) -> None:
        tier, node, serial, *pages = line.values
        # The engine computes what comes to the device by itself; a prefetch has ended before.
        by_nobody = tier != _DEVICE and (line.epoch, line.step) != self._fetched_in
        if serial < 0 and by_nobody:
            raise Violation(f"publish: node {node} is published on {tier} by nobody's intent")
        if serial >= 0:
            intent = self._get(serial)
            if intent.state not in ("committed", "done"):
                raise Violation(
                    f"publish: node {node} is published on {tier}, but {intent.name} is"
                    f" {intent.state}"
                )
        for page in pages:
            if page not in self._owned.get(tier, ()):
                raise Violation(f"owner: node {node} gets page {page} of {tier}, which is free")
            other = self._holder.get((tier, page))
            if other is not None:
                raise Violation(f"owner: page {page} of {tier} is in nodes {other} and {node}")
            self._holder[tier, page] = node
        self._published[tier, node] = pages

    def _unpublish(self, line: Line) -> None:
        tier, node = line.values
        if (tier, node) not in self._published:
            raise Violation(f"publish: node {node} was not on {tier}")
        for page in self._published.pop((tier, node)):
            del self._holder[tier, page]

    def _forget(self, line: Line) -> None:
        gone = [key for key in self._published if key[0] == line.values[0]]
        for key in gone:
            for page in self._published.pop(key):
                del self._holder[key[0], page]

    def _split(self, line: Line) -> None:
        lower, upper, num_pages = line.values
        for tier in sorted({tier for tier, node in self._published if node == lower}):
            pages = self._published[tier, lower]
            self._published[tier, upper] = pages[:num_pages]
            self._published[tier, lower] = pages[num_pages:]
            for page in pages[:num_pages]:
                self._holder[tier, page] = upper

    def _serve(self, line: Line) -> None:
        num_on_device, *nodes = line.values
        for place, node in enumerate(nodes):
            on_device = (_DEVICE, node) in self._published
            on_host = ("host", node) in self._published
            if not on_device and (place < num_on_device or not on_host):
                where = "on the device" if place < num_on_device else "anywhere"
                raise Violation(f"read: node {node} is served, but it is not published {where}")


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a journal; what a killed process has not finished writing is left out."""
    try:
        with open_regular(path, what="a journal") as file:
            number = 0
            while text := file.readline(_LINE_BYTES_MAX):
                number += 1
                if text.endswith(b"\n"):
                    yield _read_line(path, number, text)
                elif len(text) == _LINE_BYTES_MAX:
                    raise Unreadable(f"{path} line {number}: no line of a journal: too long")
    except BadInput as error:
        raise Unreadable(error.message) from None
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror}") from None


def _read_line(path: Path, number: int, text: bytes) -> Line:
    try:
        index, epoch, step, tag, values = json.loads(text)
        return Line(number, int(index), int(epoch), int(step), str(tag), list(values))
    except (ValueError, TypeError) as error:
        raise Unreadable(f"{path} line {number}: no line of a journal: {error}") from None
    except RecursionError:
        raise Unreadable(f"{path} line {number}: no line of a journal: nested too deeply") from None
