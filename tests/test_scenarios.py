"""Every scenario file holds: in the simulator, with any lag, and with real processes over gloo."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from kvpact.harness.cli import main as cli
from kvpact.harness.scenario.agent import RankRecord
from kvpact.harness.scenario.gloo import GlooRanks
from kvpact.harness.scenario.model import (
    Do,
    Drain,
    Evict,
    Expect,
    Fault,
    Finish,
    Heal,
    Insert,
    Scenario,
    Step,
)
from kvpact.harness.scenario.read import parse_scenario, read_scenario
from kvpact.harness.scenario.world import Result, run_sim, unsupported

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "scenarios"
OWN = ROOT / "tests" / "scenarios"

#: Files that this version does not run yet, and why. Whoever makes one run takes it off.
NOT_SUPPORTED: dict[str, str] = {}

#: Files whose expectations look at one step after another, so they hold with their own lag only.
DEPENDS_ON_LAG = {
    "buffer_head_of_line.toml": "counts commits after one step",
    "write_back_waits_for_its_victim.toml": "looks at what one step published",
    "insert_refused_backup_running.toml": "counts a refusal after one step",
    "parent_refused_child_fits.toml": "counts aborts after one step",
    "flush_shares_the_ballot.toml": "looks at what one step ended",
    "observe_then_stall.toml": "notices a missing rank in one step",
    "reserve_refused_on_one_rank.toml": "counts an abort after one step",
}

SEEDS = range(4)
GLOO_RANKS_MAX = 4  # of one file: more processes than this are for the soak test


def _found(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml")) if folder.is_dir() else []


ALL = [*_found(SHARED), *_found(OWN)]
SUPPORTED = [path for path in ALL if path.name not in NOT_SUPPORTED]
each_file = pytest.mark.parametrize("path", SUPPORTED, ids=lambda path: path.stem)


def at_lag(scenario: Scenario, lag: int) -> Scenario:
    """The same story with another lag: what a step must raise may come ``lag`` steps later."""
    own = scenario.world.lag
    if scenario.world.pp > 1:
        lag = max(lag, scenario.world.pp)
    entries = [
        msgspec.structs.replace(entry, times=max(1, entry.times + lag - own))
        if isinstance(entry, Step) and entry.raises is not None
        else entry
        for entry in scenario.do
    ]
    return _changed(scenario, lag, entries)


def promises_only(scenario: Scenario, lag: int) -> Scenario:
    """The story without its expectations; in the end everything must come back."""
    world = scenario.world
    entries: list[Do] = [
        msgspec.structs.replace(entry, may_miss=True) if isinstance(entry, Fault) else entry
        for entry in at_lag(scenario, lag).do
        if not isinstance(entry, Expect)
    ]
    entries += _tail(scenario, lag)
    return _changed(scenario, max(lag, world.pp) if world.pp > 1 else lag, entries)


def _tail(scenario: Scenario, lag: int) -> list[Do]:
    """Everything heals and ends, and is evicted: then each page is free and nothing is pinned."""
    world = scenario.world
    names = sorted({entry.request for entry in scenario.do if isinstance(entry, Insert)})
    tail: list[Do] = [
        Heal(number=0),
        Drain(number=0),
        *[Finish(number=0, request=name) for name in names],
    ]
    # Twice, because write-back demotes what is evicted from the device to the host first.
    for _ in range(2):
        tail += [
            Evict(number=0, tier="device", pages=max(world.device_pages)),
            Step(number=0, times=lag + 1),
            Drain(number=0),
            Step(number=0, times=lag + 1),
        ]
    if world.mode != "buffer_only":
        tail.append(Evict(number=0, tier="host", pages=max(*world.host_pages, 1)))
    nothing = {"device": 0, "host": 0}
    return [*tail, Expect(number=0, free=world.pools(), pinned=nothing)]


def _changed(scenario: Scenario, lag: int, entries: list[Do]) -> Scenario:
    return msgspec.structs.replace(
        scenario,
        world=msgspec.structs.replace(scenario.world, lag=lag),
        do=tuple(
            msgspec.structs.replace(entry, number=number) for number, entry in enumerate(entries, 1)
        ),
    )


def is_well_behaved(path: Path) -> bool:
    """Every rank makes the same calls: no error is announced that a lag would move elsewhere."""
    return not any(
        entry.ranks is not None
        or entry.raises is not None
        or (isinstance(entry, Fault) and entry.site == "scheduler" and entry.action != "late")
        for entry in read_scenario(path).do
    )


def seen(records: list[RankRecord]) -> list[object]:
    """What the ranks saw, without times and texts that may differ."""
    return [
        (
            record.rank,
            [(one.number, one.seen) for one in record.observations],
            [(one.number, one.kinds, one.ranks) for one in record.raised],
            record.broken,
            record.left_at,
        )
        for record in records
    ]


# -- the list ------------------------------------------------------------------------------------


def test_there_is_something_to_run() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: only tests/scenarios was run")
    assert len(SUPPORTED) >= 20


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_only_listed_files_are_left_out(path: Path) -> None:
    reason = unsupported(read_scenario(path))
    if path.name in NOT_SUPPORTED:
        assert reason, f"{path.name} runs now: take it off NOT_SUPPORTED"
    else:
        assert not reason, f"{path.name} needs {reason}: list it in NOT_SUPPORTED, or support it"


def test_the_lists_name_files_that_exist() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent")
    names = {path.name for path in ALL}
    assert set(NOT_SUPPORTED) <= names
    assert set(DEPENDS_ON_LAG) <= names - set(NOT_SUPPORTED)
    assert len(names) == len(ALL), "two files have one name"


def test_a_file_that_cannot_run_yet_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent")
    if not NOT_SUPPORTED:
        pytest.skip("every file runs")
    name = min(NOT_SUPPORTED)
    assert cli.main(["scenario", str(SHARED / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert name in err


# -- the simulator -------------------------------------------------------------------------------


@each_file
def test_sim(path: Path) -> None:
    scenario = read_scenario(path)
    for seed in SEEDS:
        assert run_sim(scenario, seed).failures == [], f"seed {seed}"


@each_file
def test_the_same_seed_gives_the_same_events(path: Path) -> None:
    scenario = read_scenario(path)
    first, second = (run_sim(scenario, 7).records for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


@each_file
def test_with_another_lag(path: Path) -> None:
    scenario = read_scenario(path)
    for lag in (1, 2):
        failures = run_sim(at_lag(scenario, lag), seed=lag).failures
        if path.name in DEPENDS_ON_LAG:
            assert any("(expect)" in line for line in failures), "take it off DEPENDS_ON_LAG"
        else:
            assert failures == [], f"lag {lag}"


@pytest.mark.parametrize(
    "path", [path for path in SUPPORTED if is_well_behaved(path)], ids=lambda path: path.stem
)
def test_promises_hold_with_any_lag(path: Path) -> None:
    scenario = read_scenario(path)
    draw = random.Random(path.stem)
    for seed in SEEDS:
        lag = draw.randint(0, 5)
        failures = run_sim(promises_only(scenario, lag), seed).failures
        assert failures == [], f"lag {lag}, seed {seed}"


# -- real processes ------------------------------------------------------------------------------


def _by_ranks() -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in SUPPORTED:
        found.setdefault(read_scenario(path).world.num_ranks, []).append(path)
    return {num_ranks: found[num_ranks] for num_ranks in sorted(found)}


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", _by_ranks())
def test_gloo_holds_and_sees_what_sim_sees(num_ranks: int) -> None:
    assert num_ranks <= GLOO_RANKS_MAX
    failures: dict[str, list[str]] = {}
    different: list[str] = []
    with GlooRanks() as gloo:
        for path in _by_ranks()[num_ranks]:
            scenario = read_scenario(path)
            result = gloo.run(scenario)
            if result.failures:
                failures[path.name] = result.failures
            elif seen(result.records) != seen(run_sim(scenario).records):
                different.append(path.name)
    assert failures == {}
    assert different == []


@pytest.mark.ranks
def test_gloo_says_when_a_rank_breaks(tmp_path: Path) -> None:
    """A rank that raises what nobody announced is a failure that names it; the next file runs."""
    good = parse_scenario(STORY.format(refused=1, lost=""), "good")
    bad = parse_scenario(STORY.format(refused=1, lost=LOST), "bad")
    with GlooRanks() as gloo:
        results = [gloo.run(bad), gloo.run(good)]
    assert any("expected Divergence naming rank 0" in line for line in results[0].failures)
    assert results[1].failures == []


# -- the command ---------------------------------------------------------------------------------

STORY = """\
name = "one page short"
[world]
tp = 2
page_size = 4
device_pages = 8
host_pages = [4, 1]
[[do]]
op = "insert"
request = "a"
tokens = "0..8"
{lost}
[[do]]
op = "drain"
[[do]]
op = "expect"
counters = {{ aborts = {refused} }}
"""
LOST = """\
[[do]]
op = "step"
raises = { kind = "Divergence", rank = 0 }
"""


@pytest.mark.parametrize(
    "ranks",
    ["sim", pytest.param("gloo", marks=pytest.mark.ranks)],
)
def test_a_failed_expectation_is_status_1_and_says_where(
    ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(STORY.format(refused=1, lost=""))
    bad.write_text(STORY.format(refused=5, lost=""))
    out = tmp_path / "out.json"
    # One page of two fits on rank 1, so the plan drops the backup: nothing is even voted on.
    assert cli.main(["scenario", str(good), str(bad), "--ranks", ranks, "--json", str(out)]) == 1
    text = capsys.readouterr().out
    holds, _, fails = text.partition("FAILS")
    assert "holds" in holds
    assert str(good) in holds
    assert str(bad) in fails
    for rank in (0, 1):
        assert f"entry 3 (expect), rank {rank}: counters aborts: expected 5, found 1" in fails
    assert "the journal before it" in fails
    assert "insert 1 0 2" in fails
    results = msgspec.json.decode(out.read_bytes(), type=list[Result])
    assert [bool(result.failures) for result in results] == [False, True]
    assert {result.ranks for result in results} == {ranks}


def test_a_promise_that_fails_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call on one rank only, that nobody announced, is found and named."""
    path = tmp_path / "alone.toml"
    path.write_text(
        STORY.format(refused=0, lost="")
        + '[[do]]\nop = "insert"\nrequest = "b"\ntokens = "50..54"\nranks = [1]\n'
        + '[[do]]\nop = "step"\n'
    )
    assert cli.main(["scenario", str(path)]) == 1
    text = capsys.readouterr().out
    assert "entry 5 (step), rank 0: raised without notice" in text
    assert "entry 5 (step), rank 1: raised without notice" in text


