"""PagePool against a deliberately dumb twin, and its rules one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpact.cache.memory.page_pool import PagePool
from kvpact.consensus.core.errors import InternalError, Misuse


class DumbPool:
    """The same rules with sets and counts, nothing clever; says only what must be true."""

    def __init__(self, num_pages: int) -> None:
        self.free = set(range(num_pages))
        self.out: set[int] = set()
        self.limbo: set[int] = set()
        self.holds = dict.fromkeys(range(num_pages), 0)

    def may_free(self, pages: list[int]) -> bool:
        return len(set(pages)) == len(pages) and set(pages) <= self.out

    def may_hold(self, pages: list[int]) -> bool:
        return set(pages) <= self.out

    def may_release(self, pages: list[int]) -> bool:
        return all(pages.count(page) <= self.holds.get(page, 0) for page in pages)

    def settle(self) -> None:
        back = {page for page in self.limbo if self.holds[page] == 0}
        self.limbo -= back
        self.free |= back


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, legal or not, leaves pool and twin with the same pages."""

    # Beyond the largest pool and below zero: unknown pages must be refused as well.
    some_pages = st.lists(st.integers(-1, 9), max_size=5)

    @initialize(num_pages=st.integers(0, 8))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool("device", num_pages)
        self.twin = DumbPool(num_pages)

    @rule(num_pages=st.integers(0, 9), up_to=st.booleans())
    def reserve(self, num_pages: int, up_to: bool) -> None:
        num_free = len(self.twin.free)
        if up_to:
            taken = self.pool.reserve_up_to(num_pages)
            assert len(taken) == min(num_pages, num_free)
        else:
            found = self.pool.reserve(num_pages)
            assert (found is None) == (num_pages > num_free)
            taken = found or []
            assert len(taken) == (num_pages if num_pages <= num_free else 0)
        assert len(set(taken)) == len(taken)
        assert set(taken) <= self.twin.free, "a page was handed out that is not free"
        self.twin.free -= set(taken)
        self.twin.out |= set(taken)

    @rule(pages=some_pages)
    def free(self, pages: list[int]) -> None:
        self.call(self.pool.free, pages, self.twin.may_free(pages))
        if self.twin.may_free(pages):
            self.twin.out -= set(pages)
            self.twin.limbo |= set(pages)

    @rule()
    def free_all(self) -> None:
        self.free(sorted(self.twin.out))

    @rule(pages=some_pages)
    def hold(self, pages: list[int]) -> None:
        legal = self.twin.may_hold(pages)
        self.call(self.pool.hold, pages, legal)
        if legal:
            for page in pages:
                self.twin.holds[page] += 1

    @rule(data=st.data())
    def hold_some_out(self, data: st.DataObject) -> None:
        if self.twin.out:
            self.hold(data.draw(st.lists(st.sampled_from(sorted(self.twin.out)), max_size=4)))

    @rule(pages=some_pages)
    def release(self, pages: list[int]) -> None:
        legal = self.twin.may_release(pages)
        self.call(self.pool.release, pages, legal)
        if legal:
            for page in pages:
                self.twin.holds[page] -= 1

    @rule()
    def release_one_holder_of_each(self) -> None:
        self.release([page for page, holds in self.twin.holds.items() if holds])

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.twin.limbo |= self.twin.out
        self.twin.out = set()

    def call(self, method: Callable[[list[int]], None], pages: list[int], legal: bool) -> None:
        if legal:
            method(pages)
            return
        before = snapshot(self.pool)
        with pytest.raises(InternalError, match="'device'"):
            method(pages)
        assert snapshot(self.pool) == before, "an illegal call changed the pool"

    @invariant()
    def same(self) -> None:
        self.twin.settle()
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.twin.free)
        assert self.pool.num_limbo == len(self.twin.limbo)
        assert self.pool.num_out == len(self.twin.out)
        assert self.pool.usable == self.pool.num_pages - len(self.twin.limbo)


TestPoolMachine = PoolMachine.TestCase


def snapshot(pool: PagePool) -> tuple[list[int], ...]:
    # White box on purpose: "nothing changed" includes the order of later reservations.
    return (list(pool._free), list(pool._state), list(pool._holds))


