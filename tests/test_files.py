"""Files that somebody names: one clear line for whatever is wrong with them, at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.table import Table

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.files import open_regular
from kvpact.harness.cli.main import main
from kvpact.harness.text.console import PlainConsole, plain
from kvpact.harness.text.files import MAX_DEPTH, parse_toml, read_json, read_text

ROOT = Path(__file__).parent.parent

#: Every command that reads a file; ``{}`` is the file, of whatever kind it expects.
READERS = (
    "explain {}",
    "scenario {}",
    "replay {} --ranks sim",
    "soak --faults {}",
    "soak --workload {}",
    "soak --trace {} --steps 5",
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _deep(path: Path) -> None:
    path.write_text("a = " + "[" * 50_000 + "]" * 50_000)


def _deep_json(path: Path) -> None:
    path.write_text("[" * 50_000 + "]" * 50_000)


def _controls(path: Path) -> None:
    path.write_text("\x1b]0;owned\x07 = 1\n")


@pytest.mark.parametrize("make", [_fifo, _deep, _deep_json, _controls])
@pytest.mark.parametrize("words", READERS)
def test_every_reader_says_one_line(
    words: str, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[31mfile"
    make(path)
    assert main(words.replace("{}", str(path)).split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvpact: ")
    assert "\\x1b[31mfile" in err
    assert "\x1b" not in err


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "pipe", "is not a regular file; expected a letter"),
        (Path("/dev/zero"), "is not a regular file; expected a letter"),
        (tmp_path, "is a directory; expected a letter"),
        (tmp_path / "nobody", "no such file; expected a letter"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(BadInput) as caught:
            open_regular(path, what="a letter")
        assert says in caught.value.message


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("text")
    (tmp_path / "link").symlink_to("real")
    assert read_text(tmp_path / "link", what="a text") == "text"


def test_depth_has_a_bound_that_ordinary_files_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    read_json(path, what="a list")
    path.write_text("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    with pytest.raises(BadInput, match=f"is nested more than {MAX_DEPTH} deep; expected a list"):
        read_json(path, what="a list")
    with pytest.raises(BadInput, match="nested"):
        parse_toml("a = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "x.toml")


def test_control_characters_are_written_out() -> None:
    assert plain("a\x1b[2J\tb\nc\x7f\x9b\r\u202ed\udc80") == (
        "a\\x1b[2J\tb\nc\\x7f\\x9b\\x0d\\u202ed\\udc80"
    )


def test_a_console_obeys_nothing_that_it_prints() -> None:
    out = StringIO()
    console = PlainConsole(
        file=out, force_terminal=True, color_system="standard", width=60, highlight=False
    )
    table = Table("\x1b[5mname")
    table.add_row("\x9b2J")
    console.print(table)
    console.print("\x1b]0;title\x07", markup=False, style="red")
    console.rule("\x1b[0m")
    said = out.getvalue()
    for text in ("\\x1b[5mname", "\\x9b2J", "\\x1b]0;title\\x07", "\\x1b[0m"):
        assert text in said
    assert "\x1b[31m" in said, "its own colours stay"
    assert not {"\x07", "\x9b"} & set(said)
    assert not re.findall(r"\x1b(?!\[[0-9;]*m)", said)


def test_the_harness_prints_through_nothing_else() -> None:
    for path in (ROOT / "harness").rglob("*.py"):
        if path.name != "console.py":
            assert not re.findall(r"(?<!\w)Console\([^)]", path.read_text()), path
