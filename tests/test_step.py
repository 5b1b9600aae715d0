"""The stepper: one outcome on all ranks, whoever is late, broken, lost or silent.

Time is virtual: every rank is polled in turn, the clock moves by :data:`TICK_S`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpact.consensus.core.ballot import Vector
from kvpact.consensus.core.errors import (
    Divergence,
    KvpactError,
    Misuse,
    PeerError,
    PeerLeft,
    PeerLost,
    RankStalled,
    StoreSilent,
)
from kvpact.consensus.core.participant import Intent, Outcome
from kvpact.consensus.epoch.report import LastSeen, Seal
from kvpact.consensus.step.step import StepLimits, Stepper
from kvpact.harness.rank.store import MemoryStore
from tests.foreign import Engine, Owner, make_manager, only

TICK_S = 0.01
DEADLINE_S = 1.0
GRACE_S = 0.3
LIMITS = StepLimits(deadline_s=DEADLINE_S, grace_s=GRACE_S, slice_s=0.05)
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


class Net:
    """Pairs the k-th call of every rank. Nothing reaches ``deaf`` ranks; ``cut`` ones notice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.now_s = 0.0
        self.calls: dict[int, dict[int, Vector]] = {}
        self.deaf: dict[int, int] = {}
        self.cut: set[int] = set()
        self.gone: set[int] = set()
        self.places: dict[int, tuple[int, str, float]] = {}

    def is_gone(self, rank: int) -> bool:
        return rank in self.gone

    def is_paused(self, rank: int) -> bool:
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        return {rank: self._last_seen(rank) for rank in ranks}

    def _last_seen(self, rank: int) -> LastSeen | None:
        if rank not in self.places:
            return None
        step, phase, since = self.places[rank]
        return LastSeen(step, phase, self.now_s - since, dead=rank in self.gone)


class Link:
    """One rank's group and beacon."""

    def __init__(self, net: Net, rank: int, width: int) -> None:
        self.net, self.rank, self.width = net, rank, width
        self.size, self.ranks = net.size, tuple(range(net.size))
        self.num_calls = 0
        self.is_closed = False

    def min(self, vector: Vector) -> Call:
        assert not self.is_closed
        self.num_calls += 1
        self.net.calls.setdefault(self.num_calls, {})[self.rank] = vector.copy()
        return Call(self.net, self.rank, self.num_calls)

    def now(self) -> float:
        return self.net.now_s

    def close(self) -> None:
        self.is_closed = True

    def at(self, epoch: int, step: int, phase: str, posted: int) -> None:
        self.net.places[self.rank] = (step, phase, self.net.now_s)


class Call:
    def __init__(self, net: Net, rank: int, number: int) -> None:
        self.net, self.rank, self.number = net, rank, number

    def done(self) -> bool:
        is_deaf = self.number >= self.net.deaf.get(self.rank, 1 << 30)
        is_here = len(self.net.calls[self.number]) == self.net.size and not is_deaf
        gone = self.net.gone - set(self.net.calls[self.number])
        if gone or (is_deaf and self.rank in self.net.cut):
            raise PeerLost("connection closed by peer")
        return is_here

    def wait(self, timeout_s: float) -> bool:
        return self.done()

    def result(self) -> Vector:
        assert self.done()
        return np.minimum.reduce(list(self.net.calls[self.number].values()))


class Baggage:
    """Nothing to carry into another epoch."""

    def live(self) -> dict[str, int]:
        return {}

    def kept(self) -> list[int]:
        return []

    def drop(self, seal: Seal) -> None:
        raise AssertionError("the policy is to raise")

    def usable(self) -> dict[str, int]:
        return {}

    def pools(self) -> dict[str, dict[str, int]]:
        return {}

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        raise AssertionError("the policy is to raise")


