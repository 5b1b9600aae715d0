"""Small worlds exhaustively: a breadth-first search over the real step and transaction code.

From each state every action is tried that could happen there: a rank goes on, a copy ends or fails,
an intent is withdrawn, time passes, a rank dies (also between any two of its writes) or skips a
step. States are counted once (:mod:`kvpact.harness.search.digest`), every promise is checked in
each (:mod:`kvpact.harness.search.checks`), and from each a way must lead to where nothing is left
to do without further faults. The ends of epochs are tried on the real cache, with all orders of a
few calls before (:mod:`kvpact.harness.search.ends`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from rich.console import Console

from kvpact.harness.rank.jobs import worker_processes
from kvpact.harness.search.checks import broken
from kvpact.harness.search.digest import digest
from kvpact.harness.search.ends import LARGE_ENDS, SMALL_ENDS, FoundOrders, orders
from kvpact.harness.search.net import Crash
from kvpact.harness.search.world import TICK_S, Member, Setting, World
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.quiet import quiet

__all__ = ["LARGE", "SMALL", "Action", "Found", "explore", "replay", "search"]

T = TypeVar("T")
R = TypeVar("R")

#: What happens, and to whom.
Action = tuple[str | int, ...]

STATES_MAX: Final = 2_000_000
_COLLECT_EVERY: Final = 2_000
_PLAIN = ("go", "end", "stop", "pass")  # what still happens once faults have stopped


class Found(msgspec.Struct, kw_only=True):
    """What a search of one setting came to. ``failure`` is empty where all promises hold, else
    ``path`` leads there. ``num_drained`` states have nothing left to do. ``is_cut``: there are more
    states than were asked for, and whether all of them can drain was not looked at."""

    setting: Setting
    num_states: int = 0
    num_transitions: int = 0
    num_drained: int = 0
    depth: int = 0
    spent_s: float = 0.0
    is_cut: bool = False
    failure: str = ""
    path: list[Action] = []


# -- what can happen -------------------------------------------------------------------------------


def _actions(world: World) -> Iterator[Action]:
    setting = world.setting
    for member in world.alive:
        rank = member.rank
        if not member.is_over:
            for choice in _choices(world, member):
                yield "go", rank, *choice
        if member.error is None:
            yield from _endings(world, member)
        yield from (("stop", rank, key) for key in member.stuck)
    if world.ticks:
        yield ("tick",)
    if world.fault:
        return
    for kind, member in itertools.product(setting.faults, world.alive):
        if member.is_over or (kind == "repeat" and not member.iteration):
            continue
        if kind == "crash" or member.is_idle:
            yield kind, member.rank


def _choices(world: World, member: Member) -> Iterator[tuple[str, str]]:
    """What the next step of ``member`` refuses, and which agreed call comes before it."""
    if not member.is_idle:
        yield "", ""
        return
    place = member.manager.epoch, member.manager.step + 1
    calls = [world.script[place]] if place in world.script else [""]
    if place not in world.script and world.withdraws:
        calls += [str(intent.key) for intent in member.manager.open_intents]
    grants = [["", *wish.grants] for wish in member.due()] if world.setting.refusals else []
    for refused in itertools.product(*grants):
        yield from ((" ".join(filter(None, refused)), call) for call in calls)


def _endings(world: World, member: Member) -> Iterator[Action]:
    # Nobody sees an ending before the next ballot, unless time or an epoch runs out meanwhile.
    is_timed, is_idle = bool(world.setting.ticks or world.setting.faults), member.is_idle
    for key in member.held:
        intent = member.intents[key]
        if intent.is_open and not intent.local_ended and intent.vote and (is_timed or is_idle):
            yield "end", member.rank, key
            if world.failures:
                yield "fail", member.rank, key, 0
                if intent.minimum < intent.vote:
                    yield "fail", member.rank, key, intent.vote - 1


def _apply(world: World, action: Action, visible_max: int = -1) -> int:
    """Let it happen; how much of it became visible to other ranks on the way."""
    world.net.num_visible, world.net.visible_max = 0, visible_max
    kind = action[0]
    if kind in ("tick", "pass"):
        world.net.now_s += TICK_S
        world.ticks -= kind == "tick"
        return 0
    member = world.members[int(action[1])]
    match kind:
        case "go":
            _go(world, member, str(action[2]), str(action[3]))
        case "end":
            member.manager.mark_ended(member.intents[str(action[2])])
        case "fail":
            world.failures -= 1
            member.manager.mark_ended(member.intents[str(action[2])], int(action[3]))
        case "stop":
            member.stops(str(action[2]))
        case "dies in":
            world.fault, world.faulty_rank = "crash", member.rank
            try:
                _apply(world, ("go", *action[1:4]), int(action[4]))
            except Crash:
                world.net.dead.append(member.rank)
        case _:
            world.fault, world.faulty_rank = str(kind), member.rank
            _strike(world, member, str(kind))
    return world.net.num_visible


def _go(world: World, member: Member, refused: str, call: str) -> None:
    if member.is_idle:
        place = member.manager.epoch, member.manager.step + 1
        if place not in world.script:
            world.script[place] = call
            world.withdraws -= bool(call)
    member.go(frozenset(refused.split()), call)


def _strike(world: World, member: Member, kind: str) -> None:
    match kind:
        case "crash":
            world.net.dead.append(member.rank)
        case "skip":
            member.iteration += 1
        case "repeat":
            member.iteration -= 1
        case _:
            member.manager.note("stray", member.rank)


# -- the search ------------------------------------------------------------------------------------


def explore(setting: Setting, *, states_max: int = STATES_MAX) -> Found:
    """All states of ``setting``, breadth first, until a promise breaks or none is new."""
    with quiet(), _rare_collections():
        return _explore(setting, states_max)


@contextlib.contextmanager
def _rare_collections() -> Generator[None]:
    """Every clone is a heap of cycles: collecting them by the dozen takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if was_enabled:
            gc.enable()


