"""Rare points of the protocol, by name, and how often a soak has passed them.

A soak whose plan should have led to a point and did not is "not covered": it has proved less than
it seems to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvpact.cache.hierarchical_cache import HierarchicalCache, StepResult
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.journal import Journal, Value
from kvpact.consensus.core.participant import Intent, Outcome, OutcomeKind
from kvpact.consensus.core.transaction import State
from kvpact.harness.faults.plan import FaultLine, Plan

__all__ = ["POINTS", "Coverage", "CoveringJournal", "check_names", "missing"]

POINTS: Final[Mapping[str, str]] = {
    "backup committed": "a backup was agreed",
    "backup aborted": "a backup was refused on some rank, so on all",
    "backup failed after commit": "its copy failed on some rank: unpublished again on all",
    "load-back committed": "a load-back was agreed",
    "load-back aborted": "a load-back was refused on some rank, so on all",
    "load-back shortened": "ranks had different numbers of pages and agreed on the least",
    "load-back failed after commit": "its copy failed on some rank after it was published",
    "abort after partial reserve": "this rank had its pages, another had not: all gave back",
    "child aborted with its parent": "what builds on something refused was refused too",
    "request must recompute": "a request had read what turned out void",
    "copy quarantined": "a copy outlived its timeout and was given up by all in one step",
    "page back from limbo": "a page came back when the copy that held it had really ended",
    "ended out of order": "an intent ended before one that was opened earlier",
    "aborted copy drained": "a copy went on after its intent was aborted, and its pages waited",
    "split while copying": "a node was cut while a copy of it was open",
    "device eviction": "pages went from the device tier",
    "host eviction": "pages went from the host tier",
    "request refused pages": "a request found no pages and tried again",
    "request aborted while loading": "a client left while its load-back was undecided",
    "straggler within the deadline": "a step waited for a rank for 0.3 s or longer, and settled",
    "completion after epoch change": "a copy of a closed epoch ended in a later one",
    "reset": "all ranks went on with an empty cache in a new epoch",
}

#: Fault -> what it must lead to once it has struck so often.
_IMPLIED: Final[Mapping[str, tuple[str, int]]] = {
    "write fail": ("backup failed after commit", 5),
    "write corrupt": ("backup failed after commit", 8),
    "load fail": ("load-back failed after commit", 8),
    "write hang": ("copy quarantined", 3),
    "load hang": ("copy quarantined", 3),
    "write skew": ("ended out of order", 50),
    "process stop": ("straggler within the deadline", 2),
}
_STRAGGLER_S: Final = 0.3


def check_names(plan: Plan, path: str) -> None:
    """Raise BadInput for a point in ``cover`` that does not exist."""
    for name in plan.cover:
        if name not in POINTS:
            raise BadInput(f"{path}: cover: there is no {name!r}; there are: {', '.join(POINTS)}")


def missing(
    plan: Plan,
    num_ranks: int,
    num_steps: int,
    stages: bool,
    covered: Mapping[str, int],
    struck: Mapping[str, int],
) -> list[str]:
    """What the plan should have led to within ``num_steps`` and did not, as lines.

    ``stages``: the host is staging only, so nothing is ever published there.
    """
    found = [f"{name}: asked for by the plan" for name in plan.cover if not covered.get(name)]
    for fault, (name, least) in _IMPLIED.items():
        if stages and fault.startswith("write "):
            continue
        if struck.get(fault, 0) >= least and not covered.get(name):
            found.append(f"{name}: {fault} struck {struck[fault]} times")
    lone = [
        line
        for line in plan.fault
        if line.action == "refuse" and line.ranks and len(line.ranks) < num_ranks
    ]
    name = "abort after partial reserve"
    refused = sum(struck.get(fault, 0) for fault in {line.name for line in lone})
    if refused >= 5 and not covered.get(name):
        found.append(f"{name}: reservations were refused {refused} times on some ranks only")
    due = {line.name for line in plan.fault if _is_due(line, num_steps)}
    found += [f"{name}: planned, and never struck" for name in sorted(due) if not struck.get(name)]
    return found


def _is_due(line: FaultLine, num_steps: int) -> bool:
    """Whether it should have struck by then.

    One at a pool, a copy or the storage strikes with the next occasion, which takes a while.
    """
    waits = 3 if line.site in ("process", "network", "scheduler") else 8
    return line.at_step is not None or waits * (line.every_steps or 100) <= num_steps


class CoveringJournal(Journal):
    """A journal that counts decisions by tag, and looks at splits as they happen."""

    def __init__(self, rank: int, coverage: Coverage, path: Path | None = None) -> None:
        super().__init__(rank, path=path)
        self._coverage = coverage

    def note(self, tag: str, *values: Value) -> None:
        """See :meth:`kvpact.consensus.core.journal.Journal.note`."""
        super().note(tag, *values)
        if tag == "split":
            self._coverage.split(values[0])


class Coverage:
    """Counts for one rank. ``counts`` is by point, ``causes`` by what was decided and why."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.causes: dict[str, int] = {}
        self._cache: HierarchicalCache | None = None
        self._aborted_in: dict[int, int] = {}
        self._limbo = 0
        self._old_copies = 0

    def watch(self, cache: HierarchicalCache) -> None:
        """Begin: the cache is there."""
        self._cache = cache

    def hit(self, name: str, times: int = 1) -> None:
        """Passed ``name``."""
        self.counts[name] = self.counts.get(name, 0) + times

    def split(self, node_id: Value) -> None:
        """A node was cut."""
        cache = self._cache
        if cache is None or cache.core.manager.is_idle:
            return
        for node in cache.core.tree.nodes():
            if node.node_id == node_id:
                if node.carriages:
                    self.hit("split while copying")
                return

    def after_step(self, result: StepResult, step_s: float) -> None:
        """Look at what a step settled."""
        cache = self._cache
        if cache is None:
            return
        for outcome in result.outcomes:
            self._count(outcome)
            self._look_at(outcome, cache.core.manager.settled_step)
        if any(outcome.kind is OutcomeKind.END for outcome in result.outcomes):
            self._look_at_order(result.outcomes, cache)
        if result.was_reset:
            self.hit("reset")
            self._old_copies = cache.core.tiers.copier.num_running
            self._aborted_in.clear()
        elif self._old_copies > (running := cache.core.tiers.copier.num_running):
            self.hit("completion after epoch change", self._old_copies - running)
            self._old_copies = running
        if result.must_recompute:
            self.hit("request must recompute", len(result.must_recompute))
        if step_s >= _STRAGGLER_S:
            self.hit("straggler within the deadline")
        limbo = sum(pool.num_limbo for pool in cache.core.tiers.pools.values())
        if limbo < self._limbo:
            self.hit("page back from limbo", self._limbo - limbo)
        self._limbo = limbo
        for tier in Tier:
            gone = cache.core.tiers.num_evicted[tier]
            if gone:
                self.counts[f"{tier.value} eviction"] = gone

    def _count(self, outcome: Outcome) -> None:
        cause = f" ({outcome.intent.cause})" if outcome.kind is OutcomeKind.ABORT else ""
        name = f"{outcome.intent.kind} {outcome.kind.value}{cause}"
        self.causes[name] = self.causes.get(name, 0) + 1

    def _look_at(self, outcome: Outcome, step: int) -> None:
        intent = outcome.intent
        what = {"back_up": "backup", "load_back": "load-back"}.get(intent.kind, "")
        match outcome.kind:
            case OutcomeKind.COMMIT:
                if what:
                    self.hit(f"{what} committed")
                if intent.agreed < intent.total:
                    self.hit("load-back shortened")
            case OutcomeKind.ABORT:
                self._look_at_abort(intent, what, step)
            case OutcomeKind.FAIL:
                if what:
                    self.hit(f"{what} failed after commit")
            case OutcomeKind.END:
                is_load = what == "load-back" and intent.state is State.DONE
                if is_load and intent.result < intent.agreed:
                    self.hit("load-back failed after commit")
                aborted_in = self._aborted_in.pop(intent.serial, step)
                if aborted_in < step:
                    self.hit("aborted copy drained")
            case OutcomeKind.QUARANTINE:
                self._aborted_in.pop(intent.serial, None)
                self.hit("copy quarantined")

    def _look_at_abort(self, intent: Intent, what: str, step: int) -> None:
        if what and intent.cause == "refused":
            self.hit(f"{what} aborted")
        if intent.vote >= intent.minimum and intent.cause == "refused":
            self.hit("abort after partial reserve")
            self._aborted_in[intent.serial] = step
        if intent.cause == "parent":
            self.hit("child aborted with its parent")

    def _look_at_order(self, outcomes: list[Outcome], cache: HierarchicalCache) -> None:
        still_open = [i.serial for i in cache.core.manager.open_intents if not i.is_undecided]
        if not still_open:
            return
        first = min(still_open)
        late = sum(o.kind is OutcomeKind.END and o.intent.serial > first for o in outcomes)
        if late:
            self.hit("ended out of order", late)
