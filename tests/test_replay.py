"""The main job: a trace through the caches of all ranks, and figures that follow from journals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpact.harness.cli import main as cli
from kvpact.harness.trace.conversations import WorkloadConfig, generate, shipped_trace, write_trace
from kvpact.harness.trace.mooncake import TraceRequest, read_trace, trace_stats

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
LIMIT = 96
BLOCK_TOKENS = 512

#: What a replay's table says must not depend on how its ranks run.
SAME = (
    "requests",
    "blocks",
    "pages",
    "hits",
    "steps",
    "collectives",
    "commits",
    "aborts",
    "retries",
    "at_once",
    "asked",
    "rounds",
    "evicted",
)


def replay(
    out: Path, *flags: object, trace: Path | None = None, status: int = 0
) -> tuple[dict[str, Any], Path]:
    """Run the command; its JSON, and the folder of its journals."""
    words = [str(flag) for flag in flags]
    report, journals = out / "report.json", out / "journals"
    path = trace or shipped_trace()
    ended = cli.main(
        ["replay", str(path), *words, "--json", str(report), "--journal", str(journals)]
    )
    assert ended == status
    return json.loads(report.read_text()), journals


def pages(device: int, host: Sequence[int], page_size: int = BLOCK_TOKENS) -> list[str]:
    """Flags for pools of so many blocks, the host's of unequal size."""
    factor = BLOCK_TOKENS // page_size
    hosts = ",".join(str(count * factor) for count in host)
    device_pages = str(device * factor)
    return ["--page-size", str(page_size), "--device-pages", device_pages, "--host-pages", hosts]


# -- an independent reading of the journals: json, and nothing of kvpact ---------------------------


