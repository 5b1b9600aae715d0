"""What every rank decided at each entry of a scenario, as text that a person can review.

Decisions are the same on all ranks, so each stands once; what ranks found out for themselves (a
reservation that failed, a copy that ended) names them. Where decisions differ each rank's stand
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import msgspec

from kvpact.consensus.core.journal import Journal, Value
from kvpact.harness.scenario.model import Do, Scenario
from kvpact.harness.scenario.write import scenario_text

__all__ = ["Story", "StoryJournal"]

#: Numbers beyond this are digests: a reader learns nothing from them.
_DIGEST = 1 << 40
#: Facts of every step that say nothing about what was decided.
_SILENT = ("post",)


class _Line(msgspec.Struct, frozen=True):
    """One line of one rank's journal; ``is_fact``: it need not be the same on other ranks."""

    text: str
    is_fact: bool


class Story:
    """Collects the lines of all ranks, by the number of the entry that they were at."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._lines: dict[tuple[int, int], list[_Line]] = {}  # by entry and rank
        self._at = dict.fromkeys(range(scenario.world.num_ranks), 0)
        self.raised: dict[tuple[int, int], str] = {}

    def goes_to(self, rank: int) -> Callable[[int], None]:
        """What ``rank`` calls with the number of each entry that it comes to."""

        def at(number: int) -> None:
            self._at[rank] = number

        return at

    def hear(self, rank: int, tag: str, values: Sequence[Value], *, is_fact: bool) -> None:
        """``rank`` wrote a line into its journal."""
        if tag in _SILENT:
            return
        words = [tag, *(_word(value) for value in values)]
        line = _Line(" ".join(words), is_fact)
        self._lines.setdefault((self._at[rank], rank), []).append(line)

    def text(self) -> str:
        """The whole story: each entry as it stands in the file, and below it what came of it."""
        scenario = self._scenario
        parts = [f"# {scenario.name}"]
        for entry in scenario.do:
            told = [*self._told(entry.number)]
            parts.append("\n".join([_entry(scenario, entry), "----", *told]))
        return "\n\n".join(parts) + "\n"

    def _told(self, number: int) -> Iterator[str]:
        ranks = range(self._scenario.world.num_ranks)
        by_rank = [self._lines.get((number, rank), []) for rank in ranks]
        decisions = [[line.text for line in lines if not line.is_fact] for lines in by_rank]
        if all(one == decisions[0] for one in decisions):
            yield from _merged(by_rank)
        else:
            for rank, lines in enumerate(by_rank):
                yield from (f"rank {rank}: {line.text}" for line in lines)
        errors = [(self.raised.get((number, rank), ""), rank) for rank in ranks]
        for text, group in groupby(sorted(errors), key=lambda one: one[0]):
            if text:
                yield f"{_names([rank for _, rank in group], len(ranks))} raised {text}"


class StoryJournal(Journal):
    """A journal that also tells ``story`` each line."""

    def __init__(self, rank: int, story: Story, tail_entries_max: int) -> None:
        super().__init__(rank, tail_entries_max=tail_entries_max)
        self._story = story

    def note(self, tag: str, *values: Value) -> None:
        """See :meth:`Journal.note`."""
        super().note(tag, *values)
        self._story.hear(self.rank, tag, values, is_fact=False)

    def fact(self, tag: str, *values: Value) -> None:
        """See :meth:`Journal.fact`."""
        super().fact(tag, *values)
        self._story.hear(self.rank, tag, values, is_fact=True)


def _merged(by_rank: list[list[_Line]]) -> Iterator[str]:
    """Decisions once; before each, what the ranks found out since the one before it."""
    rest = [list(lines) for lines in by_rank]
    while any(rest):
        facts: list[tuple[str, int]] = []
        for rank, lines in enumerate(rest):
            while lines and lines[0].is_fact:
                facts.append((lines.pop(0).text, rank))
        for text in dict.fromkeys(text for text, _ in facts):
            ranks = [rank for one, rank in facts if one == text]
            yield f"{_names(ranks, len(rest))}: {text}"
        if rest[0]:
            yield rest[0][0].text
            for lines in rest:
                lines.pop(0)


def _names(ranks: Sequence[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _word(value: Value) -> str:
    return "…" if isinstance(value, int) and value > _DIGEST else str(value)


def _entry(scenario: Scenario, entry: Do) -> str:
    """The entry in one line, as its TOML says it."""
    alone = msgspec.structs.replace(scenario, do=[entry])
    lines = scenario_text(alone).partition("[[do]]\n")[2].strip().split("\n")
    op = lines[0].partition(" = ")[2].strip('"')
    return " ".join([op, *lines[1:]])
