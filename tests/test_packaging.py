"""The three packages come as one: from one place, with their types, in their layers."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpact.consensus.provenance import require_installed_files

ROOT = Path(__file__).parent.parent
PACKAGES = ("consensus", "cache", "harness")

# name -> the only files (beside tests) that may use it
RESTRICTED = {
    "torch.distributed": {"consensus/transport/gloo.py"},
    "ray": {"harness/drive/ray.py", "harness/drive/actor.py"},
    "time.time": set[str](),
    "time.time_ns": set[str](),
    "builtins.hash": set[str](),  # differs between processes, as addresses do
    "builtins.id": set[str](),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel once; what git ignores is left out, as in a release."""
    folder = tmp_path_factory.mktemp("wheel")
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """Unpack the wheel as an installer does."""
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def look(site: Path) -> subprocess.CompletedProcess[str]:
    """Ask a fresh interpreter, with the unpacked wheel first on its path, whose files it runs."""
    code = (
        "from kvpact.consensus.core.errors import Misuse\n"
        "from kvpact.consensus.provenance import require_installed_files\n"
        "try:\n"
        "    print(require_installed_files())\n"
        "except Misuse as error:\n"
        "    raise SystemExit(str(error))\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=site,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_checkout_is_accepted() -> None:
    assert require_installed_files() == ROOT


def test_an_installed_wheel_is_accepted(site: Path) -> None:
    found = look(site)
    assert (found.stdout.strip(), found.returncode) == (str(site), 0), found.stderr


def test_an_overwritten_file_is_named(site: Path) -> None:
    (site / "kvpact" / "cache" / "__init__.py").write_text("# from another wheel\n")
    found = look(site)
    assert found.returncode == 1
    assert "not the installed ones: kvpact/cache/__init__.py." in found.stderr


def test_a_missing_file_is_named(site: Path) -> None:
    shutil.rmtree(site / "kvpact" / "harness" / "fuzz")
    found = look(site)
    assert found.returncode == 1
    assert "kvpact/harness/fuzz/run.py" in found.stderr


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (entry_points,) = (name for name in held if name.endswith("entry_points.txt"))
        commands = archive.read(entry_points).decode()
    assert "kvpact/py.typed" in held
    assert {name.partition("/")[0] for name in held if ".dist-info" not in name} == {"kvpact"}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "kvpact = kvpact.__main__:main" in commands
    shipped = {
        f"kvpact/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert shipped <= held


def test_restricted_names_are_used_only_where_they_may_be() -> None:
    # ruff's banned APIs say it sooner, but can be silenced with a comment, and in the files that
    # may use one of the names they are off altogether.
    found = {
        f"{file} uses {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in names_used(ast.parse(path.read_text()))
        for file in [path.relative_to(ROOT).as_posix()]
        for banned, allowed in RESTRICTED.items()
        if (name == banned or name.startswith(f"{banned}.")) and file not in allowed
    }
    assert not found


def test_names_used_sees_each_way_to_use_a_name() -> None:
    used = names_used(
        ast.parse(
            "import torch.distributed as dist\nfrom ray import remote\nfrom time import time\n"
            "import time as clock\nimport torch\nclock.time_ns()\ntorch.distributed.barrier()\n"
            "sorted(names, key=hash)\n"
        )
    )
    assert {"torch.distributed", "torch.distributed.barrier", "ray.remote"} <= used
    assert {"time.time", "time.time_ns", "builtins.hash"} <= used
    assert "builtins.id" not in used


def names_used(tree: ast.Module) -> set[str]:
    """Return the dotted names that a module imports, or reaches through what it imported."""
    used: set[str] = set()
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                used.add(alias.name)
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                used.add(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in bound:
                used.add(f"{bound[head]}.{rest}")
        elif isinstance(node, ast.Name) and node.id in {"hash", "id"}:
            used.add(f"builtins.{node.id}")
    return used