IN_SILENCE = """\
name = "nothing of it happens"
[world]
tp = 2
page_size = 4
device_pages = 8
host_pages = 8
[[do]]
op = "fault"
rank = 1
site = "load"
action = "fail"
{fault}
[[do]]
op = "insert"
request = "a"
tokens = "0..8"
namespace = "tenant"
[[do]]
op = "drain"
[[do]]
op = "expect"
right_bytes = ["{prefix}"]
device = {{ "tenant: 0..8" = 8, "0..8" = 0 }}
{expect}
"""
MISS = "may_miss = true"


@pytest.mark.parametrize(
    "fault, prefix, expect, says",
    [
        (MISS, "tenant:0..8", "", []),
        (MISS, "0..8", MISS, []),
        ("", "tenant: 0..8", "", ["entry 1 (fault), rank 1: load fail never struck"]),
        (
            MISS,
            "0..8",
            "",
            [f"entry 4 (expect), rank {rank}: right_bytes 0..8: nothing of it" for rank in (0, 1)],
        ),
    ],
)
def test_a_file_does_not_pass_in_silence(
    fault: str, prefix: str, expect: str, says: list[str]
) -> None:
    """A fault that had no occasion, and bytes that are not there, show nothing."""
    text = IN_SILENCE.format(fault=fault, prefix=prefix, expect=expect)
    found = run_sim(parse_scenario(text, "silent.toml")).failures
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True)), found


