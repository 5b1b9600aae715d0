"""The verdict of a soak, its exit status, and why."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kvpact.consensus.core.errors import ConservationBroken
from kvpact.harness.drive.gather import Gather, RankView, end_of
from kvpact.harness.soak.coverage import missing
from kvpact.harness.soak.resources import Growth, growth

__all__ = ["INTERRUPTED", "Conclusion", "Verdict", "conclude"]

#: The exit status of a soak that was stopped by hand and had found nothing.
INTERRUPTED: Final = 130


class Verdict(enum.IntEnum):
    """The exit status of ``kvpact soak``."""

    PASS = 0
    DIVERGENCE = 10  # ranks differed
    HANG = 11  # a rank did not come, ended, or nothing moved any more
    LEAK = 12  # something did not come back, or keeps growing
    SLOW = 13  # a stated budget was exceeded
    NOT_COVERED = 14  # what was planned never happened
    BROKEN_PROMISE = 15  # wrong bytes, or an invariant of one rank
    HARNESS_ERROR = 20  # the soak itself failed

    @property
    def title(self) -> str:
        """For people."""
        return self.name.replace("_", " ").lower()


class Conclusion(msgspec.Struct, frozen=True):
    """``is_expected``: the plan asks for this end. ``why``: lines, the decisive one first."""

    verdict: Verdict
    is_expected: bool
    why: tuple[str, ...]
    missing: tuple[str, ...]
    growth: tuple[Growth, ...]
    is_stopped: bool
    named_ranks: tuple[int, ...]
    detection_s: float | None

    @property
    def status(self) -> int:
        """The exit status."""
        if self.verdict is Verdict.PASS and self.is_stopped:
            return INTERRUPTED
        return int(self.verdict)


def conclude(gather: Gather, *, is_stopped: bool, trouble: str = "") -> Conclusion:
    """What a soak has found. ``trouble`` is what went wrong with the soak itself."""
    grown = tuple(one for view in gather.views for one in growth(view.rank, view.resources))
    verdict, why = _worst(gather, trouble, grown)
    lacking: list[str] = []
    if verdict is Verdict.PASS and not is_stopped:
        verdict, why = _slow(gather)
    if verdict is Verdict.PASS and not is_stopped:
        config = gather.config
        lacking = missing(
            config.plan,
            config.num_ranks,
            gather.step,
            config.mode == "buffer_only",
            gather.covered(),
            gather.struck_in_all(),
        )
        lacking = [line for line in lacking if line.partition(":")[0] not in gather.skipped]
        if lacking:
            verdict, why = Verdict.NOT_COVERED, lacking
    is_clean = verdict in (Verdict.PASS, Verdict.NOT_COVERED)
    if gather.config.unsafe_no_votes and is_clean and not is_stopped:
        verdict = Verdict.HARNESS_ERROR
        why = ["votes were ignored and no rank diverged: this soak cannot find anything"]
    raised = [view.end for view in gather.views if view.end and view.end.how == "raised"]
    named = sorted({rank for end in raised for rank in end.ranks})
    return Conclusion(
        verdict=verdict,
        is_expected=_is_expected(gather, verdict, named),
        why=tuple(why),
        missing=tuple(lacking),
        growth=grown,
        is_stopped=is_stopped,
        named_ranks=tuple(named),
        detection_s=_detection(gather, verdict),
    )


def _worst(gather: Gather, trouble: str, grown: tuple[Growth, ...]) -> tuple[Verdict, list[str]]:
    found: list[tuple[Verdict, str]] = [(_classify(view), end_of(view)) for view in gather.views]
    by_kind: dict[Verdict, list[str]] = {}
    for view, (verdict, line) in zip(gather.views, found, strict=True):
        text = line if view.end is not None and view.end.ranks else f"rank {view.rank}: {line}"
        if text not in by_kind.setdefault(verdict, []):
            by_kind[verdict].append(text)
    if gather.differences:
        by_kind.setdefault(Verdict.DIVERGENCE, []).extend(gather.differences)
    if gather.failures:
        by_kind.setdefault(Verdict.BROKEN_PROMISE, []).extend(gather.failures)
    leftovers = [line for view in gather.views if view.end for line in view.end.leftovers]
    leftovers += [
        f"rank {one.rank}: {one.name} grew from {one.first:,.0f} to {one.last:,.0f}"
        for one in grown
        if one.leaks
    ]
    if leftovers:
        by_kind.setdefault(Verdict.LEAK, []).extend(leftovers)
    # A stall is often only the consequence of what another rank met.
    order = (
        Verdict.DIVERGENCE,
        Verdict.BROKEN_PROMISE,
        Verdict.LEAK,
        Verdict.HARNESS_ERROR,
        Verdict.HANG,
    )
    for verdict in order:
        if by_kind.get(verdict):
            return verdict, by_kind[verdict]
    return (Verdict.HARNESS_ERROR, [trouble]) if trouble else (Verdict.PASS, [])


_HANGS: Final = ("RankStalled", "PeerLost", "ProgressLost", "StoreSilent")


def _classify(view: RankView) -> Verdict:
    end = view.end
    if end is None:
        # It never came as far as a step: that says nothing about the protocol.
        return Verdict.HANG if view.step else Verdict.HARNESS_ERROR
    if end.how != "raised":
        return Verdict.PASS
    if end.error == "Divergence":
        return Verdict.DIVERGENCE
    if end.error in _HANGS:
        return Verdict.HANG
    # What one rank met inside a step reaches all ranks as a PeerError that names its class.
    if ConservationBroken.__name__ in (end.error, end.raised):
        return Verdict.LEAK
    if end.error in ("InternalError", "PeerError"):
        return Verdict.BROKEN_PROMISE
    return Verdict.HARNESS_ERROR


def _slow(gather: Gather) -> tuple[Verdict, list[str]]:
    budget_ms = gather.config.budget_step_ms
    found_ms = gather.steps().percentile_s(99) * 1000
    if budget_ms is not None and found_ms > budget_ms:
        line = f"99 % of the steps took up to {found_ms:.1f} ms, the budget is {budget_ms:g} ms"
        return Verdict.SLOW, [line]
    return Verdict.PASS, []


def _is_expected(gather: Gather, verdict: Verdict, named: list[int]) -> bool:
    config, struck = gather.config, gather.struck
    if verdict is Verdict.DIVERGENCE:
        return config.unsafe_no_votes or "scheduler diverge" in struck
    if verdict is Verdict.HANG:
        guilty = set(struck.get("process kill", {})) | _stopped_too_long(gather)
        # A rank that was stopped wakes up among ruins, and may name whoever has gone meanwhile.
        told = {
            rank
            for view in gather.views
            if view.rank not in guilty and view.end is not None and view.end.how == "raised"
            for rank in view.end.ranks
        }
        return bool(told or named) and guilty >= (told or set(named))
    return verdict is Verdict.PASS


def _stopped_too_long(gather: Gather) -> set[int]:
    found: set[int] = set()
    for line in gather.config.plan.fault:
        is_pause = line.name in ("process stop", "scheduler slow")
        if is_pause and (line.seconds or 0) >= gather.config.deadline_s:
            found |= set(gather.struck.get(line.name, {}))
    return found


def _detection(gather: Gather, verdict: Verdict) -> float | None:
    """Seconds from the fault that ended the run to the error that named it."""
    if verdict not in (Verdict.DIVERGENCE, Verdict.HANG):
        return None
    ends = [view.end.at_s for view in gather.views if view.end and view.end.how == "raised"]
    causes = ("process kill", "process stop", "scheduler diverge")
    struck = [event.at_s for event in gather.events if event.name in causes and not event.skipped]
    if gather.config.unsafe_no_votes:
        struck = [0.0]  # votes did not count from the start
    before = [at_s for at_s in struck if ends and at_s <= min(ends)]
    return min(ends) - max(before) if before else None
