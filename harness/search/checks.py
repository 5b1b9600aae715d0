"""The promises, in every state of the search."""

from __future__ import annotations

from collections.abc import Iterator

from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State
from kvpact.consensus.step.stage import Stage
from kvpact.harness.search.world import LIMITS, POOLS, TICK_S, Member, Wish, World

__all__ = ["broken"]

_PUBLISHED = (State.COMMITTED, State.DONE)
_NOT_HELD = (State.RESERVED, State.REFUSED, State.VOTED_NO, State.PROPOSED)
#: Two deadlines (a straggler that settles late grants a second one), a grace after a deadline.
_STEP_S = 3 * LIMITS.deadline_s + LIMITS.grace_s + 2 * TICK_S


def broken(world: World) -> str:
    """The first promise that does not hold in this state; empty: all hold."""
    return next(_broken(world), "")


def _broken(world: World) -> Iterator[str]:
    for member in world.alive:
        if member.bug:
            yield member.bug
        where = f"rank {member.rank}"
        for line in (*_accounts(member), *_intents(member), *_bounds(member)):
            yield f"{where}: {line}"
    yield from _agreement(world)
    yield from _atomicity(world)
    yield from _bound(world)
    yield from _outcome(world)


def _accounts(member: Member) -> Iterator[str]:
    """Conservation: on this rank, and in the agreed ledger."""
    try:
        member.manager.check_integrity()
    except InternalError as error:
        yield error.message
    ledger = member.manager.ledger
    open_need = [intent.need for intent in member.manager.open_intents]
    for pool, capacity in POOLS.items():
        places = (member.held, member.tree, member.stuck)
        owned = sum(pages.get(pool, 0) for place in places for pages in place.values())
        if member.free[pool] < 0 or member.free[pool] + owned != capacity:
            yield f"pool {pool}: {member.free[pool]} free and {owned} owned of {capacity}"
        if _is_between(member):
            continue
        spoken = sum(need.get(pool, 0) for need in open_need) + ledger.cooling(pool)
        spoken += sum(pages.get(pool, 0) for pages in member.tree.values())
        if ledger.charged(pool) != spoken:
            yield f"pool {pool}: {ledger.charged(pool)} charged, but {spoken} are spoken for"


def _intents(member: Member) -> Iterator[str]:
    """Publishing, and what holds pages."""
    for wish in member.world.setting.wishes:
        intent = member.intents.get(wish.key)
        is_published = wish.key in member.published
        if is_published and (intent is None or intent.state not in _PUBLISHED):
            yield f"{wish.key} is published, but {intent!r}"
        held = member.held.get(wish.key, {})
        if held and not _is_enough(wish, held, wish.minimum or 0):
            yield f"{wish.key} holds {held} instead of {wish.need} or nothing"
        if intent is None or intent.epoch != member.manager.epoch or _is_between(member):
            continue
        if intent.state in (State.RESERVED, State.VOTED, State.COMMITTED) and not held:
            yield f"{intent!r} holds no pages"
        if intent.state in (State.REFUSED, State.VOTED_NO) and held:
            yield f"{intent!r} was refused and holds {held}"
        parent = member.intents.get("first")
        is_child = member.world.setting.has_child and wish.key == "second"
        if is_child and is_published and (parent is None or parent.key not in member.published):
            yield f"{intent!r} is published, but what it builds on is not: {parent!r}"
        elif is_child and is_published and parent is not None and _is_part(parent):
            yield f"{intent!r} is published, but what it builds on is there in part: {parent!r}"


def _bound(world: World) -> Iterator[str]:
    """What is bound together is committed together."""
    for member in world.alive:
        if world.setting.relation != "bound" or _is_between(member):
            continue
        for name, other in (("first", "second"), ("second", "first")):
            one, two = member.intents.get(name), member.intents.get(other)
            is_decided = one is not None and two is not None and two.cause
            if one is not None and one.state is State.COMMITTED and is_decided:
                yield f"{one!r} is committed, and {two!r}, which is bound to it, is not"


def _is_part(intent: Intent) -> bool:
    """It was published, but not all of what it asked for (told apart from Intent.is_whole)."""
    came = intent.result if intent.state is State.DONE else intent.agreed
    return came < sum(intent.need.values())


