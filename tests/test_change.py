"""From one epoch into the next: at the same place of every rank's loop, whoever was where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvpact.consensus.core.ballot import Vector
from kvpact.consensus.core.errors import (
    Divergence,
    KvpactError,
    Misuse,
    PeerError,
    RankStalled,
    StoreSilent,
)
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.epoch.closing import Introduction, Opener
from kvpact.consensus.epoch.report import Policy, Report, Seal
from kvpact.consensus.step.step import PAUSED, Stepper
from kvpact.consensus.transport.gloo import Group
from kvpact.harness.rank.store import MemoryStore
from tests.foreign import Engine, Owner, make_manager, only
from tests.test_step import DEADLINE_S, GRACE_S, LAGS, LIMITS, TICK_S, Call, Link, Net, one_error

RESET = Policy("reset")


class EpochLink(Link):
    """The group of one epoch: its calls are its own."""

    def __init__(self, net: Net, rank: int, width: int, epoch: int) -> None:
        super().__init__(net, rank, width)
        self.base = epoch * 10_000

    def min(self, vector: Vector) -> Call:
        assert not self.is_closed
        self.num_calls += 1
        number = self.base + self.num_calls
        self.net.calls.setdefault(number, {})[self.rank] = vector.copy()
        return Call(self.net, self.rank, number)


class Luggage:
    """What an engine with a tree of its own carries over: here, nothing but a log."""

    def __init__(self, manager: TransactionManager, owner: Owner) -> None:
        self.manager, self.owner = manager, owner
        self.dropped: list[str] = []
        self.live_pages: dict[str, int] = {}

    def live(self) -> dict[str, int]:
        return self.live_pages

    def kept(self) -> list[int]:
        return [7]

    def drop(self, seal: Seal) -> None:
        self.dropped.append(seal.then)
        self.owner.tree.clear()

    def usable(self) -> dict[str, int]:
        return {"a": 50 - self.manager.rank}

    def pools(self) -> dict[str, dict[str, int]]:
        return {}

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        self.manager.begin_epoch(epoch, usable)


class Rank:
    def __init__(self, world: World, rank: int) -> None:
        self.owner = Owner({"a": 50})
        self.manager = make_manager(rank, self.owner, lag=world.lag)
        self.posted: list[tuple[int, int, int]] = []  # epoch, step, iteration of each ballot
        self.luggage = Luggage(self.manager, self.owner)
        self.before: Callable[[], None] | None = None

        def regroup(epoch: int) -> Group:
            return EpochLink(world.net, rank, self.manager.schema.width, epoch)

        first = EpochLink(world.net, rank, self.manager.schema.width, 0)
        self.engine = Engine(self.manager)
        self.engine.prepare = self._prepare
        self.stepper = Stepper(
            self.manager,
            first,
            world.store,
            self.engine,
            limits=LIMITS,
            locator=world.net,
            carrier=self.luggage,
            policy=world.policy,
            regroup=regroup,
            beacon=first,
        )

    def _prepare(self) -> None:
        if self.before is not None:
            self.before()
        self.manager.reserve_open()
        self.posted.append((self.manager.epoch, self.manager.step + 1, self.stepper._iteration))


class World:
    def __init__(self, lag: int = 0, size: int = 3, policy: Policy = RESET) -> None:
        self.net = Net(size)
        self.store = MemoryStore()
        self.lag = lag
        self.policy = policy
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.iteration = 0

    def run(
        self, steps: int, order: tuple[int, ...] = (0, 1, 2), only_ranks: tuple[int, ...] = ()
    ) -> dict[int, KvpactError]:
        """So many iterations of every rank, each as fast as it can; what they raise."""
        errors: dict[int, KvpactError] = {}
        ranks = [rank for rank in order if rank in (only_ranks or order)]
        left = dict.fromkeys(ranks, steps)
        inside: set[int] = set()
        at = dict.fromkeys(ranks, self.iteration)
        began = self.net.now_s
        while any(left.values()):
            for number in ranks:
                if not left[number]:
                    continue
                stepper = self.ranks[number].stepper
                try:
                    if number not in inside:
                        at[number] += 1
                        stepper.begin(at[number])
                        inside.add(number)
                    if stepper.poll() is not None:
                        inside.discard(number)
                        left[number] -= 1
                except KvpactError as error:
                    errors[number] = error
                    left[number] = 0
                except SystemExit:
                    self.net.gone.add(number)
                    left[number] = 0
            self.net.now_s = round(self.net.now_s + TICK_S, 6)
            assert self.net.now_s - began < 20.0, (left, [r.stepper.stage for r in self.ranks])
        self.iteration += steps
        return errors


@LAGS
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_rank_posts_every_iteration_once_across_a_reset(
    lag: int, order: tuple[int, ...]
) -> None:
    world = World(lag)
    assert not world.run(4, order)
    world.ranks[1].manager.note("evict", "host", 17)
    assert not world.run(lag + 5, order)
    only(rank.posted for rank in world.ranks)
    for rank in world.ranks:
        assert rank.luggage.dropped == ["reset"]
        assert rank.stepper.change.num_resets == 1
        assert rank.manager.epoch == 1
        assert [iteration for _, _, iteration in rank.posted] == list(range(1, world.iteration + 1))
        assert rank.manager.ledger.usable("a") >= 48, "the smallest of what they had"
        assert rank.stepper.num_collectives == rank.stepper.num_steps
    only(rank.manager.journal.fingerprint for rank in world.ranks)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_rank_that_hears_late_resets_at_the_same_place(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 still waits for the verdict before the one that differs when it finds the others
    closing: it must not report from there, its loop is an iteration behind theirs."""
    world = World(lag)
    assert not world.run(4)
    world.ranks[1].manager.note("evict", "host", 17)  # shows in ballot 5
    net, until = world.net, world.net.now_s + 0.4

    # The result of ballot 4 comes late to rank 2: when the others already wait for its report.
    hears = Call.done

    def done(call: Call) -> bool:
        is_deaf = call.rank == 2 and call.number >= 4 and net.now_s < until
        return not is_deaf and hears(call)

    monkeypatch.setattr(Call, "done", done)
    assert not world.run(lag + 5)
    only(rank.posted for rank in world.ranks)
    assert only(rank.manager.epoch for rank in world.ranks) == 1


