"""The judgement of an epoch's end, from the reports that are there: who is named, what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvpact.consensus.core.ballot import HEADER_FIELDS, Header
from kvpact.consensus.core.journal import first_difference
from kvpact.consensus.epoch.report import LastSeen, Policy, Report, Seal, SealedError

__all__ = ["judge"]

_RAISE = Policy()
#: A difference in one of these leaves every rank at the same place of its loop.
_RESETTABLE = ("fingerprint", "live")
_PENDING_TOLD = 3
_STATES = {
    "beating": "its process lives, but its scheduler does not come",
    "stopped": "its process is stopped (a signal, a debugger)",
    "silent": "nothing is heard of its process any more",
    "left": "it has left in good order",
    "gone": "its process is gone",
}
_DIGESTS = ("schema", "fingerprint", "live")


def judge(
    reports: Mapping[int, Report],
    missing: Mapping[int, LastSeen | None],
    *,
    epoch: int,
    policy: Policy = _RAISE,
) -> Seal:
    """The seal that these reports amount to; ``missing`` ranks filed none and were last seen there.

    Divergence is named before a broken rank, that before a stall, because a stall is often the
    consequence. The seal carries all verdicts that are held: a missing rank may lack any of them.
    """
    epoch = _epoch_of_most(reports, epoch)
    there = [report for report in reports.values() if report.epoch in (-1, epoch)]
    through = max((report.settled for report in there), default=0)
    verdicts = {
        step: vector for report in there for step, vector in report.held.items() if step <= through
    }
    causes = {report.cause for report in reports.values()}
    if "mismatch" in causes:
        error = _divergence(reports, missing, epoch)
    elif "broken" in causes:
        error = _broken(reports, epoch)
    elif "stuck" in causes:
        error = _stuck(reports, epoch)
    else:
        error = _stall(reports, missing, epoch)
    then = _then(error, reports, missing, policy)
    lost = () if then in ("raise", "observe", "off") else _lost(reports)
    kept: set[int] = set()
    if then == "detach":
        every = [set(report.kept) for report in reports.values()]
        kept = every[0].intersection(*every[1:])
    return Seal(error, through, verdicts, then, lost, sorted(kept))


def _epoch_of_most(reports: Mapping[int, Report], epoch: int) -> int:
    """The epoch in which most of those who report are; ``epoch`` where they do not say."""
    counts = Counter(report.epoch for report in reports.values() if report.epoch >= 0)
    return max(counts, key=lambda one: (counts[one], -one)) if counts else epoch


def _then(
    error: SealedError,
    reports: Mapping[int, Report],
    missing: Mapping[int, LastSeen | None],
    policy: Policy,
) -> str:
    """A reset is no cure for a rank whose loop is at another place than the others'.

    Nor can such ranks be compared any further: who only observes is then off.
    """
    is_equal_otherwise = error.kind == "Divergence" and error.field in _RESETTABLE
    # An exception is for the engine of its rank to see.
    is_broken = any(report.broken_rank == report.rank for report in reports.values())
    can_go_on = is_equal_otherwise and not is_broken and not missing
    if policy.kind == "observe":
        is_same_place = len({(report.epoch, report.posted) for report in reports.values()}) == 1
        return "observe" if can_go_on and is_same_place else "off"
    if not can_go_on:
        return "raise"
    if max(report.num_resets for report in reports.values()) >= policy.max_resets:
        return "raise"
    return policy.kind


def _lost(reports: Mapping[int, Report]) -> tuple[str, ...]:
    names = {name for report in reports.values() for name in report.live}
    return tuple(
        name
        for name in sorted(names)
        if len({report.live.get(name) for report in reports.values()}) > 1
    )


def _divergence(
    reports: Mapping[int, Report], missing: Mapping[int, LastSeen | None], epoch: int
) -> SealedError:
    at_step = min(report.at_step for report in reports.values() if report.cause == "mismatch")
    # Where a collective was skipped, ranks saw the mismatch at different steps of their own.
    looked_at = {
        rank: report.at_step if report.cause == "mismatch" else at_step
        for rank, report in sorted(reports.items())
    }
    headers = {
        rank: _header(reports[rank], step)
        for rank, step in looked_at.items()
        if reports[rank].headers
    }
    for name in HEADER_FIELDS:
        values = {rank: int(getattr(header, name)) for rank, header in headers.items()}
        if len(set(values.values())) > 1:
            return _differ(name, values, reports, epoch, at_step)
    # Those who report agree with one another, so it is the others who differ.
    ranks = tuple(sorted(missing))
    who = _ranks(ranks) if ranks else "somebody else in the group"
    return SealedError(
        kind="Divergence",
        message=f"{who} posted another ballot than everyone else",
        ranks=ranks,
        epoch=epoch,
        step=at_step,
    )


def _header(report: Report, step: int) -> Header:
    """Return the header posted as ``step``; the newest where the rank counts otherwise."""
    return report.headers.get(step) or report.headers[max(report.headers)]


def _differ(
    name: str, values: dict[int, int], reports: Mapping[int, Report], epoch: int, at_step: int
) -> SealedError:
    majority, minority = _vote(values)
    is_tied = len(majority) <= len(minority)
    named = sorted(values) if is_tied else minority
    ours, theirs = values[majority[0]], values[minority[0]]
    message = f"{_ranks(named)} {'differs' if len(named) == 1 else 'differ'} in {name}:"
    message += f" {_shown(name, theirs)} instead of {_shown(name, ours)}"
    if is_tied:
        message += f"; {len(values)} ranks without a majority cannot tell who is right"
    story: list[str] = []
    if name in _RESETTABLE:
        story = _first_difference(reports, majority[0], minority[0])
    return SealedError(
        kind="Divergence",
        message=message,
        ranks=tuple(named),
        epoch=epoch,
        step=at_step,
        story=tuple(story),
        field=name,
        ours=ours,
        theirs=theirs,
    )


def _shown(name: str, value: int) -> str:
    """A digest says nothing to a person but whether it is the same."""
    return f"{value:016x}"[-8:] if name in _DIGESTS else str(value)


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
    first = left if left is not None else right
    starts = [report.tail[0].index for report in reports.values() if report.tail]
    if first is not None and first.index == max(starts) > 0:
        story = ["first decision that differs, or that is still known:"]
    for rank, entry in ((ours, left), (theirs, right)):
        story.append(f"  rank {rank}: {entry if entry is not None else 'no such decision'}")
    # Journal lines begin with what they are about; what follows are mostly numbers of pages.
    subjects = {value for one in (left, right) if one is not None for value in one.values[:2]} - {0}
    earlier = [
        f"  {entry}"
        for entry in reports[ours].tail
        if subjects & set(entry.values[:2]) and (first is None or entry.index < first.index)
    ]
    return story + (["what led there:", *earlier[-6:]] if earlier else [])


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
        raised=own.raised if own is not None else "",
    )


def _stuck(reports: Mapping[int, Report], epoch: int) -> SealedError:
    """Everyone agrees, and everyone waits: what for, and which ranks have not done their part."""
    told = [report for report in reports.values() if report.cause == "stuck"]
    first = min(told, key=lambda report: (report.at_step, report.rank))
    story: list[str] = []
    lacking: list[int] = []
    for rank, report in sorted(reports.items()):
        story += [f"rank {rank}: {line}" for line in report.pending[:_PENDING_TOLD]]
        if report.owes_ending:
            lacking.append(rank)
    story += [f"in line: {line}" for line in first.waiting]
    return SealedError(
        kind="ProgressLost",
        message=first.detail,
        ranks=tuple(lacking),
        epoch=epoch,
        step=first.at_step,
        story=tuple(story),
    )


def _stall(
    reports: Mapping[int, Report], missing: Mapping[int, LastSeen | None], epoch: int
) -> SealedError:
    # Who was asked says where it is itself, not what the others wait for.
    told = [report for report in reports.values() if report.cause != "asked"]
    wanted = min((report.epoch, report.at_step) for report in told or reports.values())
    at_step = wanted[1]
    late = _late(reports, wanted)
    named = sorted({*missing, *late})
    if not named:
        return SealedError(
            kind="PeerLost",
            message="the connection between the ranks broke, though all of them are there",
            ranks=(),
            epoch=epoch,
            step=at_step,
        )
    gone = [rank for rank, seen in sorted(missing.items()) if seen is not None and seen.dead]
    absent = [rank for rank in sorted(missing) if rank not in gone]
    first = missing.get((gone or absent or named)[0])
    whats = ((gone, "ended"), (absent, "did not come"), (late, "came too late"))
    what = ", ".join(f"{_ranks(ranks)} {verb}" for ranks, verb in whats if ranks)
    return SealedError(
        kind="RankStalled",
        message=f"{what}: step {at_step} cannot be settled",
        ranks=tuple(named),
        epoch=epoch,
        step=at_step,
        story=tuple(line for rank in sorted(missing) for line in _last_seen(rank, missing[rank])),
        phase=first.phase if first is not None else "",
        waited_s=max(report.waited_s for report in reports.values()),
        dead=bool(gone),
    )


def _late(reports: Mapping[int, Report], wanted: tuple[int, int]) -> list[int]:
    """Ranks that came when others had given up already, and not merely heard of it.

    ``wanted``: the epoch and step that were given up.

    A rank that waited for the straggler itself is refused the verdict as well: it waited longer.
    """
    if not any(report.cause in ("waited", "late") for report in reports.values()):
        return []
    waited_s = {
        rank: report.waited_s if (report.epoch, report.posted) >= wanted else 0.0
        for rank, report in sorted(reports.items())
        if report.cause == "late"
        or (report.cause != "waited" and (report.epoch, report.posted) < wanted)
    }
    least_s = min(waited_s.values(), default=0.0)
    tolerance_s = 0.1 * max(report.waited_s for report in reports.values())
    return [rank for rank, waited in waited_s.items() if waited <= least_s + tolerance_s]


def _last_seen(rank: int, seen: LastSeen | None) -> Sequence[str]:
    if seen is None:
        return [f"rank {rank} was never seen"]
    state = _STATES.get(seen.life, "its process is gone" if seen.dead else "its process is there")
    where = f"at step {seen.step}, {seen.phase}, for {seen.since_s:.1f} s"
    stack = [f"  {line}" for line in seen.stack.splitlines()]
    return [f"rank {rank} was last seen {where}; {state}", *stack]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