def read_journal(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def decisions(entries: list[list[Any]]) -> list[list[Any]]:
    """What all ranks decided; facts of one rank carry the index -1."""
    return [entry for entry in entries if entry[0] >= 0]


def recompute(entries: list[list[Any]], page_size: int) -> dict[str, Any]:
    """The figures of a replay, from one rank's journal alone."""
    per_block = BLOCK_TOKENS // page_size
    found: Counter[str] = Counter()
    commits: Counter[str] = Counter()
    aborts: Counter[str] = Counter()
    evicted = Counter({"device": 0, "host": 0})
    posts = [values[0] for _, _, _, tag, values in entries if tag == "post"]
    rounds = len(posts) - len(set(posts) - {0})  # a round has the iteration of the step before it
    for _, _, _, tag, values in entries:
        found[tag] += 1
        match tag:
            case "commit":
                commits[values[0]] += 1
            case "abort":
                kind, _, cause = values
                aborts[f"{kind}: {cause}"] += 1
            case "no room":
                aborts["no room"] += 1
            case "evict":
                evicted[values[0]] += values[2]
            case "finish":
                _, prompt, device, host = values
                found["pages"] += prompt
                found["device hits"] += device
                found["host hits"] += host
            case _:
                pass
    return {
        "requests": found["finish"],
        "blocks": found["pages"] // per_block,
        "pages": found["pages"],
        "hits": {
            "device": found["device hits"] // per_block,
            "host": found["host hits"] // per_block,
            "storage": 0,
        },
        "steps": max(step for _, _, step, _, _ in entries),
        "collectives": found["post"],
        "commits": dict(commits),
        "aborts": dict(aborts),
        "retries": found["admit again"] + found["not admitted"],
        "at_once": found["allocate"],
        "asked": found["admit"] - found["allocate"],
        "rounds": rounds,
        "evicted": dict(evicted),
    }


def check(report: dict[str, Any], journals: Path) -> None:
    """The verdict, one collective a step, equal decisions, and every figure from each journal."""
    assert report["verdict"] == "agree"
    assert report["failures"] == []
    assert report["collectives_per_step"] == 1.0
    paths = sorted(journals.glob("*.jsonl"))
    assert len(paths) == report["num_ranks"]
    ranks = [read_journal(path) for path in paths]
    for entries in ranks:
        assert recompute(entries, report["page_size"]) == {key: report[key] for key in SAME}
        own = decisions(entries)
        assert own == decisions(ranks[0])
        assert [entry[0] for entry in own] == list(range(len(own)))


# -- the twin -------------------------------------------------------------------------------------


def block_lru(requests: list[TraceRequest], capacity: int) -> float:
    """Hit rate of an LRU over blocks that knows no tree, and drops one block at a time."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for request in requests:
        still = True
        for block in request.hash_ids:
            still = still and block in kept
            hits += still
            kept[block] = None
            kept.move_to_end(block)
            if len(kept) > capacity:
                kept.popitem(last=False)
        total += len(request.hash_ids)
    return hits / total


# -- simulated ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("page_size", [512, 128])
def test_sim(lag: int, lanes: int, page_size: int, tmp_path: Path) -> None:
    flags = [*pages(60, (90, 70), page_size), "--lag", lag, "--lanes", lanes]
    report, journals = replay(tmp_path, "--ranks", "sim", *flags, "--limit", LIMIT)
    check(report, journals)
    requests = read_trace(shipped_trace(), limit=LIMIT)
    assert report["requests"] == LIMIT
    assert report["blocks"] == sum(len(request.hash_ids) for request in requests)
    # The world is tight enough that every path is taken.
    assert report["hits"]["device"] > 0
    assert report["hits"]["host"] > 0
    assert report["evicted"]["device"] > 0
    assert report["evicted"]["host"] > 0
    assert report["commits"]["back_up"] > 0
    assert report["commits"]["load_back"] > 0
    assert report["commits"]["pages"] >= LIMIT


def test_stages(tmp_path: Path) -> None:
    flags = ["--tp", 1, "--pp", 2, *pages(60, (90, 70)), "--limit", LIMIT]
    report, journals = replay(tmp_path, "--ranks", "sim", *flags)
    check(report, journals)
    assert (report["num_ranks"], report["lag"]) == (2, 2)


@pytest.mark.parametrize("flags", [["--host-pages", "0"], ["--device-pages", "26", "--lanes", "8"]])
def test_without_a_host_and_with_too_few_pages(flags: list[str], tmp_path: Path) -> None:
    base = ["--ranks", "sim", *pages(60, (90, 70)), "--limit", LIMIT]
    report, journals = replay(tmp_path, *base, *flags)
    check(report, journals)
    assert (report["hits"]["host"] > 0) == ("0" not in flags)
    assert report["retries"] == 0  # who finds no room waits in line


def test_who_waits_in_line_never_tries_twice_and_a_lag_costs_no_more_than_itself(
    tmp_path: Path,
) -> None:
    """Far too few pages for so many lanes: each link of the longest chain waits for one verdict."""
    base = ["--ranks", "sim", *pages(26, (90, 70)), "--lanes", "8", "--limit", LIMIT]
    steps: list[int] = []
    for lag in (0, 1, 2):
        (tmp_path / str(lag)).mkdir()
        report, journals = replay(tmp_path / str(lag), *base, "--lag", lag)
        check(report, journals)
        assert report["retries"] == 0
        assert report["aborts"] == {}
        steps.append(report["steps"])
    # Nobody waits behind more than all the others that ran one after the other without a lag.
    assert steps[0] < LIMIT
    assert steps[1] <= 2 * steps[0] + 2
    assert steps[2] <= 3 * steps[0] + 4


def test_a_headroom_kept_filled_makes_extra_rounds_rare(tmp_path: Path) -> None:
    """In write-back, where pages that have to be made free first take some steps."""
    base = ["--ranks", "sim", "--mode", "write_back", *pages(400, (400, 380))]
    found: list[dict[str, Any]] = []
    for name, flags in {"always": ["--decide"], "rarely": ["--decide", "--headroom", 80]}.items():
        (tmp_path / name).mkdir()
        report, journals = replay(tmp_path / name, *base, *flags)
        check(report, journals)
        found.append(report)
    always, rarely = found
    assert (always["at_once"], always["rounds"] > 50) == (0, True)
    assert rarely["rounds"] <= 5
    assert rarely["at_once"] > 50 * rarely["asked"]
    assert abs(always["hit_rate"] - rarely["hit_rate"]) < 0.05


def test_a_lag_is_over_with_an_extra_round(tmp_path: Path) -> None:
    base = ["--ranks", "sim", "--lag", 3, *pages(100, (90, 70)), "--limit", LIMIT]
    (tmp_path / "waits").mkdir()
    waits, _ = replay(tmp_path / "waits", *base)
    decides, journals = replay(tmp_path, *base, "--decide")
    check(decides, journals)
    assert decides["rounds"] > 0
    assert decides["steps"] - decides["rounds"] < waits["steps"]


def test_the_seed_changes_nothing_that_counts(tmp_path: Path) -> None:
    """It draws only in which order the simulated ranks go on."""
    found: list[dict[str, Any]] = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        flags = ["--ranks", "sim", *pages(60, (90, 70)), "--limit", 48, "--seed", seed]
        report, _ = replay(tmp_path / str(seed), *flags)
        found.append({key: report[key] for key in SAME})
    assert found[0] == found[1]


def test_unbounded_hits_are_exactly_those_of_the_trace(tmp_path: Path) -> None:
    flags = ["--ranks", "sim", "--tp", 1, "--lanes", 1, "--host-pages", 0, "--device-pages", 5000]
    report, journals = replay(tmp_path, *flags)
    check(report, journals)
    stats = trace_stats(read_trace(shipped_trace()))
    assert report["hits"] == {"device": stats.num_hits, "host": 0, "storage": 0}
    assert report["blocks"] == stats.num_blocks
    assert report["evicted"] == {"device": 0, "host": 0}


@pytest.mark.parametrize("is_generated", [False, True])
@pytest.mark.parametrize("capacity, page_size", [(150, 512), (400, 512), (150, 128)])
def test_lru_is_within_a_point_of_an_lru_over_blocks(
    is_generated: bool, capacity: int, page_size: int, tmp_path: Path
) -> None:
    path = shipped_trace()
    if is_generated:
        path = tmp_path / "made.jsonl"
        write_trace(path, generate(WorkloadConfig(seed=11, lanes=24, turns=6, lanes_per_group=4)))
    flags = ["--ranks", "sim", "--tp", 1, "--lanes", 1, *pages(capacity, (0,), page_size)]
    report, _ = replay(tmp_path, *flags, trace=path)
    assert report["verdict"] == "agree"
    assert abs(report["hit_rate"] - block_lru(read_trace(path), capacity)) <= 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, hits, blocks, capacity",
    [
        ("conversation_trace.jsonl", 105_710, 288_500, 190_000),
        ("synthetic_trace.jsonl", 77_953, 121_877, 50_000),
    ],
)
def test_real_traces_hit_exactly(
    name: str, hits: int, blocks: int, capacity: int, tmp_path: Path
) -> None:
    """Slow: about 30 s together. Every block of a real trace, one page each, none evicted."""
    trace = SHARED / name
    if not trace.is_file():
        pytest.skip(f"{trace} is absent: the real traces do not ship with the project")
    flags = ["--ranks", "sim", "--tp", "1", "--lanes", "1", "--host-pages", "0"]
    report = tmp_path / "report.json"
    words = [*flags, "--device-pages", str(capacity), "--json", str(report)]
    assert cli.main(["replay", str(trace), *words]) == 0
    found = json.loads(report.read_text())
    assert (found["hits"]["device"], found["blocks"]) == (hits, blocks)
    assert found["evicted"] == {"device": 0, "host": 0}


# -- real processes -------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*pages(60, (90, 70)), "--lanes", "4"], id="lag0"),
        pytest.param([*pages(60, (90, 70), 128), "--lanes", "1", "--lag", "1"], id="lag1-pages128"),
        pytest.param(["--tp", "1", "--pp", "2", *pages(60, (90, 70))], id="stages-lag2"),
        pytest.param([*pages(2000, (4000, 3900)), "--lag", "2"], id="lag2-roomy"),
    ],
)
def test_gloo_does_what_sim_does(
    flags: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found: dict[str, dict[str, Any]] = {}
    written: dict[str, list[list[Any]]] = {}
    for ranks in ("gloo", "sim"):
        (tmp_path / ranks).mkdir()
        report, journals = replay(tmp_path / ranks, "--ranks", ranks, *flags, "--limit", LIMIT)
        check(report, journals)
        found[ranks] = report
        written[ranks] = decisions(read_journal(journals / "rank0.jsonl"))
    gloo, sim = found["gloo"], found["sim"]
    for key in ("requests", "blocks", "pages"):
        assert gloo[key] == sim[key], key
    if "roomy" not in request.node.name:
        # How long a real copy pins its pages is a fact of the machine; it moves evictions a little.
        assert abs(gloo["hit_rate"] - sim["hit_rate"]) <= 0.05
        assert gloo["commits"].keys() == sim["commits"].keys()
        return
    for key in ("hits", "commits", "aborts", "evicted"):
        assert gloo[key] == sim[key], key
    kinds = ("match", "insert", "finish", "commit", "abort")
    calls = {
        ranks: [entry[3:] for entry in entries if entry[3] in kinds]
        for ranks, entries in written.items()
    }
    assert calls["gloo"] == calls["sim"]


@pytest.mark.ranks
def test_a_killed_rank_ends_the_replay_and_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    write_trace(trace, generate(WorkloadConfig(lanes=60, turns=20)))
    journals = tmp_path / "journals"
    words = [str(trace), "--lanes", "1", "--limit", "1000", "--journal", str(journals)]
    command = [sys.executable, "-m", "kvpact", "replay", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            ranks = _running(process, journals)
            os.kill(ranks[1], signal.SIGKILL)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "failed" in out
    assert "rank 1" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def _running(process: subprocess.Popen[str], journals: Path) -> list[int]:
    """The pids of the ranks, by rank, once both are far into the trace."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        assert process.poll() is None, process.communicate()
        written = list(journals.glob("*.jsonl"))
        if len(written) == 2 and all(path.stat().st_size for path in written):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            ranks = sorted(int(pid) for pid in children.split())
            assert len(ranks) == 2
            return ranks
        time.sleep(0.02)
    raise AssertionError("the replay did not get on its way")


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("{0}/broken.jsonl", "broken.jsonl:3: "),
        ("{0}/none.jsonl", "none.jsonl: no such file; expected a trace"),
        ("--device-pages 10", "--device-pages: request "),
        ("--device-pages 2048,15", "pages of 512 tokens, the smallest device pool has 15"),
        ("--tp 2 --pp 2 --host-pages 9,9,9", "one for each of 4 ranks, got 3"),
        ("--tp 1 --pp 2 --decide", "--decide: would deadlock"),
        ("--headroom 2048", "--headroom: must be between 0 and 2047, got 2048"),
        ("--headroom 2040", "has 8 beside a headroom of 2040"),
        ("--journal {0}/others", "rank7.jsonl is of another run, with more ranks"),
        ("--json {0}", "is a directory; expected a file to write"),
        ("--json {0}/no/out.json", "its parent directory does not exist"),
        ("--journal {0}/file", "file is not a directory"),
        ("--journal {0}/taken", "taken/rank1.jsonl cannot be written: Is a directory"),
        ("--json {0}/" + 300 * "x", "cannot be written: File name too long"),
    ],
)
@pytest.mark.parametrize("ranks", ["sim", "gloo"])
def test_bad_input_is_one_line_and_status_2(
    flags: str, complaint: str, ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shipped_trace().read_text().splitlines(keepends=True)
    (tmp_path / "broken.jsonl").write_text("".join(lines[:2]) + lines[2][:-10] + "\n")
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "rank1.jsonl").mkdir(parents=True)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "rank7.jsonl").touch()
    words = flags.format(tmp_path).split()
    assert cli.main(["replay", *words, "--ranks", ranks]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvpact: ")
    assert err.count("\n") == 1
    assert complaint in err
