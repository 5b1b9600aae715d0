"""The public surface changes on purpose only: each export stands in tests/public_api.txt."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"^```python.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("kvpact", "kvpact.consensus", "kvpact.cache", "kvpact.harness")
LISTED = (Path(__file__).parent / "public_api.txt").read_text().split()


def test_the_list_is_sorted_and_names_each_export_once() -> None:
    assert sorted(set(LISTED)) == LISTED


def test_the_list_names_only_our_packages() -> None:
    assert {line.rpartition(".")[0] for line in LISTED} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_the_listed_ones(package: str) -> None:
    exported: list[str] = importlib.import_module(package).__all__
    exports = {f"{package}.{name}" for name in exported}
    listed = {line for line in LISTED if line.rpartition(".")[0] == package}

    assert len(exports) == len(exported), f"{package}.__all__ names something twice"
    assert exports == listed, (
        f"the public surface of {package} has changed: added {sorted(exports - listed)}, removed"
        f" {sorted(listed - exports)}. If that is meant, bring tests/public_api.txt up to date by"
        " hand (sorted, one name a line)"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_there_and_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    exported: list[str] = module.__all__
    missing = [name for name in exported if not hasattr(module, name)]
    assert not missing
    undocumented = [
        name
        for name in exported
        if callable(getattr(module, name)) and not (getattr(module, name).__doc__ or "").strip()
    ]
    assert not undocumented


#: Calls that nobody outside makes: their objects come from the function beside them.
INSIDE = {
    "CacheMetrics.__init__",  # metrics()
    "HierarchicalCache.__init__",  # join_cache()
    "Membership.__init__",  # Membership.join()
    "TcpStore.give_back",  # the store's own
    "Ticket.__init__",  # request_pages(), request_load_back(), admit()
}


@pytest.mark.parametrize("package", ["kvpact.consensus", "kvpact.cache"])
def test_every_type_in_a_public_signature_is_public(package: str) -> None:
    modules = [importlib.import_module(name) for name in PACKAGES]
    public = [getattr(module, name) for module in modules for name in module.__all__]
    hidden = {
        f"{name}: {found.__module__}.{found.__qualname__}"
        for name, call in _calls(importlib.import_module(package))
        if name not in INSIDE
        for found in _types_of(call)
        if found.__module__.startswith("kvpact.") and not any(found is one for one in public)
    }
    assert not hidden, "make it public, or keep it out of the signature"


def _calls(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Each public function, and each public method of each public class, by name."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            yield f"{name}: its fields", thing
            for member, kept in vars(thing).items():
                call = getattr(kept, "fget", None) or getattr(kept, "__func__", kept)
                is_ours = member == "__init__" or not member.startswith("_")
                if is_ours and inspect.isfunction(call):
                    yield f"{name}.{member}", call


def _types_of(call: Any) -> Iterator[type]:
    """Every class in the annotations of ``call``."""
    # What is imported for the type checker alone is not there to be looked up: torch, by name.
    known = vars(importlib.import_module(call.__module__)) | {"torch": torch}
    todo = list(typing.get_type_hints(call, known).values())
    while todo:
        found = todo.pop()
        todo += [one for one in typing.get_args(found) if not isinstance(one, str)]
        if isinstance(found, list):
            todo += found
        elif inspect.isclass(found) and typing.get_origin(found) is None:
            yield found


def test_documents_import_public_names_only() -> None:
    found: list[tuple[str, str, str]] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(
            r"^```python.*?\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvpact"):
                    found += [(path.name, str(node.module), one.name) for one in node.names]
    assert len(found) > 5
    assert [one for one in found if f"{one[1]}.{one[2]}" not in LISTED] == []


def test_no_document_installs_from_an_index_where_the_project_is_not() -> None:
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ):
        for line in re.findall(r"pip install [^`\n]*kvpact[^`\n]*", path.read_text()):
            assert re.search(r"dist/|file://|\.\s|git\+", line), f"{path.name}: {line}"
