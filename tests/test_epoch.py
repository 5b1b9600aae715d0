"""Closing an epoch: who is named, and that all ranks get the same seal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.ballot import HEADER_FIELDS, Header
from kvpact.consensus.core.errors import (
    Divergence,
    KvpactError,
    Misuse,
    PeerError,
    PeerLost,
    RankStalled,
)
from kvpact.consensus.core.journal import Entry
from kvpact.consensus.epoch.closing import Closer, Introduction, agree, judge
from kvpact.consensus.epoch.report import LastSeen, Report, Seal, SealedError
from kvpact.harness.rank.store import MemoryStore

COMMON = Header(schema=1, epoch=2, step=7, iteration=70, round=0, fingerprint=99, live=5)
EPOCH = 2


def report(
    rank: int,
    cause: str = "waited",
    at_step: int = 7,
    *,
    header: Header = COMMON,
    posted: int | None = None,
    settled: int | None = None,
    **more: object,
) -> Report:
    """A rank that posted ``at_step``, with ``header``, and settled everything before."""
    return msgspec.convert(
        {
            "rank": rank,
            "cause": cause,
            "at_step": at_step,
            "posted": at_step if posted is None else posted,
            "settled": at_step - 1 if settled is None else settled,
            "headers": {at_step: header},
            "tail": [],
            "held": {},
            **more,
        },
        Report,
    )


def seal_of(
    reports: Sequence[Report], missing: Mapping[int, LastSeen | None] | None = None
) -> Seal:
    return judge({one.rank: one for one in reports}, missing or {}, epoch=EPOCH)


def error_of(
    reports: Sequence[Report], missing: Mapping[int, LastSeen | None] | None = None
) -> SealedError:
    error = seal_of(reports, missing).error
    assert error.epoch == EPOCH
    return error


def seen(phase: str = "preparing its ballot", **how: object) -> LastSeen:
    return LastSeen(6, phase, 3.25, **how)  # type: ignore[arg-type]


def differing(field: str, values: Sequence[int]) -> list[Report]:
    """All ranks saw the mismatch at step 7; rank r had ``values[r]`` in ``field``."""
    return [
        report(rank, "mismatch", header=msgspec.structs.replace(COMMON, **{field: value}))
        for rank, value in enumerate(values)
    ]


# -- divergence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", HEADER_FIELDS)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_the_minority_is_named_with_its_field_and_value(field: str, size: int) -> None:
    for odd in range(size):
        values = [40] * size
        values[odd] = 41
        error = error_of(differing(field, values))
        assert (error.kind, error.ranks, error.field) == ("Divergence", (odd,), field)
        assert (error.ours, error.theirs, error.step) == (40, 41, 7)
        is_digest = field in ("schema", "fingerprint", "live")
        shown = "00000029 instead of 00000028" if is_digest else "41 instead of 40"
        assert error.message == f"rank {odd} differs in {field}: {shown}"


@pytest.mark.parametrize("size", [2, 4])
def test_where_there_is_no_majority_all_are_named(size: int) -> None:
    half = size // 2
    error = error_of(differing("iteration", [8] * half + [9] * half))
    assert error.ranks == tuple(range(size))
    assert (error.ours, error.theirs) == (8, 9), "ours is the lowest rank's"
    assert "majority" in error.message


@given(st.lists(st.integers(0, 2), min_size=2, max_size=5).filter(lambda v: len(set(v)) > 1))
def test_naming_against_a_twin(values: list[int]) -> None:
    """The twin counts: who does not hold the value that more than half the ranks hold."""
    error = error_of(differing("fingerprint", values))
    majority = [value for value in set(values) if 2 * values.count(value) > len(values)]
    named = [rank for rank, value in enumerate(values) if majority and value != majority[0]]
    assert error.ranks == tuple(named or range(len(values)))
    assert error.ours != error.theirs
    assert {error.ours, error.theirs} <= set(values)


def test_the_first_field_that_differs_is_the_cause() -> None:
    """A rank that skipped a step differs in much more than its iteration."""
    skipped = msgspec.structs.replace(COMMON, iteration=71, fingerprint=3, live=4)
    reports = [report(r, "mismatch", header=skipped if r == 1 else COMMON) for r in range(3)]
    error = error_of(reports)
    assert (error.field, error.ranks) == ("iteration", (1,))


@pytest.mark.parametrize("field", ["fingerprint", "live"])
def test_the_story_is_the_first_decision_that_differs(field: str) -> None:
    tails = {
        0: [Entry(4, 2, 6, "insert", (1,)), Entry(5, 2, 6, "evict", ("host", 8))],
        1: [Entry(4, 2, 6, "insert", (1,)), Entry(5, 2, 6, "evict", ("host", 9))],
    }
    tails[2] = tails[0]
    reports = [
        msgspec.structs.replace(one, tail=tails[one.rank]) for one in differing(field, [1, 2, 1])
    ]
    story = "\n".join(error_of(reports).story)
    assert "rank 0: #5 step 6 evict host 8" in story
    assert "rank 1: #5 step 6 evict host 9" in story


def test_a_difference_older_than_the_journals_says_so() -> None:
    assert "older" in error_of(differing("fingerprint", [1, 2, 1])).story[0]


def test_where_those_who_report_agree_the_missing_one_is_named() -> None:
    reports = [report(0, "mismatch"), report(1, "mismatch")]
    error = error_of(reports, {2: seen()})
    assert (error.kind, error.ranks) == ("Divergence", (2,))
    assert "rank 2 posted another ballot" in error.message


def test_a_skipped_collective_is_seen_at_different_steps() -> None:
    """Rank 1 was one collective behind: what it posted as step 6 met the others' step 7."""
    behind = report(1, "mismatch", 6, header=msgspec.structs.replace(COMMON, step=6))
    error = error_of([report(0, "mismatch"), behind, report(2, "mismatch")])
    assert (error.kind, error.field, error.ranks) == ("Divergence", "step", (1,))


