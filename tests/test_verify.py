"""Histories: real ones hold, and each rule has one that was doctored and is rejected."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpact.harness.cli.main import main
from kvpact.harness.fuzz.run import run_world
from kvpact.harness.scenario.read import parse_scenario
from kvpact.harness.scenario.world import run_sim
from kvpact.harness.verify import headers
from kvpact.harness.verify import history as histories
from kvpact.harness.verify import verify as verifies

Lines = list[list[Any]]
Doctor = Callable[[Lines], None]
FLAGS = "--lanes 4 --limit 40 --device-pages 120 --host-pages 90"


def _write(folder: Path, lines: Lines, rank: int) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"rank{rank}.jsonl").write_text(text)


def _read(folder: Path, rank: int) -> Lines:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journals") / "run"
    flags = f"replay --ranks sim --lag 1 {FLAGS} --journal {folder}"
    assert main(flags.split()) == 0
    return folder


def test_the_history_of_a_simulated_replay_holds(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(history)]) == 0
    assert "holds; 2 ranks" in capsys.readouterr().out
    tags = {line[3] for line in _read(history, 0)}
    assert {"take", "put back", "publish", "unpublish", "serve", "split", "quarantine"} - tags <= {
        "quarantine",
        "split",
    }


@pytest.mark.ranks
def test_the_history_of_a_replay_over_gloo_holds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(f"replay --ranks gloo {FLAGS} --journal {folder}".split()) == 0
    assert main(["verify", str(folder)]) == 0


def test_histories_of_random_worlds_hold(tmp_path: Path) -> None:
    for seed in range(2000, 2012):
        result = run_world(seed, journals=tmp_path)
        assert not result.failures
    assert main(["verify", str(tmp_path)]) == 0


PARTS = """
name = "rank 1 evicts what the others do not"

[world]
tp = 3
page_size = 4
device_pages = 16
host_pages = 16
policy = "reset"

[[do]]
op = "insert"
request = "a"
tokens = "0..16"

[[do]]
op = "drain"

[[do]]
op = "evict"
tier = "device"
pages = 1
ranks = [1]

[[do]]
op = "evict"
tier = "host"
pages = 1