def _explore(setting: Setting, states_max: int) -> Found:
    started = time.monotonic()
    found = Found(setting=setting)
    first = World(setting)
    known = {digest(first): 0}
    came_from: list[tuple[int, Action]] = [(-1, ())]
    led_here: list[list[int]] = [[]]  # by plain actions, from which states
    drained: list[int] = []
    depths = [0]
    queue: deque[tuple[int, bytes]] = deque([(0, pickle.dumps(first, 5))])
    while queue and not found.failure:
        here, data = queue.popleft()
        num_moves = 0
        for action, world, key, is_plain in _successors(data, setting):
            found.num_transitions += 1
            if found.num_transitions % _COLLECT_EVERY == 0:
                gc.collect()
            there = known.get(key)
            if there is None:
                there = known[key] = len(came_from)
                came_from.append((here, action))
                led_here.append([])
                depths.append(depths[here] + 1)
                found.failure = broken(world)
                if found.failure:
                    found.path = _path(came_from, there)
                    break
                queue.append((there, pickle.dumps(world, 5)))
            if there != here:
                num_moves += 1
                if is_plain:
                    led_here[there].append(here)
        if not found.failure and _clone(data).is_drained:
            drained.append(here)
        elif not found.failure and not num_moves:
            found.failure, found.path = "nothing can happen any more", _path(came_from, here)
        found.is_cut = len(known) > states_max
        if found.is_cut:
            break
    found.num_states, found.num_drained, found.depth = len(known), len(drained), max(depths)
    stuck = None if found.failure or found.is_cut else _stuck(led_here, drained)
    if stuck is not None:
        found.failure = "from here nothing leads to where all has drained"
        found.path = _path(came_from, stuck)
    found.spent_s = time.monotonic() - started
    return found


def _clone(data: bytes) -> World:
    world: World = pickle.loads(data)  # noqa: S301 - this search has pickled it itself
    return world


def _successors(data: bytes, setting: Setting) -> Iterator[tuple[Action, World, bytes, bool]]:
    """What each action makes of the world in ``data``, which is cloned by pickling.

    Last comes whether it goes on like this when there are no faults and nobody changes his mind.
    """
    world = _clone(data)
    before = digest(world)
    can_move, waits = False, any(not m.is_over and not m.is_idle for m in world.alive)
    dies = "crash" in setting.faults and not world.fault
    for action in list(_actions(world)):
        clone = _clone(data)
        num_visible = _apply(clone, action)
        key = digest(clone)
        if action[0] == "go":
            if key == before:
                continue  # it only waits
            can_move = True
            for visible in range(1, num_visible) if dies else ():
                dying = _clone(data)
                cut = ("dies in", *action[1:4], visible)
                _apply(dying, cut)
                yield cut, dying, digest(dying), False
        is_plain = action[0] in _PLAIN and clone.withdraws == world.withdraws
        yield action, clone, key, is_plain
    if waits and not can_move:
        clone = _clone(data)
        _apply(clone, ("pass",))
        yield ("pass",), clone, digest(clone), True


def _stuck(led_here: list[list[int]], drained: list[int]) -> int | None:
    """The first state from which no plain actions lead to a drained one."""
    reached = bytearray(len(led_here))
    pending = list(drained)
    for state in pending:
        reached[state] = 1
    while pending:
        for before in led_here[pending.pop()]:
            if not reached[before]:
                reached[before] = 1
                pending.append(before)
    return next((state for state, is_reached in enumerate(reached) if not is_reached), None)


def _path(came_from: list[tuple[int, Action]], state: int) -> list[Action]:
    path: list[Action] = []
    while state > 0:
        state, action = came_from[state]
        path.append(action)
    return path[::-1]


def replay(setting: Setting, path: list[Action]) -> World:
    """The world at the end of ``path``: to look at what a search has found."""
    world = World(setting)
    for action in path:
        _apply(world, action)
    return world


# -- the settings, and the command -----------------------------------------------------------------


def _settings(ranks: int, lags: tuple[int, ...], **how: Any) -> list[Setting]:
    return [Setting(ranks=ranks, lag=lag, **how) for lag in lags]