@LAGS
def test_a_rank_that_attends_between_steps_resets_with_the_others(lag: int) -> None:
    world = World(lag)
    assert not world.run(4)
    world.ranks[1].manager.note("evict", "host", 17)
    for _ in range(lag + 4):
        assert not world.run(1)
        for rank in world.ranks:
            rank.stepper.attend()
    only(rank.posted for rank in world.ranks)
    assert only(rank.manager.epoch for rank in world.ranks) == 1


def test_a_step_begun_while_attending_found_the_end_is_not_lost() -> None:
    """Rank 2 hears between two steps that the others give up; its next step begins all the same."""
    world = World(lag=1)
    assert not world.run(3)
    world.ranks[0].stepper._give_up("asked", 9)
    world.ranks[2].stepper.attend()
    world.ranks[2].stepper.begin(4)
    with pytest.raises(Misuse, match="entered again"):
        world.ranks[2].stepper.begin(5)


@LAGS
def test_a_rank_that_does_not_come_to_the_new_epoch_is_the_same_error_on_all(lag: int) -> None:
    world = World(lag)
    assert not world.run(4)
    world.ranks[1].manager.note("evict", "host", 17)

    def dies(seal: Seal) -> None:
        raise SystemExit

    world.ranks[1].luggage.drop = dies
    errors = world.run(lag + 2)
    error = one_error([errors[0], errors[2]])
    assert isinstance(error, RankStalled)
    assert error.ranks == (1,)
    for number in (0, 2):
        with pytest.raises(RankStalled):
            world.ranks[number].stepper.begin(99)