class Rank:
    """One rank: a foreign engine, its manager and its stepper. ``before`` runs in ``prepare``."""

    def __init__(self, world: World, rank: int, lag: int) -> None:
        self.owner = Owner({"a": 50})
        self.manager = make_manager(rank, self.owner, lag=lag)
        self.link = Link(world.net, rank, self.manager.schema.width)
        self.before: Callable[[], None] | None = None
        self.settled: list[str] = []
        self.engine = Engine(self.manager)
        self.engine.prepare = self._prepare
        self.engine.settled = self._settled
        self.stepper = Stepper(
            self.manager,
            self.link,
            world.store,
            self.engine,
            limits=LIMITS,
            locator=world.net,
            carrier=Baggage(),
            beacon=self.link,
        )

    def _prepare(self) -> None:
        if self.before is not None:
            self.before()
        self.manager.reserve_open()

    def _settled(self, outcomes: list[Outcome]) -> None:
        self.settled += [f"{one.kind.value} {one.intent.key}" for one in outcomes]

    def open(self, key: str) -> Intent:
        intent = self.manager.open("copy", key, {"a": 2}, self.owner, ends_on_commit=True)
        assert intent is not None
        return intent


class _Turns:
    """One rank's way through its steps."""

    def __init__(self, rank: Rank, num_steps: int, late_s: Mapping[tuple[int, int], float]) -> None:
        self.rank = rank
        self.late_s = late_s
        self.step = rank.manager.step + 1
        self.last_step = rank.manager.step + num_steps
        self.ready_at = rank.link.now() + late_s.get((rank.link.rank, self.step), 0.0)
        self.is_inside = False
        self.error: KvpactError | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.step > self.last_step or self.ready_at > 1e8

    def go_on(self, now_s: float, freeze: tuple[int, float] | None) -> None:
        if self.is_over or now_s + 1e-9 < self.ready_at:
            return
        stepper = self.rank.stepper
        try:
            if not self.is_inside:
                self.is_inside = True
                self.rank.open(f"y{self.step}")
                stepper.begin(self.step)
            num_calls = self.rank.link.num_calls
            if stepper.poll() is not None:
                self.is_inside = False
                self.step += 1
                self.ready_at = now_s + self.late_s.get((self.rank.link.rank, self.step), 0.0)
            if freeze is not None and num_calls < freeze[0] == self.rank.link.num_calls:
                self.ready_at = now_s + freeze[1]
        except KvpactError as error:
            self.error = error


class World:
    """Ranks that step together, each from the moment at which it comes."""

    def __init__(self, size: int = 3, lag: int = 0) -> None:
        self.net = Net(size)
        self.store = MemoryStore()
        self.lag = lag
        self.ranks = [Rank(self, rank, lag) for rank in range(size)]
        self.iteration = 0
        self.num_opened = 0
        #: Once it has posted so many ballots a rank stands still for so many seconds.
        self.freeze: dict[int, tuple[int, float]] = {}

    def open(self) -> None:
        """The same intent on every rank."""
        for rank in self.ranks:
            rank.open(f"x{self.num_opened}")
        self.num_opened += 1

    def settle_in(self, num_steps: int = 4) -> None:
        """Ordinary steps, so that nothing below happens in a first step."""
        for _ in range(num_steps):
            self.open()
            assert not any(self.step().values())

    def step(
        self,
        late_s: Mapping[int, float] | None = None,
        *,
        iterations: Mapping[int, int] | None = None,
        limit_s: float = 10.0,
    ) -> dict[int, KvpactError | None]:
        """One step. Each rank comes ``late_s`` after now; 1e9: it never does. What each raises.

        Ranks that come are polled until their step is over, in an order that alternates.
        """
        self.iteration += 1
        began = self.net.now_s
        comes = {r: began + (late_s or {}).get(r, 0.0) for r in range(len(self.ranks))}
        inside: set[int] = set()
        found: dict[int, KvpactError | None] = {}
        expected = {rank for rank, at in comes.items() if at < 1e8}
        for tick in itertools.count():
            order = sorted(expected, reverse=tick % 2 == 1)
            for rank in order:
                if rank in found or comes[rank] > self.net.now_s + 1e-9:
                    continue
                stepper = self.ranks[rank].stepper
                try:
                    if rank not in inside:
                        stepper.begin((iterations or {}).get(rank, self.iteration))
                        inside.add(rank)
                    if stepper.poll() is not None:
                        found[rank] = None
                except KvpactError as error:
                    found[rank] = error
            if len(found) == len(expected):
                return found
            self.net.now_s = round(self.net.now_s + TICK_S, 6)
            assert self.net.now_s - began < limit_s, f"no end: {found}"
        raise AssertionError

    def run(
        self, num_steps: int = 12, late_s: Mapping[tuple[int, int], float] | None = None
    ) -> dict[int, KvpactError | None]:
        """Each rank goes through its own steps, one intent each, from where it stands.

        ``late_s[rank, step]``: it comes so much later to that step; 1e9: it never does. Ends when
        every rank has raised, is through, or stays away. Returns what each of them raised.
        """
        turns = [_Turns(rank, num_steps, late_s or {}) for rank in self.ranks]
        began = self.net.now_s
        for tick in itertools.count():
            for turn in turns[:: 1 if tick % 2 else -1]:
                turn.go_on(self.net.now_s, self.freeze.get(turn.rank.link.rank))
            if all(turn.is_over for turn in turns):
                return {t.rank.link.rank: t.error for t in turns if t.ready_at < 1e8}
            self.net.now_s = round(self.net.now_s + TICK_S, 6)
            assert self.net.now_s - began < 60, "no end"
        raise AssertionError

    def until_all_raise(self, late_s: Mapping[int, float] | None = None) -> KvpactError:
        """Steps until every rank that steps has raised: the one error, and one outcome."""
        for _ in range(self.lag + 2):
            found = self.step(late_s)
            errors = [error for error in found.values() if error is not None]
            if errors:
                assert len(errors) == len(found), found
                self.check_one_outcome([self.ranks[rank] for rank in found])
                return one_error(errors)
        raise AssertionError("nobody raised")

    def check_one_outcome(self, ranks: list[Rank] | None = None) -> None:
        """All have settled the same steps with the same outcomes, and say the same."""
        for rank in ranks or self.ranks:
            rank.manager.check_integrity()
        only(rank.manager.settled_step for rank in ranks or self.ranks)
        only(rank.settled for rank in ranks or self.ranks)
        only(rank.owner.tree for rank in ranks or self.ranks)
        for rank in ranks or self.ranks:
            assert rank.stepper.num_collectives == rank.manager.step == rank.link.num_calls


