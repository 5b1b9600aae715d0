"""Slots: the lowest free one first, and a rest between two users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.slots import SlotTable


def test_lowest_first() -> None:
    table = SlotTable(4, lag=0)
    assert [table.take(1) for _ in range(5)] == [0, 1, 2, 3, None]
    for slot in (3, 0, 2):
        table.give_back(slot, 1)
    assert [table.take(2) for _ in range(4)] == [0, 2, 3, None]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_a_slot_rests_for_lag_plus_one_steps(lag: int) -> None:
    table = SlotTable(1, lag)
    assert table.take(10) == 0
    table.give_back(0, 10)
    for step in range(10, 11 + lag):
        assert table.take(step) is None
    assert table.take(11 + lag) == 0


def test_a_slot_that_nobody_holds_cannot_be_given_back() -> None:
    table = SlotTable(2, lag=0)
    slot = table.take(0)
    assert slot == 0
    table.give_back(0, 0)
    for unheld in (0, 1, 7):
        with pytest.raises(InternalError, match=f"slot {unheld}"):
            table.give_back(unheld, 0)
    assert table.num_taken == 0


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["take", "give", "step"]), st.integers(0, 5)), max_size=80),
)
def test_against_a_twin(num_slots: int, lag: int, calls: list[tuple[str, int]]) -> None:
    """The twin keeps, for every slot, the step from which on it may be taken."""
    table = SlotTable(num_slots, lag)
    free_from = dict.fromkeys(range(num_slots), 0)
    taken: list[int] = []
    step = 0
    for call, which in calls:
        if call == "step":
            step += 1
        elif call == "take":
            free = [slot for slot, start in sorted(free_from.items()) if start <= step]
            slot = table.take(step)
            assert slot == (free[0] if free else None)
            if slot is not None:
                del free_from[slot]
                taken.append(slot)
        elif taken:
            slot = taken.pop(which % len(taken))
            table.give_back(slot, step)
            free_from[slot] = step + lag + 1
        assert table.num_taken == len(taken)