def test_a_ballot_that_none_of_the_ranks_posted_is_somebody_elses() -> None:
    error = error_of([report(0, "mismatch"), report(1, "mismatch")])
    assert error.ranks == ()
    assert "somebody else in the group" in error.message


# -- broken, stalled, lost -------------------------------------------------------------------------


def test_a_broken_rank_is_named_with_its_own_words() -> None:
    own = report(1, "broken", broken_rank=1, detail="ValueError: no")
    other = report(0, "broken", broken_rank=1)
    error = error_of([other, own])
    assert (error.kind, error.ranks, error.step) == ("PeerError", (1,), 7)
    assert error.message.endswith("ValueError: no")
    assert error_of([other], {1: seen()}).message.endswith("an exception"), "without its report"


def test_the_earliest_broken_step_is_the_cause() -> None:
    reports = [
        report(0, "broken", 8, broken_rank=2),
        report(1, "broken", 7, broken_rank=1),
        report(2, "asked"),
    ]
    error = error_of(reports)
    assert (error.ranks, error.step) == ((1,), 7)


def test_blame_order() -> None:
    mismatch = differing("iteration", [1, 2])
    broken = report(2, "broken", broken_rank=2)
    waited = report(3, "waited")
    assert error_of([*mismatch, broken, waited]).kind == "Divergence"
    assert error_of([broken, waited]).kind == "PeerError"
    assert error_of([waited], {0: None}).kind == "RankStalled"


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_who_did_not_come_is_named_and_where_it_was(size: int) -> None:
    missing = {size - 1: seen(stack="step.py:1\nwait")}
    error = error_of([report(rank) for rank in range(size - 1)], missing)
    assert (error.kind, error.ranks, error.step) == ("RankStalled", (size - 1,), 7)
    assert (error.phase, error.dead) == ("preparing its ballot", False)
    where = "at step 6, preparing its ballot, for 3.2 s; its process is there"
    assert error.story == (f"rank {size - 1} was last seen {where}", "  step.py:1", "  wait")


def test_a_rank_that_was_never_seen_is_named() -> None:
    error = error_of([report(0)], {1: None})
    assert (error.ranks, error.story) == ((1,), ("rank 1 was never seen",))


def test_dead_and_absent_ranks_are_told_apart() -> None:
    error = error_of([report(1, "lost")], {0: seen("its copies"), 2: seen("idle", dead=True)})
    assert error.ranks == (0, 2)
    assert error.message.startswith("rank 2 ended, rank 0 did not come:")
    assert (error.dead, error.phase) == (True, "idle"), "what a dead rank did last comes first"
    assert len(error.story) == 2


def test_a_late_rank_is_named() -> None:
    error = error_of([report(0), report(1, "late"), report(2)])
    assert (error.kind, error.ranks) == ("RankStalled", (1,))
    assert "rank 1 came too late" in error.message


def test_a_rank_that_waited_for_the_late_one_is_not_named_with_it() -> None:
    """It too is refused the verdict, when a third rank has given the step up."""
    reports = [
        report(0, waited_s=10.0),
        report(1, "late", waited_s=0.01),
        report(2, "late", waited_s=9.9),
        report(3, "late", waited_s=4.0),
    ]
    assert error_of(reports).ranks == (1,)
    both = [report(0, waited_s=10.0), *(report(r, "late", waited_s=0.1 * r) for r in (1, 2))]
    assert error_of(both).ranks == (1, 2)


