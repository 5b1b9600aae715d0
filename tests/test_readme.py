"""What README.md shows is true: its files are written, its commands run, their output compared.

A block whose fence names a file (```python two_ranks.py) is that file. In a ``console`` block each
line that starts with ``$ `` is run, and what follows is its output; ``...`` stands for anything,
and the width of a table does not count.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = {name: text for _, name, text in BLOCKS if name}
CONSOLE = [text for kind, _, text in BLOCKS if kind == "console"]
COMMANDS: list[tuple[str, str]] = [
    (command, output)
    for text in CONSOLE
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
]
LIMIT_S = 100.0


def test_every_block_is_checked() -> None:
    assert {"two_ranks.py", "own_pools.py", "skipped_step.toml"} <= set(FILES)
    unchecked = [kind for kind, name, _ in BLOCKS if not name and kind != "console"]
    assert unchecked == ["sh", "text"]  # the two scripts, and the picture of the step
    assert len(COMMANDS) >= len(CONSOLE) >= 5


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", "scripts/setup"])
def test_the_scripts_it_names_are_there(script: str) -> None:
    assert script in README
    assert os.access(ROOT / script, os.X_OK)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.ranks
@pytest.mark.parametrize("command, output", COMMANDS, ids=[c.split(" --")[0] for c, _ in COMMANDS])
def test_commands_print_what_it_says(command: str, output: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = subprocess.run(
        _argv(command),
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name != "RES_OPTIONS"},
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
            "TERM": "dumb",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    printed = run.stdout + run.stderr
    assert run.returncode == 0, printed
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(output, printed, flags), printed


def _argv(command: str) -> list[str]:
    """The command with this interpreter and this checkout, whatever is on the path."""
    first, *rest = shlex.split(command)
    start = {
        "python": [sys.executable],
        "kvpact": [sys.executable, "-m", "kvpact"],
    }[first]
    return [*start, *rest]