def one_error(errors: list[KvpactError]) -> KvpactError:
    """The same error on all ranks: class, text, everything it says."""
    only([(type(e), str(e), e.ranks, e.epoch, e.step) for e in errors])
    return errors[0]


# -- when nothing goes wrong -----------------------------------------------------------------------


@LAGS
def test_ordinary_steps_settle_alike_with_one_collective_each(lag: int) -> None:
    world = World(lag=lag)
    for step in range(1, 9):
        world.open()
        assert world.step() == {0: None, 1: None, 2: None}
        world.check_one_outcome()
        assert only(rank.manager.step for rank in world.ranks) == step
        assert only(rank.manager.settled_step for rank in world.ranks) == max(0, step - lag)
        assert only(rank.stepper.num_in_flight for rank in world.ranks) == min(step, lag)
    settled = [line for key in range(8 - lag) for line in (f"commit x{key}", f"end x{key}")]
    assert only(rank.settled for rank in world.ranks) == settled
    assert world.store.keys() == ["epoch/0/late/1"], "the store is for the first step only"


@LAGS
def test_outcomes_of_a_step_are_returned_by_it(lag: int) -> None:
    world = World(size=1, lag=lag)
    stepper = world.ranks[0].stepper
    told: list[list[str]] = []
    for iteration in range(4):
        world.open()
        outcomes = stepper.run(iteration)
        told.append([f"{one.kind.value} {one.intent.key}" for one in outcomes])
    assert told == [[]] * lag + [[f"commit x{k}", f"end x{k}"] for k in range(4 - lag)]


# -- late ranks ------------------------------------------------------------------------------------


def check_end(world: World, found: Mapping[int, KvpactError | None]) -> KvpactError | None:
    """All have settled and none has raised, or all have raised the same: one outcome."""
    errors = [error for error in found.values() if error is not None]
    assert len(errors) in (0, len(found)), found
    world.check_one_outcome([world.ranks[rank] for rank in found])
    return one_error(errors) if errors else None


@LAGS
@pytest.mark.parametrize("late_s", [0.5, 0.85, 0.89, 0.9, 0.91, 0.95, 0.98])
def test_a_straggler_before_the_deadline_is_an_ordinary_settle(lag: int, late_s: float) -> None:
    world = World(lag=lag)
    found = world.run(late_s={(1, 5): late_s, (1, 6): late_s, (2, 7): late_s})
    assert check_end(world, found) is None
    assert world.store.get("epoch/0/closing") is None
    assert only(rank.manager.step for rank in world.ranks) == 12


