"""The journal: what enters the fingerprint, what is kept, what comes back from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.journal import Entry, Journal, Value, first_difference, read_journal

values = st.lists(st.one_of(st.integers(-(1 << 40), 1 << 40), st.text(max_size=3)), max_size=3)
decisions = st.lists(st.tuples(st.sampled_from(["a", "b", "ab"]), values), max_size=6)


def journal(said: list[tuple[str, list[Value]]], tail_entries_max: int = 512) -> Journal:
    made = Journal(0, tail_entries_max=tail_entries_max)
    for tag, what in said:
        made.note(tag, *what)
    return made


@given(decisions, decisions)
def test_fingerprints_are_equal_iff_the_decisions_are(
    ours: list[tuple[str, list[Value]]], theirs: list[tuple[str, list[Value]]]
) -> None:
    left, right = journal(ours), journal(theirs)
    assert (left.fingerprint == right.fingerprint) == (ours == theirs)
    assert 0 <= left.fingerprint <= MASK62


def test_order_and_boundaries_and_types_count() -> None:
    said: list[list[tuple[str, list[Value]]]] = [
        [("evict", [1]), ("evict", [2])],
        [("evict", [2]), ("evict", [1])],
        [("evict", [1, 2])],
        [("evict", [12])],
        [("evict", ["1"]), ("evict", ["2"])],
        [("evict", [1]), ("evict", [2]), ("evict", [2])],
        [],
    ]
    assert len({journal(one).fingerprint for one in said}) == len(said)


def test_facts_and_steps_do_not_enter_the_fingerprint(tmp_path: Path) -> None:
    ours, theirs = Journal(0, path=tmp_path / "j"), Journal(1)
    for one in (ours, theirs):
        one.note("insert", 1)
    ours.step = 5
    ours.fact("ended", 7, 3)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.count == theirs.count == 1
    assert [entry.tag for entry in ours.tail()] == ["insert"]
    ours.close()


def test_ring_keeps_the_newest() -> None:
    made = Journal(0, tail_entries_max=4)
    for index in range(10):
        made.note("evict", index % 2, f"node {index}")
    assert [entry.index for entry in made.tail()] == [6, 7, 8, 9]
    assert [entry.index for entry in made.tail(2)] == [8, 9]
    assert made.story(1) == ["#7 step 0 evict 1 node 7", "#9 step 0 evict 1 node 9"]
    assert made.story(1, 1) == ["#9 step 0 evict 1 node 9"]
    assert made.story("node 3") == [], "fallen out of the ring"
    assert made.count == 10


def test_how_much_is_kept_and_shown_unless_told_otherwise() -> None:
    made = Journal(0)
    for _ in range(2100):
        made.note("evict", 1)
    assert len(made.tail(5000)) == 2048
    assert len(made.tail()) == 512
    assert len(made.story(1)) == 12


def test_an_entry_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        setattr(Entry(0, 0, 0, "a", ()), "tag", "b")  # noqa: B010  the type forbids it, too


def test_a_journal_in_a_folder_that_is_there_and_in_one_that_is_not(tmp_path: Path) -> None:
    for path in (tmp_path / "0.journal", tmp_path / "new" / "deep" / "0.journal"):
        Journal(0, path=path).close()
        assert path.exists()


def test_an_epoch_starts_from_nothing() -> None:
    old, new = Journal(0), Journal(1)
    old.step = 9
    old.note("evict", 1)
    for one in (old, new):
        one.begin_epoch(3)
        one.note("insert", 2)
    assert old.fingerprint == new.fingerprint
    assert old.tail() == new.tail() == [Entry(0, 3, 0, "insert", (2,))]


def test_file_holds_decisions_and_facts_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rank0.jsonl"
    made = Journal(0, path=path, tail_entries_max=1)
    made.begin_epoch(2)
    made.step = 4
    made.note("insert", 1, "näme")
    made.fact("ended", 5)
    made.step = 5
    made.note("evict", -3)
    assert list(read_journal(path)) == [], "buffered"
    made.flush()
    written = [
        Entry(0, 2, 4, "insert", (1, "näme")),
        Entry(-1, 2, 4, "ended", (5,)),
        Entry(1, 2, 5, "evict", (-3,)),
    ]
    assert list(read_journal(path)) == written
    made.note("evict", 9)
    made.close()
    made.close()
    assert list(read_journal(path)) == [*written, Entry(2, 2, 5, "evict", (9,))]
    made.note("evict", 10)
    assert made.count == 4, "the ring goes on without the file"


def test_a_long_journal_reaches_the_file_without_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "j"
    made = Journal(0, path=path)
    for index in range(5000):
        made.note("evict", index)
    found = [entry.index for entry in read_journal(path)]
    assert found == list(range(4096)), "the buffer is bounded"
    made.close()


@pytest.mark.parametrize("line", ["", "{}", '[1,2,3,"a"]', '["0",0,0,"a",[]]', "\xff", "[0,0,0,"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j"
    good = '[0,0,0,"a",[]]'
    path.write_bytes(f"{good}\n{line}\n{good}\n".encode("latin-1"))
    reading = read_journal(path)
    assert next(reading) == Entry(0, 0, 0, "a", ())
    with pytest.raises(BadInput, match=r"j line 2: not a journal entry"):
        next(reading)


def test_files_that_cannot_be_had_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file; expected a journal"):
        next(read_journal(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write the journal"):
        Journal(0, path=tmp_path / "file" / "j")


def entries(first: int, said: str) -> list[Entry]:
    """One entry per letter, from index ``first`` on."""
    return [Entry(first + place, 0, place, letter, ()) for place, letter in enumerate(said)]


@pytest.mark.parametrize(
    "ours,theirs,found",
    [
        ((0, "abc"), (0, "abc"), None),
        ((0, "abc"), (0, "axc"), (1, "b", "x")),
        ((0, "xbc"), (0, "abz"), (0, "x", "a")),
        ((0, "ab"), (0, "abc"), (2, None, "c")),
        ((0, "abc"), (0, "ab"), (2, "c", None)),
        ((0, ""), (0, "a"), (0, None, "a")),
        ((0, ""), (0, ""), None),
        # Rings that have dropped their beginning: only what both still have is compared.
        ((0, "abcd"), (2, "cd"), None),
        ((2, "cd"), (0, "xxcd"), None),
        ((1, "bcd"), (2, "cx"), (3, "d", "x")),
        ((3, "d"), (0, "abcde"), (4, None, "e")),
        ((0, "ab"), (5, "fg"), (5, None, "f")),
    ],
)
def test_first_difference(
    ours: tuple[int, str], theirs: tuple[int, str], found: tuple[int, str, str] | None
) -> None:
    left, right = first_difference(entries(*ours), entries(*theirs))
    if found is None:
        assert (left, right) == (None, None)
        return
    index, ours_tag, theirs_tag = found
    assert (left.tag if left else None, right.tag if right else None) == (ours_tag, theirs_tag)
    assert {entry.index for entry in (left, right) if entry is not None} == {index}


def test_a_difference_of_values_alone_is_found_and_one_of_steps_is_none() -> None:
    ours = [Entry(0, 0, 1, "evict", (1,)), Entry(1, 0, 1, "evict", (2,))]
    theirs = [Entry(0, 0, 9, "evict", (1,)), Entry(1, 0, 9, "evict", (3,))]
    assert first_difference(ours, theirs) == (ours[1], theirs[1])
    assert first_difference(ours[:1], theirs[:1]) == (None, None)


@given(st.text("ab", max_size=8), st.text("ab", max_size=8), st.integers(1, 8), st.integers(1, 8))
def test_first_difference_against_a_twin(
    ours: str, theirs: str, kept_ours: int, kept_theirs: int
) -> None:
    """The twin compares whole journals, from where both rings still reach back to."""
    left, right = entries(0, ours)[-kept_ours:], entries(0, theirs)[-kept_theirs:]
    start = max(left[0].index if left else 0, right[0].index if right else 0)
    expected: tuple[str | None, str | None] = (None, None)
    for index in range(start, max(len(ours), len(theirs))):
        pair = (ours[index : index + 1] or None, theirs[index : index + 1] or None)
        if pair[0] != pair[1]:
            expected = pair
            break
    found = first_difference(left, right)
    assert (found[0].tag if found[0] else None, found[1].tag if found[1] else None) == expected


def test_an_entry_reads_as_a_line() -> None:
    assert str(Entry(3, 0, 7, "evict", ("host", 5))) == "#3 step 7 evict host 5"
    assert str(Entry(3, 0, 7, "reset", ())) == "#3 step 7 reset"


def test_an_epoch_begins_as_a_new_journal_does(tmp_path: Path) -> None:
    fresh, later = Journal(0), Journal(0, path=tmp_path / "rank0.jsonl")
    later.note("a", 1)
    later.begin_epoch(1)
    assert fresh.fingerprint == later.fingerprint == 0
    assert not fresh.is_written
    assert later.is_written
    later.close()
    assert not later.is_written


def test_flushing_twice_writes_once(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    made = Journal(0, path=path)
    made.note("a", 1)
    made.flush()
    made.flush()
    made.close()
    assert path.read_bytes() == b'[0,0,0,"a",[1]]\n'
