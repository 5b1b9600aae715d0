"""SGLang's own cache on kvpact: the plugin's door here, the rest by scripts/sglang_check."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from kvpact.cache.adapters.sglang import plugin

ROOT = Path(__file__).parent.parent
PEER = Path(os.environ.get("KVPACT_PEER", ROOT / "out" / "peer"))


def test_the_entry_point_leads_to_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["kvpact"].partition(":")
    assert getattr(import_module(module), name) is plugin.add


def test_the_plugin_imports_no_engine_and_no_torch_until_it_is_called() -> None:
    code = (
        "import sys, kvpact.cache.adapters.sglang.plugin\n"
        "raise SystemExit(str([m for m in ('sglang', 'torch') if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.stderr.strip() == "[]"


@pytest.mark.parametrize("found", ["0.5.22", "0.6.0", "of an unknown version"])
def test_a_version_that_was_not_tested_ends_the_process(found: str) -> None:
    with pytest.raises(SystemExit, match=r"was not tested .*tested: 0\.5\.23.*SGLANG_PLUGINS"):
        plugin.check_version(found)


def test_without_sglang_the_process_ends_and_says_so() -> None:
    with pytest.raises(SystemExit, match="SGLang of an unknown version was not tested"):
        plugin.add()


def test_tested_versions_pass() -> None:
    for found in plugin.TESTED:
        plugin.check_version(found)


def test_the_mode_is_to_look_on_unless_it_is_said() -> None:
    assert plugin.mode_from({}) == "observe"
    assert plugin.mode_from({"KVPACT_MODE": "decide"}) == "decide"
    with pytest.raises(SystemExit, match="'decides'; say one of observe, decide"):
        plugin.mode_from({"KVPACT_MODE": "decides"})


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [[], ["--observe"]], ids=["decide", "observe"])
def test_sglang_itself_under_faults(words: list[str]) -> None:
    if not (PEER / f"sglang-{plugin.TESTED[0]}").exists():
        pytest.skip(f"SGLANG IS NOT TESTED: it is not in {PEER}; run scripts/sglang_check --setup")
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sglang_check"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    if run.returncode == 3:
        pytest.skip(f"SGLANG IS NOT TESTED: {run.stderr}")
    assert run.returncode == 0, run.stdout + run.stderr
