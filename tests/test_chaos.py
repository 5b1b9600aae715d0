"""Fault plans: read strictly, drawn from a seed, carried out the same again; and the control."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvpact.cache.copies.mover import NO_FAULT, Direction, Part, PartPlan
from kvpact.consensus.core.errors import BadInput
from kvpact.harness.drive.gather import Gather
from kvpact.harness.drive.replay import simulate
from kvpact.harness.drive.verdict import Verdict, conclude
from kvpact.harness.faults.plan import SITES, FaultLine, Plan, chaos_plan, fit_plan, parse_plan
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.coverage import POINTS, check_names, missing
from kvpact.harness.soak.feed import FaultEvent
from kvpact.harness.soak.process_faults import ProcessFaults, SoakBoard
from kvpact.harness.verify.history import read_lines
from kvpact.harness.verify.verify import complaint

PLAN = """
seed = 7
host_pages = [192, 180]
cover = ["abort after partial reserve"]

[[fault]]
site = "write"
action = "delay"
ranks = [1]
every_steps = 40
times = 2
steps = 5

[[fault]]
site = "process"
action = "kill"
at_step = 1000
"""


def test_a_plan_is_read_as_written() -> None:
    plan = parse_plan(PLAN, "plan.toml")
    assert plan.seed == 7
    assert plan.host_pages == (192, 180)
    assert [line.name for line in plan.fault] == ["write delay", "process kill"]
    assert plan.fault[0].steps == 5
    assert plan.has("process kill")
    fit_plan(plan, "plan.toml", 2)
    check_names(plan, "plan.toml")


@pytest.mark.parametrize(
    "text,expected",
    [
        ("x = 1", "plan.toml: x"),
        ("[[fault]]\nsite = 'wrte'\naction = 'delay'", "fault 1: site: there is no fault at"),
        ("[[fault]]\nsite = 'write'\naction = 'melt'", "fault 1: action: write cannot 'melt'"),
        ("[[fault]]\nsite = 'write'\naction = 'fail'", "say either at_step or every_steps"),
        (
            "[[fault]]\nsite = 'write'\naction = 'delay'\nat_step = 1",
            "fault 1: steps: is needed for write delay",
        ),
        (
            "[[fault]]\nsite = 'write'\naction = 'fail'\nat_step = 1\nseconds = 1.0",
            "seconds: has no meaning for write fail",
        ),
        ("[[fault]]\nsite = 'write'\naction = 'fail'\nat_step = 0", "fault 1: at_step"),
        ("[[fault]]\nsite = 3", "fault 1:"),
        ("fault = 3", "fault: expected [[fault]] entries"),
        ("a = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(text: str, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_plan(text, "plan.toml")
    assert expected in caught.value.message
    assert caught.value.message.startswith("plan.toml")


def test_a_plan_must_fit_the_ranks() -> None:
    plan = parse_plan(PLAN, "plan.toml")
    with pytest.raises(BadInput, match="there is no rank 1; the soak has 1 ranks"):
        fit_plan(plan, "plan.toml", 1)
    with pytest.raises(BadInput, match="host_pages: expected 4 counts, got 2"):
        fit_plan(plan, "plan.toml", 4)
    with pytest.raises(BadInput, match="cover: there is no 'a miracle'"):
        check_names(Plan(cover=("a miracle",)), "plan.toml")


def test_chaos_follows_from_its_seed() -> None:
    def draw(seed: int) -> Plan:
        return chaos_plan(seed, 4, (96,) * 4, (192,) * 4)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    for seed in range(20):
        plan = draw(seed)
        assert all(line.action in SITES[line.site] for line in plan.fault)
        assert not plan.has("process kill"), "what ends a run is only planned by hand"
        fit_plan(plan, "chaos", 4)


# -- carrying out --------------------------------------------------------------------------------


def process_faults(plan: Plan, rank: int, seed: int = 1) -> tuple[ProcessFaults, list[FaultEvent]]:
    told: list[FaultEvent] = []
    return ProcessFaults(plan, rank, seed, told.append, lambda: 0.0, is_simulated=True), told


def strikes(plan: Plan, rank: int, seed: int) -> list[int]:
    """Steps in which a reservation on the host was refused, tried once a step."""
    devil, told = process_faults(plan, rank, seed)
    for step in range(1, 400):
        devil.before_step(step, None)
        devil.board.strike("host.reserve")
    return [event.step for event in told]


def test_the_same_seed_strikes_in_the_same_steps() -> None:
    line = FaultLine(site="host.reserve", action="refuse", every_steps=20)
    plan = Plan(fault=(line,))
    assert strikes(plan, 0, 1) == strikes(plan, 0, 1)
    assert strikes(plan, 0, 1) != strikes(plan, 0, 2)
    assert strikes(plan, 0, 1) != strikes(plan, 1, 1)
    assert 10 <= len(strikes(plan, 0, 1)) <= 40
    assert strikes(Plan(fault=(msgspec.structs.replace(line, ranks=(1,)),)), 0, 1) == []


def occasions(board: SoakBoard, number: int) -> list[bool]:
    """Whether each of so many reservations on the host is refused."""
    return [board.strike("host.reserve") is not None for _ in range(number)]


def test_what_recurs_strikes_at_most_every_second_occasion() -> None:
    """However often it is due, and however many faults of one site are."""
    lines = [
        FaultLine(site="host.reserve", action="refuse", every_steps=1, times=3),
        FaultLine(site="host.reserve", action="refuse", every_steps=1),
    ]
    devil, _ = process_faults(Plan(fault=tuple(lines)), 0)
    struck: list[bool] = []
    for step in range(1, 60):
        devil.before_step(step, None)
        struck += occasions(devil.board, 2)
    assert 50 < sum(struck) <= len(struck) / 2
    assert not any(one and after for one, after in itertools.pairwise(struck))


def test_what_recurs_does_not_pile_up_while_there_is_no_occasion() -> None:
    line = FaultLine(site="host.reserve", action="refuse", every_steps=5, times=2)
    devil, told = process_faults(Plan(fault=(line,)), 0)
    for step in range(1, 500):
        devil.before_step(step, None)
    assert occasions(devil.board, 10) == [False, True, False, True] + 6 * [False]
    assert len(told) == 2
    devil.before_step(600, None)
    devil.heal()
    assert not any(occasions(devil.board, 10))


def test_a_plan_that_wants_all_occasions_has_them() -> None:
    line = FaultLine(site="host.reserve", action="refuse", at_step=1, times=-1)
    devil, _ = process_faults(Plan(fault=(line,)), 0)
    devil.before_step(1, None)
    assert all(occasions(devil.board, 10))


def test_skew_delays_a_share_of_the_copies_until_healed() -> None:
    line = FaultLine(site="write", action="skew", steps=4, share=0.5)
    devil, told = process_faults(Plan(fault=(line,)), 0)
    part = Part(1, [0], [0])

    def plans() -> list[PartPlan]:
        return [devil.board.plan_part(Direction.TO_HOST, part) for _ in range(200)]

    delays = [plan.delay_collects for plan in plans()]
    assert {0, 1, 2, 3, 4} == set(delays)
    assert 60 < sum(delay != 0 for delay in delays) < 140
    assert len(told) == sum(delay != 0 for delay in delays)
    assert devil.board.plan_part(Direction.TO_DEVICE, part) == NO_FAULT
    devil.board.heal()
    assert set(plans()) == {NO_FAULT}


def test_process_faults_are_not_carried_out_in_a_simulation() -> None:
    plan = Plan(fault=(FaultLine(site="process", action="kill", at_step=3),))
    devil, told = process_faults(plan, 0)
    for step in range(1, 6):
        devil.before_step(step, None)
    assert [(event.name, event.step, event.skipped) for event in told] == [
        ("process kill", 3, "not in a simulation")
    ]


def test_the_network_of_the_whole_machine_is_left_alone() -> None:
    line = FaultLine(
        site="network", action="delay", at_step=1, seconds=1.0, delay_ms=5.0, interface="lo"
    )
    told: list[FaultEvent] = []
    devil = ProcessFaults(Plan(fault=(line,)), 0, 1, told.append, lambda: 0.0)
    devil.before_step(1, None)
    devil.close()
    assert len(told) == 1
    assert told[0].skipped, "lo is shared with every other test on this machine"


# -- coverage ------------------------------------------------------------------------------------


def test_what_was_planned_and_never_happened_is_missing() -> None:
    refuse = FaultLine(site="host.reserve", action="refuse", ranks=(0,), every_steps=10)
    hang = FaultLine(site="write", action="hang", every_steps=600)
    plan = Plan(fault=(refuse, hang), cover=("split while copying",))
    covered = {"abort after partial reserve": 3, "split while copying": 1}
    assert missing(plan, 2, 500, False, covered, {"host.reserve refuse": 9}) == []
    assert [
        line.partition(":")[0]
        for line in missing(plan, 2, 5000, False, {}, {"host.reserve refuse": 9})
    ] == ["split while copying", "abort after partial reserve", "write hang"]
    assert set(covered) <= set(POINTS)


# -- whole soaks in the simulator ----------------------------------------------------------------


def simulated(**how: object) -> Gather:
    plan = chaos_plan(3, 2, (96, 96), (192, 192))
    config: dict[str, object] = {
        "steps": 150,
        "plan": plan,
        "device_pages": plan.device_pages,
        "host_pages": plan.host_pages,
        "seed": 3,
    }
    return simulate(SoakConfig(**{**config, **how}))  # pyright: ignore[reportArgumentType]


def test_a_simulated_soak_under_chaos_holds_and_repeats_itself() -> None:
    first, second = simulated(), simulated()
    assert conclude(first, is_stopped=False).verdict is Verdict.PASS
    assert first.num_compared == first.step > 150
    covered = [one.covered() for one in (first, second)]
    for one in covered:
        one.pop("straggler within the deadline", None)  # by the real clock: a busy machine
    assert covered[0] == covered[1]
    assert first.struck == second.struck
    assert first.views[0].counts == second.views[1].counts
    assert first.covered()["abort after partial reserve"] > 0


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "write_back"},
        {"mode": "write_through_selective", "storage": "memory"},
        {"mode": "buffer_only", "storage": "memory"},
        {"tp": 1, "pp": 2, "lag": 2},
    ],
    ids=lambda how: " ".join(str(value) for value in how.values()),
)
def test_every_mode_holds_under_chaos(how: dict[str, object]) -> None:
    plan = chaos_plan(
        3,
        2,
        (96, 96),
        (192, 192),
        has_storage="storage" in how,
        stages=how.get("mode") == "buffer_only",
    )
    gather = simulated(plan=plan, **how)
    found = conclude(gather, is_stopped=False)
    assert found.verdict is Verdict.PASS, found.why
    if "storage" in how:
        assert any(name.startswith("storage.") for name in gather.struck)


@pytest.mark.parametrize("mode", ["write_through", "write_back", "buffer_only"])
def test_the_history_of_a_soak_under_chaos_is_checked_and_holds(mode: str, tmp_path: Path) -> None:
    storage = {"storage": "memory"} if mode == "buffer_only" else {}
    gather = simulated(mode=mode, journal=str(tmp_path), steps=100, **storage)
    assert (gather.history, gather.failures) == ("holds", [])
    assert complaint(str(tmp_path)) == ""
    tags = {line.tag for line in read_lines(tmp_path / "rank1.jsonl")}
    assert {"open", "commit", "abort", "take", "publish", "serve"} <= tags


def test_a_history_that_does_not_hold_is_a_broken_promise(tmp_path: Path) -> None:
    gather = simulated(journal=str(tmp_path), steps=50)
    path = tmp_path / "rank1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if '"commit"' in line)
    path.write_text("".join(lines[:place] + lines[place + 1 :]))
    gather.check_history()
    found = conclude(gather, is_stopped=False)
    assert (gather.history, found.verdict) == ("broken", Verdict.BROKEN_PROMISE)
    assert str(path) in found.why[0]


def test_a_journal_that_is_elsewhere_proves_nothing(tmp_path: Path) -> None:
    """As on a cluster whose ranks do not see one folder: what the driver made is empty."""
    gather = simulated(journal=str(tmp_path), steps=20)
    (tmp_path / "rank1.jsonl").write_bytes(b"")
    gather.check_history()
    found = conclude(gather, is_stopped=False)
    assert (gather.history, found.verdict) == ("broken", Verdict.BROKEN_PROMISE)
    assert "rank 1 has written nothing" in found.why[0]


def test_no_history_is_asked_for_where_ranks_are_made_to_differ(tmp_path: Path) -> None:
    gather = simulated(journal=str(tmp_path), unsafe_no_votes=True)
    assert gather.history.startswith("not checked")
    assert conclude(gather, is_stopped=False).verdict is Verdict.DIVERGENCE


def test_a_divergence_is_survived_where_the_policy_is_to_reset() -> None:
    line = FaultLine(site="scheduler", action="diverge", ranks=(1,), at_step=60)
    plan = Plan(fault=(line,), cover=("reset",))
    gather = simulated(plan=plan, policy="reset")
    found = conclude(gather, is_stopped=False)
    assert found.verdict is Verdict.PASS, found.why
    assert gather.covered()["reset"] == 1
    assert gather.num_compared > 150, "steps of both epochs are compared"


def test_the_control_diverges_in_the_simulator_too() -> None:
    found = conclude(simulated(unsafe_no_votes=True), is_stopped=False)
    assert found.verdict is Verdict.DIVERGENCE
    assert found.is_expected
    assert found.status == 10
    assert found.named_ranks == (0, 1)


@pytest.mark.parametrize("names", [(1,), (0, 1)])
def test_a_planned_stop_beyond_the_deadline_is_a_planned_end(names: tuple[int, ...]) -> None:
    """Whatever the rank that was stopped makes of what it finds when it wakes up."""
    line = FaultLine(site="process", action="stop", ranks=(1,), at_step=5, seconds=20.0)
    gather = simulated(plan=Plan(fault=(line,)), steps=20)
    gather.skipped.clear()
    gather.struck["process stop"] = {1: 1}
    stalled = {"how": "raised", "error": "RankStalled", "ranks": (1,)}
    end = gather.views[0].end
    assert end is not None
    gather.views[0].end = msgspec.structs.replace(end, **stalled)
    _end_of_rank_1(gather, **{**stalled, "error": "PeerLost", "ranks": names})
    found = conclude(gather, is_stopped=False)
    assert (found.verdict, found.is_expected) == (Verdict.HANG, True)
    gather.struck.clear()
    assert not conclude(gather, is_stopped=False).is_expected


def test_a_stop_is_told_of_before_the_process_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a driver that gives up on the rank would not know that this was planned."""
    seconds: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, in_s: float, *_: object) -> None:
            seconds.append(in_s)

        def start(self) -> None:
            """It never strikes here."""

    monkeypatch.setattr("kvpact.harness.soak.process_faults.threading.Timer", Timer)
    line = FaultLine(site="process", action="stop", at_step=1, seconds=20.0)
    told: list[FaultEvent] = []
    devil = ProcessFaults(Plan(fault=(line,)), 0, 1, told.append, lambda: 0.0)
    devil.before_step(1, None)
    assert [event.name for event in told] == ["process stop"]
    assert seconds[0] >= 1.0