def test_a_rank_asked_before_it_had_posted_is_late_too() -> None:
    """It came to the store in time for a report, but not to the step."""
    asked = report(1, "asked", 6, posted=6, settled=5)
    error = error_of([report(0), asked, report(2)])
    assert (error.ranks, error.step) == ((1,), 7), "the step is the one that was waited for"


def test_a_rank_asked_while_it_waited_itself_is_not_named() -> None:
    error = error_of([report(0), report(1, "asked")], {2: seen()})
    assert error.ranks == (2,)


def test_nobody_is_named_where_all_are_there() -> None:
    error = error_of([report(0, "lost"), report(1, "asked", 6, posted=6)])
    assert (error.kind, error.ranks) == ("PeerLost", ())


# -- what the seal settles -------------------------------------------------------------------------


def test_the_seal_settles_through_the_highest_step_settled_anywhere() -> None:
    reports = [
        report(0, "lost", 8, settled=7, held={6: [6], 7: [7]}),
        report(1, "lost", 7, settled=6, held={5: [5], 6: [6]}),
    ]
    seal = seal_of(reports)
    assert seal.through == 7
    assert seal.verdicts[7] == [7]


def test_the_seal_has_what_a_missing_rank_may_lack() -> None:
    """All who report have settled step 7; the one that comes later has not."""
    reports = [report(rank, "lost", 8, settled=7, held={6: [6], 7: [7]}) for rank in (0, 1)]
    assert seal_of(reports, {2: seen()}).verdicts == {6: [6], 7: [7]}


def test_a_seal_survives_the_store() -> None:
    seal = seal_of([report(0, "lost", settled=7, held={7: [1, -2]})], {1: seen(dead=True)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seal), type=Seal) == seal


@given(st.permutations([0, 1, 2, 3]))
def test_the_order_of_reports_changes_nothing(order: list[int]) -> None:
    reports = differing("fingerprint", [3, 3, 4, 5])
    assert seal_of([reports[rank] for rank in order]) == seal_of(reports)


@pytest.mark.parametrize(
    "kind,expected",
    [
        ("Divergence", Divergence),
        ("RankStalled", RankStalled),
        ("PeerLost", PeerLost),
        ("PeerError", PeerError),
        ("of a later version", PeerError),
    ],
)
def test_every_kind_is_built_with_all_it_says(kind: str, expected: type[KvpactError]) -> None:
    sealed = SealedError(
        kind, "what", (1, 3), 2, 7, ("story",), field="live", ours=4, theirs=5,
        phase="idle", waited_s=1.5, dead=True,
    )  # fmt: skip
    error = sealed.build()
    assert type(error) is expected
    assert (error.message, error.ranks, error.rank) == ("what", (1, 3), 1)
    assert (error.epoch, error.step, error.story) == (2, 7, ("story",))
    if isinstance(error, Divergence):
        assert (error.field, error.ours, error.theirs) == ("live", 4, 5)
    if isinstance(error, RankStalled):
        assert (error.phase, error.waited_s, error.dead) == ("idle", 1.5, True)
    assert sealed.build() is not error


# -- the closer ------------------------------------------------------------------------------------


class Places:
    """Where ranks are, out of band."""

    def __init__(self) -> None:
        self.gone: set[int] = set()

    def is_gone(self, rank: int) -> bool:
        return rank in self.gone

    def is_paused(self, rank: int) -> bool:
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        return {rank: seen(dead=rank in self.gone) for rank in ranks}


def closers(size: int, store: MemoryStore, places: Places | None = None) -> list[Closer]:
    where = places or Places()
    return [
        Closer(store=store, rank=rank, ranks=range(size), epoch=EPOCH, locator=where)
        for rank in range(size)
    ]


