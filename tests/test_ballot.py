"""The ballot: its layout, and what a reduced one says, against a twin that sees all ballots."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.ballot import (
    HEADER_FIELDS,
    MASK62,
    Header,
    Schema,
    Status,
    Vector,
    tally,
)
from kvpact.consensus.core.errors import Misuse

POOLS: tuple[str, ...] = ("device", "host")
SCHEMA = Schema(POOLS, num_slots=3)

values62 = st.integers(0, MASK62)
headers = st.builds(Header, **dict.fromkeys(HEADER_FIELDS, values62))


class OneBallot(msgspec.Struct, frozen=True):
    """What one rank says, before it is written into a vector."""

    header: Header
    status: Status
    clock_ms: int
    usable: dict[str, int]
    slots: list[tuple[int, int]]

    def vector(self, rank: int) -> Vector:
        vector = SCHEMA.ballot(rank, self.header, self.status, self.clock_ms, self.usable)
        vector[SCHEMA.first_slot :] = [number for slot in self.slots for number in slot]
        return vector


amounts = st.integers(0, 1 << 40)
slot_columns = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 1)), min_size=3, max_size=3
)


def ballots(header: st.SearchStrategy[Header]) -> st.SearchStrategy[OneBallot]:
    return st.builds(
        OneBallot,
        header=header,
        status=st.sampled_from(Status),
        clock_ms=amounts,
        usable=st.fixed_dictionaries(dict.fromkeys(POOLS, amounts)),
        slots=slot_columns,
    )


def header(**changes: int) -> Header:
    return msgspec.structs.replace(Header(9, 1, 2, 3, 0, 55, 66), **changes)


def reduce_ballots(said: list[OneBallot]) -> Vector:
    return np.minimum.reduce([ballot.vector(rank) for rank, ballot in enumerate(said)])


def test_layout() -> None:
    one = OneBallot(header(), Status.HEALTHY, 77, {"host": 20, "device": 10}, [(4, 1)] * 3)
    vector = one.vector(0)
    pairs = [number for name in HEADER_FIELDS for number in (getattr(one.header, name),) * 2]
    pairs[1::2] = [-number for number in pairs[1::2]]
    assert vector.tolist() == [*pairs, 0, 77, 10, 20, 4, 1, 4, 1, 4, 1]
    assert vector.dtype == np.int64
    assert vector.shape == (SCHEMA.width,) == (14 + 2 + 2 + 6,)
    assert SCHEMA.first_slot == 18


@given(st.lists(st.text(min_size=1, max_size=4), max_size=5, unique=True), st.integers(1, 600))
def test_width_follows_from_pools_and_slots(pools: list[str], num_slots: int) -> None:
    schema = Schema(tuple(sorted(pools)), num_slots)
    usable = dict.fromkeys(pools, 1)
    vector = schema.ballot(0, header(), Status.HEALTHY, 0, usable)
    assert vector.shape == (schema.width,) == (16 + len(pools) + 2 * num_slots,)
    verdict = tally(schema, vector)
    assert len(verdict.votes) == len(verdict.ended) == num_slots
    assert verdict.usable == usable


@given(
    st.integers(2, 8),
    st.integers(0, 7),
    headers,
    st.sampled_from(HEADER_FIELDS),
    values62,
)
def test_any_single_difference_is_named(
    size: int, odd_rank: int, common: Header, field: str, value: int
) -> None:
    odd = msgspec.structs.replace(common, **{field: value})
    said = [OneBallot(common, Status.HEALTHY, 0, dict.fromkeys(POOLS, 0), [(0, 0)] * 3)] * size
    said[odd_rank % size] = msgspec.structs.replace(said[0], header=odd)
    verdict = tally(SCHEMA, reduce_ballots(said))
    was = getattr(common, field)
    if value == was:
        assert verdict.mismatch == ""
        assert verdict.step == common.step
    else:
        assert (verdict.mismatch, verdict.lowest, verdict.highest) == (
            field,
            min(was, value),
            max(was, value),
        )


@given(st.data(), st.integers(2, 8))
def test_reduced_ballot_says_what_a_twin_sees(data: st.DataObject, size: int) -> None:
    """Small header values, so that any mixture of equal and different fields comes up."""
    small = st.builds(Header, **dict.fromkeys(HEADER_FIELDS, st.integers(0, 1)))
    said = data.draw(st.lists(ballots(small), min_size=size, max_size=size))
    verdict = tally(SCHEMA, reduce_ballots(said))

    differing = [
        name for name in HEADER_FIELDS if len({getattr(one.header, name) for one in said}) > 1
    ]
    assert verdict.mismatch == (differing[0] if differing else "")
    worst = max(one.status for one in said)
    assert verdict.status is worst
    if worst is Status.HEALTHY:
        assert verdict.status_rank == -1
    else:
        assert verdict.status_rank == max(r for r in range(size) if said[r].status is worst)
    assert verdict.step == min(one.header.step for one in said)
    assert verdict.clock_ms == min(one.clock_ms for one in said)
    assert verdict.usable == {pool: min(one.usable[pool] for one in said) for pool in POOLS}
    for slot in range(3):
        assert verdict.votes[slot] == min(one.slots[slot][0] for one in said)
        assert verdict.ended[slot] == int(all(one.slots[slot][1] for one in said))


@pytest.mark.parametrize("rank", [0, 1, 5, (1 << 20) - 1])
@pytest.mark.parametrize("status", [Status.LEAVING, Status.BROKEN])
def test_status_names_its_rank_among_healthy_ones(rank: int, status: Status) -> None:
    usable = dict.fromkeys(POOLS, 0)
    healthy = SCHEMA.ballot(7, header(), Status.HEALTHY, 0, usable)
    unwell = SCHEMA.ballot(rank, header(), status, 0, usable)
    verdict = tally(SCHEMA, np.minimum(healthy, unwell))
    assert (verdict.status, verdict.status_rank) == (status, rank)


def test_broken_is_worse_than_leaving_whatever_the_ranks() -> None:
    usable = dict.fromkeys(POOLS, 0)
    broken = SCHEMA.ballot(0, header(), Status.BROKEN, 0, usable)
    leaving = SCHEMA.ballot((1 << 20) - 1, header(), Status.LEAVING, 0, usable)
    verdict = tally(SCHEMA, np.minimum(broken, leaving))
    assert (verdict.status, verdict.status_rank) == (Status.BROKEN, 0)


def test_only_the_asked_slots_are_read() -> None:
    said = OneBallot(header(), Status.HEALTHY, 0, dict.fromkeys(POOLS, 0), [(1, 0), (2, 1), (3, 0)])
    assert tally(SCHEMA, said.vector(0), 2).votes == [1, 2]
    assert tally(SCHEMA, said.vector(0), 0).ended == []
    assert tally(SCHEMA, said.vector(0)).ended == [0, 1, 0]


def test_a_vector_of_another_shape_is_refused() -> None:
    for shape in [(SCHEMA.width - 1,), (SCHEMA.width + 1,), (SCHEMA.width, 1), ()]:
        with pytest.raises(Misuse, match="numbers"):
            tally(SCHEMA, np.zeros(shape, dtype=np.int64))


def test_what_travels_between_versions_stays_as_it_is() -> None:
    """Another number here, and two versions of kvpact read each other's ballots wrongly."""
    assert MASK62 == 2**62 - 1
    assert {status.name: int(status) for status in Status} == {
        "HEALTHY": 0,
        "LEAVING": 1,
        "BROKEN": 2,
    }
    assert Schema(("a",)).num_slots == 256


