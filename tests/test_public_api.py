"""The public surface changes on purpose only: each export stands in tests/public_api.txt."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

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