def _is_between(member: Member) -> bool:
    """Its epoch is over, and no other one has begun."""
    return member.error is not None or member.stepper.stage is Stage.OPENING


def _bounds(member: Member) -> Iterator[str]:
    stepper, manager = member.stepper, member.manager
    if stepper.num_in_flight > manager.lag + 1:
        yield f"{stepper.num_in_flight} ballots in flight with lag {manager.lag}"
    if member.is_idle and not manager.epoch and stepper.num_collectives != stepper.num_steps:
        yield f"{stepper.num_collectives} collectives in {stepper.num_steps} steps"
    now = member.world.net.now_s
    waited_s = now - stepper._verdict_wait._began  # pyright: ignore[reportPrivateUsage]
    if not member.is_over and not member.is_idle and waited_s > _STEP_S:
        yield f"waits for {waited_s:g} s: {stepper.stage}"


def _agreement(world: World) -> Iterator[str]:
    """One journal is the beginning of the other, and slots were used for the same."""
    if world.fault == "stray":
        return
    first = world.alive[0]
    for other in world.alive[1:]:
        if first.manager.epoch != other.manager.epoch:
            continue
        ours, theirs = first.journal.prints, other.journal.prints
        common = min(len(ours), len(theirs))
        if ours[:common] != theirs[:common]:
            left = [str(entry) for entry in first.journal.tail()]
            right = [str(entry) for entry in other.journal.tail()]
            yield f"journals differ: rank {first.rank} {left}, rank {other.rank} {right}"


def _atomicity(world: World) -> Iterator[str]:
    """What one rank has committed is held on every rank; what is decided is so everywhere."""
    members = [member for member in world.alive if not _is_between(member)]
    for wish in world.setting.wishes:
        found = [
            (member, member.intents[wish.key])
            for member in members
            if wish.key in member.intents and member.intents[wish.key].epoch == member.manager.epoch
        ]
        states = {intent.state for _, intent in found}
        if State.ABORTED in states and states & set(_PUBLISHED):
            yield f"{wish.key} is {sorted(state.value for state in states)}"
        if State.COMMITTED not in states:
            continue
        for member, intent in found:
            has = member.held.get(wish.key, {})
            agreed = max(one.agreed for _, one in found)
            if intent.state is State.COMMITTED and intent.agreed != agreed:
                yield f"{wish.key}: {intent.agreed} pages on rank {member.rank}, {agreed} elsewhere"
            if intent.state in (State.VOTED, State.COMMITTED) and not _is_enough(wish, has, agreed):
                yield f"{wish.key} is committed, but rank {member.rank} holds {has}"
            if intent.state in _NOT_HELD:
                yield f"{wish.key} is committed, but {intent.state.value} on rank {member.rank}"


def _is_enough(wish: Wish, held: dict[str, int], agreed: int) -> bool:
    if wish.minimum is None:
        return held == wish.need
    return agreed <= sum(held.values()) <= sum(wish.need.values())


def _outcome(world: World) -> Iterator[str]:
    """One outcome: the same error, and the same settled step; none where nothing went wrong."""
    told = [member for member in world.alive if member.error is not None]
    if not told:
        return
    first = told[0]
    for other in told[1:]:
        if other.error != first.error:
            yield f"rank {first.rank} raised {first.error}, rank {other.rank} {other.error}"
        ours, theirs = first.manager.settled_step, other.manager.settled_step
        if ours != theirs:
            yield f"rank {first.rank} settled {ours} steps, rank {other.rank} {theirs}"
    if not world.fault and world.setting.ticks - world.ticks < 2:
        yield f"nothing was wrong, but rank {first.rank} raised {first.error}"
    assert first.error is not None
    kind, named = first.error[0], first.error[2]
    if world.fault in ("skip", "repeat") and kind != "Divergence" and not _was_slow(world):
        yield f"a rank did a {world.fault}, but {first.error}"
    is_named = str(world.faulty_rank) in named
    if world.fault and not is_named and not _was_slow(world):
        yield f"rank {world.faulty_rank} did a {world.fault}, but {first.error}"


def _was_slow(world: World) -> bool:
    return world.setting.ticks - world.ticks >= 2
