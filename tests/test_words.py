"""How docstrings begin: with their subject or an imperative, so that a reader knows what is meant.

A ratchet: the counts may only go down. And each exported class has a name of its own.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Docstrings that begin with a word that stands for a noun.
ALLOWED = {"consensus": 0, "cache": 0, "harness": 106}
HEADLESS = re.compile(r"^(What|Who|Whom|Whose|Whoever|It|They|That|Where)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def headless(package: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, Documented)
        and (text := ast.get_docstring(node)) is not None
        and HEADLESS.match(text)
    ]


@pytest.mark.parametrize("package, allowed", ALLOWED.items(), ids=ALLOWED)
def test_a_docstring_begins_with_its_subject_or_an_imperative(package: str, allowed: int) -> None:
    found = headless(package)
    assert len(found) <= allowed, found
    assert len(found) == allowed, f"it is better than it was: say {len(found)} in ALLOWED"


def test_a_headless_sentence_is_seen() -> None:
    assert HEADLESS.match("What is in each pool.")
    assert not HEADLESS.match("Whatever")
    assert not HEADLESS.match("Count the pages of each pool.")


def test_each_class_of_the_library_has_a_name_of_its_own() -> None:
    names = Counter(
        node.name
        for package in ("consensus", "cache")
        for _, tree in sources(package)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


#: An engine's own tickets, in the library and in the cache: each is what its users call it.
SHARED_NAMES = {"Ticket", "TicketState"}
