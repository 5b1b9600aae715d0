"""Movers: their words, their protocol, and the books that all kinds of them keep.

A `Mover` is given *parts* (one per node) and carries out all parts of one `submit` as ONE copy:
one gather and one scatter for K and V of all layers together, however many parts there are. How
each part ended comes back from `collect`, by ticket, in the order of submission.

The fault seam is the same in all of them: ``plan_part`` is asked once per part, at `submit`, and
its `PartPlan` says whether the part is delayed, hangs, fails or corrupts. A part with a fault is
*withheld*: taken out of the merged copy, and carried out by the `collect` at which it is due.

A mover trusts its caller on three things: pages stay held (`PagePool.hold`) until their part's
ending, no two open parts write one page, and no part reads what another open part writes.
Only the thread that steps the cache calls a mover.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.cache.memory.paged import PagedMemory
from kvpact.consensus.core.errors import InternalError, Misuse, ResourceError

__all__ = [
    "MAX_PARTS",
    "NO_FAULT",
    "Batch",
    "Direction",
    "Ending",
    "Mover",
    "MoverBase",
    "Part",
    "PartPlan",
    "PlanPart",
    "Withheld",
]

MAX_PARTS = 4096
"""Open parts that a mover takes unless told otherwise; open = submitted, ending not collected."""


class Direction(enum.IntEnum):
    """Which way a copy goes."""

    TO_HOST = 0  # a backup, a write-back, staging: device pages are read, host pages written
    TO_DEVICE = 1  # a load-back: host pages are read, device pages written


class Part(msgspec.Struct, frozen=True):
    """One node's share of a merged copy: page ``source[i]`` goes to page ``target[i]``.

    ``ticket`` names the part in its `Ending` and is unique among open parts. The lists must not
    change before the ending. ``after`` is the `mark_launch` number of the forward that must have
    ended before this copy (None: every forward launched so far); only CUDA needs it.
    """

    ticket: int
    source: Sequence[int]
    target: Sequence[int]
    after: int | None = None


class Ending(msgspec.Struct, frozen=True):
    """The copy of a part no longer touches its pages. Not ``ok``: its target bytes are garbage."""

    ticket: int
    ok: bool
    why: str = ""


class PartPlan(msgspec.Struct, frozen=True):
    """The effect of a fault on one part.

    ``delay_collects`` are the calls of `collect` it is late by (0: on time, None: it hangs until
    `heal`). Not ``ok``: it fails, and leaves wrong bytes. ``corrupt``: wrong bytes, yet it says ok.
    """

    delay_collects: int | None = 0
    ok: bool = True
    corrupt: bool = False

    def __post_init__(self) -> None:
        if self.delay_collects is not None and self.delay_collects < 0:
            raise Misuse(f"delay_collects must be at least 0 or None, not {self.delay_collects}")


NO_FAULT = PartPlan()

PlanPart = Callable[[Direction, Part], PartPlan]


class Mover(Protocol):
    """Copies pages between two `PagedMemory`; see the module for what it promises."""

    plan_part: PlanPart | None
    device: PagedMemory
    host: PagedMemory
    submitted: dict[Direction, int]
    """Merged copies handed in so far: one per `submit` with at least one part."""

    @property
    def in_flight(self) -> int:
        """CacheCore whose ending was not collected yet, also those that hang."""
        ...

    @property
    def room(self) -> int:
        """CacheCore that `submit` would still take; ask before anything is promised."""
        ...

    def mark_launch(self) -> int:
        """A forward was just launched; returns its number, counted from 1, for `Part.after`."""
        ...

    def submit(self, direction: Direction, parts: Sequence[Part]) -> None:
        """Start ONE copy of all ``parts``. Whatever is raised, nothing was started.

        Raises `ResourceError` beyond `room`, `InternalError` for parts that cannot be copied
        (lengths, unknown pages, a target or an open ticket twice), `Misuse` after `close`.
        """
        ...

    def collect(self) -> list[Ending]:
        """Return the endings since the last call, in the order of submission. Never blocks."""
        ...

    def wait_layer(
        self, layer: int, timeout_s: float, tickets: Collection[int] | None = None
    ) -> bool:
        """Make layer ``layer`` of open loads readable for a forward launched from now on.

        ``tickets`` limits it to some loads. False: not within ``timeout_s``, or a fault withholds
        one beyond the next `collect` (then at once, there is nothing to wait for). True says that
        they ended, not that they ended well: see their `Ending`.
        """
        ...

    def wait_all(self, timeout_s: float) -> bool:
        """Wait until every copy that ends by itself has ended; False: not within ``timeout_s``.

        Withheld parts are not waited for: only calls of `collect`, or `heal`, end them.
        """
        ...

    def heal(self) -> None:
        """End every withheld part at the next `collect`, as its plan says it ends."""
        ...

    def close(self, timeout_s: float = 1.0) -> bool:
        """Take no more parts and end the threads; False: one still ran after ``timeout_s``."""
        ...


class Batch:
    """One merged copy: the parts that are carried out together."""

    __slots__ = ("direction", "fence", "layer_events", "parts")

    def __init__(self, direction: Direction, parts: Sequence[Part]) -> None:
        self.direction = direction
        self.parts = parts
        # CUDA events: of the forward that must have ended first, and of each layer once enqueued.
        self.fence: Any = None
        self.layer_events: list[Any] = []

    def pages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and target pages of all parts. Called where the copy runs, not by the caller."""
        source = joined([part.source for part in self.parts])
        target = joined([part.target for part in self.parts])
        return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)


