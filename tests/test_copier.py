"""Copies of one step, merged; pages are held until their copy has really ended."""

from __future__ import annotations

import pytest

from kvpact.cache.copies.copier import Copier
from kvpact.cache.copies.cpu import DeferredMover
from kvpact.cache.copies.mover import Direction, Part, PartPlan
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.cache.tree.node import Tier
from kvpact.harness.verify.content import fill_pages, matches_pages

SHAPE = KVShape(layers=2, heads=1, dim=2)


class Desk:
    """A copier over 8 device and 8 host pages; device page p holds the bytes of hash 100 + p."""

    def __init__(self, *, verifies: bool = True) -> None:
        self.tensors = {tier: KVTensors(SHAPE, 8, 4) for tier in Tier}
        fill_pages(self.tensors[Tier.DEVICE], range(8), range(100, 108), 0)
        self.pools = {tier: PagePool(tier.value, 8) for tier in Tier}
        device, host = self.tensors[Tier.DEVICE], self.tensors[Tier.HOST]
        self.mover = DeferredMover(device, host, max_parts=4)
        self.copier = Copier(self.mover, self.pools, verifies=verifies)
        self.ended: list[tuple[str, bool]] = []

    def take(self, tier: Tier, num_pages: int) -> list[int]:
        pages = self.pools[tier].reserve(num_pages)
        assert pages is not None
        return pages

    def back_up(self, name: str, num_pages: int = 2) -> tuple[list[int], list[int]]:
        source, target = self.take(Tier.DEVICE, num_pages), self.take(Tier.HOST, num_pages)
        pairs = [(source, target)]
        self.copier.add(Direction.TO_HOST, pairs, lambda _, ok: self.ended.append((name, ok)))
        return source, target


def corrupts_first(direction: Direction, part: Part) -> PartPlan:
    return PartPlan(corrupt=part.ticket == 1)


def fails_second(direction: Direction, part: Part) -> PartPlan:
    return PartPlan(ok=part.ticket != 2)


def test_one_merged_copy_per_direction_however_many_parts() -> None:
    copier = Desk()
    pairs = [copier.back_up(name) for name in "abc"]
    assert copier.mover.submitted[Direction.TO_HOST] == 0  # nothing starts before submit
    copier.copier.submit()
    copier.copier.submit()
    assert copier.mover.submitted == {Direction.TO_HOST: 1, Direction.TO_DEVICE: 0}
    copier.copier.collect()
    assert copier.ended == [("a", True), ("b", True), ("c", True)]
    for source, target in pairs:
        hashes = [100 + page for page in source]
        assert matches_pages(copier.tensors[Tier.HOST], target, hashes, 0) == [True, True]
    assert copier.copier.num_running == 0


def test_freed_pages_wait_in_limbo_for_their_copy() -> None:
    copier = Desk()
    source, target = copier.back_up("a")
    copier.copier.submit()
    copier.pools[Tier.DEVICE].free(source)
    copier.pools[Tier.HOST].free(target)
    for tier in Tier:
        assert (copier.pools[tier].num_free, copier.pools[tier].num_limbo) == (6, 2)
    copier.copier.collect()
    for tier in Tier:
        assert (copier.pools[tier].num_free, copier.pools[tier].num_limbo) == (8, 0)


@pytest.mark.parametrize("verifies", [True, False])
def test_wrong_bytes_count_as_failed_where_copies_are_verified(verifies: bool) -> None:
    copier = Desk(verifies=verifies)
    copier.mover.plan_part = corrupts_first
    copier.back_up("a")
    copier.back_up("b")
    copier.copier.submit()
    copier.copier.collect()
    assert copier.ended == [("a", not verifies), ("b", True)]
    assert copier.copier.num_wrong == int(verifies)


def test_a_failed_part_fails_alone() -> None:
    copier = Desk()
    copier.mover.plan_part = fails_second
    for name in "abc":
        copier.back_up(name)
    copier.copier.submit()
    copier.copier.collect()
    assert dict(copier.ended) == {"a": True, "b": False, "c": True}


def test_room_counts_what_waits_and_what_runs() -> None:
    copier = Desk()
    copier.back_up("a", 1)
    assert copier.copier.room == 3
    copier.copier.submit()
    assert copier.copier.room == 3
    copier.back_up("b", 1)
    assert copier.copier.room == 2
    copier.copier.submit()
    copier.copier.collect()
    assert copier.copier.room == 4
