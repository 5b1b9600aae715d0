"""The planted faults apply to the tree as it is; scripts/planted shows that all are caught."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/planted/faults.toml").read_text())[
    "fault"
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_it_applies_at_exactly_one_place(fault: dict[str, Any]) -> None:
    text = (ROOT / fault["file"]).read_text()
    assert text.count(fault["old"]) == 1, f"{fault['file']} has changed: bring the fault up to date"
    compile(text.replace(fault["old"], fault["new"]), fault["file"], "exec")
    for check in fault["checks"]:
        test = ROOT / f"tests/test_{check.removeprefix('ranks:')}.py"
        assert check == "fuzz" or test.exists(), check


def test_there_are_enough_and_none_twice() -> None:
    names = [fault["name"] for fault in FAULTS]
    assert len(set(names)) == len(names) >= 25


def test_a_planted_fault_is_caught_and_named() -> None:
    command = [sys.executable, str(ROOT / "scripts/planted"), "--only", "a refund twice"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 caught" in done.stdout
    assert done.stdout.startswith("ledger ")
