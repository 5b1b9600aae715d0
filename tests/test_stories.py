"""A dozen stories: what all ranks decide, step by step, as text that a person reviews."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.consensus.core.errors import InternalError
from kvpact.harness.cli import main as cli
from kvpact.harness.scenario.read import read_scenario
from kvpact.harness.scenario.story import Story
from kvpact.harness.scenario.world import run_sim

HERE = Path(__file__).parent
OWN = (
    "insert_and_backup",
    "refused_on_one_rank",
    "load_back",
    "load_ends_in_part",
    "eviction",
    "prefetch",
)
#: Scenario files that are tests already, and stories as they are.
SHARED = (
    "write_back_waits_for_its_victim",
    "flush_shares_the_ballot",
    "ordered_reset_at_lag_0",
    "detach_at_lag_0",
    "insert_on_one_rank",
    "rank_dies",
    "leave_in_good_order",
    "drop_one_namespace",
)
STORIES = {name: HERE / "stories" / f"{name}.toml" for name in OWN} | {
    name: HERE / "scenarios" / f"{name}.toml" for name in SHARED
}


def told(source: Path) -> str:
    """The story of a scenario file. Raises :class:`InternalError` where the file does not hold."""
    scenario = read_scenario(str(source))
    story = Story(scenario)
    result = run_sim(scenario, story=story)
    if result.failures:
        raise InternalError(f"{source.name}: {result.failures}")
    return story.text()


def written(name: str) -> Path:
    """Where the story is kept."""
    return HERE / "stories" / f"{name}.txt"


@pytest.mark.parametrize("name", STORIES)
def test_the_story_is_the_one_that_was_reviewed(name: str) -> None:
    assert told(STORIES[name]) == written(name).read_text(), "read the diff, then scripts/stories"


def test_every_text_has_its_story() -> None:
    assert {path.stem for path in (HERE / "stories").glob("*.txt")} == set(STORIES)
    assert {path.stem for path in (HERE / "stories").glob("*.toml")} == set(OWN)


def test_what_ranks_find_out_alone_is_told_by_name_and_decisions_once() -> None:
    text = told(STORIES["refused_on_one_rank"])
    assert {"rank 0: reserve 1 2", "rank 1: refuse 1"} < set(text.splitlines())
    assert text.count("abort back_up 1 refused") == 1


def test_where_decisions_differ_each_ranks_stand_apart() -> None:
    text = told(STORIES["insert_on_one_rank"])
    assert "rank 1: insert" in text
    assert "all ranks raised Divergence" in text


def test_the_command_prints_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    source = STORIES["insert_and_backup"]
    assert cli.main(["scenario", "--trace", str(source)]) == 0
    assert capsys.readouterr().out.startswith(written("insert_and_backup").read_text())
    assert cli.main(["scenario", "--trace", "--ranks", "gloo", str(source)]) == 2
    assert "only simulated ranks tell their story" in capsys.readouterr().err