[[do]]
op = "step"
times = 2
"""


def test_logs_that_part_are_right_only_where_all_were_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert not run_sim(parse_scenario(PARTS, "parts.toml"), journals=run).failures
    assert main(["verify", str(run)]) == 0
    assert "epochs; of these 1 parted" in capsys.readouterr().out
    whole = [_read(run, rank) for rank in range(3)]
    for lines in whole:
        for line in lines:
            if line[3] == "sealed":
                line[4] = ["RankStalled", 1]
    without = [[line for line in lines if line[3] != "sealed"] for lines in whole]
    for doctored in (whole, without):
        for rank in range(3):
            _write(run, doctored[rank], rank)
        assert main(["verify", str(run)]) == 1
        assert "prefix: " in capsys.readouterr().out


def test_it_imports_nothing_of_the_code_that_wrote_the_journals() -> None:
    for module in (headers, histories, verifies):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {
            a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
        }
        ours = {name for name in names if name.split(".")[0] == "kvpact"}
        assert ours <= {
            "kvpact.consensus.core.errors",
            "kvpact.consensus.core.files",
            "kvpact.harness.text.console",
            "kvpact.harness.verify.headers",
            "kvpact.harness.verify.history",
        }


# -- doctored --------------------------------------------------------------------------------------


def _first(lines: Lines, tag: str, start: int = 0) -> int:
    return next(i for i in range(start, len(lines)) if lines[i][3] == tag)


def _renumber(lines: Lines) -> None:
    for index, line in enumerate(line for line in lines if line[0] >= 0):
        line[0] = index


def _backup(lines: Lines) -> int:
    """Where the first backup was committed."""
    return next(i for i, one in enumerate(lines) if one[3] == "commit" and one[4][0] == "back_up")


def _drop_a_decision(lines: Lines) -> None:
    del lines[_first(lines, "match", 10)]


def _other_decision(lines: Lines) -> None:
    lines[_first(lines, "match", 10)][4][1] += 1


def _commit_twice(lines: Lines) -> None:
    at = _first(lines, "commit")
    lines.insert(at, list(lines[at]))
    _renumber(lines)


def _commit_unposted(lines: Lines) -> None:
    at = _first(lines, "post")
    serial = next(one[4][1] for one in lines if one[3] == "commit")
    while not (lines[at][3] == "commit" and lines[at][4][1] == serial):
        at = at + 1
    commit = lines.pop(at)
    lines.insert(_first(lines, "reserve"), commit)
    _renumber(lines)


def _commit_more_than_held(lines: Lines) -> None:
    lines[_first(lines, "commit")][4][2] += 1


def _commit_orphan(lines: Lines) -> None:
    """The parent of the first child is refused instead of committed."""
    child = next(
        one for one in lines if one[3] == "open" and one[4][-1] not in ("ends", "ends on commit")
    )
    parent = child[4][-1]
    at = next(i for i, one in enumerate(lines) if one[3] == "commit" and one[4][1] == parent)
    lines[at][3], lines[at][4] = "abort", [lines[at][4][0], parent, "refused"]
    for one in [one for one in lines if one[3] == "publish" and one[4][2] == parent]:
        lines.remove(one)


def _commit_withdrawn(lines: Lines) -> None:
    at = _backup(lines)
    lines.insert(at, [0, 0, lines[at][2], "withdraw", [lines[at][4][1]]])
    _renumber(lines)


def _publish_early(lines: Lines) -> None:
    at = next(i for i, one in enumerate(lines) if one[3] == "publish" and one[4][2] >= 0)
    fact = lines.pop(at)
    serial = fact[4][2]
    before = next(i for i, o in enumerate(lines) if o[3] == "commit" and o[4][1] == serial)
    lines.insert(before, fact)


def _publish_by_nobody(lines: Lines) -> None:
    at = next(i for i, o in enumerate(lines) if o[3] == "publish" and o[4][0] == "host")
    lines[at][4][2] = -1


def _serve_early(lines: Lines) -> None:
    at = next(i for i, o in enumerate(lines) if o[3] == "publish")
    lines.insert(at, [-1, 0, lines[at][2], "serve", [1, lines[at][4][1]]])


def _take_twice(lines: Lines) -> None:
    at = _first(lines, "take")
    lines.insert(at + 1, list(lines[at]))


def _free_twice(lines: Lines) -> None:
    at = _first(lines, "put back")
    lines.insert(at + 1, list(lines[at]))


def _page_in_two_nodes(lines: Lines) -> None:
    at = next(i for i, o in enumerate(lines) if o[3] == "publish")
    fact = lines[at]
    lines.insert(at + 1, [-1, 0, fact[2], "publish", [fact[4][0], 9999, *fact[4][2:]]])


def _slot_at_once(lines: Lines) -> None:
    at = next(i for i, o in enumerate(lines) if o[3] == "end")
    serial = lines[at][4][0]
    slot = next(o[4][3] for o in lines if o[3] == "open" and o[4][2] == serial)
    step = lines[at][2]
    opened = ["pages", 7, 9999, slot, "device", 1, "at least", 1, "ends"]
    lines.insert(at + 1, [0, 0, step - 1, "open", opened])
    _renumber(lines)


def _slot_of_another(lines: Lines) -> None:
    at = _first(lines, "open")
    lines.insert(at + 1, [0, 0, 0, "open", ["pages", 7, 9999, *lines[at][4][3:]]])
    _renumber(lines)


def _end_before_the_copy(lines: Lines) -> None:
    at = _backup(lines)
    serial = lines[at][4][1]
    del lines[next(i for i, o in enumerate(lines) if o[3] == "ended" and o[4][0] == serial)]


def _never_ends(lines: Lines) -> None:
    at = max(i for i, o in enumerate(lines) if o[3] == "end")
    del lines[at:]


def _nothing_went_well(lines: Lines) -> None:
    for line in lines:
        if line[3] == "ended":
            line[4][1] = 0


def _no_facts(lines: Lines) -> None:
    lines[1:] = [line for line in lines[1:] if line[0] >= 0]


def _no_page_moves(lines: Lines) -> None:
    lines[:] = [line for line in lines if line[3] not in ("take", "put back", "limbo")]


def _no_header(lines: Lines) -> None:
    del lines[0]


def _header_of_another_run(lines: Lines) -> None:
    lines[0][4][0] = "another"


def _header_of_another_version(lines: Lines) -> None:
    lines[0][4][2] = "0.0.1"


def _header_of_another_configuration(lines: Lines) -> None:
    lines[0][4][3] = "lag 7"


def _header_of_three_ranks(lines: Lines) -> None:
    lines[0][4][4:] = [0, 1, 2]


def _header_of_no_rank(lines: Lines) -> None:
    lines[0][4][1] = True


def _half_reserved(lines: Lines) -> None:
    at = next(i for i, o in enumerate(lines) if o[3] == "reserve" and o[4][1] > 1)
    lines[at][4][1] -= 1


DOCTORED: list[tuple[str, Doctor]] = [
    ("order", _drop_a_decision),
    ("prefix", _other_decision),
    ("table", _commit_twice),
    ("table", _commit_unposted),
    ("verdict", _commit_more_than_held),
    ("verdict", _commit_orphan),
    ("verdict", _commit_withdrawn),
    ("publish", _publish_early),
    ("publish", _publish_by_nobody),
    ("read", _serve_early),
    ("owner", _take_twice),
    ("owner", _free_twice),
    ("owner", _page_in_two_nodes),
    ("slots", _slot_at_once),
    ("slots", _slot_of_another),
    ("ending", _end_before_the_copy),
    ("closed", _never_ends),
    ("atomic", _half_reserved),
    ("ending", _nothing_went_well),
    ("table", _no_facts),
    ("owner", _no_page_moves),
    ("header", _no_header),
    ("header", _header_of_another_run),
    ("header", _header_of_another_version),
    ("header", _header_of_another_configuration),
    ("header", _header_of_three_ranks),
    ("header", _header_of_no_rank),
]


@pytest.mark.parametrize("rule, doctor", DOCTORED, ids=lambda one: getattr(one, "__name__", one))
def test_a_doctored_history_is_rejected(
    rule: str,
    doctor: Doctor,
    history: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in (0, 1):
        lines = _read(history, rank)
        if rank == 1:
            doctor(lines)
        _write(tmp_path, lines, rank)

    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f": {rule}: " in said, said


def test_what_is_no_journal_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    (tmp_path / "rank0.jsonl").write_text("[1, 2]\n")
    assert main(["verify", str(tmp_path)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_what_a_killed_process_had_not_finished_writing_is_left_out(
    history: Path, tmp_path: Path
) -> None:
    for rank in (0, 1):
        text = (history / f"rank{rank}.jsonl").read_text()
        (tmp_path / f"rank{rank}.jsonl").write_text(text + '[12, 0, 5, "ma')
    assert main(["verify", str(tmp_path)]) == 0


# -- all journals, of one run, and nothing but journals -------------------------------------------


def _judge(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["verify", str(folder)])
    out, err = capsys.readouterr()
    return status, out + err


@pytest.fixture
def copied(history: Path, tmp_path: Path) -> Path:
    """The journals of ranks 0 and 1, to be harmed."""
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.jsonl").write_bytes((history / f"rank{rank}.jsonl").read_bytes())
    return tmp_path


def test_an_empty_journal_proves_nothing(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "rank1.jsonl").write_bytes(b"")
    status, said = _judge(copied, capsys)
    assert (status, "rank1.jsonl: header: the journal is empty" in said) == (1, True), said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_journal_is_missed(
    rank: int, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / f"rank{rank}.jsonl").unlink()
    status, said = _judge(copied, capsys)
    assert (status, "header: there is no such journal" in said) == (1, True), said


def test_one_ranks_journal_in_place_of_anothers_is_seen(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "rank1.jsonl").write_bytes((copied / "rank0.jsonl").read_bytes())
    status, said = _judge(copied, capsys)
    assert (status, "rank1.jsonl: header: it is the journal of rank 0" in said) == (1, True), said


def test_a_journal_of_another_run_with_the_same_flags_is_seen(
    copied: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path_factory.mktemp("again")
    assert main(f"replay --ranks sim --lag 1 {FLAGS} --journal {again}".split()) == 0
    (copied / "rank1.jsonl").write_bytes((again / "rank1.jsonl").read_bytes())
    capsys.readouterr()
    status, said = _judge(copied, capsys)
    assert (status, "they are not of one run" in said) == (1, True), said


def test_no_file_makes_it_wait_or_fall(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO, a deep line and a name with control characters: one clear line each."""
    path = copied / "rank1.jsonl"
    path.unlink()
    os.mkfifo(path)
    wanted = f"kvpact: {path}: is not a regular file; expected a journal\n"
    assert _judge(copied, capsys) == (2, wanted)
    path.unlink()
    path.write_text("[" * 100_000 + "\n")
    status, said = _judge(copied, capsys)
    assert (status, said.count("\n")) == (2, 1)
    assert "line 1: no line of a journal: nested too deeply" in said
    lines = _read(copied, 0)
    lines[0][4][0] = "\x1b[31mred\x9b"
    _write(copied, lines, 0)
    _write(copied, [[-1, 0, 0, "journal", ["x", 1, "v", "c", 0, 1]]], 1)
    status, said = _judge(copied, capsys)
    assert status == 1
    assert "\\x1b[31mred\\x9b" in said
    assert not {"\x1b", "\x9b"} & set(said)


def test_what_was_open_when_the_ranks_were_restarted_need_not_have_ended(
    history: Path, tmp_path: Path
) -> None:
    for rank in range(2):
        lines = _read(history, rank)
        _never_ends(lines)
        _write(tmp_path, lines, rank)
    assert "never ended, and the epoch was not closed" in verifies.complaint(str(tmp_path))
    assert verifies.complaint(str(tmp_path), is_cut=True) == ""


def test_a_world_with_a_restart_on_the_way_has_a_history_that_holds(tmp_path: Path) -> None:
    assert run_world(170902002895973, weighted=True, journals=tmp_path).failures == []
