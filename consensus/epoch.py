"""Closing an epoch: one outcome and one error for all ranks, through the store.

Nobody raises on its own. A rank that gives up files a *report* (what it posted, what it settled,
the verdicts it holds, the tail of its journal), reads the reports of the others, and writes the
*seal* by compare-and-set: the first writer wins. The seal carries the error that every rank raises
and the highest step settled anywhere, with the verdicts that some ranks still lack.

:class:`Closer` is polled, never blocks, and makes no collective: the epoch's group may be broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from consensus.ballot import HEADER_FIELDS, Header
from consensus.errors import Divergence, KvpactError, PeerError, PeerLost, RankStalled
from consensus.journal import Entry, first_difference
from consensus.store import Store

__all__ = ["Closer", "LastSeen", "Locator", "Report", "Seal", "SealedError", "judge"]

_LATE, _SETTLED, _GIVEN_UP = "late", b"settled", b"given up"


class LastSeen(msgspec.Struct, frozen=True):
    """Where a rank was last seen, out of band."""

    step: int
    phase: str
    since_s: float
    dead: bool = False
    stack: str = ""


class Locator(Protocol):
    """Tells, out of band, where another rank is; asked only while an epoch is being closed."""

    def is_gone(self, rank: int) -> bool:
        """Its process is known to have ended: nobody need wait for its report. Quick."""
        ...

    def last_seen(self, rank: int) -> LastSeen | None:
        """Where it was last seen; may take a moment, to ask it for its stack."""
        ...


class Report(msgspec.Struct, frozen=True):
    """What one rank knows when it gives up.

    ``cause``: ``mismatch`` (it saw headers differ at ballot ``at_step``), ``waited`` (its deadline
    passed), ``late`` (it came after others had given up), ``lost`` (the transport broke),
    ``broken`` (a rank said so), ``asked`` (others are closing).
    """

    rank: int
    cause: str
    at_step: int
    posted: int
    settled: int
    headers: dict[int, Header]
    tail: list[Entry]
    held: dict[int, list[int]]
    broken_rank: int = -1
    detail: str = ""


class SealedError(msgspec.Struct, frozen=True):
    """The error of a seal, in a form that crosses processes and is rebuilt on each rank."""

    kind: str
    message: str
    ranks: tuple[int, ...]
    epoch: int
    step: int
    story: tuple[str, ...] = ()
    field: str = ""
    ours: int = 0
    theirs: int = 0
    phase: str = ""
    waited_s: float = 0.0
    dead: bool = False

    def build(self) -> KvpactError:
        """A new exception with this content."""
        where: dict[str, Any] = {
            "ranks": self.ranks,
            "epoch": self.epoch,
            "step": self.step,
            "story": self.story,
        }
        match self.kind:
            case "Divergence":
                return Divergence(
                    self.message, field=self.field, ours=self.ours, theirs=self.theirs, **where
                )
            case "RankStalled":
                return RankStalled(
                    self.message,
                    phase=self.phase,
                    waited_s=self.waited_s,
                    dead=self.dead,
                    **where,
                )
            case "PeerLost":
                return PeerLost(self.message, **where)
            case _:
                return PeerError(self.message, **where)


class Seal(msgspec.Struct, frozen=True):
    """The end of an epoch: settle through ``through`` with ``verdicts``, then raise ``error``."""

    error: SealedError
    through: int
    verdicts: dict[int, list[int]]


class Closer:
    """Carries one rank through the closing of one epoch. Poll it until it returns the seal."""

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        epoch: int,
        locator: Locator,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._epoch = epoch
        self._locator = locator
        self._give_up_at = 0.0
        self._report: Report | None = None

    def is_sealed(self) -> bool:
        """Whether this epoch has ended, as far as the store knows."""
        return self._store.get(self._key("seal")) is not None

    def claim_settled(self, step: int) -> bool:
        """A straggler wants to settle ``step``: True unless others have given it up already."""
        return self._claim(step, _SETTLED) == _SETTLED

    def claim_given_up(self, step: int) -> bool:
        """A waiting rank gives ``step`` up: False where a straggler has settled it after all."""
        return self._claim(step, _GIVEN_UP) == _GIVEN_UP

    def _claim(self, step: int, value: bytes) -> bytes:
        return self._store.compare_set(self._key(_LATE, step), None, value)

    def file(self, report: Report, now_s: float, grace_s: float) -> None:
        """Publish this rank's report; wait at most ``grace_s`` for those of the others."""
        if self._report is not None:
            return
        self._report = report
        self._give_up_at = now_s + grace_s
        self._store.set(self._key("report", self._rank), msgspec.msgpack.encode(report))

    def poll(self, now_s: float) -> Seal | None:
        """The seal, once it stands; ``None``: others may still report, ask again."""
        standing = self._store.get(self._key("seal"))
        if standing is None:
            reports = self._read_reports()
            missing = [rank for rank in range(self._size) if rank not in reports]
            waiting = [rank for rank in missing if not self._locator.is_gone(rank)]
            if waiting and now_s < self._give_up_at:
                return None
            seen = {rank: self._locator.last_seen(rank) for rank in missing}
            seal = judge(reports, seen, epoch=self._epoch)
            standing = self._store.compare_set(
                self._key("seal"), None, msgspec.msgpack.encode(seal)
            )
        return msgspec.msgpack.decode(standing, type=Seal)

    def _read_reports(self) -> dict[int, Report]:
        reports: dict[int, Report] = {}
        for rank in range(self._size):
            data = self._store.get(self._key("report", rank))
            if data is not None:
                reports[rank] = msgspec.msgpack.decode(data, type=Report)
        return reports

    def _key(self, *parts: object) -> str:
        return "/".join(str(part) for part in ("epoch", self._epoch, *parts))


