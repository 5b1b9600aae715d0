"""Every order of a few calls before an epoch ends, on the real cache, in the simulator.

What a rank carries over at that moment must be what all ranks agree on: pages of the engine, a
headroom, inserts, loads and admissions that are asked for, undecided or running, at every lag, with
and without side pools. So each short sequence of such calls is tried, then the epoch ends, then the
ranks go on, and at the end every page must have come back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvpact.harness.scenario.model import (
    Admit,
    Compute,
    Do,
    Drain,
    Evict,
    Expect,
    Finish,
    Free,
    Headroom,
    Insert,
    LoadBack,
    Reset,
    Scenario,
    SidePool,
    Step,
    Take,
    TakeMatch,
    World,
)
from kvpact.harness.scenario.world import run_sim
from kvpact.harness.scenario.write import scenario_text
from kvpact.harness.text.quiet import quiet

__all__ = ["LARGE_ENDS", "SMALL_ENDS", "Ends", "FoundOrders", "orders", "scenario_of"]

_OLD, _OWN = ((0, 3),), ((10, 13),)

#: What may be in hand, by name: the calls that bring it there.
MENU: Final[dict[str, tuple[Do, ...]]] = {
    "insert": (Insert(number=0, request="i", tokens=((0, 2), (20, 22))),),
    "own": (Admit(number=0, request="e", tokens=_OWN), Take(number=0, request="e", pages=3)),
    "compute": (Compute(number=0, request="e"),),
    "free": (Free(number=0, request="e", pages=1),),
    "load": (Evict(number=0, tier="device", pages=9), LoadBack(number=0, request="l", tokens=_OLD)),
    "wish": (Admit(number=0, request="w", tokens=((0, 4),), whole=True, extra=1),),
    "headroom": (Headroom(number=0, pages=3),),
    "step": (Step(number=0),),
}


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """All orders of ``length`` calls of the menu before an epoch ends: by a difference with
    ``policy`` reset or detach, or by an ordered ``reset`` (policy raise)."""

    length: int
    lag: int
    policy: str
    side: bool

    @property
    def name(self) -> str:
        """All of it in one line."""
        how = "ordered reset" if self.policy == "raise" else self.policy
        side = ", side pages" * self.side
        return f"{how} with {self.length} things in hand, lag {self.lag}{side}"


class FoundOrders(msgspec.Struct, kw_only=True):
    """What came of it. ``failure`` is empty where all promises hold, else ``text`` shows it."""

    ends: Ends
    num_orders: int = 0
    spent_s: float = 0.0
    failure: str = ""
    text: str = ""


def orders(ends: Ends) -> FoundOrders:
    """Try every order, until a promise breaks."""
    started = time.monotonic()
    found = FoundOrders(ends=ends)
    with quiet():
        for names in itertools.product(MENU, repeat=ends.length):
            scenario = scenario_of(ends, names)
            found.num_orders += 1
            try:
                failures = run_sim(scenario).failures
            except Exception as error:  # noqa: BLE001 - a crash of the code under test is a finding
                failures = [f"crash: {type(error).__name__}: {error}"]
            if failures:
                found.failure, found.text = failures[0], scenario_text(scenario)
                break
    found.spent_s = time.monotonic() - started
    return found


def scenario_of(ends: Ends, names: tuple[str, ...]) -> Scenario:
    """The file in which these calls are made in this order."""
    side = SidePool(name="mamba", device_pages=(4, 3), host_pages=(6, 6), need="per_node")
    how: dict[str, Any] = {"policy": ends.policy}
    world = World(
        tp=2,
        lag=ends.lag,
        page_size=1,
        device_pages=(8, 7),
        host_pages=(8, 8),
        headroom_pages=2,
        deadline_s=1.0,
        num_slots=16,
        side_pools=(side,) if ends.side else (),
        **how,
    )
    entries = [*_before(ends), *(one for name in names for one in MENU[name])]
    entries += [*_ending(ends), *_after(ends, world)]
    numbered = (msgspec.structs.replace(one, number=at) for at, one in enumerate(entries, 1))
    return Scenario(
        path=f"{ends.name}: {' '.join(names)}",
        name=f"an epoch ends with things in hand: {', '.join(names)}",
        world=world,
        do=tuple(numbered),
    )


def _before(ends: Ends) -> Iterator[Do]:
    """Something is cached on both tiers, and the headroom is filled."""
    yield Insert(number=0, request="a", tokens=_OLD)
    yield Step(number=0, times=2 * ends.lag + 3)


def _ending(ends: Ends) -> Iterator[Do]:
    if ends.policy == "raise":
        yield Reset(number=0)
    else:
        yield TakeMatch(number=0, request="x", tokens=_OLD, ranks=(1,))
    yield Step(number=0, times=ends.lag + 2)


def _after(ends: Ends, world: World) -> Iterator[Do]:
    """The engine goes on with what it has, then all of it comes back."""
    yield Compute(number=0, request="e")
    yield Insert(number=0, request="b", tokens=_OLD)
    yield Step(number=0, times=ends.lag + 2)
    yield from (Finish(number=0, request=name) for name in "eiwla")
    yield Headroom(number=0, pages=0)
    yield Step(number=0)
    yield Drain(number=0, max_steps=20 * (ends.lag + 1))
    yield Step(number=0, times=ends.lag + 1)
    for tier in ("device", "host"):
        yield Evict(number=0, tier=tier, pages=9)
        yield Drain(number=0, max_steps=20 * (ends.lag + 1))
    yield Expect(number=0, free=world.pools(), pinned={"device": 0, "host": 0})


def _all_ends(length: int, lags: tuple[int, ...]) -> tuple[Ends, ...]:
    every = itertools.product(("reset", "detach", "raise"), lags, (False, True))
    return tuple(Ends(length=length, lag=lag, policy=how, side=side) for how, lag, side in every)


#: Seconds, and some minutes.
SMALL_ENDS: Final = _all_ends(1, (0, 1, 2, 3, 4)) + _all_ends(2, (3,))
LARGE_ENDS: Final = _all_ends(3, (0, 1, 2, 3, 4))