#: Seconds: what runs with every change.
SMALL: Final = (
    *_settings(2, (0,), relation="apart"),
    *_settings(2, (0,), relation="bound"),
    *_settings(2, (1,), relation="line", refusals=False),
    *_settings(2, (0,), relation="child", refusals=False, withdraws=1),
    *_settings(2, (0,), relation="child", refusals=False, failures=1),
    *_settings(2, (0,), relation="line", refusals=False, faults=("crash",)),
    *_settings(2, (0,), relation="child", elastic=True),
    *_settings(2, (0,), relation="heir", elastic=True),
    *_settings(2, (0,), relation="child", elastic=True, refusals=False, failures=1),
)

#: Minutes to hours: everything that is promised to have been searched.
LARGE: Final = (
    *(
        setting
        for relation in ("apart", "child", "bound", "line")
        for setting in (
            *_settings(2, (0, 1, 2), relation=relation),
            *_settings(2, (0, 1), relation=relation, withdraws=1),
            *_settings(2, (0, 1), relation=relation, failures=1),
            *_settings(2, (0, 1), relation=relation, refusals=False, ticks=1),
            *_settings(2, (0, 1, 2), relation=relation, refusals=False, faults=("crash",)),
            *_settings(2, (0, 1, 2), relation=relation, refusals=False, faults=("skip", "repeat")),
            *_settings(3, (0,), relation=relation),
        )
    ),
    *(
        setting
        for relation in ("child", "heir")
        for setting in (
            *_settings(2, (0, 1, 2), relation=relation, elastic=True),
            *_settings(2, (0, 1), relation=relation, elastic=True, failures=1),
            *_settings(2, (0, 1), relation=relation, elastic=True, withdraws=1),
        )
    ),
    *_settings(2, (0, 1), relation="apart", elastic=True, failures=1),
    *_settings(2, (0, 1, 2), relation="line", refusals=False, ticks=3),
    *_settings(2, (0, 1), relation="line", refusals=False, ticks=1, faults=("crash",)),
    *_settings(2, (0, 1, 2), refusals=False, faults=("stray",), policy="reset"),
    *_settings(3, (0,), relation="line", refusals=False, faults=("crash",)),
    *_settings(3, (0,), relation="line", refusals=False, faults=("skip",)),
)


#: The exit status of what was stopped by hand and had found nothing.
INTERRUPTED = 130


def search(*, small: bool, states_max: int = STATES_MAX, jobs: int = 1) -> int:
    """Search all settings and print what came of each; 1 where a promise does not hold.

    ``jobs`` processes search as many settings at a time.
    """
    console = PlainConsole(highlight=False, soft_wrap=True)
    num_states = num_transitions = num_failed = num_cut = num_orders = 0
    status = 0
    try:
        for found in _explore_all(SMALL if small else LARGE, states_max, jobs):
            num_states += found.num_states
            num_transitions += found.num_transitions
            num_failed += bool(found.failure)
            num_cut += found.is_cut
            _tell(found, console)
        for ending in _in_order(orders, SMALL_ENDS if small else LARGE_ENDS, jobs):
            num_orders += ending.num_orders
            num_failed += bool(ending.failure)
            _tell_orders(ending, console)
    except KeyboardInterrupt:
        console.print("stopped by hand; until then ", end="")
        status = INTERRUPTED
    verdict = f"[red]{num_failed} fail[/red]" if num_failed else "all promises hold"
    cut = f", {num_cut} of the settings cut short" if num_cut else ""
    told = f"{num_states:,} states, {num_transitions:,} transitions, {num_orders:,} orders"
    console.print(f"{verdict}: {told}{cut}")
    return 1 if num_failed else status


def _explore_all(settings: Sequence[Setting], states_max: int, jobs: int) -> Iterator[Found]:
    """What came of each setting, in their order."""
    yield from _in_order(partial(explore, states_max=states_max), settings, jobs)


def _in_order(call: Callable[[T], R], settings: Sequence[T], jobs: int) -> Iterator[R]:
    if jobs == 1:
        yield from map(call, settings)
        return
    with worker_processes(jobs) as pool:
        yield from pool.map(call, settings)


def _tell_orders(found: FoundOrders, console: Console) -> None:
    console.print(f"{found.ends.name}: {found.num_orders:,} orders, {found.spent_s:.1f} s")
    if found.failure:
        console.print(f"  [red]FAILS[/red]  {found.failure}")
        console.print(found.text, markup=False)


def _tell(found: Found, console: Console) -> None:
    how = "[yellow]cut short[/yellow]" if found.is_cut else "complete"
    console.print(
        f"{found.setting.name}: {found.num_states:,} states, {found.num_transitions:,} transitions,"
        f" depth {found.depth}, {found.spent_s:.1f} s, {how}"
    )
    if found.failure:
        console.print(f"  [red]FAILS[/red]  {found.failure}")
        for action in found.path:
            console.print(f"    {' '.join(map(str, action))}", markup=False)
