"""What a seal says beyond the name: what follows, who is lost, the story, and who waits for whom.

Who is named, and in which order causes are looked at, is in tests/test_epoch.py.
"""

from __future__ import annotations

import msgspec
import pytest

from kvpact.consensus.core.errors import PeerError
from kvpact.consensus.core.journal import Entry
from kvpact.consensus.epoch.closing import judge
from kvpact.consensus.epoch.report import Policy, Report, Seal
from tests.test_epoch import COMMON, EPOCH, differing, error_of, report, seen

TWO = [7, 8, 7]  # rank 1 differs


def ended(
    reports: list[Report], kind: str = "raise", *, max_resets: int = 3, missing: bool = False
) -> Seal:
    policy = Policy(kind, max_resets)
    absent = {9: seen()} if missing else {}
    return judge({one.rank: one for one in reports}, absent, epoch=EPOCH, policy=policy)


def each(reports: list[Report], **more: list[object]) -> list[Report]:
    """Rank r gets the r-th of each value."""
    return [
        msgspec.structs.replace(one, **{name: values[one.rank] for name, values in more.items()})
        for one in reports
    ]


# -- what follows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raise", "reset", "detach", "observe"])
@pytest.mark.parametrize("field", ["fingerprint", "live"])
def test_what_the_policy_says_follows_where_only_contents_differ(kind: str, field: str) -> None:
    assert ended(differing(field, TWO), kind).then == kind


@pytest.mark.parametrize("kind", ["reset", "detach", "observe"])
def test_no_policy_cures_anything_else(kind: str) -> None:
    """Who only observes raises nothing: it is off from then on."""
    end = "off" if kind == "observe" else "raise"
    for field in ("schema", "epoch", "step", "iteration", "round"):
        assert ended(differing(field, TWO), kind).then == end, field
    assert ended([report(rank) for rank in range(2)], kind, missing=True).then == end
    assert ended([report(0, "broken", broken_rank=0), report(1)], kind).then == end
    assert ended(differing("fingerprint", TWO), kind, missing=True).then == end
    own = each(differing("fingerprint", TWO), broken_rank=[-1, -1, 2])
    assert ended(own, kind).then == end, "rank 2's engine has an exception to see"
    others = each(differing("fingerprint", TWO), broken_rank=[2, 2, -1])
    assert ended(others, kind).then == kind


@pytest.mark.parametrize("resets, then", [([0, 1, 0], "reset"), ([0, 2, 0], "raise")])
def test_resets_are_counted_by_whoever_has_seen_most(resets: list[object], then: str) -> None:
    reports = each(differing("fingerprint", TWO), num_resets=resets)
    assert ended(reports, "reset", max_resets=2).then == then
    assert ended(reports, "observe", max_resets=0).then == "observe"


def test_requests_that_are_not_the_same_everywhere_are_lost() -> None:
    live: list[object] = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 3}, {"a": 1, "b": 2}]
    reports = each(differing("live", TWO), live=live)
    for kind in ("reset", "detach"):
        assert ended(reports, kind).lost == ("b", "c")
    for kind in ("raise", "observe"):
        assert ended(reports, kind).lost == ()


def test_detached_ranks_keep_what_all_have() -> None:
    kept: list[object] = [[1, 2, 3, 9], [3, 2, 9], [9, 2, 7]]
    reports = each(differing("fingerprint", TWO), kept=kept)
    assert ended(reports, "detach").kept == [2, 9]
    assert ended(reports, "reset").kept == []


def test_nothing_settled_is_settled_through_nothing() -> None:
    first = report(0, "lost", 1, settled=0)
    assert ended([first]).through == 0
    elsewhere = msgspec.structs.replace(first, epoch=EPOCH + 1)
    here = [report(rank, "lost", 8, settled=7, epoch=EPOCH) for rank in (1, 2)]
    assert ended([elsewhere, *here]).through == 7


def test_the_epoch_is_that_of_most() -> None:
    def at(*epochs: int) -> int:
        reports = [report(rank, "lost", epoch=epoch) for rank, epoch in enumerate(epochs)]
        return ended(reports).error.epoch

    assert at(-1, -1) == EPOCH
    assert at(0, 0, 1) == 0
    assert at(0, 1, 1) == 1
    assert at(1, 0) == 0, "a tie goes to the older one"


# -- the story -------------------------------------------------------------------------------------


def told(ours: list[Entry], theirs: list[Entry]) -> list[str]:
    """The story where rank 1 has other decisions than ranks 0 and 2."""
    tails: list[object] = [ours, theirs, ours]
    return list(error_of(each(differing("fingerprint", TWO), tail=tails)).story)


def entry(index: int, tag: str, *values: int | str) -> Entry:
    return Entry(index, EPOCH, 6, tag, values)


def test_the_story_has_what_led_there() -> None:
    common = [
        entry(0, "insert", 4, 0, 2),
        entry(1, "insert", 5, 4, 2),
        entry(2, "match", 0, 17),
        entry(3, "insert", 6, 4, 8),
    ]
    ours = [*common, entry(4, "evict", "device", 5, 8), entry(5, "match", 5, 18)]
    theirs = [*common, entry(4, "evict", "device", 4, 8)]
    assert told(ours, theirs) == [
        "first decision that differs:",
        "  rank 0: #4 step 6 evict device 5 8",
        "  rank 1: #4 step 6 evict device 4 8",
        "what led there:",
        "  #0 step 6 insert 4 0 2",
        "  #1 step 6 insert 5 4 2",
        "  #3 step 6 insert 6 4 8",
    ]


