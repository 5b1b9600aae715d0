"""The wheel as a user has it: installed beside packages called cache, consensus and harness, and
used in a folder full of such names. Nothing is taken for another's, and nothing of theirs is
touched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TAKEN = ("cache", "consensus", "harness")
FOREIGN = "raise RuntimeError('this is another package')\n"
README = (ROOT / "README.md").read_text()
LIMIT_S = 100.0
pytestmark = pytest.mark.xdist_group("wheel")  # what is built is built once


def run(*argv: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout, and without kvpact's packages on its path."""
    return subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def other_wheel(folder: Path, name: str) -> Path:
    """A wheel of somebody else's whose one package is called ``name``."""
    info = f"{name}-9.0.dist-info"
    files = {
        f"{name}/__init__.py": FOREIGN,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scripts/build makes: it compares two builds, and what the sdist builds."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, ROOT / "scripts" / "build", folder, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def env(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty environment with the wheel and its namesakes; torch and the rest are borrowed."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    # Only what lies there: the checkout itself is named in a .pth there, which is not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheels = [*built.glob("*.whl"), *(other_wheel(folder, name) for name in TAKEN)]
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    quiet = ["--no-deps", "--no-index", "-qq", "--disable-pip-version-check", "--ignore-installed"]
    done = run(*pip, "install", *quiet, *wheels, cwd=folder)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory in which every one of the names is taken."""
    for name in TAKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(FOREIGN)
        (tmp_path / f"{name}.py").write_text(FOREIGN)
    return tmp_path


def test_another_folder_of_the_same_clone_has_the_same_bytes(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "clone"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "shared", "out", "dist")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    shutil.copy(ROOT / ".gitignore", copy)
    epoch = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    script, out = copy / "scripts" / "build", tmp_path / "out"
    done = run(sys.executable, script, out, cwd=tmp_path, SOURCE_DATE_EPOCH=epoch.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == sorted(p.name for p in built.iterdir())
    for path in out.iterdir():
        assert path.read_bytes() == (built / path.name).read_bytes(), path.name


def test_a_file_that_does_not_belong_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "clone"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "shared", "out", "dist")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    text = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(text.replace('"kvpact/py.typed", ', ""))
    done = run(sys.executable, copy / "scripts" / "build", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "lacks ['kvpact/py.typed']" in done.stderr


def test_the_library_is_the_wheel_s_and_so_are_the_others(env: Path, hostile: Path) -> None:
    code = "import kvpact, kvpact.cache.config as c; print(kvpact.__file__, c.__file__)"
    done = run(env / "bin" / "python", "-c", code, cwd=hostile)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(env) for file in done.stdout.split()), done.stdout
    (site,) = env.glob("lib/python*/site-packages")
    for name in TAKEN:
        assert (site / name / "__init__.py").read_text() == FOREIGN


def test_the_command_says_its_version(env: Path, hostile: Path) -> None:
    ways = ([env / "bin" / "kvpact"], [env / "bin" / "python", "-m", "kvpact"])
    said = {run(*way, "--version", cwd=hostile).stdout for way in ways}
    (line,) = said
    assert re.fullmatch(r"kvpact \d+\.\d+\.\d+\S*\n", line)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_packages_the_command_says_what_to_install(
    env: Path, hostile: Path, missing: str
) -> None:
    # A finder that does not find it: as where it was not installed.
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {missing!r} else real(name, *a)\n"
        "from kvpact.__main__ import main; sys.exit(main())\n"
    )
    done = run(env / "bin" / "python", "-c", code, cwd=hostile)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvpact: the command needs {missing}, ")
    assert "kvpact[cli]" in done.stderr


def test_a_configuration_needs_no_torch(env: Path, hostile: Path) -> None:
    code = (
        "import sys; from kvpact import CacheConfig, Misuse, Policy, Tier\n"
        "CacheConfig(page_size=4, device_pages=8, host_pages=8)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = run(env / "bin" / "python", "-c", code, cwd=hostile)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks
def test_a_replay_with_real_ranks(env: Path, hostile: Path) -> None:
    flags = ["--ranks", "gloo", "--tp", "2", "--limit", "20"]
    done = run(env / "bin" / "kvpact", "replay", *flags, cwd=hostile)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"verdict\W+agree", done.stdout)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["two_ranks.py", "own_pools.py"])
def test_the_examples(env: Path, hostile: Path, name: str) -> None:
    (text,) = re.findall(rf"^```python {name}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (hostile / name).write_text(text)
    done = run(env / "bin" / "python", name, cwd=hostile)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" returned: ") == 2, done.stdout


@pytest.mark.ranks
def test_a_soak_under_torchrun(env: Path, hostile: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    soak = ["kvpact.harness.torchrun", "--steps", "60", "--out", hostile / "report"]
    done = run(env / "bin" / "python", *words, *soak, cwd=hostile)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (hostile / "report" / "report.html").exists()
