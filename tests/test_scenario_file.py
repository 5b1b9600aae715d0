"""Scenario files: every shared one is read, every broken one is named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.scenario import model
from kvpact.harness.scenario.read import parse_scenario, read_scenario

SHARED = Path(__file__).parents[1] / ".." / "shared" / "scenarios"

BASE = """\
name = "base"

[world]
tp = 2
page_size = 4
device_pages = 16
host_pages = [4, 3]
mode = "write_through"

[[world.side_pool]]
name = "swa"
device_pages = 8
host_pages = [8, 7]
need = "window"
window = 12

[[do]]
op = "insert"
request = "a"
tokens = "0..8,100..108"

[[do]]
op = "load_back"
request = "b"
tokens = "0..8"
"""


def broken(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_scenario(text, "x.toml")
    assert caught.value.message.startswith("x.toml:")
    assert "\n" not in caught.value.message
    return caught.value.message


def world(**keys: str) -> str:
    """BASE with keys of its world replaced, added, or left out where the value is empty."""
    head, rest = BASE.split("[world]\n")
    body, side = rest.split("\n[[world.side_pool]]")
    lines = [line for line in body.splitlines() if line.split(" = ")[0] not in keys]
    lines += [f"{key} = {value}" for key, value in keys.items() if value]
    return f"{head}[world]\n" + "\n".join(lines) + f"\n\n[[world.side_pool]]{side}"


def entry(text: str) -> str:
    """BASE with a third entry of these lines (separated by ``;``)."""
    return BASE + "\n[[do]]\n" + text.replace("; ", "\n") + "\n"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared scenarios are not beside us")
def test_every_shared_scenario_is_read() -> None:
    paths = sorted(SHARED.glob("*.toml"))
    assert len(paths) >= 26
    for path in paths:
        scenario = read_scenario(path)
        assert scenario.path == str(path)
        assert [one.number for one in scenario.do] == list(range(1, len(scenario.do) + 1))
        assert path.read_text().count("[[do]]") == len(scenario.do)
        assert pickle.loads(pickle.dumps(scenario)) == scenario


def test_defaults_and_what_is_spread_over_the_ranks() -> None:
    scenario = parse_scenario(BASE, "x.toml")
    assert (scenario.name, scenario.source, scenario.about) == ("base", "", "")
    swa = model.SidePool(
        name="swa", device_pages=(8, 8), host_pages=(8, 7), need="window", window=12
    )
    assert scenario.world == model.World(
        tp=2,
        pp=1,
        lag=0,
        page_size=4,
        device_pages=(16, 16),
        host_pages=(4, 3),
        mode="write_through",
        storage="none",
        policy="raise",
        deadline_s=5.0,
        step_ms=10,
        copy_timeout_s=30.0,
        side_pools=(swa,),
    )
    assert scenario.world.num_ranks == 2
    assert scenario.do == (
        model.Insert(number=1, request="a", tokens=((0, 8), (100, 108)), hold=False),
        model.LoadBack(number=2, request="b", tokens=((0, 8),)),
    )


def test_lag_is_pp_with_stages_unless_given() -> None:
    pages = {"device_pages": "9", "host_pages": "0"}
    assert parse_scenario(world(pp="1"), "x").world.lag == 0
    stages = world(tp="1", pp="2", **pages)
    assert parse_scenario(stages, "x").world.lag == 2
    given_lag = parse_scenario(world(tp="1", pp="2", lag="3", **pages), "x").world
    assert (given_lag.lag, given_lag.device_pages, given_lag.host_pages) == (3, (9, 9), (0, 0))


def test_pools_by_name() -> None:
    assert parse_scenario(BASE, "x").world.pools() == {
        "device": (16, 16),
        "host": (4, 3),
        "swa.device": (8, 8),
        "swa.host": (8, 7),
    }
    buffered = parse_scenario(world(mode='"buffer_only"'), "x").world
    assert set(buffered.pools()) == {"device", "staging", "swa.device", "swa.host"}
    assert "staging.reserve" in model.actions(buffered)
    assert "host.reserve" not in model.actions(buffered)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ('op = "insert"; request = "c"; tokens = "0..4"; hold = true; ranks = [1]',
         model.Insert(number=3, ranks=(1,), request="c", tokens=((0, 4),), hold=True)),
        ('op = "insert"; request = "c"; tokens = "0..6"',
         model.Insert(number=3, request="c", tokens=((0, 6),))),
        ('op = "load_back"; request = "c"; tokens = ""',
         model.LoadBack(number=3, request="c", tokens=())),
        ('op = "leave"; ranks = [1]', model.Leave(number=3, ranks=(1,))),
        ('op = "restart"', model.Restart(number=3)),
        ('op = "prefetch"; request = "c"; tokens = " 0..2, 6..8 "',
         model.Prefetch(number=3, request="c", tokens=((0, 2), (6, 8)))),
        ('op = "evict"; tier = "host"; pages = 2', model.Evict(number=3, tier="host", pages=2)),
        ('op = "finish"; request = "a"', model.Finish(number=3, request="a")),
        ('op = "abort"; request = "a"', model.Abort(number=3, request="a")),
        ('op = "step"', model.Step(number=3, times=1)),
        ('op = "step"; times = 4; raises = { kind = "RankStalled", rank = 1 }',
         model.Step(number=3, times=4, raises=model.Raises("RankStalled", 1))),
        ('op = "drain"', model.Drain(number=3, max_steps=100)),
        ('op = "reset"', model.Reset(number=3)),
        ('op = "attach_storage"', model.AttachStorage(number=3)),
        ('op = "detach_storage"', model.DetachStorage(number=3)),
        ('op = "heal"', model.Heal(number=3)),
        ('op = "fault"; rank = 1; site = "load"; action = "delay"; steps = 4',
         model.Fault(number=3, rank=1, site="load", action="delay", steps=4)),
        ('op = "fault"; rank = 0; site = "swa.host.reserve"; action = "refuse"; times = -1',
         model.Fault(number=3, rank=0, site="swa.host.reserve", action="refuse", times=-1)),
        ('op = "fault"; rank = 0; site = "storage.get"; action = "miss"; after = 2',
         model.Fault(number=3, rank=0, site="storage.get", action="miss", after=2)),
        ('op = "fault"; rank = 0; site = "scheduler"; action = "late"; seconds = 1',
         model.Fault(number=3, rank=0, site="scheduler", action="late", seconds=1.0)),
        ('op = "expect"', model.Expect(number=3)),
    ],
)  # fmt: skip
def test_each_entry_is_read(text: str, wanted: model.Do) -> None:
    assert parse_scenario(entry(text), "x.toml").do[2] == wanted


def test_expect_is_read() -> None:
    read = parse_scenario(
        entry(
            'op = "expect"; device = { "0..16" = 8, "0..8,100..108" = 16 };'
            ' usable = { "0..4" = 0 };'
            ' free = { device = 12, "swa.host" = [4, 3] }; pinned = { host = 2 };'
            ' loaded = { b = 8 }; counters = { commits = 1, resets = 0 }; right_bytes = ["0..16"]'
        ),
        "x.toml",
    ).do[2]
    assert read == model.Expect(
        number=3,
        device={"0..16": 8, "0..8,100..108": 16},
        usable={"0..4": 0},
        free={"device": (12, 12), "swa.host": (4, 3)},
        pinned={"host": 2},
        loaded={"b": 8},
        counters={"commits": 1, "resets": 0},
        right_bytes=("0..16",),
    )


@pytest.mark.parametrize(
    "text, complaint",
    [
        (BASE.replace('name = "base"\n', "", 1), "x.toml: name: is missing"),
        (BASE + "[more]\n", "x.toml: more: unknown key; allowed: name, source, about, world, do"),
        ('name = "a"\n[[do]]\nop = "step"\n', "x.toml: world: is missing"),
        (BASE.split("[[do]]", maxsplit=1)[0], "x.toml: do: is missing"),
        ("do = []\n" + BASE.split("[[do]]", maxsplit=1)[0], "do: expected at least one [[do]]"),
        (BASE.replace('"base"', "7"), "x.toml: name: expected a text, got an integer"),
        (BASE.replace("tp = 2", "tp 2"), "x.toml:4: column 4: not valid TOML: Expected '='"),
        (BASE + "[[do", "not valid TOML"),
        (world(tp=""), "x.toml: world: tp: is missing"),
        (world(tp="0"), "world: tp: must be at least 1, got 0"),
        (world(tp='"2"'), "world: tp: expected an integer, got a text"),
        (world(tp="true"), "world: tp: expected an integer, got true or false"),
        (world(tp="65"), "world: tp: tp * pp = 65 ranks, more than 64"),
        (world(pp="-1"), "world: pp: must be at least 1, got -1"),
        (world(lag="-1"), "world: lag: must be at least 0"),
        (world(lag="1", tp="1", pp="2"), "world: lag: with pp = 2 must be at least 2, got 1"),
        (world(page_size=""), "world: page_size: is missing"),
        (world(page_size="0"), "world: page_size: must be at least 1"),
        (world(page_size="4.0"), "world: page_size: expected an integer, got a number"),
        (world(device_pages=""), "world: device_pages: is missing"),
        (world(device_pages="0"), "world: device_pages: must be at least 1, got 0"),
        (world(host_pages=""), "world: host_pages: is missing"),
        (world(host_pages="[4]"),
         "world: host_pages: expected one number, or one for each of 2 ranks, got 1"),
        (world(host_pages="[4, -1]"), "world: host_pages[1]: must be at least 0, got -1"),
        (world(host_pages="99999999"), "world: host_pages: must be at most 1048576"),
        (world(mode='"lazy"'), "world: mode: 'lazy' is not known; allowed: write_through, wr"),
        (world(storage='"s3"'), "world: storage: 's3' is not known; allowed: none, memory, file"),
        (world(policy="1"), "world: policy: expected a text, got an integer"),
        (world(deadline_s="0"), "world: deadline_s: must be more than 0"),
        (world(deadline_s="inf"), "world: deadline_s: must be finite"),
        (world(step_ms="nan"), "world: step_ms: must be"),
        (world(copy_timeout_s='"1"'), "world: copy_timeout_s: expected a number, got a text"),
        (world(tokens='"0..4"'), "world: tokens: unknown key; allowed: tp, pp, lag, page_size"),
        (BASE.replace("window = 12", ""), "world.side_pool 1: window: is missing"),
        (BASE.replace('need = "window"', 'need = "per_page"'),
         "world.side_pool 1: window: goes with need = \"window\" only, not 'per_page'"),
        (BASE.replace('"window"', '"some"'), "side_pool 1: need: 'some' is not known; allowed: "),
        (BASE.replace("[8, 7]", "[8, 7, 6]"), "world.side_pool 1: host_pages: expected one number"),
        (BASE.replace('"swa"', '"a.b"'), "world.side_pool 1: name: must match"),
        (BASE.replace("window = 12", "size = 1"), "side_pool 1: size: unknown key; allowed: name,"),
        (world(side_pool="3").replace("\n[[world.side_pool]]", "\n[other]"), "other: unknown key"),
        (BASE.replace("\n[[do]]", '\n[[world.side_pool]]\nname = "swa"\ndevice_pages = 1\n'
                      'host_pages = 1\nneed = "per_node"\n\n[[do]]', 1),
         "world: side_pool: two pools are named 'swa'"),
    ],
)  # fmt: skip
def test_a_broken_head_or_world_is_named(text: str, complaint: str) -> None:
    assert complaint in broken(text)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('request = "c"', ": op: is missing; allowed: insert, load_back,"),
        ('op = "push"', ": op: 'push' is not known; allowed: insert, load_back, match,"),
        ('op = ["step"]', ": op: ['step'] is not known"),
        ('op = "step"; count = 2', " (step): count: unknown key; allowed: op, ranks, raises, ti"),
        ('op = "step"; number = 2', " (step): number: unknown key; allowed: op, ranks, raises"),
        ('op = "step"; times = 0', " (step): times: must be at least 1"),
        ('op = "step"; times = "2"', " (step): times: expected an integer, got a text"),
        ('op = "step"; times = 99999999', " (step): times: must be at most 1000000"),
        ('op = "drain"; max_steps = -1', " (drain): max_steps: must be at least 1"),
        ('op = "insert"; tokens = "0..4"', " (insert): request: is missing"),
        ('op = "insert"; request = "c"', " (insert): tokens: is missing"),
        ('op = "insert"; request = ""; tokens = "0..4"', "(insert): request: must not be empty"),
        ('op = "insert"; request = "c"; tokens = "0..4"; hold = 1',
         " (insert): hold: expected true or false, got an integer"),
        ('op = "insert"; request = "c"; tokens = 4',
         ' (insert): tokens: expected token ranges like "0..8,100..108", got an integer'),
        ('op = "insert"; request = "c"; tokens = "0-4"',
         " (insert): tokens: '0-4' is not a token range; write it like '0..8'"),
        ('op = "insert"; request = "c"; tokens = ""', "tokens: an insert is of one page of 4"),
        ('op = "insert"; request = "c"; tokens = "0..4,"', "(insert): tokens: '' is not a token"),
        ('op = "insert"; request = "c"; tokens = "-4..4"', "tokens: '-4..4' is not a token range"),
        ('op = "insert"; request = "c"; tokens = "4..4"', "(insert): tokens: '4..4' is empty"),
        ('op = "insert"; request = "c"; tokens = "8..4"', "(insert): tokens: '8..4' is empty"),
        ('op = "insert"; request = "c"; tokens = "0..3"',
         " (insert): tokens: an insert is of one page of 4 tokens at least"),
        ('op = "restart"; ranks = [0]', " (restart): ranks: a run ends, and another begins"),
        ('op = "insert"; request = "c"; tokens = "0..4294967296"', "leaves the 32-bit token ids"),
        ('op = "insert"; request = "c"; tokens = "0..2000000000"', "more than 1048576 tokens"),
        ('op = "load_back"; tokens = "0..4"', " (load_back): request: is missing"),
        ('op = "prefetch"; tokens = "0..4"', " (prefetch): request: is missing"),
        ('op = "finish"', " (finish): request: is missing"),
        ('op = "abort"', " (abort): request: is missing"),
        ('op = "abort"; request = "a"; tokens = "0..4"', " (abort): tokens: unknown key"),
        ('op = "evict"; pages = 1', " (evict): tier: is missing"),
        ('op = "evict"; tier = "device"', " (evict): pages: is missing"),
        ('op = "evict"; tier = "disk"; pages = 1',
         " (evict): tier: 'disk' is not known; allowed: device, host"),
        ('op = "evict"; tier = "host"; pages = -1', " (evict): pages: must be at least 1"),
        ('op = "step"; ranks = [2]', " (step): ranks: rank 2 does not exist; ranks are 0..1"),
        ('op = "step"; ranks = []', " (step): ranks: must not be empty"),
        ('op = "step"; ranks = [0, 0]', " (step): ranks: names a rank twice"),
        ('op = "step"; ranks = 1', " (step): ranks: expected a list, got an integer"),
        ('op = "step"; ranks = [0, -1]', " (step): ranks[1]: must be at least 0"),
        ('op = "step"; raises = "Divergence"', "(step): raises: expected a table, got a text"),
        ('op = "step"; raises = { rank = 1 }', " (step): raises.kind: is missing"),
        ('op = "step"; raises = { kind = "Divergence", who = 1 }',
         " (step): raises.who: unknown key; allowed: kind, rank"),
        ('op = "step"; raises = { kind = "Oops", rank = 1 }',
         " (step): raises.kind: 'Oops' is not known; allowed: BadInput, ConservationBroken,"),
        ('op = "step"; raises = { kind = "Divergence", rank = 2 }',
         " (step): raises.rank: rank 2 does not exist"),
        ('op = "fault"; site = "write"; action = "fail"', " (fault): rank: is missing"),
        ('op = "fault"; rank = 1; action = "fail"', " (fault): site: is missing"),
        ('op = "fault"; rank = 1; site = "write"', " (fault): action: is missing"),
        ('op = "fault"; rank = 2; site = "write"; action = "fail"', "rank: rank 2 does not exist"),
        ('op = "fault"; rank = -1; site = "write"; action = "fail"', "rank: must be at least 0"),
        ('op = "fault"; rank = 1; site = "disk"; action = "fail"',
         " (fault): site: 'disk' does not exist in this world; allowed: device.reserve, host."),
        ('op = "fault"; rank = 1; site = "mamba.host.reserve"; action = "refuse"',
         " (fault): site: 'mamba.host.reserve' does not exist in this world"),
        ('op = "fault"; rank = 1; site = "staging.reserve"; action = "refuse"',
         " (fault): site: 'staging.reserve' does not exist in this world"),
        ('op = "fault"; rank = 1; site = "host.reserve"; action = "fail"',
         " (fault): action: 'fail' is not known at 'host.reserve'; allowed: refuse, short"),
        ('op = "fault"; rank = 1; site = "write"; action = "miss"',
         "action: 'miss' is not known at 'write'; allowed: delay, hang, fail, corrupt"),
        ('op = "fault"; rank = 1; site = "storage.put"; action = "corrupt"', "'corrupt' is not"),
        ('op = "fault"; rank = 1; site = "storage.put"; action = "miss"', "'miss' is not known"),
        ('op = "fault"; rank = 1; site = "storage.exists"; action = "corrupt"', "is not known at"),
        ('op = "fault"; rank = 1; site = "scheduler"; action = "hang"',
         "allowed: skip_step, extra_step, stall, exit, late, diverge"),
        ('op = "fault"; rank = 1; site = "write"; action = "delay"',
         " (fault): steps: is missing; action 'delay' needs it"),
        ('op = "fault"; rank = 1; site = "write"; action = "hang"; steps = 2',
         " (fault): steps: goes with action 'delay' only, not 'hang'"),
        ('op = "fault"; rank = 1; site = "write"; action = "delay"; steps = 0',
         " (fault): steps: must be at least 1"),
        ('op = "fault"; rank = 1; site = "scheduler"; action = "late"', "seconds: is missing"),
        ('op = "fault"; rank = 1; site = "scheduler"; action = "late"; seconds = -1',
         " (fault): seconds: must be more than 0"),
        ('op = "fault"; rank = 1; site = "scheduler"; action = "late"; seconds = inf',
         " (fault): seconds: must be finite"),
        ('op = "fault"; rank = 1; site = "write"; action = "fail"; times = 0',
         " (fault): times: must be at least 1, or -1 for ever, got 0"),
        ('op = "fault"; rank = 1; site = "write"; action = "fail"; after = -1',
         " (fault): after: must be at least 0"),
    ],
)  # fmt: skip
def test_a_broken_entry_is_named(text: str, complaint: str) -> None:
    message = broken(entry(text))
    assert message.startswith("x.toml:27: do 3")
    assert complaint in message


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('disk = { "0..4" = 4 }', "disk: unknown key; allowed: op, ranks, raises, device, host,"),
        ("device = 4", "device: expected a table, got an integer"),
        ('device = { "0..6" = 4 }', 'device."0..6": 6 tokens are not whole pages of 4'),
        ('host = { "0..8" = 6 }', 'host."0..8": 6 tokens are not whole pages of 4'),
        ('storage = { "0..8" = 12 }', 'storage."0..8": 12 tokens of a prefix of 8'),
        ('usable = { "0..8" = -4 }', 'usable."0..8": must be at least 0, got -4'),
        ('usable = { "0..8" = "4" }', 'usable."0..8": expected an integer, got a text'),
        ('usable = { x = 4 }', "usable.\"x\": 'x' is not a token range"),
        ("free = { disk = 4 }", "free.disk: no such pool in this world; allowed: device, host,"),
        ("free = { staging = 4 }", "free.staging: no such pool in this world"),
        ("free = { host = [4, 3, 2] }", "free.host: expected one number, or one for each of 2"),
        ("free = { swa = { host = 3 } }", "free.swa: no such pool"),
        ("pinned = { storage = 1 }", "pinned.storage: is not known; allowed: device, host"),
        ("pinned = { host = true }", "pinned.host: expected an integer, got true or false"),
        ("loaded = { a = 4 }", "loaded.a: no earlier load_back names it"),
        ("loaded = { b = 3 }", "loaded.b: 3 tokens are not whole pages of 4"),
        ("prefetched = { b = 4 }", "prefetched.b: no earlier prefetch names it"),
        ("counters = { commit = 1 }", "counters.commit: is not known; allowed: commits, aborts,"),
        ("counters = { commits = 1.0 }", "counters.commits: expected an integer, got a number"),
        ('right_bytes = "0..4"', "right_bytes: expected a list, got a text"),
        ("right_bytes = [4]", "right_bytes[0]: expected token ranges"),
        ('right_bytes = ["0..4", "0..3"]', "right_bytes[1]: 3 tokens are not whole pages of 4"),
    ],
)  # fmt: skip
def test_a_broken_expectation_is_named(text: str, complaint: str) -> None:
    assert f"x.toml:27: do 3 (expect): {complaint}" in broken(entry('op = "expect"; ' + text))


def test_the_line_is_left_out_where_it_cannot_be_told() -> None:
    text = BASE.replace('"base"', '"""\n[[do]]\n"""') + '\n[[do]]\nop = "push"\n'
    assert broken(text).startswith("x.toml: do 3: op: 'push'")


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'name = "caf\xe9"\n')
    for path, complaint in (
        (tmp_path / "none.toml", "no such file; expected a scenario"),
        (tmp_path, "is a directory; expected a scenario"),
        (latin, "latin.toml:1: is not UTF-8"),
    ):
        with pytest.raises(BadInput) as caught:
            read_scenario(path)
        assert complaint in caught.value.message


RANGES = st.lists(
    st.tuples(st.integers(0, 2**31 - 101), st.integers(1, 100)), min_size=1, max_size=6
)


@given(RANGES)
def test_ranges_are_what_was_written(parts: list[tuple[int, int]]) -> None:
    ranges = tuple((start, start + length) for start, length in parts)
    text = ",".join(f"{start}..{stop}" for start, stop in ranges)
    assert model.parse_ranges(text) == ranges
    tokens = model.expand(ranges)
    assert tokens.dtype == "int32"
    assert tokens.tolist() == [token for start, stop in ranges for token in range(start, stop)]
    assert model.num_tokens(ranges) == tokens.size


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_one_error(text: str) -> None:
    for whole in (text, BASE + text, entry(f'op = "step"; times = {text}')):
        try:
            parse_scenario(whole, "x")
        except BadInput as error:
            complaint = error.message
        else:
            continue
        assert complaint.startswith("x:")
