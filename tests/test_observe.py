"""Policy observe: everything is told, nothing changes, and no engine is ended by it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpact.consensus.core.ballot import Vector
from kvpact.consensus.core.errors import BadInput, PeerLost, StoreSilent
from kvpact.consensus.epoch.incident_files import IncidentFiles
from kvpact.consensus.epoch.report import Incident, Policy
from kvpact.consensus.step.observe import QUIET_STEPS
from kvpact.harness.cli.explain import incidents_in
from tests.foreign import only
from tests.test_change import World
from tests.test_step import DEADLINE_S, GRACE_S, Call

LAGS = pytest.mark.parametrize("lag", [0, 1, 2, 3, 4])
STEPS_TO_BE_SURE = 5


def observing(lag: int) -> tuple[World, list[list[Incident]]]:
    """Three ranks that only observe, and what each has told its engine."""
    world = World(lag, policy=Policy("observe"))
    told: list[list[Incident]] = []
    for rank in world.ranks:
        told.append([])
        rank.stepper.change.on_incident = told[-1].append
    assert not world.run(4)
    return world, told


def go_on(world: World, steps: int) -> None:
    """No rank raises, and each posts or votes for itself once a step."""
    before = [rank.stepper.num_steps for rank in world.ranks]
    assert not world.run(steps)
    assert [rank.stepper.num_steps for rank in world.ranks] == [one + steps for one in before]


def differ(world: World, rank: int, what: int) -> None:
    world.ranks[rank].manager.note("evict", "host", what)


def raises(*_: object) -> None:
    raise ValueError("no such thing")


@LAGS
def test_each_finding_is_told_once_and_the_next_is_found_too(lag: int) -> None:
    world, told = observing(lag)
    for number, who in enumerate((1, 2, 0), 1):
        differ(world, who, number)
        go_on(world, lag + QUIET_STEPS + STEPS_TO_BE_SURE)
        for rank, incidents in zip(world.ranks, told, strict=True):
            assert [one.seal.then for one in incidents] == ["observe"] * number
            error = incidents[-1].seal.error
            assert (error.field, error.ranks) == ("fingerprint", (who,))
            assert any(f"evict host {number}" in line for line in error.story)
            assert len(incidents[-1].reports) == 3
            assert rank.stepper.change.endings["Divergence"] == number
            assert rank.manager.epoch == 0
        only(rank.manager.journal.fingerprint for rank in world.ranks)


@LAGS
def test_findings_that_follow_soon_are_counted_and_hide_nothing_later(lag: int) -> None:
    world, told = observing(lag)
    for number in range(4):
        differ(world, 1, number)
        go_on(world, 1)
    go_on(world, lag + QUIET_STEPS)
    assert [len(one) for one in told] == [1] * 3
    found = only(rank.stepper.change.endings["Divergence"] for rank in world.ranks)
    assert 1 <= found <= 4
    only(rank.manager.journal.fingerprint for rank in world.ranks)
    differ(world, 2, 99)
    go_on(world, lag + STEPS_TO_BE_SURE)
    assert [one[-1].seal.error.ranks for one in told] == [(2,)] * 3


@LAGS
def test_a_flush_begins_anew(lag: int) -> None:
    world, told = observing(lag)
    differ(world, 1, 1)
    go_on(world, lag + 2)
    for rank in world.ranks:
        rank.stepper.renew({"a": 50})
    differ(world, 2, 2)
    go_on(world, lag + 2)
    assert [[one.epoch for one in incidents] for incidents in told] == [[0, 1]] * 3
    assert {incidents[-1].seal.error.ranks for incidents in told} == {(2,)}


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_who_hears_of_a_finding_between_steps_compares_from_the_same_place(lag: int) -> None:
    """Rank 2 takes part in the closing from outside a step, and then makes an agreed call."""
    world, told = observing(lag)
    differ(world, 1, 1)
    assert not world.run(lag)
    first, second, third = (rank.stepper for rank in world.ranks)
    for rank in world.ranks[:2]:
        rank.manager.note("insert", 7)
        rank.stepper.begin(world.iteration + 1)
    for _ in range(20):
        first.poll()
        second.poll()
        third.attend()
        world.net.now_s = round(world.net.now_s + 0.01, 6)
        if third.change.incident is not None and third.stage == "idle":
            break
    assert third.change.incident is not None
    world.ranks[2].manager.note("insert", 7)
    third.begin(world.iteration + 1)
    assert third.poll() is not None
    assert first.poll() is not None
    assert second.poll() is not None
    world.iteration += 1
    go_on(world, lag + QUIET_STEPS)
    only(rank.manager.journal.fingerprint for rank in world.ranks)
    assert [len(one) for one in told] == [1] * 3
    assert only(rank.stepper.change.endings["Divergence"] for rank in world.ranks) == 1


@LAGS
def test_live_requests_that_differ_are_told_again_once_they_were_equal(lag: int) -> None:
    world, told = observing(lag)
    for times in (1, 2):
        world.ranks[1].engine.live_digest = lambda: 5
        go_on(world, lag + 2 * QUIET_STEPS)
        assert [len(one) for one in told] == [times] * 3
        world.ranks[1].engine.live_digest = int
        go_on(world, lag + 2)
    assert {one[-1].seal.error.field for one in told} == {"live"}


def cut_off(world: World, rank: int) -> None:
    """The transport of ``rank`` is broken, and says so when it is asked to post."""

    def breaks(vector: Vector) -> Call:
        raise PeerLost("group a: a collective failed: Connection reset by peer")

    world.ranks[rank].stepper.group.min = breaks  # type: ignore[method-assign]


@LAGS
def test_a_transport_that_breaks_while_posting_ends_nobody_who_observes(lag: int) -> None:
    world, told = observing(lag)
    cut_off(world, 1)
    go_on(world, lag + 3)
    assert all(rank.stepper.observation.is_off for rank in world.ranks)
    assert [one[0].seal.then for one in told] == ["off"] * 3
    go_on(world, 5)


@LAGS
def test_a_transport_that_breaks_while_posting_is_one_error_on_all_ranks(lag: int) -> None:
    world = World(lag, policy=Policy("raise"))
    assert not world.run(lag + 2)
    cut_off(world, 1)
    errors = world.run(lag + 3)
    assert set(errors) == {0, 1, 2}
    assert only(str(error) for error in errors.values())
    assert {type(error) for error in errors.values()} == {PeerLost}


def breaks_prepare(world: World) -> None:
    world.ranks[1].before = raises


def breaks_settled(world: World) -> None:
    world.ranks[1].engine.settled = raises


@LAGS
@pytest.mark.parametrize("breaks", [breaks_prepare, breaks_settled])
def test_an_exception_is_told_and_ends_nobody(
    lag: int, breaks: Callable[[World], None], caplog: pytest.LogCaptureFixture
) -> None:
    world, told = observing(lag)
    breaks(world)
    go_on(world, lag + 6)
    for rank, incidents in zip(world.ranks, told, strict=True):
        assert rank.stepper.observation.is_off
        assert [one.seal.then for one in incidents] == ["off"]
        assert "ValueError: no such thing" in incidents[0].seal.error.message
        assert incidents[0].seal.error.ranks == (1,)
    logged = [record for record in caplog.records if record.exc_info is not None]
    assert logged, "the exception itself, with its traceback"
    assert caplog.text.count("observing is off") == 3


@LAGS
def test_who_does_not_come_is_named_and_the_others_go_on(lag: int) -> None:
    world, told = observing(lag)
    began = world.net.now_s
    assert not world.run(lag + 3, only_ranks=(0, 2))
    assert world.net.now_s - began < DEADLINE_S + GRACE_S + 0.5, "they wait for it once"
    for number in (0, 2):
        assert [one.seal.error.kind for one in told[number]] == ["RankStalled"]
        assert told[number][0].seal.error.ranks == (1,)
    world.iteration -= lag + 3
    assert not world.run(lag + 3, only_ranks=(1,)), "it comes back, and goes on too"
    assert only(rank.stepper.observation.is_off for rank in world.ranks)
    go_on(world, 5)


@LAGS
def test_a_rank_that_skips_a_step_is_named_and_goes_on(lag: int) -> None:
    world, told = observing(lag)
    rank = world.ranks[2]
    rank.manager.step += 1
    rank.manager.settled_step += 1
    go_on(world, lag + 4)
    assert only(one.stepper.observation.is_off for one in world.ranks)
    assert {incidents[0].seal.error.field for incidents in told} == {"step"}


@pytest.mark.parametrize("lag", [0, 2])
def test_a_silent_store_ends_only_the_observing(lag: int) -> None:
    world, told = observing(lag)

    def silent(*_: object, **__: object) -> Any:
        raise StoreSilent("store 10.0.0.7:29500 did not answer within 2 s")

    world.store.get = silent
    world.store.set = silent
    world.store.compare_set = silent
    differ(world, 1, 1)
    go_on(world, lag + 5)
    for rank, incidents in zip(world.ranks, told, strict=True):
        assert rank.stepper.observation.is_off
        assert [one.seal.error.kind for one in incidents] == ["StoreSilent"]
        assert any("mismatch" in line for line in incidents[0].seal.error.story)


def test_what_a_stranger_wrote_ends_only_the_observing() -> None:
    world, told = observing(1)
    world.store.set("epoch/0/closing", b"no step")
    assert not world.run(3, only_ranks=(0, 2))
    for number in (0, 2):
        assert [one.seal.then for one in told[number]] == ["off"]
        assert told[number][0].seal.error.kind == "StoreForged"


def test_a_listener_that_fails_changes_nothing() -> None:
    world, _ = observing(1)
    for rank in world.ranks:
        rank.stepper.change.on_incident = raises
    differ(world, 1, 1)
    go_on(world, 4)
    assert {rank.stepper.change.endings["Divergence"] for rank in world.ranks} == {1}


def test_nobody_is_warned_of_ranks_that_agree(caplog: pytest.LogCaptureFixture) -> None:
    world, told = observing(2)
    with caplog.at_level(logging.WARNING, "kvpact"):
        go_on(world, 3 * QUIET_STEPS)
    assert not caplog.records
    assert told == [[], [], []]


def test_the_files_of_incidents_are_what_explain_reads(tmp_path: Path) -> None:
    world, _ = observing(1)
    files = [IncidentFiles(tmp_path / "incidents", files_max=2) for _ in world.ranks]
    for rank, one in zip(world.ranks, files, strict=True):
        rank.stepper.change.on_incident = one
    for number in range(3):
        differ(world, 1, number)
        go_on(world, QUIET_STEPS + STEPS_TO_BE_SURE)
    assert [one.num_written for one in files] == [3] * 3
    found = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert found == [f"rank{rank}-{n}.json" for rank in range(3) for n in range(2)]
    for name, step in (("rank2-0.json", 2), ("rank2-1.json", 1)):
        [incident] = incidents_in(json.loads((tmp_path / "incidents" / name).read_bytes()))
        assert any(f"evict host {step}" in line for line in incident.seal.error.story)
    with pytest.raises(BadInput, match="cannot make the folder"):
        IncidentFiles(tmp_path / "incidents" / "rank0-0.json")
    with pytest.raises(BadInput, match="files_max"):
        IncidentFiles(tmp_path, files_max=0)
