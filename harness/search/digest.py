"""What two worlds of the search must have in common to count as one: everything that can matter.

Steps are told from the lowest step that some living rank has still to settle, times from now, and
fingerprints by their place in the journal: so an engine that spins without anything happening comes
back to where it was, and the search ends.
"""

# The point of this file is to see all there is.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.step.stage import Stage
from kvpact.consensus.step.step import Stepper
from kvpact.harness.search.world import LIMITS, Member, World

__all__ = ["digest"]

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_FAR_S = 2 * LIMITS.deadline_s


class _View:
    """From where a world is looked at: its lowest step, its time, its fingerprints."""

    def __init__(self, world: World) -> None:
        alive = world.alive
        epochs = {member.manager.epoch for member in alive}
        same = len(epochs) == 1
        self.base = min((m.manager.settled_step for m in alive), default=0) if same else 0
        self.now_s = world.net.now_s
        self.prints: dict[int, object] = {}
        for member in world.members:
            for count, value in enumerate(member.journal.prints):
                self.prints.setdefault(value, [member.rank, count])

    def ballot(self, vector: NDArray[np.int64], started_s: float) -> list[Any]:
        """A ballot, or the minimum of several, without the numbers that only count up."""
        numbers: list[int] = vector.tolist()
        steps = [numbers[4] - self.base, -numbers[5] - self.base]
        loops = [numbers[6] - self.base, -numbers[7] - self.base]
        prints = [self.prints.get(numbers[10]), self.prints.get(-numbers[11])]
        clock = numbers[15] - round((self.now_s - started_s) * 1000)
        return [numbers[2], steps, loops, numbers[8], prints, numbers[14], clock, numbers[16:]]


def digest(world: World) -> bytes:
    """16 bytes that are the same for worlds that can go on in the same ways only."""
    view = _View(world)
    alive = world.alive
    closing = any(member.stepper.stage in (Stage.CLOSING, Stage.OPENING) for member in alive)
    claims = [
        (key, value)
        for key, value in sorted(world.net.values.items())
        if "/late/" not in key or int(key.rpartition("/")[2]) > view.base
    ]
    if not closing:
        claims = [(_near(key, view.base), value) for key, value in claims]
    script = [
        [epoch, step - view.base, call]
        for (epoch, step), call in sorted(world.script.items())
        if any((m.manager.epoch, m.manager.step) < (epoch, step) for m in alive)
    ]
    calls = [
        [index[0], index[1] - view.base, [[r, view.ballot(v, 0.0)] for r, v in sorted(by.items())]]
        for index, by in sorted(world.net.calls.items())
        if index[1] + 1 > view.base or index[0] != alive[0].manager.epoch
    ]
    budget = [world.withdraws, world.failures, world.ticks, world.fault, world.faulty_rank]
    members = [_member(member, view) for member in alive]
    told = [world.net.dead, world.net.left, claims, script, calls, budget, members]
    return xxhash.xxh3_128_digest(_encode(told))


def _near(key: str, base: int) -> str:
    head, _, step = key.rpartition("/")
    return f"{head}/{int(step) - base}" if "/late/" in key else key


def _member(member: Member, view: _View) -> list[Any]:
    if member.error is not None or member.bug:
        return [member.rank, member.error, member.bug, member.manager.settled_step - view.base]
    pages = [member.free, member.held, member.tree, member.stuck, sorted(member.published)]
    planned = sorted(one for one in member.refuse if one.partition(":")[0] not in member.intents)
    loop = [member.is_idle, member.iteration - view.base, [] if member.is_idle else planned]
    intents = [[key, _intent(one, member, view)] for key, one in member.intents.items()]
    return [
        member.rank, loop, pages, intents,
        _manager(member.manager, view), _stepper(member.stepper, view),
    ]  # fmt: skip


def _intent(intent: Intent, member: Member, view: _View) -> list[Any]:
    if not intent.is_open:
        return [intent.state.value, intent.result]
    age_ms = 0 if intent.is_undecided else member.manager.clock_ms - intent.decided_ms
    return [
        intent.state.value, intent.serial, intent.slot, intent.vote, intent.agreed,
        intent.withdrawn, intent.local_ended, intent.local_result, age_ms,
        intent.posted_step < 0,
        [parent.state.value for parent in intent.parents],
    ]  # fmt: skip


def _manager(manager: TransactionManager, view: _View) -> list[Any]:
    base, slots, ledger = view.base, manager._slots, manager.ledger
    free = sorted([*slots._free, *(s for step, s in slots._resting if step <= manager.step + 1)])
    resting = [[step - base, s] for step, s in slots._resting if step > manager.step + 1]
    posted = [
        [
            one.step - base,
            [i.serial for i in one.intents],
            [i.serial for i in one.voted],
            one.repeats is not None,
        ]
        for one in manager._posted
    ]
    return [
        manager.epoch, manager.step - base, manager.settled_step - base, free, resting, posted,
        ledger._usable, ledger._charged, [[step - base, p, n] for step, p, n in ledger._cooling],
        [intent.serial for intent in manager._unposted], manager.journal.count,
        manager.said is not None, manager._agreed,
    ]  # fmt: skip


def _stepper(stepper: Stepper, view: _View) -> list[Any]:
    now, base, wait = view.now_s, view.base, stepper._verdict_wait
    works = [
        [work.epoch, work.header.step - base, work.header.iteration - base]
        for work in stepper.in_flight
    ]
    held = [[s - base, view.ballot(v, stepper._started)] for s, v in stepper._held.items()
            if s > base]  # fmt: skip
    posted_at = [
        [step - base, min(now - at, _FAR_S)]
        for step, at in stepper._posted_at.items()
        if step >= base
    ]
    patient: list[Any] = []
    if stepper.stage in (Stage.AWAIT, Stage.AWAIT_LAGGED):
        patient = [min(now - stepper._waiting_since, 2 * _FAR_S)]
        if stepper._has_to_wait:
            patient += [
                min(now - wait._began, 2 * _FAR_S), min(now - wait._counts_from, 2 * _FAR_S),
                now - wait._looked_at >= LIMITS.slice_s, wait._num_deadlines,
            ]  # fmt: skip
    fingerprint = stepper.manager.journal.fingerprint
    rests = stepper._rests_with is not None and stepper._rests_with[0] == fingerprint
    closer, opener = stepper.change.closer, stepper.change._opener
    closing = []
    if closer._report is not None:
        closing = [closer._look_at - now, closer._give_up_at - now, sorted(closer._seen)]
    opening = [] if opener is None else [opener._end_s - now, sorted(opener._found)]
    seen = stepper.observation
    known = [seen.is_off, seen._is_live_known, seen._owes_start,
             max(0, seen.through - base), max(0, seen._quiet_until - base)]  # fmt: skip
    clock_ms = round((now - stepper._started) * 1000) - stepper.manager.clock_ms
    return [
        stepper.stage.value, stepper._closing_from.value, stepper._is_leaving, works, held,
        posted_at, patient, closing, opening, clock_ms, str(stepper._cause),
        known, rests,
    ]  # fmt: skip
