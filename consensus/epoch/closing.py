"""Closing an epoch, and opening the next: one outcome and one error for all ranks.

Nobody raises on its own. A rank that gives up files a *report* (what it posted, what it settled,
the verdicts it holds, the tail of its journal), which asks all others for theirs, reads them, and
writes the *seal* by compare-and-set: the first writer wins. The seal carries the error that every
rank raises and the highest step settled anywhere, with the verdicts that some ranks still lack.

:class:`Closer` and :class:`Opener` are polled, never block, and make no collective: the epoch's
group may be broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvpact.consensus.core.errors import Misuse, RankStalled, StoreForged
from kvpact.consensus.epoch.judge import judge
from kvpact.consensus.epoch.report import (
    Incident,
    LastSeen,
    Policy,
    Report,
    Seal,
    SealedError,
    packed_report,
)
from kvpact.consensus.transport.envelope import decode
from kvpact.consensus.transport.pieces import (
    WHOLE_BYTES_MAX,
    read_whole,
    remove_pieces,
    write_pieces,
)
from kvpact.consensus.transport.store import Store

__all__ = [
    "Closer",
    "Introduction",
    "LastSeen",
    "Locator",
    "Opener",
    "Policy",
    "Report",
    "Seal",
    "SealedError",
    "agree",
    "judge",
]

#: Before every step: all who wait, whatever for, report at once.
_NOW = "0 0"
_LATE, _SETTLED, _GIVEN_UP = "late", b"settled", b"given up"


class Locator(Protocol):
    """Tells, out of band, where another rank is; asked only while somebody is waited for."""

    def is_gone(self, rank: int) -> bool:
        """Its process is known to have ended: nobody need wait for its report. Quick."""
        ...

    def is_paused(self, rank: int) -> bool:
        """The rank has said that it pauses: others wait for it beyond their deadline. Quick.

        May raise :class:`StoreSilent`.
        """
        ...

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        """Return where ranks were last seen (``None``: never); all at once, within about a second.

        With ``asks`` those that can answer are asked for their stacks.
        """
        ...


class Closer:
    """Carries one rank through the closing of one epoch. Poll it until it returns the seal.

    An epoch whose end was only observed can be closed again: in the next ``round``. ``group_epoch``
    is the epoch in which the group was formed: all ranks of a group meet under it, also where some
    of them have ended an epoch by a call that the others did not make.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        epoch: int,
        locator: Locator,
        policy: Policy | None = None,
        group_epoch: int | None = None,
        round_number: int = 0,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.group_epoch = epoch if group_epoch is None else group_epoch
        self.round_number = round_number
        self._store = store
        self._ranks = tuple(ranks)
        self._locator = locator
        self._policy = policy or Policy()
        self._look_at = 0.0
        self._give_up_at = 0.0
        self._report: Report | None = None
        self._found: dict[int, Report] = {}
        self._has_read = False
        self._seen: dict[int, LastSeen | None] = {}
        self._forged: StoreForged | None = None
        self._read: dict[str, tuple[bytes, Report]] = {}  # what stood there, and what it says
        self._in_pieces: dict[str, bytes] = {}

    def is_closing(self, step: int = 1 << 62) -> bool:
        """Whether this rank, which waits for ``step``, shall report now.

        Where others found a difference in a later ballot, this rank goes on: it will meet it too,
        and at the same place of its loop as they, which is where a new epoch can begin.
        """
        try:
            place = self._closing_at()
        except StoreForged as error:
            self._forged = error  # sealed as it is, so that all ranks raise the same
            return True
        return place is not None and place <= (self.epoch, step)

    def _closing_at(self) -> tuple[int, int] | None:
        key = self._key("closing")
        mark = self._store.get(key)
        if mark is None:
            return None
        epoch, _, waits_for = mark.partition(b" ")
        if not (epoch.isdigit() and waits_for.isdigit()):
            raise StoreForged(f"what stands at '{key}' in the store cannot be read: no step")
        return int(epoch), int(waits_for)

    def claim_settled(self, step: int) -> bool:
        """A straggler wants to settle ``step``: True unless others have given it up already."""
        return self._claim(step, _SETTLED) == _SETTLED

    def claim_given_up(self, step: int) -> bool:
        """A waiting rank gives ``step`` up: False where a straggler has settled it after all."""
        return self._claim(step, _GIVEN_UP) == _GIVEN_UP

    def _claim(self, step: int, value: bytes) -> bytes:
        key = f"epoch/{self.epoch}/{_LATE}/{step}"
        return self._store.compare_set(key, None, value)

    def file(self, report: Report, now_s: float, grace_s: float) -> None:
        """Publish this rank's report; wait at most ``grace_s`` for those of the others."""
        if self._report is not None:
            return
        self._report = report
        self._look_at = now_s + grace_s / 4
        self._give_up_at = now_s + grace_s
        self._put_report(report)
        at = f"{self.epoch} {report.at_step}" if report.cause == "mismatch" else _NOW
        self._store.set(self._key("closing"), at.encode())

    def poll(self, now_s: float) -> Seal | None:
        """The seal, once it stands; ``None``: others may still report, ask again."""
        standing = self._store.get(self._key("seal"))
        if standing is None:
            try:
                reports = self._read_reports()
                seal = self._judge_all(reports, now_s) if self._forged is None else None
            except StoreForged as error:
                self._forged, seal = error, None
            if self._forged is not None:
                seal = self._distrust(self._forged)
            if seal is None:
                return None
            standing = self._put_seal(seal)
            self._store.set(self._key("closing"), _NOW.encode())
        return self._seal_of(standing)

    def _put_report(self, report: Report) -> None:
        """One that no store takes is told without what it would keep: nothing is kept then."""
        packed = packed_report(report)
        if len(packed) > WHOLE_BYTES_MAX:
            packed = packed_report(msgspec.structs.replace(report, kept=[]))
        self._store.set(*self._pieced("report", self.rank, packed=packed))

    def _put_seal(self, seal: Seal) -> bytes:
        """Write it where none stands; what stands then."""
        key, value = self._pieced("seal", packed=msgspec.msgpack.encode(seal))
        return self._store.compare_set(key, None, value)

    def _pieced(self, *parts: object, packed: bytes) -> tuple[str, bytes]:
        """Key and value for ``packed``, whose pieces are written where it is large."""
        key = self._key(*parts)
        value = self._in_pieces[key] = write_pieces(self._store, key, self.rank, packed)
        return key, value

    def _seal_of(self, standing: bytes) -> Seal:
        key = self._key("seal")
        return decode(key, read_whole(self._store, key, standing), Seal)

    def tidy(self) -> None:
        """Delete what this rank wrote in pieces: all are in the next epoch, and have read it."""
        for key, value in self._in_pieces.items():
            remove_pieces(self._store, key, value)
        self._in_pieces.clear()

    def _judge_all(self, reports: dict[int, Report], now_s: float) -> Seal | None:
        """The seal that this rank would write; ``None``: others may still report."""
        missing = [rank for rank in self._ranks if rank not in reports]
        waiting = [rank for rank in missing if not self._locator.is_gone(rank)]
        if waiting and self._is_looking(now_s):
            self._seen = self._locator.last_seen(waiting)
        if waiting and now_s < self._give_up_at:
            return None
        unseen = [rank for rank in missing if rank not in self._seen]
        self._seen |= self._locator.last_seen(unseen) if unseen else {}
        seen = {rank: self._seen[rank] for rank in missing}
        return judge(reports, seen, epoch=self.epoch, policy=self._policy)

    def _distrust(self, forged: StoreForged) -> Seal:
        """The seal where something was not written by this run: nothing more is settled."""
        step = 0 if self._report is None else self._report.at_step
        error = SealedError("StoreForged", forged.message, (), self.epoch, step)
        then = "off" if self._policy.kind == "observe" else "raise"
        return Seal(error, through=0, verdicts={}, then=then)

    def have_all_read(self) -> bool:
        """Say that this rank has read the seal; whether all others who reported have.

        One of them may serve the store: it must not end before.
        """
        if not self._has_read:
            self._store.set(self._key("read", self.rank), b"1")
            self._has_read = True
        return all(
            self._store.get(self._key("read", rank)) is not None or self._locator.is_gone(rank)
            for rank in sorted(self._found)
            if rank != self.rank
        )

    def overheard(self, *, is_enough: Callable[[dict[int, Report]], bool]) -> Seal | None:
        """Return the seal that the reports of others amount to, once ``is_enough``.

        It only reads: any thread may ask, while the scheduler's own hangs and reports nothing.
        """
        if self._store.get(self._key("closing")) is None:
            return None
        standing = self._store.get(self._key("seal"))
        if standing is not None:
            return self._seal_of(standing)
        reports = self._filed()
        if not reports or not is_enough(reports):
            return None
        missing = [rank for rank in self._ranks if rank not in reports]
        seal = self.judged(reports, missing)
        if seal.error.kind == "Divergence":  # this rank will report too: then the policy may help
            others = [rank for rank in missing if rank != self.rank]
            seal = msgspec.structs.replace(seal, then=self.judged(reports, others).then)
        return seal

    def judged(self, reports: dict[int, Report], missing: Sequence[int]) -> Seal:
        """Judge these reports here, where nothing is known of ``missing`` ranks."""
        return judge(reports, dict.fromkeys(missing), epoch=self.epoch, policy=self._policy)

    def _is_looking(self, now_s: float) -> bool:
        """Looking for a rank takes a moment: do it while its report may still come.

        Only where this rank has waited long enough already; otherwise others are just slower.
        """
        waited = self._report is not None and self._report.cause in ("waited", "late")
        return waited and not self._seen and now_s >= self._look_at

    def incident(self, seal: Seal) -> Incident:
        """All that is known of the end of this epoch, without verdicts and kept pages: these are
        long."""
        reports = [
            msgspec.structs.replace(report, held={}, kept=[])
            for _, report in sorted(self._read_reports().items())
        ]
        bare = msgspec.structs.replace(seal, verdicts={}, kept=[])
        return Incident(self.rank, self.epoch, bare, reports)

    def _read_reports(self) -> dict[int, Report]:
        self._found = self._filed()
        return self._found

    def _filed(self) -> dict[int, Report]:
        reports: dict[int, Report] = {}
        for rank in self._ranks:
            key = self._key("report", rank)
            value = self._store.get(key)
            if value is None:
                continue
            known = self._read.get(key)
            if known is None or known[0] != value:
                whole = read_whole(self._store, key, value)
                known = self._read[key] = (value, decode(key, whole, Report))
            reports[rank] = known[1]
        return reports

    def known(self) -> list[Report]:
        """This rank's report and those it has read, by rank; asks nobody."""
        mine = {} if self._report is None else {self.rank: self._report}
        found = {**mine, **self._found}
        return [msgspec.structs.replace(found[rank], held={}) for rank in sorted(found)]

    def _key(self, *parts: object) -> str:
        rounds = ("round", self.round_number) if self.round_number else ()
        return "/".join(str(part) for part in ("epoch", self.group_epoch, *rounds, *parts))