@LAGS
def test_a_reset_is_journaled_logged_and_counted(
    lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(lag)
    told: dict[int, list[tuple[str, tuple[object, ...]]]] = {}
    for number, rank in enumerate(world.ranks):
        known = told.setdefault(number, [])
        rank.manager.journal.fact = lambda tag, *values, known=known: known.append((tag, values))
    assert not world.run(3)
    groups = [rank.stepper.group for rank in world.ranks]
    world.ranks[1].manager.note("evict", "host", 17)
    with caplog.at_level("ERROR", "kvpact"):
        assert not world.run(lag + 4)
    for number, rank in enumerate(world.ranks):
        change = rank.stepper.change
        assert (change.num_resets, change.group_epoch, rank.manager.epoch) == (1, 1, 1)
        seals = [values for tag, values in told[number] if tag == "sealed"]
        assert len(seals) == 1
        assert seals[0][0] == "Divergence"
        old, new = groups[number], rank.stepper.group
        assert isinstance(old, EpochLink)
        assert isinstance(new, EpochLink)
        assert (old.is_closed, new.is_closed, new.base) == (True, False, 10_000)
        incident = change.incident
        assert incident is not None
        assert (incident.rank, incident.epoch, len(incident.reports)) == (number, 0, 3)
    assert sum("all ranks reset" in line for line in caplog.messages) == 3


@pytest.mark.parametrize("apart_s, resets", [(1.0, 2), (30.0, 5)])
def test_resets_are_forgiven_with_time(apart_s: float, resets: int) -> None:
    """Two within 20 s are allowed; the third within that time raises."""
    world = World(policy=Policy("reset", max_resets=2, window_s=20.0))
    for number in range(5):
        assert not world.run(2)
        world.ranks[1].manager.note("evict", "host", number)
        errors = world.run(2)
        if errors:
            assert isinstance(one_error(list(errors.values())), Divergence)
            break
        world.net.now_s += apart_s
    assert {rank.stepper.change.num_resets for rank in world.ranks} == {resets}


def test_only_a_detach_says_what_it_could_keep() -> None:
    for kind, expected in (("reset", []), ("detach", [7])):
        world = World(policy=Policy(kind))
        assert not world.run(2)
        world.ranks[1].manager.note("evict", "host", 17)
        assert not world.run(3)
        found = [world.store.get(f"epoch/0/report/{rank}") for rank in range(3)]
        reports = [msgspec.msgpack.decode(one, type=Report) for one in found if one is not None]
        assert [one.kept for one in reports] == [expected] * 3
        incident = world.ranks[0].stepper.change.incident
        assert incident is not None
        assert [one.kept for one in incident.reports] == [[]] * 3, "too long for a person"


@LAGS
def test_a_new_epoch_keeps_nothing_of_the_old_one(lag: int) -> None:
    world = World(lag)
    assert not world.run(3)
    world.ranks[1].manager.note("evict", "host", 17)
    assert not world.run(1)
    while {rank.manager.epoch for rank in world.ranks} == {0}:
        assert not world.run(1)
    for rank in world.ranks:
        stepper = rank.stepper
        assert all(header.epoch == 1 for header in stepper._headers.values())
        assert max([*stepper._posted_at, *stepper._held], default=0) <= rank.manager.step


def test_the_journal_is_on_disk_before_a_rank_reports(tmp_path: Path) -> None:
    world = World(policy=Policy("raise"))
    rank = world.ranks[0]
    rank.manager.journal._file = (tmp_path / "0.jsonl").open("wb")
    assert not world.run(2)
    rank.manager.note("evict", "host", 17)
    assert world.run(2)
    assert b'"evict",["host",17]' in (tmp_path / "0.jsonl").read_bytes()
    rank.manager.journal.close()


def test_who_does_not_come_to_a_new_epoch_is_waited_for_as_long_as_its_deadline() -> None:
    world = World()
    assert not world.run(4)
    world.ranks[1].manager.note("evict", "host", 17)

    def dies(seal: Seal) -> None:
        raise SystemExit

    world.ranks[1].luggage.drop = dies
    began = world.net.now_s
    errors = world.run(2)
    assert isinstance(errors[0], RankStalled)
    assert DEADLINE_S + GRACE_S <= world.net.now_s - began < 2 * DEADLINE_S + 2 * GRACE_S


def test_who_was_missing_is_agreed() -> None:
    """Rank 0 has lost verdict_wait before rank 2 came; rank 1 would have seen it come."""
    store = MemoryStore()
    openers = [
        Opener(store, "epoch/1", Introduction(r, {}, {"a": 1}), range(3), now_s=0.0, timeout_s=t)
        for r, t in ((0, 1.0), (1, 2.0))
    ]
    with pytest.raises(RankStalled) as first:
        openers[0].poll(1.0)
    late = Opener(store, "epoch/1", Introduction(2, {}, {"a": 1}), range(3), now_s=1.0, timeout_s=9)
    for opener in (openers[1], late):
        with pytest.raises(RankStalled) as caught:
            opener.poll(1.5)
        assert caught.value.ranks == first.value.ranks == (2,)


def test_an_exception_on_one_rank_is_no_matter_for_a_reset() -> None:
    """Rank 0 differs; rank 1 met an exception before its ballot: its engine must see that."""
    world = World(lag=2)
    assert not world.run(3)
    world.ranks[0].manager.note("evict", "host", 17)
    assert not world.run(1)

    def fails() -> None:
        raise ValueError("no such thing")

    world.ranks[1].before = fails
    errors = world.run(3)
    error = one_error(list(errors.values()))
    assert len(errors) == 3
    assert isinstance(error, Divergence | PeerError)
    assert all(rank.luggage.dropped == [] for rank in world.ranks)


@LAGS
def test_a_reset_that_one_rank_alone_orders_is_named(lag: int) -> None:
    world = World(lag)
    assert not world.run(4)
    world.ranks[2].stepper.renew({"a": 50})
    errors = world.run(2 * lag + 2)
    error = one_error(list(errors.values()))
    assert isinstance(error, Divergence)
    assert (error.field, error.ranks, error.epoch) == ("epoch", (2,), 0)
    assert only(world.ranks[r].manager.settled_step for r in (0, 1)) == 4


def test_a_pause_is_waited_for_and_the_deadline_begins_when_it_ends() -> None:
    world = World(size=2)
    assert not world.run(3, order=(0, 1))
    paused_until = world.net.now_s + 5 * DEADLINE_S
    world.net.is_paused = lambda rank: world.net.now_s < paused_until
    first, second = (rank.stepper for rank in world.ranks)
    first.begin(4)
    while world.net.now_s < paused_until + 0.8 * DEADLINE_S:
        assert first.poll() is None, "it waits, also for a while after the pause"
        world.net.now_s = round(world.net.now_s + TICK_S, 6)
    second.begin(4)
    for _ in range(3):
        second.poll()
        first.poll()
    assert (first.stage, second.stage) == ("idle", "idle")


def test_a_pause_has_a_limit_too() -> None:
    world = World(size=2)
    assert not world.run(3, order=(0, 1))
    world.net.is_paused = lambda rank: True
    limits = msgspec.structs.replace(LIMITS, pause_s=3.0)
    world.ranks[0].stepper._verdict_wait._limits = limits
    began = world.net.now_s
    errors = world.run(1, order=(0,))
    assert isinstance(errors[0], RankStalled)
    assert 3.0 <= world.net.now_s - began < 3.0 + DEADLINE_S + GRACE_S + 0.5


def test_a_phase_of_a_pause_says_so() -> None:
    world = World(size=2)
    with world.ranks[0].stepper.paused("graph capture"):
        assert world.net.places[0][1] == f"{PAUSED}: graph capture"
    assert world.net.places[0][1] == "idle"


def test_a_silent_store_does_not_put_off_the_deadline() -> None:
    """A store whose calls hang longer than the deadline: one look, then one claim, then the end."""
    world = World(size=2)
    assert not world.run(3, order=(0, 1))
    asked: list[str] = []

    def hangs(key: str, expected: bytes | None = None, value: bytes = b"") -> bytes:
        asked.append(key)
        world.net.now_s += 2 * DEADLINE_S
        raise StoreSilent("hangs")

    world.store.get = hangs
    world.store.compare_set = hangs
    began = world.net.now_s
    errors = world.run(1, order=(0,))
    assert isinstance(errors[0], StoreSilent)
    assert asked == ["epoch/0/closing", "epoch/0/late/4"]
    assert world.net.now_s - began < 4 * DEADLINE_S + 0.5


def test_a_silent_store_costs_one_call_before_the_verdict_is_looked_at() -> None:
    """With a store that hangs each call, the wait must not add up calls for nothing."""
    world = World(size=2)
    assert not world.run(3, order=(0, 1))
    asked: list[str] = []

    def silent(key: str) -> bytes | None:
        asked.append(key)
        world.net.now_s += 2.0
        raise StoreSilent("hangs")

    world.store.get = silent
    first, second = (rank.stepper for rank in world.ranks)
    first.begin(4)
    assert first.poll() is None
    world.net.now_s += 0.06
    assert first.poll() is None
    assert len(asked) == 1
    second.begin(4)
    second.poll()
    assert first.poll() == []
