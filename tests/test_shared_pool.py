"""A pool that the engine allocates from too: its free pages are the same number on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus import Intent, Misuse, SharedPool
from tests.foreign import Owner, make_manager


class Pages:
    """An engine's pool: a free list of page numbers."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))

    def take(self, num_pages: int) -> list[int] | None:
        if num_pages > len(self.free):
            return None
        taken, self.free = self.free[:num_pages], self.free[num_pages:]
        return taken

    def give(self, pages: list[int]) -> None:
        self.free += pages


def shared(num_pages: int, agreed: int) -> tuple[Pages, SharedPool[list[int]]]:
    pages = Pages(num_pages)
    pool = SharedPool("a", take=pages.take, free=pages.give, available=lambda: len(pages.free))
    pool.adopt(num_pages, agreed)
    return pages, pool


def intent(need: int) -> Intent:
    opened = make_manager(0).open("load", "x", {"a": need}, Owner({"a": 10}))
    assert opened is not None
    return opened


def test_a_larger_rank_holds_its_surplus_for_good() -> None:
    pages, pool = shared(12, 8)
    assert (pool.surplus, pool.room(), len(pages.free)) == (4, 8, 8)
    pages.free = list(range(12))  # the engine has emptied its pool
    pool.cleared()
    assert pool.room() == 8


def test_more_than_there_is_cannot_be_agreed() -> None:
    with pytest.raises(Misuse, match="has 4 pages, but 8 were agreed"):
        shared(4, 8)


def test_a_pool_in_use_cannot_be_adopted() -> None:
    pages = Pages(8)
    pages.take(6)
    pool = SharedPool("a", take=pages.take, free=pages.give, available=lambda: len(pages.free))
    with pytest.raises(Misuse, match="cannot spare the 4 pages"):
        pool.adopt(8, 4)


def test_a_refused_rank_holds_what_the_others_hold() -> None:
    pages, pool = shared(8, 8)
    one = intent(5)
    pool.refused(one)
    assert pool.room() == 3
    pool.decided(one)
    pool.decided(one)  # a second verdict gives nothing back
    assert pool.room() == len(pages.free) == 8


def test_what_cannot_even_be_held_is_owed() -> None:
    pages, pool = shared(8, 8)
    pages.take(6)
    one = intent(5)
    pool.refused(one)
    assert pool.room() == 2 - 5, "the others have 5 fewer"
    pool.decided(one)
    assert pool.room() == 2


@given(
    sizes=st.lists(st.integers(8, 16), min_size=2, max_size=4),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["engine", "free", "load", "decide"]),
            st.integers(1, 4),
            st.sets(st.integers(0, 3)),
        ),
        max_size=40,
    ),
)
def test_room_is_one_number_whoever_is_refused(
    sizes: list[int], calls: list[tuple[str, int, set[int]]]
) -> None:
    agreed = min(sizes)
    ranks = [shared(size, agreed) for size in sizes]
    mine: list[list[list[int]]] = []  # by allocation, by rank
    votes: list[tuple[Intent, list[list[int] | None]]] = []
    for call, num_pages, refused in calls:
        fits = num_pages <= ranks[0][1].room()
        if call == "engine" and fits:
            taken = [pages.take(num_pages) for pages, _ in ranks]
            assert all(pages is not None for pages in taken), "room says what can be had"
            mine.append([pages for pages in taken if pages is not None])
        elif call == "free" and mine:
            for (pages, _), back in zip(ranks, mine.pop(0), strict=True):
                pages.give(back)
        elif call == "load" and fits:
            one, held = intent(num_pages), list[list[int] | None]()
            for rank, (pages, pool) in enumerate(ranks):
                if rank in refused:
                    pool.refused(one)
                held.append(None if rank in refused else pages.take(num_pages))
            votes.append((one, held))
        elif call == "decide" and votes:
            one, held = votes.pop(0)
            for (pages, pool), back in zip(ranks, held, strict=True):
                pool.decided(one)
                if back is not None:
                    pages.give(back)
        assert len({pool.room() for _, pool in ranks}) == 1