def _end_of_rank_1(gather: Gather, **what: object) -> None:
    view = gather.views[1]
    assert view.end is not None
    view.end = msgspec.structs.replace(view.end, **what)


def _config(gather: Gather, **what: object) -> None:
    gather.config = msgspec.structs.replace(gather.config, **what)


def _wrong_bytes(gather: Gather) -> None:
    gather.failures.append("rank 0: wrong bytes")


def _difference(gather: Gather) -> None:
    gather.differences.append("after step 3: live")


def _no_end(gather: Gather) -> None:
    gather.views[1].end = None


def _leak(gather: Gather) -> None:
    _end_of_rank_1(gather, leftovers=("3 pages leaked",))


def _lost_page(gather: Gather) -> None:
    _end_of_rank_1(gather, how="raised", error="ConservationBroken", message="in other words")


def _lost_page_elsewhere(gather: Gather) -> None:
    _end_of_rank_1(gather, how="raised", error="PeerError", raised="ConservationBroken")


def _bug(gather: Gather) -> None:
    _end_of_rank_1(gather, how="raised", error="TypeError")


def _tight_budget(gather: Gather) -> None:
    _config(gather, budget_step_ms=1e-6)


def _uncovered(gather: Gather) -> None:
    _config(gather, plan=Plan(cover=("reset",)))