def test_who_reads_a_ballot_cannot_change_it() -> None:
    said = OneBallot(header(), Status.HEALTHY, 0, dict.fromkeys(POOLS, 0), [(0, 0)] * 3)
    for one, field in (
        (SCHEMA, "pools"),
        (header(), "step"),
        (tally(SCHEMA, said.vector(0)), "step"),
    ):
        with pytest.raises(AttributeError):
            setattr(one, field, 1)


def test_without_a_difference_nothing_is_named() -> None:
    said = OneBallot(header(), Status.HEALTHY, 0, dict.fromkeys(POOLS, 0), [(0, 0)] * 3)
    verdict = tally(SCHEMA, said.vector(0))
    assert (verdict.mismatch, verdict.lowest, verdict.highest) == ("", 0, 0)


def test_digest_differs_where_schemas_do() -> None:
    schemas = [
        Schema(("device", "host"), 3),
        Schema(("device", "host"), 4),
        Schema(("device",), 3),
        Schema(("devicehost",), 3),
        Schema(("device", "hos"), 3),
        Schema((), 3),
    ]
    digests = {schema.digest for schema in schemas}
    assert len(digests) == len(schemas)
    assert all(0 <= digest <= MASK62 for digest in digests)
    assert Schema(("device", "host"), 3).digest == schemas[0].digest


@pytest.mark.parametrize(
    "pools,num_slots",
    [(("host", "device"), 1), (("device", "device"), 1), (("device",), 0), (("device",), -1)],
)
def test_schemas_without_sense_are_refused(pools: tuple[str, ...], num_slots: int) -> None:
    with pytest.raises(Misuse):
        Schema(pools, num_slots)


@pytest.mark.parametrize("rank", [-1, 1 << 20])
def test_a_rank_that_the_status_cannot_name_is_refused(rank: int) -> None:
    usable: dict[str, Any] = dict.fromkeys(POOLS, 0)
    with pytest.raises(Misuse, match="rank"):
        SCHEMA.ballot(rank, header(), Status.HEALTHY, 0, usable)
