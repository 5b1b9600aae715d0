"""docs/tour.md is true: its files and tests exist, its stories and pictures are the code's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOUR = (ROOT / "docs" / "tour.md").read_text()
STORIES = "".join(path.read_text() for path in sorted((ROOT / "tests" / "stories").glob("*.txt")))
PACKAGES = ("consensus", "cache", "harness")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TOUR, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number, package", list(enumerate(PACKAGES)), ids=PACKAGES)
def test_the_picture_is_drawn_from_the_imports(number: int, package: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_rooms"), package]
    drawn = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert blocks("mermaid")[number] == drawn, f"scripts/draw_rooms {package}"


def test_its_stories_are_told_by_the_code() -> None:
    texts = blocks("text")
    assert len(texts) == 3
    assert all(text in STORIES for text in texts)


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:consensus|cache|harness|tests|scripts|docs)/[\w/.]+)[`:]", TOUR)
    assert len(named) > 40
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_test_that_says_no_is_there() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", TOUR)
    assert len(named) == 5
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_there_are_twelve_words() -> None:
    words = TOUR.partition("## Twelve words")[2].partition("## ")[0]
    assert len(re.findall(r"^- \*\w+\*: ", words, re.MULTILINE)) == 12


def test_the_readme_leads_here() -> None:
    assert "(docs/tour.md)" in (ROOT / "README.md").read_text()