def _dull_control(gather: Gather) -> None:
    _config(gather, unsafe_no_votes=True)


@pytest.mark.parametrize(
    "spoil,expected",
    [
        (_wrong_bytes, Verdict.BROKEN_PROMISE),
        (_difference, Verdict.DIVERGENCE),
        (_no_end, Verdict.HANG),
        (_leak, Verdict.LEAK),
        (_lost_page, Verdict.LEAK),
        (_lost_page_elsewhere, Verdict.LEAK),
        (_bug, Verdict.HARNESS_ERROR),
        (_tight_budget, Verdict.SLOW),
        (_uncovered, Verdict.NOT_COVERED),
        (_dull_control, Verdict.HARNESS_ERROR),
    ],
)
def test_each_finding_has_its_verdict(
    clean: Gather, spoil: Callable[[Gather], None], expected: Verdict
) -> None:
    assert conclude(clean, is_stopped=False).verdict is Verdict.PASS
    spoil(clean)
    found = conclude(clean, is_stopped=False)
    assert found.verdict is expected
    assert found.status == int(expected)
    assert found.why
    assert not found.is_expected


@pytest.fixture
def clean() -> Gather:
    return simulate(SoakConfig(steps=20))


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    from kvpact.harness.faults.plan import read_plan

    with pytest.raises(BadInput, match=r"plan.toml: no such file; expected a fault plan"):
        read_plan(str(tmp_path / "plan.toml"))


def test_what_hangs_for_a_while_is_released() -> None:
    now_s = 0.0
    healed: list[float] = []
    line = FaultLine(site="write", action="hang", at_step=1, seconds=5.0)
    told: list[FaultEvent] = []
    devil = ProcessFaults(Plan(fault=(line,)), 0, 1, told.append, lambda: now_s)
    devil.attach(lambda: healed.append(now_s))
    devil.before_step(1, None)
    assert devil.board.plan_part(Direction.TO_HOST, Part(1, [0], [0])).delay_collects is None
    for now_s in (1.0, 4.9, 5.0, 9.0):  # noqa: B007 - the clock of the lambdas above
        devil.before_step(2, None)
    assert healed == [5.0]
    devil.heal()
    assert healed == [5.0, 9.0]
