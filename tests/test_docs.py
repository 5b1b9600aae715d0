"""The documents say what the code does: diagram, journal, recount, names of the facade."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.harness.scenario import model as scenario_model
from kvpact.harness.scenario.read import read_scenario
from kvpact.harness.scenario.world import run_sim

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "docs" / "design.md").read_text()
ENGINES = (ROOT / "docs" / "engines.md").read_text()
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
LIMIT_S = 100.0


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_diagram_is_what_the_table_says() -> None:
    assert run("scripts/draw_transitions") in DESIGN, "scripts/draw_transitions prints another one"


def noted_tags() -> set[str]:
    """The first argument of every call of ``note`` and ``fact`` that is written out."""
    return {
        call.args[0].value
        for package in ("consensus", "cache")
        for path in (ROOT / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"note", "_note", "fact"}
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def test_every_tag_of_the_journal_is_explained() -> None:
    table = DESIGN.partition("| tag | values | when |")[2].partition("\n\n")[0]
    explained = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)

    assert len(set(explained)) == len(explained)
    assert set(explained) == noted_tags(), "bring the table of tags in docs/design.md up to date"


@pytest.mark.parametrize("host_pages", ["60", "0"])
def test_the_report_can_be_recounted_from_any_journal(host_pages: str, tmp_path: Path) -> None:
    (recount,) = re.findall(r"^```python recount.py\n(.*?)^```$", DESIGN, re.MULTILINE | re.DOTALL)
    (tmp_path / "recount.py").write_text(recount)
    flags = f"--ranks sim --lanes 8 --limit 120 --device-pages 120 --host-pages {host_pages}"
    out = ("--journal", "journals", "--json", "report.json")
    run("-m", "kvpact", "replay", *flags.split(), *out, cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "agree"
    assert report["commits"]

    for rank in range(2):
        counted = json.loads(run("recount.py", f"journals/rank{rank}.jsonl", cwd=tmp_path))
        counted["hits"]["storage"] = 0
        assert counted == {name: report[name] for name in counted}


def test_the_layouts_of_three_engines_print_what_stands_there(tmp_path: Path) -> None:
    (layouts,) = re.findall(r"^```python layouts.py\n(.*?)^```$", ENGINES, re.MULTILINE | re.DOTALL)
    (tmp_path / "layouts.py").write_text(layouts)
    printed = run("layouts.py", cwd=tmp_path)
    said = ENGINES.partition(layouts)[2].partition("It prints:\n\n")[2].partition("\n\n")[0]
    assert printed.splitlines() == [line.strip() for line in said.splitlines()]


def test_the_story_in_the_scenarios_document_is_that_of_its_file(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "scenarios.md").read_text()
    (tmp_path / "full.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    told = run("-m", "kvpact", "scenario", "--trace", "full.toml", cwd=tmp_path)
    said = text.partition("```text\n")[2].partition("```")[0]
    assert said in told


def test_every_call_of_the_facade_is_listed() -> None:
    table = ENGINES.partition("| call | returns | moment |")[2].partition("\n\n")[0]
    listed = set(
        re.findall(r"`(\w+)\(", "\n".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    )
    offered = {name for name in vars(HierarchicalCache) if not name.startswith("_")}

    assert listed == offered, "bring the table of calls in docs/engines.md up to date"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_are_there(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
    for target in re.findall(
        r"`((?:consensus|cache|harness|tests|scripts)/[\w/]+(?:\.\w+)?)`", text
    ):
        assert (ROOT / target).exists(), target


def test_every_word_of_the_scenario_language_is_explained(tmp_path: Path) -> None:
    text = (ROOT / "docs/scenarios.md").read_text()
    words = {field.encode_name for field in msgspec.structs.fields(scenario_model.World)}
    for entry in get_args(scenario_model.Do):
        words.add(str(entry.__struct_config__.tag))
        words |= {field.encode_name for field in msgspec.structs.fields(entry)} - {"number"}
    words |= {*scenario_model.COUNTERS, *scenario_model.SCHEDULER_ACTIONS}
    words |= {*scenario_model.POOL_ACTIONS, *scenario_model.COPY_ACTIONS}
    words |= set(scenario_model.STORAGE_ACTIONS)
    missing = {word for word in words if f"`{word}`" not in text and f"`{word} = " not in text}
    assert missing == set()
    example = text.partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "example.toml"
    path.write_text(example)
    assert run_sim(read_scenario(path)).failures == []