@LAGS
@pytest.mark.parametrize("late_s", [1.04, 1.05, 1.1, 1.2, 5.0])
def test_a_straggler_after_the_deadline_is_named_on_all_ranks(lag: int, late_s: float) -> None:
    """Whether it comes in time for a report (within the grace) or long after the others raised."""
    world = World(lag=lag)
    error = check_end(world, world.run(late_s={(1, 5): late_s}))
    assert isinstance(error, RankStalled)
    assert (error.ranks, error.step) == ((1,), 5)
    assert only(rank.manager.settled_step for rank in world.ranks) == 4
    expected = "did not come" if late_s > DEADLINE_S + GRACE_S else "came too late"
    assert error.message == f"rank 1 {expected}: step 5 cannot be settled"


@LAGS
def test_one_outcome_whenever_a_straggler_comes(lag: int) -> None:
    """Around the deadline, tick by tick."""
    ends: list[bool] = []
    for hundredths in range(80, 140):
        world = World(lag=lag)
        error = check_end(world, world.run(7, late_s={(2, 4): hundredths / 100}))
        assert error is None or error.ranks == (2,)
        ends.append(error is not None)
    assert ends == sorted(ends), "late enough is late"
    assert not all(ends)
    assert any(ends)


@pytest.mark.parametrize("lag", [0, 1])
def test_one_outcome_whenever_two_ranks_come(lag: int) -> None:
    for early, late in itertools.product(range(0, 150, 26), range(85, 135, 3)):
        world = World(lag=lag)
        found = world.run(6, late_s={(1, 4): early / 100, (2, 4): late / 100})
        error = check_end(world, found)
        assert error is None or 2 in error.ranks or 1 in error.ranks


def test_one_outcome_in_the_first_step_too() -> None:
    """Others may have waited for it since before the straggler had even built its stepper."""
    for hundredths in range(85, 130):
        world = World()
        late_s = hundredths / 100
        world.ranks[2].stepper._started = late_s - 0.01
        check_end(world, world.run(3, late_s={(2, 1): late_s}))


@LAGS
def test_only_who_never_came_is_named_however_early_the_others_gave_up(lag: int) -> None:
    """Rank 1 comes when rank 0 has waited for a while; rank 2 does not come at all."""
    world = World(lag=lag)
    world.settle_in()
    began = world.net.now_s
    error = world.until_all_raise({1: 0.5, 2: 1e9})
    assert isinstance(error, RankStalled)
    assert error.ranks == (2,)
    assert error.phase == "idle"
    assert any(line.startswith("rank 2 was last seen at step 4, idle") for line in error.story)
    assert world.net.now_s - began < (lag + 1) * (0.5 + DEADLINE_S + GRACE_S), "bounded"