class Withheld:
    """A part that waits for the ``due``-th call of `collect` (None: hangs)."""

    __slots__ = ("direction", "due", "part", "plan", "submission")

    def __init__(
        self, direction: Direction, submission: int, part: Part, plan: PartPlan, due: int | None
    ) -> None:
        self.direction = direction
        self.submission = submission
        self.part = part
        self.plan = plan
        self.due = due


class MoverBase:
    """The base of all movers: checks, tickets, order, the bound and the fault seam.

    A subclass says how a batch starts (`_start`) and how one is carried out on the caller's
    thread (`_carry`). ``withholds_all`` leaves nothing to start.
    """

    withholds_all = False

    def __init__(
        self,
        device: PagedMemory,
        host: PagedMemory,
        *,
        plan_part: PlanPart | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        if device.layout != host.layout or device.page_size != host.page_size:
            raise Misuse(
                f"the tiers differ: device {device.described} x {device.page_size} tokens,"
                f" host {host.described} x {host.page_size}"
            )
        self.plan_part = plan_part
        self.submitted = dict.fromkeys(Direction, 0)
        self.device = device
        self.host = host
        self._limits = (
            (device.num_pages, host.num_pages),
            (host.num_pages, device.num_pages),
        )
        self._max_parts = max_parts
        self._order: dict[int, int] = {}  # open ticket -> its place in the order of submission
        self._num_parts = 0
        self._num_collects = 0
        self._num_launches = 0
        self._withheld: list[Withheld] = []
        self._ended: list[Ending] = []
        self._closed = False

    @property
    def in_flight(self) -> int:
        """See `Mover`."""
        return len(self._order)

    @property
    def room(self) -> int:
        """See `Mover`."""
        return self._max_parts - len(self._order)

    def mark_launch(self) -> int:
        """See `Mover`."""
        self._num_launches += 1
        return self._num_launches

    def submit(self, direction: Direction, parts: Sequence[Part]) -> None:
        """See `Mover`."""
        if not parts:
            return
        self._require_sound(direction, parts)
        if self.plan_part is None and not self.withholds_all:
            prompt = parts
        else:
            prompt = self._withhold(direction, parts)
        for part in parts:
            self._order[part.ticket] = self._num_parts
            self._num_parts += 1
        self.submitted[direction] += 1
        if prompt:
            self._start(Batch(direction, prompt))

    def collect(self) -> list[Ending]:
        """See `Mover`."""
        self._num_collects += 1
        self._drain()
        if self._withheld:
            self._carry_due()
        ended = self._ended
        if not ended:
            return []
        self._ended = []
        order = self._order
        ended.sort(key=lambda ending: order[ending.ticket])
        for ending in ended:
            del order[ending.ticket]
        return ended

    def heal(self) -> None:
        """See `Mover`."""
        for held in self._withheld:
            held.due = self._num_collects + 1

    def close(self, timeout_s: float = 1.0) -> bool:
        """See `Mover`; there is no thread to end."""
        self._closed = True
        return True

    def check_integrity(self) -> None:
        """Raises `InternalError` unless each open ticket is in exactly one place."""
        found = [held.part.ticket for held in self._withheld]
        found += [ending.ticket for ending in self._ended]
        found += [part.ticket for batch in self._batches() for part in batch.parts]
        if sorted(found) != sorted(self._order):
            raise InternalError(f"open tickets {sorted(self._order)}, found {sorted(found)}")

    def _batches(self) -> Sequence[Batch]:
        """Batches that a thread was given and whose report was not read yet."""
        return ()

    def _start(self, batch: Batch) -> None:
        raise NotImplementedError

    def _carry(self, batch: Batch, invert: bool) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        """Turn what threads posted into endings."""

    def _finish(self, parts: Sequence[Part], why: str) -> None:
        for part in parts:
            self._ended.append(Ending(part.ticket, not why, why))

    def _withhold(self, direction: Direction, parts: Sequence[Part]) -> list[Part]:
        """Set aside the parts that a fault concerns; returns the others."""
        planned = self.plan_part
        # All are planned before any is set aside: a plan that raises must leave nothing behind.
        plans = [NO_FAULT if planned is None else planned(direction, part) for part in parts]
        prompt: list[Part] = []
        submission = self.submitted[direction]
        for part, plan in zip(parts, plans, strict=True):
            if not self.withholds_all and plan == NO_FAULT:
                prompt.append(part)
                continue
            delay = plan.delay_collects
            due = None if delay is None else self._num_collects + 1 + delay
            self._withheld.append(Withheld(direction, submission, part, plan, due))
        return prompt

    def _carry_due(self) -> None:
        now = self._num_collects
        due = [held for held in self._withheld if held.due is not None and held.due <= now]
        if due:
            self._withheld = [h for h in self._withheld if h.due is None or h.due > now]
            self._carry_withheld(due)

    def _carry_withheld(self, due: Sequence[Withheld]) -> None:
        """Carry out ``due`` now; what was submitted together and needs the same is one copy."""
        merged: dict[tuple[Direction, int, bool, bool], list[Part]] = {}
        for held in due:
            wrong = held.plan.corrupt or not held.plan.ok
            key = (held.direction, held.submission, wrong, held.plan.ok)
            merged.setdefault(key, []).append(held.part)
        for (direction, _, wrong, ok), parts in merged.items():
            why = "" if ok else "failed by the fault plan"
            try:
                self._carry(Batch(direction, parts), wrong)
            except Exception as error:  # noqa: BLE001 - a failed copy costs a hit, not the engine
                why = f"{type(error).__name__}: {error}"
            self._finish(parts, why)

    def _bring_loads(self, tickets: Collection[int] | None) -> bool:
        """Carry out now the withheld loads that would end by the next `collect`; False: not all."""
        loads = [
            held
            for held in self._withheld
            if held.direction is Direction.TO_DEVICE
            and (tickets is None or held.part.ticket in tickets)
        ]
        soon = self._num_collects + 1
        ready = [held for held in loads if held.due is not None and held.due <= soon]
        if ready:
            self._withheld = [held for held in self._withheld if held not in ready]
            self._carry_withheld(ready)
        return len(ready) == len(loads)

    def _require_layer(self, layer: int) -> None:
        num_layers = len(self.device.layer_planes)
        if not 0 <= layer < num_layers:
            raise Misuse(f"layer {layer} does not exist: there are {num_layers}")

    def _require_sound(self, direction: Direction, parts: Sequence[Part]) -> None:
        if self._closed:
            raise Misuse("the mover is closed: nothing can be submitted any more")
        if len(parts) > self.room:
            raise ResourceError(
                f"{len(parts)} parts submitted but only {self.room} of {self._max_parts} may be"
                " opened: collect endings first, and ask `room` before promising a copy"
            )
        num_source, num_target = self._limits[direction]
        for part in parts:
            if len(part.source) != len(part.target):
                raise InternalError(
                    f"{direction.name} part {part.ticket}: {len(part.source)} source pages but"
                    f" {len(part.target)} target pages"
                )
            if part.ticket in self._order:
                raise InternalError(f"{direction.name} part {part.ticket}: its ticket is open")
            if part.source and not (
                min(part.source) >= 0
                and max(part.source) < num_source
                and min(part.target) >= 0
                and max(part.target) < num_target
            ):
                raise InternalError(
                    f"{direction.name} part {part.ticket}: unknown page in {list(part.source)} ->"
                    f" {list(part.target)} (source has {num_source} pages, target {num_target})"
                )
        if len(parts) > 1 and len({part.ticket for part in parts}) != len(parts):
            tickets = [part.ticket for part in parts]
            raise InternalError(f"{direction.name}: a ticket is named twice: {tickets}")
        targets = joined([part.target for part in parts])
        if len(set(targets)) != len(targets):
            raise InternalError(f"{direction.name}: a target page is named twice: {targets}")


def joined(lists: Sequence[Sequence[int]]) -> Sequence[int]:
    """The lists one after the other; a single list is not copied."""
    if len(lists) == 1:
        return lists[0]
    return [page for pages in lists for page in pages]
