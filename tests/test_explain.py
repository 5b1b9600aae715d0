"""``kvpact explain``: the story of a failed run, from what the other commands write."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.cli import main as cli
from kvpact.harness.cli.explain import explain, incidents_in
from kvpact.harness.drive.drive import Options, finish
from kvpact.harness.drive.replay import simulate
from kvpact.harness.drive.report import read_report
from kvpact.harness.drive.verdict import conclude
from kvpact.harness.faults.plan import FaultLine, Plan
from kvpact.harness.rank.rank import Rank
from kvpact.harness.replay import rank as replay_rank
from kvpact.harness.replay.config import ReplayConfig
from kvpact.harness.scenario.read import parse_scenario
from kvpact.harness.scenario.world import run_sim
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.text.console import PlainConsole

GOLDEN = Path(__file__).with_name("explain_divergence.txt")

WORLD = """\
name = "one rank alone"
[world]
tp = 3
page_size = 4
device_pages = 16
host_pages = 16
policy = "{policy}"
deadline_s = 1.0
[[do]]
op = "insert"
request = "a"
tokens = "0..16"
[[do]]
op = "drain"
{trouble}
[[do]]
op = "step"
times = 3
"""
ALONE = """\
[[do]]
op = "insert"
request = "b"
tokens = "50..58"
ranks = [1]
"""
FAULT = """\
[[do]]
op = "fault"
rank = 2
site = "scheduler"
action = "{action}"
"""


def told(tmp_path: Path, trouble: str, policy: str = "raise", width: int = 100) -> str:
    """Run it in the simulator, write the report, explain it as plain text."""
    result = run_sim(parse_scenario(WORLD.format(trouble=trouble, policy=policy), "alone.toml"))
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode([result]))
    out = StringIO()
    assert explain(str(path), around=3, console=Console(file=out, width=width)) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_the_golden_text(tmp_path: Path) -> None:
    """What a person reads. After a change that is meant: look at it, and write it to the file."""
    assert told(tmp_path, ALONE) == GOLDEN.read_text()


def test_plain_text_has_no_escapes(tmp_path: Path) -> None:
    assert "\x1b" not in told(tmp_path, ALONE)


def test_a_terminal_gets_colours(tmp_path: Path) -> None:
    told(tmp_path, ALONE)
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system="standard")
    explain(str(tmp_path / "report.json"), console=console)
    assert "\x1b[1;31mDivergence" in out.getvalue()


def test_a_stall_says_who_was_waited_for(tmp_path: Path) -> None:
    text = told(tmp_path, FAULT.format(action="stall"))
    assert "RankStalled: rank 2 did not come" in text
    assert "waited in vain" in text
    assert "did not report" in text
    assert "rank 2 was last seen at step" in text
    assert "paused(reason)" in " ".join(text.split())


def test_a_dead_rank_is_another_story(tmp_path: Path) -> None:
    text = " ".join(told(tmp_path, FAULT.format(action="exit")).split())
    assert "rank 2 ended" in text
    assert "its process is gone" in text
    assert "start the replica again" in text


def test_what_followed_is_told(tmp_path: Path) -> None:
    text = told(tmp_path, FAULT.format(action="diverge"), policy="reset")
    assert "what followed: all ranks dropped their caches and went on in a new epoch" in text
    assert "What the run says of itself" not in text, "nothing failed"


def test_the_fullest_telling_of_an_incident_is_taken(tmp_path: Path) -> None:
    told(tmp_path, ALONE)
    (result,) = json.loads((tmp_path / "report.json").read_text())
    (full,) = result["incidents"]
    bare = {**full, "rank": 2, "reports": full["reports"][:1]}
    (found,) = incidents_in({"ranks": [{"incident": bare}, {"incident": full}, {"incident": None}]})
    assert isinstance(found, Incident)
    assert (found.rank, len(found.reports)) == (full["rank"], 3)


def test_a_report_without_an_incident_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fine.json"
    path.write_text(json.dumps({"verdict": "agree", "failures": []}))
    assert cli.main(["explain", str(path)]) == 0
    assert "fine.json: no incident in it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "no such file; expected a report of kvpact in JSON"),
        ("{", "is not JSON"),
        ("[1, 2]", "no report of kvpact"),
        ('"text"', "no report of kvpact"),
        ('{"a": 1}', "no report of kvpact"),
        ('{"rank": 0, "epoch": 0, "seal": {}, "reports": []}', "an incident in it cannot be read"),
        ('{"rank": 0, "epoch": 0, "seal": [], "reports": [7]}', "an incident in it cannot be read"),
    ],
)
def test_bad_input_is_one_clear_line(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert str(path) in err


def test_around_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "x.json", "--around", "0"]) == 2
    assert "--around: must be at least 1" in capsys.readouterr().err


def test_a_folder_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a directory"):
        explain(str(tmp_path))


# -- each command that writes a report: run, fail, tell at once, explain from the file -------------


def explained(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``kvpact explain`` says of a report, its lines joined."""
    capsys.readouterr()
    assert cli.main(["explain", str(path)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_failed_scenario_is_told_at_once_and_again_from_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "alone.toml", tmp_path / "report.json"
    path.write_text(WORLD.format(trouble=ALONE, policy="raise"))
    assert cli.main(["scenario", str(path), "--json", str(report)]) == 1
    at_once = capsys.readouterr().out
    for text in (at_once, explained(report, capsys)):
        assert "Divergence" in text
        assert "Journals of all ranks around the first difference" in text


def test_a_failed_replay_is_told_at_once_and_again_from_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = replay_rank._sim_rank

    def faulty(config: ReplayConfig, rank: int, *rest: Any) -> Rank:
        made = make(config, rank, *rest)
        if rank == 1:
            made.cache.journal.note("stray", 7)
        return made

    monkeypatch.setattr(replay_rank, "_sim_rank", faulty)
    report = tmp_path / "report.json"
    assert cli.main(f"replay --ranks sim --limit 20 --json {report}".split()) == 1
    at_once = capsys.readouterr().out
    for text in (at_once, explained(report, capsys)):
        assert "Divergence" in text
        assert "stray 7" in text


@pytest.mark.parametrize("policy, status", [("raise", 10), ("reset", 0)])
def test_a_soak_is_explained_from_its_report(
    policy: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The soak of all ranks in this process: the same loop, gathering and reporting."""
    line = FaultLine(site="scheduler", action="diverge", ranks=(1,), at_step=60)
    config = SoakConfig(steps=200, plan=Plan(fault=(line,)), policy=policy)  # pyright: ignore[reportArgumentType]
    gather = simulate(config)
    found = conclude(gather, is_stopped=False)
    assert finish(gather, found, Options(out=str(tmp_path)), PlainConsole()).status == status
    at_once = capsys.readouterr().out
    assert ("incident 1 of 1" in at_once) == bool(status), "what was survived is in the report only"
    assert len(read_report(str(tmp_path)).incidents) == 1
    text = explained(tmp_path / "report.json", capsys)
    assert "incident 1 of 1" in text
    assert "Journals of all ranks around the first difference" in text
    assert ("went on in a new epoch" in text) == (policy == "reset")


def test_a_soak_in_which_nobody_gets_on_says_who_waits_for_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 refuses every device page: all agree, and no request finishes."""
    line = FaultLine(site="device.reserve", action="refuse", ranks=(1,), at_step=30, times=-1)
    gather = simulate(SoakConfig(steps=100_000, plan=Plan(fault=(line,))))
    found = conclude(gather, is_stopped=False)
    assert finish(gather, found, Options(out=str(tmp_path)), PlainConsole()).verdict == "hang"
    at_once = " ".join(capsys.readouterr().out.split())
    for text in (at_once, explained(tmp_path / "report.json", capsys)):
        assert "no request has finished for 30 s" in text
        assert "waits for its admission, pending" in text
        assert "open: load_back" in text
        assert "loads since a request last finished: 0 committed" in text
        assert " aborted" in text