def test_reserve_is_all_or_nothing_and_ordered():
    pool = PagePool("host", 4)
    assert pool.reserve(5) is None
    assert pool.num_free == 4
    assert pool.reserve(3) == [0, 1, 2]
    assert pool.reserve(0) == []
    assert pool.reserve(2) is None
    assert pool.reserve_up_to(2) == [3]


def test_freeing_what_was_reserved_restores_the_order():
    pool = PagePool("host", 8)
    first = pool.reserve(3)
    assert first is not None
    second = pool.reserve(3)
    assert second is not None
    before = snapshot(pool)
    third = pool.reserve(2)
    assert third is not None
    pool.free(third)
    assert snapshot(pool) == before
    pool.free(second)
    pool.free(first)
    assert pool.reserve(8) == list(range(8))


def test_a_held_page_is_not_reused_before_its_last_holder():
    pool = PagePool("device", 2)
    assert pool.reserve(2) == [0, 1]
    pool.hold([0])
    pool.hold([0, 1])
    pool.free([0])
    assert (pool.num_free, pool.num_limbo, pool.usable) == (0, 1, 1)
    pool.release([0, 1])
    assert pool.reserve(1) is None, "one copy still touches page 0"
    pool.release([0])
    assert pool.reserve(1) == [0]
    assert pool.num_limbo == 0


def test_a_page_may_be_released_and_kept():
    pool = PagePool("device", 1)
    pool.reserve(1)
    pool.hold([0])
    pool.release([0])
    assert (pool.num_free, pool.num_out) == (0, 1)


def test_reset_keeps_what_copies_still_touch():
    pool = PagePool("device", 3)
    pool.reserve(3)
    pool.hold([1])
    pool.reset()
    assert (pool.num_free, pool.num_limbo, pool.usable) == (2, 1, 2)
    assert pool.reserve(3) is None
    assert pool.reserve_up_to(3) == [0, 2]
    pool.release([1])
    assert pool.reserve(1) == [1]


ILLEGAL: list[tuple[Callable[[PagePool], object], str]] = [
    (lambda pool: pool.free([3]), "cannot free page 3: it is free"),
    (lambda pool: pool.free([0, 1, 0]), "page 0 is freed twice in one call"),
    (lambda pool: pool.free([2]), "cannot free page 2: it is in limbo"),
    (lambda pool: pool.free([4]), "page 4 is unknown"),
    (lambda pool: pool.free([0, -1]), "page -1 is unknown"),
    (lambda pool: pool.hold([0, 3]), "cannot hold page 3: it is free"),
    (lambda pool: pool.hold([2]), "cannot hold page 2: it is in limbo"),
    (lambda pool: pool.release([0]), "page 0 is released but no copy holds it"),
    (lambda pool: pool.release([2, 2]), "page 2 is released but no copy holds it"),
    (lambda pool: pool.reserve(-1), "cannot reserve -1 pages"),
    (lambda pool: pool.reserve_up_to(-1), "cannot reserve -1 pages"),
]


@pytest.mark.parametrize("call, words", ILLEGAL)
def test_an_illegal_call_names_pool_and_page_and_changes_nothing(
    call: Callable[[PagePool], object], words: str
):
    pool = PagePool("device", 4)
    pool.reserve(3)  # page 3 stays free
    pool.hold([2])
    pool.free([2])  # page 2 is in limbo
    before = snapshot(pool)
    with pytest.raises(InternalError, match=f"pool 'device': {words}"):
        call(pool)
    assert snapshot(pool) == before


def test_a_negative_size_is_misuse():
    with pytest.raises(Misuse, match="num_pages must be at least 0, not -1"):
        PagePool("device", -1)


def test_check_integrity_sees_damage():
    def damaged(damage: Callable[[PagePool], None]) -> PagePool:
        pool = PagePool("device", 3)
        pool.reserve(1)
        pool.check_integrity()
        damage(pool)
        return pool

    damages: list[Callable[[PagePool], None]] = [
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.append(1),
        lambda pool: pool._free.clear(),
        lambda pool: pool._holds.__setitem__(2, 1),
        lambda pool: pool._state.__setitem__(0, 2),
        lambda pool: setattr(pool, "_num_limbo", 1),
    ]
    for damage in damages:
        with pytest.raises(InternalError, match="'device'"):
            damaged(damage).check_integrity()