def test_a_decision_of_one_rank_alone() -> None:
    common = [entry(0, "insert", 4, 0, 2)]
    more = [*common, entry(1, "evict", "host", 9)]
    lines = ["first decision that differs:", "  rank 0: no such decision"]
    assert told(common, more) == [*lines, "  rank 1: #1 step 6 evict host 9"]
    lines = ["first decision that differs:", "  rank 0: #1 step 6 evict host 9"]
    assert told(more, common) == [*lines, "  rank 1: no such decision"]


def test_what_led_there_is_cut_to_the_last() -> None:
    common = [entry(index, "match", 4, index) for index in range(9)]
    story = told([*common, entry(9, "evict", 4)], [*common, entry(9, "evict", 7)])
    assert story[3:] == ["what led there:", *(f"  #{n} step 6 match 4 {n}" for n in range(3, 9))]


def test_a_node_0_is_nobody() -> None:
    common = [entry(0, "match", 0, 1)]
    story = told([*common, entry(1, "match", 0, 2)], [*common, entry(1, "match", 0, 3)])
    assert "what led there:" not in story


@pytest.mark.parametrize("first, is_sure", [(0, True), (3, False)])
def test_what_the_journals_do_not_reach_back_to_is_said(first: int, is_sure: bool) -> None:
    ours, theirs = [entry(first, "evict", 1)], [entry(first, "evict", 2)]
    expected = "first decision that differs" + (":" if is_sure else ", or that is still known:")
    assert told(ours, theirs)[0] == expected


def test_a_difference_at_the_start_of_one_journal_is_not_sure() -> None:
    earlier, here, there = entry(2, "match", 1), entry(3, "evict", 8), entry(3, "evict", 9)
    for ours, theirs in ([earlier, here], [there]), ([here], [earlier, there]):
        assert told(ours, theirs)[0].endswith("or that is still known:")


def test_a_difference_behind_the_start_of_both_journals_is_sure() -> None:
    common = [entry(3, "match", 1)]
    story = told([*common, entry(4, "evict", 8)], [*common, entry(4, "evict", 9)])
    assert story[0] == "first decision that differs:"


# -- stuck, and last seen --------------------------------------------------------------------------


def test_who_has_not_done_its_part_is_named_where_all_wait() -> None:
    here = ["<load a>: not ended here", "<load b>: waits", "<load c>: waits", "<load d>: waits"]
    there = ["<load a>: not ended on another rank"]
    reports = [
        report(0, "stuck", 9, pending=there, detail="no progress for 300 s"),
        report(1, "stuck", 8, pending=here, owes_ending=True, detail="no progress for 301 s"),
        report(2, "asked", 8, pending=[]),
    ]
    error = error_of(reports)
    assert (error.kind, error.ranks, error.step) == ("ProgressLost", (1,), 8)
    assert error.message == "no progress for 301 s"
    assert error.story == (
        "rank 0: <load a>: not ended on another rank",
        "rank 1: <load a>: not ended here",
        "rank 1: <load b>: waits",
        "rank 1: <load c>: waits",
    )
    assert error_of(reports[:1]).ranks == ()


def test_who_waits_in_line_is_told_once() -> None:
    """All ranks agree on it, so one tells it for all."""
    lines = ["load-back of r1 has waited for 9.0 s: no room"]
    reports = [report(rank, "stuck", 8, waiting=lines) for rank in range(3)]
    assert error_of(reports).story == (f"in line: {lines[0]}",)


def test_the_judge_reads_no_sentences() -> None:
    """Lines for a person may say anything: who is named follows from the records beside them."""
    owed = report(0, "stuck", 8, pending=["in other words"], owes_ending=True)
    told = report(1, "stuck", 8, pending=["<load a>: not ended here"])
    assert error_of([owed, told]).ranks == (0,)


def test_what_a_rank_raised_is_told_by_its_class() -> None:
    reports = [
        report(0, "asked", 5),
        report(1, "broken", 5, broken_rank=1, raised="KeyError", detail="KeyError: 'x'"),
    ]
    error = error_of(reports)
    assert (error.kind, error.raised) == ("PeerError", "KeyError")
    built = error.build()
    assert isinstance(built, PeerError)
    assert built.raised == "KeyError"


def test_who_was_stuck_first_speaks() -> None:
    reports = [
        report(0, "stuck", 9, detail="later"),
        report(1, "asked", 3, detail="not stuck"),
        report(2, "stuck", 9, detail="of a higher rank"),
    ]
    assert error_of(reports).message == "later"


@pytest.mark.parametrize(
    "life, dead, words",
    [
        ("", False, "its process is there"),
        ("", True, "its process is gone"),
        ("beating", False, "its process lives, but its scheduler does not come"),
        ("stopped", False, "its process is stopped (a signal, a debugger)"),
        ("silent", False, "nothing is heard of its process any more"),
        ("left", False, "it has left in good order"),
        ("gone", False, "its process is gone"),
    ],
)
def test_what_is_known_of_a_process_is_said(life: str, dead: bool, words: str) -> None:
    error = error_of([report(0)], {1: seen(life=life, dead=dead)})
    where = "at step 6, preparing its ballot, for 3.2 s"
    assert error.story == (f"rank 1 was last seen {where}; {words}",)


def test_ranks_that_saw_the_mismatch_elsewhere_are_looked_at_where_they_saw_it() -> None:
    """Rank 2 was only asked: of it counts what it posted as the step of the mismatch."""
    older = msgspec.structs.replace(COMMON, step=6)
    asked = report(2, "asked", 9, header=COMMON)
    asked = msgspec.structs.replace(asked, headers={7: COMMON, 9: older})
    reports = [*differing("live", [5, 6]), asked]
    error = error_of(reports)
    assert (error.field, error.ranks) == ("live", (1,))