def test_all_who_report_get_one_seal_whatever_the_order() -> None:
    """Three ranks; each files once and polls twice, in every order. Rank 2 sees it differently."""
    orders = set(itertools.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    assert len(orders) == 1680
    for order in sorted(orders):
        made = closers(3, MemoryStore())
        seals: dict[int, list[Seal]] = {rank: [] for rank in range(3)}
        turns = dict.fromkeys(range(3), 0)
        for now, rank in enumerate(order):
            if turns[rank] == 0:
                cause = "late" if rank == 2 else "waited"
                made[rank].file(report(rank, cause), now, grace_s=3.0)
            else:
                seal = made[rank].poll(now)
                if seal is not None:
                    seals[rank].append(seal)
            turns[rank] += 1
        final = [one.poll(100) for one in made]
        assert final.count(final[0]) == 3
        assert final[0] is not None
        assert 2 in final[0].error.ranks
        for found in seals.values():
            assert all(seal == final[0] for seal in found), "it never changes"


def test_the_first_writer_wins() -> None:
    """Both have lost verdict_wait with one another before either had reported."""
    store = MemoryStore()
    first, second = closers(2, store)
    first.file(report(0), 0.0, grace_s=1.0)
    assert first.poll(0.5) is None, "the other may still report"
    seal = first.poll(1.0)
    assert seal is not None
    assert seal.error.ranks == (1,)
    second.file(report(1), 5.0, grace_s=1.0)
    assert second.poll(5.0) == seal, "a report that comes late changes nothing"
    assert first.poll(9.0) == seal


def test_whoever_files_asks_all_others_for_their_reports() -> None:
    store = MemoryStore()
    first, second = closers(2, store)
    assert not second.is_closing()
    first.file(report(0), 0.0, grace_s=10.0)
    assert second.is_closing()
    assert first.poll(0.1) is None
    second.file(report(1, "asked"), 0.1, grace_s=10.0)
    assert first.poll(0.2) == second.poll(0.2) is not None


def test_a_rank_whose_process_ended_is_not_waited_for() -> None:
    places = Places()
    first, _, _ = closers(3, MemoryStore(), places)
    places.gone = {1, 2}
    first.file(report(0, "lost"), 0.0, grace_s=60.0)
    seal = first.poll(0.0)
    assert seal is not None
    assert (seal.error.ranks, seal.error.dead) == ((1, 2), True)


def _all_of(store: MemoryStore) -> dict[str, bytes | None]:
    keys = store.keys()
    return {key: store.get(key) for key in keys}


def test_a_second_report_of_the_same_rank_changes_nothing() -> None:
    store = MemoryStore()
    first, _ = closers(2, store)
    first.file(report(0, "waited"), 0.0, grace_s=1.0)
    before = _all_of(store)
    first.file(report(0, "mismatch"), 9.0, grace_s=1.0)
    assert _all_of(store) == before
    assert first.poll(1.0) is not None, "nor how long it waits"


def test_epochs_do_not_see_one_another() -> None:
    store = MemoryStore()
    old, _ = closers(2, store)
    new = Closer(store=store, rank=0, ranks=range(2), epoch=EPOCH + 1, locator=Places())
    old.file(report(0), 0.0, grace_s=0.0)
    assert old.poll(0.0) is not None
    assert old.claim_given_up(7)
    assert not new.is_closing()
    assert new.claim_settled(7)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_is_claimed_one_way_only(size: int) -> None:
    """Every rank asks one thing of one step; in every order, all are told the same."""
    for wishes in itertools.product(["settle", "give up"], repeat=size):
        for order in itertools.permutations(range(size)):
            made = closers(size, MemoryStore())
            is_settled: set[bool] = set()
            for rank in order:
                if wishes[rank] == "settle":
                    is_settled.add(made[rank].claim_settled(7))
                else:
                    is_settled.add(not made[rank].claim_given_up(7))
            assert is_settled == {wishes[order[0]] == "settle"}, "as the first one wanted"
            assert made[0].claim_settled(8), "another step is another question"


def test_who_waits_for_which_step_is_asked_for_its_report() -> None:
    """A difference in step 7 is met by everyone in step 7; whoever is not there yet goes on."""
    store = MemoryStore()
    first, second = closers(2, store)
    assert second.is_closing(7) is False
    first.file(report(0, "mismatch", 7), 0.0, grace_s=1.0)
    assert [second.is_closing(step) for step in (6, 7, 8)] == [False, True, True]
    assert second.is_closing()
    assert first.poll(1.0) is not None
    assert second.is_closing(3), "it is sealed: nobody has anything to wait for"


def test_the_keys_of_an_epoch() -> None:
    """Other versions of kvpact, and people with a store's client, know them."""
    store = MemoryStore()
    first, _ = closers(2, store)
    first.file(report(0), 0.0, grace_s=1.0)
    assert first.poll(1.0) is not None
    assert first.claim_settled(9)
    assert sorted(store.keys()) == [
        "epoch/2/closing",
        "epoch/2/late/9",
        "epoch/2/report/0",
        "epoch/2/seal",
    ]


class Looking(Places):
    """Counts who is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        self.asked.append(list(ranks))
        return super().last_seen(ranks, asks=asks)


@pytest.mark.parametrize("cause", ["waited", "late"])
def test_who_has_waited_looks_once_for_the_others_while_they_may_still_come(cause: str) -> None:
    places = Looking()
    first = closers(3, MemoryStore(), places)[0]
    first.file(report(0, cause), 10.0, grace_s=4.0)
    assert first.poll(10.9) is None
    assert places.asked == []
    for now_s in (11.0, 11.1, 13.9):
        assert first.poll(now_s) is None
        assert places.asked == [[1, 2]]
    assert first.poll(14.0) is not None
    assert places.asked == [[1, 2]], "what is known is not asked again"


@pytest.mark.parametrize("cause", ["mismatch", "asked"])
def test_who_has_not_waited_looks_for_nobody_before_the_end(cause: str) -> None:
    places = Looking()
    first = closers(3, MemoryStore(), places)[0]
    first.file(report(0, cause), 10.0, grace_s=4.0)
    for now_s in (10.5, 11.5, 13.9):
        assert first.poll(now_s) is None
    assert places.asked == []
    assert first.poll(14.0) is not None
    assert places.asked == [[1, 2]]


def test_who_only_looks_on_looks_for_nobody() -> None:
    places = Looking()
    onlooker = closers(2, MemoryStore(), places)[1]
    onlooker._give_up_at = 5.0
    assert onlooker.poll(4.0) is None
    assert places.asked == []


def test_an_incident_has_the_reports_without_what_only_settling_needs() -> None:
    store = MemoryStore()
    first, second = closers(2, store)
    first.file(report(0, held={7: [1]}), 0.0, grace_s=1.0)
    second.file(report(1, "asked", held={7: [2]}), 0.0, grace_s=1.0)
    seal = first.poll(0.1)
    assert seal is not None
    incident = second.incident(seal)
    assert (incident.rank, incident.epoch) == (1, EPOCH)
    assert incident.seal == msgspec.structs.replace(seal, verdicts={})
    assert [(one.rank, one.cause, one.held) for one in incident.reports] == [
        (0, "waited", {}),
        (1, "asked", {}),
    ]


# -- introductions ---------------------------------------------------------------------------------


def introduced(*facts: dict[str, str]) -> list[Introduction]:
    return [Introduction(rank, one, {"a": 10 - rank}) for rank, one in enumerate(facts)]


def test_who_agrees_has_the_least_of_everyone() -> None:
    same = {"mode": "write_back", "tp": "2"}
    assert agree(introduced(same, same, same)) == {"a": 8}
    assert agree(introduced(same)) == {"a": 10}
    with pytest.raises(AttributeError):
        introduced(same)[0].rank = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize(
    "theirs, field, has",
    [
        ({"mode": "write_back", "tp": "4"}, "tp", "4"),
        ({"mode": "write_back"}, "tp", "nothing"),
        ({"mode": "write_back", "tp": "2", "pp": "1"}, "pp", "1"),
        ({"tp": "4"}, "mode", "nothing"),
    ],
)
def test_the_first_rank_and_field_that_differ_are_named(
    odd: int, theirs: dict[str, str], field: str, has: str
) -> None:
    facts = [{"mode": "write_back", "tp": "2"}] * 3
    facts[odd] = theirs
    ours = facts[0].get(field, "nothing")
    expected = f"rank {odd} has {field} = {has}, rank 0 has {ours}"
    with pytest.raises(Misuse, match=expected) as caught:
        agree(introduced(*facts))
    assert caught.value.rank == odd


def test_a_report_that_cannot_be_written_whole_is_told_as_well_as_it_can_be() -> None:
    """What an engine put into its decisions never takes the place of the error that it is about."""
    store = MemoryStore()
    odd = Entry(0, EPOCH, 7, "match", ("r\ud800", 2**70))
    reports = [
        msgspec.structs.replace(
            one,
            tail=[odd],
            live={"r\ud800": 3},
            detail="half \udfff",
            pools={"\ud800": {"x": 2**80}},
        )
        for one in differing("fingerprint", [40, 40, 41])
    ]
    closers = [
        Closer(store=store, rank=rank, ranks=range(3), epoch=EPOCH, locator=Places())
        for rank in range(3)
    ]
    for closer, one in zip(closers, reports, strict=True):
        closer.file(one, 0.0, 10.0)
    seals = [closer.poll(5.0) for closer in closers]
    assert all(seal is not None and seal == seals[0] for seal in seals)
    error = seals[0].error if seals[0] is not None else None
    assert error is not None
    assert (error.kind, error.ranks, error.field) == ("Divergence", (2,), "fingerprint")