def judge(
    reports: Mapping[int, Report], missing: Mapping[int, LastSeen | None], *, epoch: int
) -> Seal:
    """What happened, from the reports that are there and where the missing ranks were last seen.

    Pure: the same reports give the same seal. Divergence is named before a broken rank, that
    before a stall, because a stall is often the consequence.
    """
    through = max((report.settled for report in reports.values()), default=0)
    behind = min((report.settled for report in reports.values()), default=0)
    verdicts = {
        step: vector
        for report in reports.values()
        for step, vector in report.held.items()
        if behind < step <= through
    }
    causes = {report.cause for report in reports.values()}
    if "mismatch" in causes:
        error = _divergence(reports, missing, epoch)
    elif "broken" in causes:
        error = _broken(reports, epoch)
    else:
        error = _stall(reports, missing, epoch)
    return Seal(error, through, verdicts)


def _divergence(
    reports: Mapping[int, Report], missing: Mapping[int, LastSeen | None], epoch: int
) -> SealedError:
    at_step = min(report.at_step for report in reports.values() if report.cause == "mismatch")
    headers = {
        rank: report.headers[at_step]
        for rank, report in reports.items()
        if at_step in report.headers
    }
    for name in HEADER_FIELDS:
        values = {rank: int(getattr(header, name)) for rank, header in headers.items()}
        if len(set(values.values())) > 1:
            break
    else:
        # Those who report agree with one another, so it is the others who differ.
        ranks = tuple(sorted(missing))
        return SealedError(
            kind="Divergence",
            message=f"{_ranks(ranks)} posted another ballot than everyone else",
            ranks=ranks,
            epoch=epoch,
            step=at_step,
        )
    majority, minority = _vote(values)
    story: list[str] = []
    if name in ("fingerprint", "live"):
        story = _first_difference(reports, majority[0], minority[0])
    two = "" if len(majority) > len(minority) else "; there is no majority, so all are named"
    named = minority if not two else sorted(values)
    ours, theirs = values[majority[0]], values[minority[0]]
    return SealedError(
        kind="Divergence",
        message=f"{_ranks(named)} differ in {name}: {theirs} instead of {ours}{two}"
        if len(named) > 1
        else f"{_ranks(named)} differs in {name}: {theirs} instead of {ours}",
        ranks=tuple(named),
        epoch=epoch,
        step=at_step,
        story=tuple(story),
        field=name,
        ours=ours,
        theirs=theirs,
    )


def _vote(values: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Ranks that hold the most common value, and the others; ties go to the lowest rank's."""
    counts = Counter(values[rank] for rank in sorted(values))
    common = max(counts, key=lambda value: (counts[value], -_first_rank(values, value)))
    return (
        [rank for rank in sorted(values) if values[rank] == common],
        [rank for rank in sorted(values) if values[rank] != common],
    )


def _first_rank(values: Mapping[int, int], value: int) -> int:
    return min(rank for rank, other in values.items() if other == value)


def _first_difference(reports: Mapping[int, Report], ours: int, theirs: int) -> list[str]:
    left, right = first_difference(reports[ours].tail, reports[theirs].tail)
    if left is None and right is None:
        return ["the first difference is older than the journals that were kept"]
    story = ["first decision that differs:"]
    story.append(f"  rank {ours}: {left if left is not None else 'no such decision'}")
    story.append(f"  rank {theirs}: {right if right is not None else 'no such decision'}")
    return story


def _broken(reports: Mapping[int, Report], epoch: int) -> SealedError:
    report = min(
        (report for report in reports.values() if report.cause == "broken"),
        key=lambda report: (report.at_step, report.rank),
    )
    own = reports.get(report.broken_rank)
    detail = own.detail if own is not None and own.detail else "an exception"
    return SealedError(
        kind="PeerError",
        message=f"rank {report.broken_rank} could not take part in the step: {detail}",
        ranks=(report.broken_rank,),
        epoch=epoch,
        step=report.at_step,
    )


def _stall(
    reports: Mapping[int, Report], missing: Mapping[int, LastSeen | None], epoch: int
) -> SealedError:
    at_step = min(report.at_step for report in reports.values())
    late = [rank for rank, report in sorted(reports.items()) if report.cause == "late"]
    named = sorted(missing) or late
    if not named:
        return SealedError(
            kind="PeerLost",
            message="the connection between the ranks broke, though all of them are there",
            ranks=(),
            epoch=epoch,
            step=at_step,
        )
    first = missing.get(named[0])
    dead = first is not None and first.dead
    story = [line for rank in named for line in _last_seen(rank, missing.get(rank))]
    verb = "ended" if dead else ("came too late" if not missing else "has not come")
    return SealedError(
        kind="RankStalled",
        message=f"{_ranks(named)} {verb}: nobody can wait any longer for step {at_step}",
        ranks=tuple(named),
        epoch=epoch,
        step=at_step,
        story=tuple(story),
        phase=first.phase if first is not None else "",
        waited_s=first.since_s if first is not None else 0.0,
        dead=dead,
    )


def _last_seen(rank: int, seen: LastSeen | None) -> Sequence[str]:
    if seen is None:
        return [f"rank {rank} was never seen"]
    state = "its process is gone" if seen.dead else "its process is there"
    lines = [
        f"rank {rank} was last seen at step {seen.step}, {seen.phase},"
        f" for {seen.since_s:.1f} s; {state}"
    ]
    return lines + [f"  {line}" for line in seen.stack.splitlines()]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