class Introduction(msgspec.Struct, frozen=True):
    """One rank's introduction: ``facts`` must be equal everywhere, ``usable`` need not be."""

    rank: int
    facts: dict[str, str]
    usable: dict[str, int]


def agree(introductions: Sequence[Introduction]) -> dict[str, int]:
    """The usable pages of each pool that every rank has.

    Raises :class:`Misuse` naming the first rank and field that differ from the lowest rank's.
    """
    first = introductions[0]
    for other in introductions[1:]:
        for name in sorted(first.facts.keys() | other.facts.keys()):
            ours, theirs = first.facts.get(name, "nothing"), other.facts.get(name, "nothing")
            if ours != theirs:
                raise Misuse(
                    f"rank {other.rank} has {name} = {theirs}, rank {first.rank} has {ours}:"
                    " start all ranks with the same",
                    rank=other.rank,
                )
    return {pool: min(one.usable[pool] for one in introductions) for pool in first.usable}


class Opener:
    """Exchanges introductions through the store before an epoch begins. Poll it.

    Whether all came in time is written down by whoever knows first, and is so for every rank.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        mine: Introduction,
        ranks: Sequence[int],
        *,
        now_s: float,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._name = name
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._end_s = now_s + timeout_s
        self._found: dict[int, Introduction] = {}
        store.set(self._key(mine.rank), msgspec.msgpack.encode(mine))

    def poll(self, now_s: float) -> dict[int, Introduction] | None:
        """All introductions by rank, once all are there.

        Raises :class:`RankStalled` naming who has not come in time, the same on every rank.
        """
        for rank in self._ranks:
            data = None if rank in self._found else self._store.get(self._key(rank))
            if data is not None:
                self._found[rank] = decode(self._key(rank), data, Introduction)
        missing = [rank for rank in self._ranks if rank not in self._found]
        if missing and now_s < self._end_s:
            return None
        absent = self._agree_on(missing)
        if absent:
            raise RankStalled(
                f"ranks {absent} have not introduced themselves within {self._timeout_s:g} s",
                ranks=absent,
                phase="start",
            )
        if missing:
            return None  # they came at the last moment, others have seen them
        return {rank: self._found[rank] for rank in self._ranks}

    def _agree_on(self, missing: list[int]) -> list[int]:
        """Return the missing ranks, as the first rank wrote that had an opinion."""
        mine = msgspec.msgpack.encode(missing)
        stands = self._store.compare_set(f"{self._name}/absent", None, mine)
        return decode(f"{self._name}/absent", stands, list[int])

    def _key(self, rank: int) -> str:
        return f"{self._name}/introduction/{rank}"