@LAGS
def test_a_wait_ends_within_its_bound_and_not_before(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    for _ in range(lag):
        world.step({0: 1e9})
    began = world.net.now_s
    found = world.step({0: 1e9})
    assert set(found) == {1, 2}
    waited = world.net.now_s - began
    assert DEADLINE_S <= waited <= DEADLINE_S + GRACE_S + 3 * TICK_S


# -- broken ranks ----------------------------------------------------------------------------------


def _raises(*_: object) -> Any:
    raise ValueError("no such thing")


@LAGS
@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("where", ["at once", "half way", "live", "usable", "unreserved"])
def test_an_exception_before_the_ballot_is_the_same_error_everywhere(
    lag: int, broken: int, where: str
) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.open()
    rank = world.ranks[broken]
    match where:
        case "at once":
            rank.before = _raises
        case "half way":  # what it has planned so far is in its fingerprint already

            def plan() -> None:
                rank.manager.note("evict", 1)
                _raises()

            rank.before = plan
        case "live":
            rank.engine.live_digest = _raises
        case "usable":
            rank.owner.usable = _raises  # type: ignore[method-assign]
            rank.manager._usable["a"] = _raises
        case _:
            rank.engine.prepare = lambda: None
    found = world.run()
    error = one_error([e for e in found.values() if e is not None])
    assert len(found) == 3
    assert type(error) is PeerError
    assert rank.manager.step == 5, "it works on no further step over a half-made plan"
    assert error.ranks == (broken,)
    assert ("reserved" if where == "unreserved" else "ValueError: no such thing") in error.message
    own = found[broken]
    assert own is not None
    assert isinstance(own.__cause__, Misuse if where == "unreserved" else ValueError)
    assert only(r.manager.settled_step for r in world.ranks) == 4
    for one in world.ranks:
        assert one.link.num_calls == one.manager.step >= 5, "it posted all the same"
        assert "x4" not in one.owner.tree


@LAGS
def test_the_first_of_several_exceptions_is_told(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    counter = itertools.count()

    def fails() -> None:
        raise ValueError(f"number {next(counter)}")

    world.ranks[1].before = fails
    found = world.run()
    assert "number 0" in one_error([e for e in found.values() if e is not None]).message


@LAGS
def test_an_exception_while_settling_is_heard_by_all(lag: int) -> None:
    """A participant that breaks its contract: the others need not run into their deadline."""
    world = World(lag=lag)
    world.settle_in()
    world.ranks[1].owner.commit = _raises  # type: ignore[method-assign]
    began = world.net.now_s
    found = world.run()
    assert len(found) == 3
    error = one_error([e for e in found.values() if e is not None])
    assert (type(error), error.ranks) == (PeerError, (1,))
    assert "ValueError: no such thing" in error.message
    assert isinstance(world.ranks[1].stepper.error, PeerError)
    assert isinstance(world.ranks[1].stepper.error.__cause__, ValueError)
    assert world.net.now_s - began < 0.5
    only(rank.manager.settled_step for rank in world.ranks)


# -- differing ranks -------------------------------------------------------------------------------


@LAGS
def test_a_repeated_or_skipped_step_is_found_at_once(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    found = world.step(iterations={1: world.iteration + 2})
    for _ in range(lag):
        assert not any(found.values())
        found = world.step()
    error = one_error([e for e in found.values() if e is not None])
    assert isinstance(error, Divergence)
    assert (error.field, error.ranks, error.step) == ("iteration", (1,), 5)
    assert (error.ours, error.theirs) == (5, 6)


@LAGS
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_made_on_one_rank_only_is_found_and_told(lag: int, size: int) -> None:
    world = World(size=size, lag=lag)
    world.settle_in()
    world.ranks[1].manager.note("evict", "host", 17)
    error = world_error = None
    for _ in range(1 + lag):
        found = world.step()
        error = next((e for e in found.values() if e is not None), None)
        world_error = found
    assert world_error is not None
    error = one_error([e for e in world_error.values() if e is not None])
    assert isinstance(error, Divergence)
    assert (error.field, error.step) == ("fingerprint", 5)
    assert error.ranks == ((1,) if size == 3 else (0, 1))
    assert any("evict host 17" in line for line in error.story)
    assert only(r.manager.settled_step for r in world.ranks) == 4, "nothing of it is settled"


@LAGS
def test_live_requests_that_differ_are_found(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.ranks[2].engine.live_digest = lambda: 7
    error = world.until_all_raise()
    assert isinstance(error, Divergence)
    assert (error.field, error.ranks) == ("live", (2,))


# -- lost ranks, and what was settled elsewhere ----------------------------------------------------


@LAGS
def test_a_rank_whose_process_ended_is_named_quickly(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.net.gone.add(2)
    began = world.net.now_s
    error = world.until_all_raise({2: 1e9})
    assert isinstance(error, RankStalled)
    assert (error.ranks, error.dead) == ((2,), True)
    assert world.net.now_s - began < 0.2


@LAGS
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_step_settled_by_some_is_settled_by_all(lag: int, is_cut: bool) -> None:
    """The verdict of step 5 reaches rank 0 only, which goes on; then rank 2 is gone for good.

    Rank 1 sees its connection break (``is_cut``), or nothing at all until its deadline has passed.
    """
    world = World(lag=lag)
    world.net.deaf[1] = 5
    if is_cut:
        world.net.cut.add(1)
    found = world.run(late_s={(2, 6): 1e9})
    assert set(found) == {0, 1}
    error = check_end(world, found)
    assert isinstance(error, RankStalled)
    assert error.ranks == (2,)
    assert world.ranks[1].manager.settled_step == 5, "through the seal"
    assert "y5" in world.ranks[1].owner.tree


@LAGS
@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_rank_that_wakes_after_the_end_settles_what_the_others_had(
    lag: int, is_deaf: bool
) -> None:
    """Rank 2 posts step 5 and stands still; the others settle it, and give up later."""
    world = World(lag=lag)
    world.freeze[2] = (5, 20.0)
    if is_deaf:
        world.net.deaf[2] = 5
    error = check_end(world, world.run(late_s={(0, 5): 0.05}))
    assert isinstance(error, RankStalled)
    assert error.ranks == (2,)
    assert only(rank.manager.settled_step for rank in world.ranks) == 5


# -- between steps, and misuse ---------------------------------------------------------------------


def test_entering_a_step_twice_is_misuse_and_harmless() -> None:
    world = World()
    stepper = world.ranks[0].stepper
    stepper.begin(1)
    assert stepper.poll() is None
    with pytest.raises(Misuse, match="entered again"):
        stepper.begin(2)
    world.iteration = 0
    for rank in (1, 2):
        world.ranks[rank].stepper.begin(1)
        assert world.ranks[rank].stepper.poll() == ([] if rank == 2 else None)
    assert stepper.poll() == []
    assert stepper.stage == "idle"


def test_a_negative_iteration_is_misuse_and_changes_nothing() -> None:
    world = World()
    stepper = world.ranks[0].stepper
    with pytest.raises(Misuse, match="negative"):
        stepper.begin(-1)
    assert (stepper.stage, world.ranks[0].manager.step) == ("idle", 0)
    assert not any(world.step().values())


@LAGS
def test_an_error_sticks(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.ranks[1].before = _raises
    world.run()
    for rank in world.ranks:
        posted = rank.manager.step
        for _ in range(2):
            for call in (partial(rank.stepper.begin, 99), rank.stepper.poll, rank.stepper.attend):
                with pytest.raises(PeerError) as caught:
                    call()
                assert caught.value is rank.stepper.error
        assert rank.manager.step == posted
        assert rank.link.is_closed
        assert rank.stepper.stage == "closed"


@pytest.mark.parametrize("begins", [False, True])
def test_a_rank_between_steps_hears_of_the_end(begins: bool) -> None:
    """It says where it is, so that it need not be waited for; ``begins``: its next step comes."""
    world = World()
    world.settle_in()
    early, waiting, between = (rank.stepper for rank in world.ranks)
    between.attend()
    early.begin(9)
    began = world.net.now_s
    while early.stage != "closing the epoch":
        assert early.poll() is None
        world.net.now_s += TICK_S
    assert world.net.now_s - began <= DEADLINE_S + 3 * TICK_S
    between.attend()
    assert between.stage == "closing the epoch", "it has reported, and waits for rank 1"
    waiting.attend()
    assert waiting.error is None, "the seal stands, and the others have not read it"
    if begins:
        between.begin(9)
    errors: list[KvpactError] = []
    for stepper in (early, between, waiting, early, between):
        try:
            assert stepper.poll() is None, "whoever may serve the store stays until all have read"
        except RankStalled as error:
            if error not in errors:
                errors.append(error)
    assert len(errors) == 3
    assert one_error(errors).ranks == (1, 2), "who had not come when the other had waited"


@LAGS
def test_a_rank_that_leaves_in_good_order_is_named_after_its_last_step(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.open()
    world.ranks[1].stepper.leave()
    error = world.until_all_raise()
    assert (type(error), error.ranks) == (PeerLeft, (1,))
    assert only(rank.manager.settled_step for rank in world.ranks) == 5, "settled on all ranks"


# -- a silent store --------------------------------------------------------------------------------


@LAGS
def test_a_silent_store_disturbs_nobody_as_long_as_all_come(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.store.silent = True
    for _ in range(4):
        world.open()
        assert not any(world.step({1: 0.25}).values())
    for rank in world.ranks:
        rank.stepper.attend()
    world.check_one_outcome()


@LAGS
def test_a_silent_store_at_the_deadline_is_named_and_the_error_sticks(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    world.store.silent = True
    error = world.until_all_raise({2: 1e9})
    assert isinstance(error, StoreSilent)
    assert "memory:0" in error.message
    for rank in world.ranks[:2]:
        with pytest.raises(StoreSilent):
            rank.stepper.begin(99)
        assert rank.link.is_closed


@pytest.mark.parametrize("name", ["deadline_s", "grace_s", "slice_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limits_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(Misuse, match=name):
        StepLimits(**{name: value})


# -- rounds, clocks, and what is kept --------------------------------------------------------------


def finish(world: World) -> None:
    """Poll all ranks until what they have begun is over."""
    inside = list(world.ranks)
    for _ in range(200):
        inside = [rank for rank in inside if rank.stepper.poll() is None]
        if not inside:
            return
        world.net.now_s += TICK_S
    raise AssertionError("it does not end")


@LAGS
def test_rounds_are_numbered_and_settled_at_once(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    for number in (1, 2):
        world.open()
        for rank in world.ranks:
            rank.stepper.begin_round()
        finish(world)
        for rank in world.ranks:
            assert rank.manager.settled_step == rank.manager.step
            assert rank.stepper._headers[rank.manager.step].round == number
            assert rank.stepper._headers[rank.manager.step].iteration == world.iteration
            assert rank.settled[-1].endswith(f"x{world.num_opened - 1}")
    world.step()
    assert only(rank.stepper._headers[rank.manager.step].round for rank in world.ranks) == 0


def test_a_round_is_for_between_two_steps_of_an_epoch_that_goes_on() -> None:
    world = World()
    world.settle_in()
    rank = world.ranks[0]
    rank.stepper.begin(99)
    with pytest.raises(Misuse, match="between two steps"):
        rank.stepper.begin_round()
    rank.stepper.error = PeerLost("it is over")
    with pytest.raises(PeerLost, match="it is over"):
        rank.stepper.begin_round()


def test_waiting_is_counted_and_the_agreed_clock_is_that_of_the_epoch() -> None:
    world = World()
    world.net.now_s = 50.0  # none of it belongs to the epoch: steppers begin to count when made
    world.ranks = [Rank(world, number, 0) for number in range(3)]
    world.step()
    assert only(rank.manager.clock_ms for rank in world.ranks) < 100
    before = [rank.stepper.waited_s for rank in world.ranks]
    world.net.now_s += 2.0
    world.step({2: 0.4})
    waited = [rank.stepper.waited_s - was for rank, was in zip(world.ranks, before, strict=True)]
    assert waited[0] == pytest.approx(0.4, abs=0.05)
    assert waited[2] < 0.05
    world.step()
    clock_ms = only(rank.manager.clock_ms for rank in world.ranks)
    assert clock_ms == pytest.approx(2400, abs=100)


def test_the_agreed_clock_stands_still_while_one_pauses() -> None:
    world = World()
    world.settle_in()
    for rank in world.ranks:
        with rank.stepper.paused("graph capture"):
            if rank is world.ranks[0]:
                assert world.net.places[0][1] == "paused: graph capture"
                world.net.now_s += 7.0
    assert not any(world.step().values())
    assert not any(world.step().values())
    assert only(rank.manager.clock_ms for rank in world.ranks) < 1000
    assert not world.net.places[0][1].startswith("paused")


@LAGS
def test_what_is_kept_of_settled_steps_is_bounded(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in(60)
    for rank in world.ranks:
        stepper = rank.stepper
        assert len(stepper._headers) <= lag + 9
        assert len(stepper._posted_at) <= lag + 2
        assert len(stepper._held) <= lag + 2
        assert max(stepper._headers) == rank.manager.step


@LAGS
def test_an_exception_while_settling_ends_the_step_behind_what_is_settled(lag: int) -> None:
    world = World(lag=lag)
    world.settle_in()
    settled = only(rank.manager.settled_step for rank in world.ranks)

    def fails(outcomes: list[Outcome]) -> None:
        raise ValueError("cannot publish")

    world.ranks[1].engine.settled = fails
    error = one_error([error for error in world.run().values() if error is not None])
    assert (type(error), error.ranks) == (PeerError, (1,))
    assert "cannot publish" in error.message
    assert error.step == settled + 2, "the step itself is settled"
    assert only(rank.manager.settled_step for rank in world.ranks) >= settled + 1