RECOMPUTED = """\
name = "a load fails after its pages were agreed"
[world]
tp = 2
lag = 1
page_size = 4
device_pages = 8
host_pages = 8
storage = "memory"
[[do]]
op = "insert"
request = "a"
tokens = "0..16"
[[do]]
op = "drain"
[[do]]
op = "evict"
tier = "device"
pages = 4
[[do]]
op = "load_back"
request = "part"
tokens = "0..16"
pages_max = 2
[[do]]
op = "drain"
[[do]]
op = "pause"
seconds = 30.0
ranks = [1]
[[do]]
op = "expect"
loaded = {{ part = 8 }}
device = {{ "0..16" = 8 }}
must_recompute = {{ part = {times} }}
right_bytes = ["0..16"]
[[do]]
op = "clear_storage"
[[do]]
op = "drain"
[[do]]
op = "expect"
storage = {{ "0..16" = 0 }}
"""


def test_new_words_do_what_they_say() -> None:
    """``pages_max``, ``pause`` beyond the deadline, ``must_recompute``, ``clear_storage``."""
    assert run_sim(parse_scenario(RECOMPUTED.format(times=0), "words.toml")).failures == []
    found = run_sim(parse_scenario(RECOMPUTED.format(times=1), "words.toml")).failures
    assert all("must_recompute part: expected 1, found 0" in line for line in found)
    assert len(found) == 2


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_first_request_after_a_day_is_not_stuck(lag: int) -> None:
    """Nobody steps an idle engine, so what it opens next has the clock of its last step."""
    text = RECOMPUTED.format(times=0).replace("lag = 1", f"lag = {lag}")
    idle = '[[do]]\nop = "idle"\nseconds = 100000.0\n'
    text = text.replace('[[do]]\nop = "evict"', f'{idle}[[do]]\nop = "evict"')
    assert idle in text
    assert run_sim(parse_scenario(text, "words.toml")).failures == []


def test_nothing_announced_was_raised_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calm.toml"
    path.write_text(STORY.format(refused=1, lost=LOST))
    assert cli.main(["scenario", str(path)]) == 1
    expected = "expected Divergence naming rank 0, nothing was raised"
    assert f"entry 2 (step), rank 1: {expected}" in capsys.readouterr().out


def test_a_story_that_is_no_scenario_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(STORY.format(refused='"one"', lost=""))
    assert cli.main(["scenario", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "bad.toml:14: do 3 (expect): counters.aborts: expected an integer" in err


def test_the_json_holds_what_was_seen(tmp_path: Path) -> None:
    path, out = tmp_path / "good.toml", tmp_path / "out.json"
    path.write_text(STORY.format(refused=1, lost=""))
    assert cli.main(["scenario", str(path), "--json", str(out), "--seed", "3"]) == 0
    (result,) = json.loads(out.read_text())
    assert (result["name"], result["seed"], result["failures"]) == ("one page short", 3, [])
    observed = [record["observations"][0]["seen"] for record in result["records"]]
    assert observed == [{"counters": {"aborts": 1}}] * 2
