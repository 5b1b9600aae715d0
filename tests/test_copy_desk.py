"""Copies of one step, merged; pages are held until their copy has really ended."""

from __future__ import annotations

import pytest

from kvpact.cache.copies.copier import CopyDesk
from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.copies.mover import Direction, Part, PartPlan
from kvpact.cache.memory.content import fill_pages, matches_pages
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.cache.tree.node import Tier

SHAPE = KVShape(layers=2, heads=1, dim=2)


class Desk:
    """A desk over 8 device and 8 host pages; device page p holds the bytes of hash 100 + p."""

    def __init__(self, *, verifies: bool = True) -> None:
        self.tensors = {tier: KVTensors(SHAPE, 8, 4) for tier in Tier}
        fill_pages(self.tensors[Tier.DEVICE], range(8), range(100, 108), 0)
        self.pools = {tier: PagePool(tier.value, 8) for tier in Tier}
        device, host = self.tensors[Tier.DEVICE], self.tensors[Tier.HOST]
        self.mover = DeferredMover(device, host, max_parts=4)
        self.desk = CopyDesk(self.mover, self.pools, verifies=verifies)
        self.ended: list[tuple[str, bool]] = []

    def take(self, tier: Tier, num_pages: int) -> list[int]:
        pages = self.pools[tier].reserve(num_pages)
        assert pages is not None
        return pages

    def back_up(self, name: str, num_pages: int = 2) -> tuple[list[int], list[int]]:
        source, target = self.take(Tier.DEVICE, num_pages), self.take(Tier.HOST, num_pages)
        pairs = [(source, target)]
        self.desk.add(Direction.TO_HOST, pairs, lambda _, ok: self.ended.append((name, ok)))
        return source, target


def corrupts_first(direction: Direction, part: Part) -> PartPlan:
    return PartPlan(corrupt=part.ticket == 1)


def fails_second(direction: Direction, part: Part) -> PartPlan:
    return PartPlan(ok=part.ticket != 2)


def test_one_merged_copy_per_direction_however_many_parts() -> None:
    desk = Desk()
    pairs = [desk.back_up(name) for name in "abc"]
    assert desk.mover.submitted[Direction.TO_HOST] == 0  # nothing starts before submit
    desk.desk.submit()
    desk.desk.submit()
    assert desk.mover.submitted == {Direction.TO_HOST: 1, Direction.TO_DEVICE: 0}
    desk.desk.collect()
    assert desk.ended == [("a", True), ("b", True), ("c", True)]
    for source, target in pairs:
        hashes = [100 + page for page in source]
        assert matches_pages(desk.tensors[Tier.HOST], target, hashes, 0) == [True, True]
    assert desk.desk.num_running == 0


def test_freed_pages_wait_in_limbo_for_their_copy() -> None:
    desk = Desk()
    source, target = desk.back_up("a")
    desk.desk.submit()
    desk.pools[Tier.DEVICE].free(source)
    desk.pools[Tier.HOST].free(target)
    for tier in Tier:
        assert (desk.pools[tier].num_free, desk.pools[tier].num_limbo) == (6, 2)
    desk.desk.collect()
    for tier in Tier:
        assert (desk.pools[tier].num_free, desk.pools[tier].num_limbo) == (8, 0)


@pytest.mark.parametrize("verifies", [True, False])
def test_wrong_bytes_count_as_failed_where_copies_are_verified(verifies: bool) -> None:
    desk = Desk(verifies=verifies)
    desk.mover.plan_part = corrupts_first
    desk.back_up("a")
    desk.back_up("b")
    desk.desk.submit()
    desk.desk.collect()
    assert desk.ended == [("a", not verifies), ("b", True)]
    assert desk.desk.num_wrong == int(verifies)


def test_a_failed_part_fails_alone() -> None:
    desk = Desk()
    desk.mover.plan_part = fails_second
    for name in "abc":
        desk.back_up(name)
    desk.desk.submit()
    desk.desk.collect()
    assert dict(desk.ended) == {"a": True, "b": False, "c": True}


def test_room_counts_what_waits_and_what_runs() -> None:
    desk = Desk()
    desk.back_up("a", 1)
    assert desk.desk.room == 3
    desk.desk.submit()
    assert desk.desk.room == 3
    desk.back_up("b", 1)
    assert desk.desk.room == 2
    desk.desk.submit()
    desk.desk.collect()
    assert desk.desk.room == 4
