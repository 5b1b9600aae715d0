"""The ledger: an account that is the same on every rank, never below zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.errors import InternalError
from kvpact.consensus.core.ledger import Ledger


def ledger(**usable: int) -> Ledger:
    made = Ledger(usable)
    made.agree(usable)
    return made


def test_room_is_what_is_usable_and_not_charged() -> None:
    made = ledger(device=10, host=3)
    made.charge("device", 4)
    assert (made.usable("device"), made.charged("device"), made.room("device")) == (10, 4, 6)
    assert made.room("host") == 3
    made.refund("device", 1)
    assert made.room("device") == 7


def test_room_is_never_negative() -> None:
    made = ledger(device=10)
    made.charge("device", 8)
    made.agree({"device": 5})
    assert (made.room("device"), made.charged("device")) == (0, 8)
    made.agree({"device": 9})
    assert made.room("device") == 1


@pytest.mark.parametrize("num_pages", [5, -1])
def test_a_wrong_refund_raises_and_changes_nothing(num_pages: int) -> None:
    made = ledger(device=10)
    made.charge("device", 4)
    with pytest.raises(InternalError, match="pool device"):
        made.refund("device", num_pages)
    assert made.charged("device") == 4


def test_a_negative_charge_raises_and_changes_nothing() -> None:
    made = ledger(device=10)
    made.charge("device", 4)
    with pytest.raises(InternalError, match="-1"):
        made.charge("device", -1)
    assert made.charged("device") == 4


def test_cooling_pages_stay_charged_until_their_ballot_is_settled() -> None:
    made = ledger(device=10, host=10)
    made.charge("device", 5)
    made.charge("host", 2)
    made.cool(3, "device", 4)
    made.cool(3, "host", 2)
    made.cool(4, "device", 1)
    assert (made.cooling("device"), made.cooling("host")) == (5, 2)
    made.settle(2)
    assert (made.charged("device"), made.charged("host"), made.is_cooling) == (5, 2, True)
    made.settle(3)
    assert (made.charged("device"), made.charged("host")) == (1, 0)
    assert made.is_cooling
    made.settle(9)
    assert (made.charged("device"), made.cooling("device"), made.is_cooling) == (0, 0, False)


def test_nothing_cools_where_there_is_nothing() -> None:
    made = ledger(device=10)
    made.cool(3, "device", 0)
    assert not made.is_cooling


def test_a_new_epoch_starts_from_nothing() -> None:
    made = ledger(device=10)
    made.charge("device", 5)
    made.cool(1, "device", 5)
    made.clear()
    assert (made.charged("device"), made.is_cooling, made.usable("device")) == (0, False, 10)
    made.settle(1)
    assert made.charged("device") == 0


@given(st.lists(st.tuples(st.sampled_from(["charge", "refund", "cool"]), st.integers(0, 4))))
def test_against_a_sum(calls: list[tuple[str, int]]) -> None:
    """Ballots are settled one by one; what cools from call ``n`` comes back at ballot ``n + 2``."""
    made, charged = ledger(device=6), 0
    cooling: dict[int, int] = {}
    for step, (call, num_pages) in enumerate(calls):
        # As the manager, which never gives the same page back twice.
        given_back = min(num_pages, charged - sum(cooling.values()))
        if call == "charge":
            made.charge("device", num_pages)
            charged += num_pages
        elif call == "refund":
            made.refund("device", given_back)
            charged -= given_back
        else:
            made.cool(step + 2, "device", given_back)
            cooling[step + 2] = given_back
        made.settle(step)
        charged -= cooling.pop(step, 0)
        assert made.charged("device") == charged
        assert made.room("device") == max(0, 6 - charged)
        assert made.cooling("device") == sum(cooling.values())
