"""``kvpact scenario``: runs files, simulated or with real processes, and says what came of it."""

from __future__ import annotations

import msgspec

from kvpact.consensus.core.errors import Misuse
from kvpact.harness.scenario.gloo import GlooRanks
from kvpact.harness.scenario.model import Scenario
from kvpact.harness.scenario.story import Story
from kvpact.harness.scenario.world import run_sim, unsupported
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.files import write_bytes
from kvpact.harness.text.incident import print_incidents

__all__ = ["run_files"]


def run_files(
    scenarios: list[Scenario],
    *,
    ranks: str,
    seed: int,
    json_out: str | None = None,
    traces: bool = False,
) -> int:
    """Run files and print what came of each; 0: everything holds, 1: something does not.

    ``traces``: print also what all ranks decided at each entry; simulated ranks only.
    """
    for scenario in scenarios:
        if reason := unsupported(scenario):
            raise Misuse(f"{scenario.path}: this version does not run {reason} yet")
    if ranks == "gloo":
        with GlooRanks() as gloo:
            results = [gloo.run(scenario, seed) for scenario in scenarios]
    else:
        stories = [Story(scenario) if traces else None for scenario in scenarios]
        results = [
            run_sim(scenario, seed, story=story)
            for scenario, story in zip(scenarios, stories, strict=True)
        ]
        for story in stories:
            if story is not None:
                print(story.text())  # noqa: T201 - as it is: it may be kept in a file
    console = PlainConsole(highlight=False, soft_wrap=True)
    for result in results:
        verdict = "[red]FAILS[/red]" if result.failures else "[green]holds[/green]"
        console.print(f"{verdict}  {result.path}  ({result.name})")
        for failure in result.failures:
            console.print(f"    {failure}", markup=False)
        if result.failures:
            print_incidents(result.incidents, console)
    if json_out is not None:
        write_bytes(json_out, msgspec.json.format(msgspec.json.encode(results)))
    return int(any(result.failures for result in results))
