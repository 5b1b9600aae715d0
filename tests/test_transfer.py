"""Copies: the bytes really move, merged; endings come in order; faults do what they say."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.copies.cpu import (
    NO_FAULT,
    CpuMover,
    DeferredMover,
    Direction,
    Ending,
    Part,
    PartPlan,
    PlanPart,
)
from kvpact.cache.copies.cuda import CudaMover
from kvpact.cache.copies.mover import MAX_PARTS
from kvpact.cache.copies.pages import HostCopier
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.consensus.core.errors import InternalError, Misuse, ResourceError
from kvpact.harness.verify.content import fill_pages, matches_pages

SHAPE = KVShape(layers=2, heads=1, dim=2)
NUM_PAGES = 24
TO_HOST, TO_DEVICE = Direction.TO_HOST, Direction.TO_DEVICE
LONG_S = 20.0  # never reached unless something is broken

AnyMover = CpuMover | DeferredMover


class MakeMover(Protocol):
    def __call__(
        self, *, plan_part: PlanPart | None = None, max_parts: int = MAX_PARTS
    ) -> AnyMover: ...


def planned(plans: Mapping[int, PartPlan], otherwise: PartPlan = NO_FAULT) -> PlanPart:
    """The plan of each part, by its ticket."""

    def plan(direction: Direction, part: Part) -> PartPlan:
        return plans.get(part.ticket, otherwise)

    return plan


def make_tiers() -> tuple[KVTensors, KVTensors]:
    """Device page p holds the contents of hash 100 + p, host page p those of 200 + p."""
    device, host = (KVTensors(SHAPE, NUM_PAGES, 4) for _ in range(2))
    fill_pages(device, range(NUM_PAGES), range(100, 100 + NUM_PAGES), 0)
    fill_pages(host, range(NUM_PAGES), range(200, 200 + NUM_PAGES), 0)
    return device, host


@pytest.fixture
def tiers() -> tuple[KVTensors, KVTensors]:
    return make_tiers()


@pytest.fixture(params=[CpuMover, DeferredMover])
def make(request: pytest.FixtureRequest, tiers: tuple[KVTensors, KVTensors]) -> Iterator[MakeMover]:
    movers: list[AnyMover] = []

    def build(*, plan_part: PlanPart | None = None, max_parts: int = MAX_PARTS) -> AnyMover:
        mover: AnyMover = request.param(*tiers, plan_part=plan_part, max_parts=max_parts)
        movers.append(mover)
        return mover

    yield build
    for mover in movers:
        mover.check_integrity()
        assert mover.close(LONG_S)


def ended(mover: AnyMover) -> list[Ending]:
    """One step of the caller: what runs ends, then it is collected."""
    assert mover.wait_all(LONG_S)
    endings = mover.collect()
    mover.check_integrity()
    return endings


def ok(*tickets: int) -> list[Ending]:
    return [Ending(ticket, True) for ticket in tickets]


class Watched:
    """Counts the copies of all movers, notes the threads, and can make them fail or wait."""

    def __init__(self) -> None:
        self.copies = dict.fromkeys(Direction, 0)
        self.threads: list[str] = []
        self.error: Exception | None = None
        self.gate: threading.Event | None = None

    def begins(self, to_device: bool) -> None:
        self.copies[TO_DEVICE if to_device else TO_HOST] += 1
        self.threads.append(threading.current_thread().name)
        if self.gate is not None:
            self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched, copy = Watched(), HostCopier.copy

    def watched_copy(self: HostCopier, to_device: bool, source: Any, target: Any) -> None:
        watched.begins(to_device)
        copy(self, to_device, source, target)

    monkeypatch.setattr(HostCopier, "copy", watched_copy)
    return watched


# ----------------------------------------------------------------------------- bytes, merged


def test_bytes_move_both_ways_and_nothing_else_changes(
    make: MakeMover, tiers: tuple[KVTensors, KVTensors]
):
    device, host = tiers
    mover = make()
    mover.submit(TO_HOST, [Part(1, [3, 0], [5, 6]), Part(2, [7], [1])])
    assert ended(mover) == ok(1, 2)
    mover.submit(TO_DEVICE, [Part(1, [5, 9], [10, 11])])
    assert ended(mover) == ok(1)
    expected_host = [200 + page for page in range(NUM_PAGES)]
    expected_host[5], expected_host[6], expected_host[1] = 103, 100, 107
    expected_device = [100 + page for page in range(NUM_PAGES)]
    expected_device[10], expected_device[11] = 103, 209
    assert all(matches_pages(host, range(NUM_PAGES), expected_host, 0))
    assert all(matches_pages(device, range(NUM_PAGES), expected_device, 0))


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("kind", [CpuMover, DeferredMover])
@pytest.mark.parametrize("direction", Direction)
def test_a_submit_is_one_copy_however_many_parts(
    kind: type[AnyMover], num_parts: int, direction: Direction, watched: Watched
):
    mover = kind(*make_tiers())
    parts = [
        Part(i, [3 * i, 3 * i + 1, 3 * i + 2], [3 * i + 2, 3 * i, 3 * i + 1]) for i in range(7)
    ]
    for number in (1, 2):
        mover.submit(direction, parts[:num_parts])
        assert ended(mover) == ok(*range(num_parts))
        assert watched.copies == mover.submitted
        assert mover.submitted == {direction: number, Direction(1 - direction): 0}
    main = threading.current_thread().name
    assert (main in watched.threads) == (kind is DeferredMover), "who copied?"
    mover.close(LONG_S)


def test_nothing_submitted_is_nothing_done(make: MakeMover):
    mover = make()
    mover.submit(TO_HOST, [])
    assert mover.submitted[TO_HOST] == 0
    assert ended(mover) == []
    mover.submit(TO_HOST, [Part(1, [], [])])
    assert ended(mover) == ok(1), "a side pool may need no page of a node"


# ----------------------------------------------------------------------------------- endings


def test_a_part_without_pages_ends_well(make: MakeMover):
    """Side pages alone are copied: the part of the KV pages is empty."""
    mover = make()
    mover.submit(TO_HOST, [Part(1, (), ())])
    assert ended(mover) == ok(1)
    mover.submit(TO_HOST, [Part(2, [3], [5]), Part(3, (), ())])
    assert ended(mover) == ok(2, 3)


def test_endings_come_in_the_order_of_submission(make: MakeMover):
    plans = {4: PartPlan(delay_collects=1), 3: PartPlan(ok=False), 9: PartPlan(delay_collects=1)}
    mover = make(plan_part=planned(plans))
    mover.submit(TO_HOST, [Part(9, [0], [0]), Part(4, [1], [1]), Part(5, [2], [2])])
    mover.submit(TO_DEVICE, [Part(3, [8], [8]), Part(1, [9], [9])])
    assert mover.in_flight == 5
    assert [ending.ticket for ending in ended(mover)] == [5, 3, 1]
    mover.submit(TO_HOST, [Part(2, [3], [3])])
    assert [ending.ticket for ending in ended(mover)] == [9, 4, 2]
    assert (mover.in_flight, mover.collect()) == (0, [])


def test_a_copy_that_raises_fails_its_parts_and_the_next_one_works(
    make: MakeMover, watched: Watched
):
    mover = make()
    watched.error = RuntimeError("bus error")
    mover.submit(TO_HOST, [Part(1, [0], [0]), Part(2, [1], [1])])
    why = "RuntimeError: bus error"
    assert ended(mover) == [Ending(1, False, why), Ending(2, False, why)]
    watched.error = None
    mover.submit(TO_HOST, [Part(1, [0], [0])])
    assert ended(mover) == ok(1)


def test_a_ticket_may_be_used_again_once_collected(make: MakeMover):
    mover = make()
    mover.submit(TO_HOST, [Part(1, [0], [0])])
    with pytest.raises(InternalError, match="TO_DEVICE part 1: its ticket is open"):
        mover.submit(TO_DEVICE, [Part(1, [5], [5])])
    assert ended(mover) == ok(1)
    mover.submit(TO_DEVICE, [Part(1, [5], [5])])
    assert ended(mover) == ok(1)


# ------------------------------------------------------------------------ refused, unchanged


@pytest.mark.parametrize(
    "parts, error, words",
    [
        ([Part(1, [0, 1], [0])], InternalError, "2 source pages but 1 target pages"),
        ([Part(1, [-1], [0])], InternalError, r"unknown page in \[-1\] -> \[0\]"),
        ([Part(1, [0], [NUM_PAGES])], InternalError, "unknown page .* target 24"),
        ([Part(1, [0, 1], [5, 5])], InternalError, "a target page is named twice"),
        ([Part(1, [0], [5]), Part(2, [1], [5])], InternalError, "a target page is named twice"),
        ([Part(1, [0], [5]), Part(1, [1], [6])], InternalError, "a ticket is named twice"),
        ([Part(i, [i], [i]) for i in range(5)], ResourceError, "5 parts submitted but only 4 of 4"),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_starts(
    make: MakeMover, parts: Sequence[Part], error: type[Exception], words: str
):
    mover = make(max_parts=4)
    with pytest.raises(error, match=words):
        mover.submit(TO_HOST, parts)
    assert (mover.in_flight, mover.room, mover.submitted[TO_HOST]) == (0, 4, 0)
    assert ended(mover) == []


def test_the_bound_counts_what_was_not_collected(make: MakeMover):
    mover = make(max_parts=2, plan_part=planned({1: PartPlan(None)}))
    mover.submit(TO_HOST, [Part(0, [0], [0]), Part(1, [1], [1])])
    assert mover.room == 0
    with pytest.raises(ResourceError, match="1 parts submitted but only 0 of 2"):
        mover.submit(TO_DEVICE, [Part(2, [2], [2])])
    assert ended(mover) == ok(0)
    assert mover.room == 1, "the part that hangs still counts"


def test_a_plan_that_raises_leaves_nothing_behind(make: MakeMover):
    def plan(_: Direction, part: Part) -> PartPlan:
        return PartPlan(delay_collects=-1 if part.ticket == 2 else 3)

    mover = make(plan_part=plan)
    with pytest.raises(Misuse, match="delay_collects must be at least 0 or None, not -1"):
        mover.submit(TO_HOST, [Part(1, [0], [0]), Part(2, [1], [1])])
    mover.heal()
    assert (mover.in_flight, ended(mover)) == (0, [])


def test_a_closed_mover_takes_nothing_but_gives_what_ended(make: MakeMover):
    mover = make()
    mover.submit(TO_HOST, [Part(1, [0], [0])])
    assert mover.close(LONG_S)
    assert mover.close(LONG_S), "closing again is harmless"
    with pytest.raises(Misuse, match="the mover is closed"):
        mover.submit(TO_HOST, [Part(2, [1], [1])])
    assert ended(mover) == ok(1)


@pytest.mark.parametrize("kind", [CpuMover, DeferredMover])
def test_tiers_must_be_made_alike(kind: type[AnyMover]):
    with pytest.raises(Misuse, match="the tiers differ"):
        kind(KVTensors(SHAPE, 2, 4), KVTensors(SHAPE, 2, 8))


# ------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_delayed_part_keeps_its_ending_and_its_bytes_back(
    make: MakeMover, tiers: tuple[KVTensors, KVTensors], delay: int
):
    _, host = tiers
    mover = make(plan_part=planned({2: PartPlan(delay)}))
    mover.submit(TO_HOST, [Part(1, [0], [0]), Part(2, [1], [1]), Part(3, [2], [2])])
    for late in range(delay):
        assert ended(mover) == (ok() if late else ok(1, 3))
        assert matches_pages(host, [0, 1, 2], [100, 201, 102], 0) == [True] * 3
    assert ended(mover) == (ok(2) if delay else ok(1, 2, 3))
    assert matches_pages(host, [0, 1, 2], [100, 101, 102], 0) == [True] * 3


def test_a_hung_part_ends_only_once_healed(make: MakeMover, tiers: tuple[KVTensors, KVTensors]):
    _, host = tiers
    mover = make(plan_part=planned({1: PartPlan(None), 2: PartPlan(2)}))
    mover.submit(TO_HOST, [Part(1, [0], [0]), Part(2, [1], [1])])
    assert [ended(mover) for _ in range(5)] == [[], [], ok(2), [], []]
    assert mover.in_flight == 1
    assert matches_pages(host, [0, 1], [200, 101], 0) == [True, True]
    mover.plan_part = None
    mover.heal()
    assert ended(mover) == ok(1)
    assert matches_pages(host, [0], [100], 0) == [True]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_failed_part_says_so_and_leaves_garbage(
    make: MakeMover, tiers: tuple[KVTensors, KVTensors], delay: int
):
    _, host = tiers
    # The right bytes stand there already: a failure that is overlooked must not look right.
    fill_pages(host, [0], [100], 0)
    mover = make(plan_part=planned({1: PartPlan(delay, ok=False)}, PartPlan(delay)))
    mover.submit(TO_HOST, [Part(1, [0], [0]), Part(2, [1], [1])])
    for _ in range(delay):
        assert ended(mover) == []
    assert ended(mover) == [Ending(1, False, "failed by the fault plan"), Ending(2, True)]
    assert matches_pages(host, [0, 1], [100, 101], 0) == [False, True]


def test_a_corrupt_part_says_ok_with_every_byte_wrong(
    make: MakeMover, tiers: tuple[KVTensors, KVTensors]
):
    device, host = tiers
    mover = make(plan_part=planned({1: PartPlan(corrupt=True)}))
    mover.submit(TO_DEVICE, [Part(1, [0], [0]), Part(2, [1], [1])])
    assert ended(mover) == ok(1, 2)
    good, bad = (np.frombuffer(t.read_page(0), dtype=np.uint8) for t in (host, device))
    assert (good != bad).all()
    assert matches_pages(device, [1], [201], 0) == [True]


def test_parts_withheld_alike_are_one_copy(tiers: tuple[KVTensors, KVTensors], watched: Watched):
    mover = DeferredMover(*tiers, plan_part=planned({i: PartPlan(1) for i in (1, 3, 5)}))
    mover.submit(TO_HOST, [Part(i, [i], [i]) for i in range(6)])
    assert ended(mover) == ok(0, 2, 4)
    assert watched.copies[TO_HOST] == 1
    assert ended(mover) == ok(1, 3, 5)
    assert watched.copies[TO_HOST] == 2


plans = st.builds(PartPlan, st.sampled_from([0, 0, 0, 1, 2, None]), st.booleans(), st.booleans())
batches = st.lists(
    st.tuples(st.sampled_from(Direction), st.lists(plans, max_size=3)), min_size=1, max_size=5
)


@given(batches)
def test_the_thread_and_the_simulation_tell_the_same_story(
    batches: list[tuple[Direction, list[PartPlan]]],
):
    told = [story(kind, batches) for kind in (CpuMover, DeferredMover)]
    assert told[0] == told[1]


def story(
    kind: type[AnyMover], batches: list[tuple[Direction, list[PartPlan]]]
) -> tuple[list[list[Ending]], list[bytes], list[bytes]]:
    """Endings per collect and the bytes in the end; part t moves page t to page t."""
    device, host = make_tiers()
    flat = [plan for _, plans in batches for plan in plans]
    mover = kind(device, host, plan_part=planned(dict(enumerate(flat))))
    endings: list[list[Ending]] = []
    ticket = 0
    for direction, of_batch in batches:
        parts = [Part(ticket + i, [ticket + i], [ticket + i]) for i in range(len(of_batch))]
        ticket += len(parts)
        mover.submit(direction, parts)
        mover.check_integrity()
        endings.append(ended(mover))
    endings += [ended(mover) for _ in range(3)]
    mover.heal()
    endings.append(ended(mover))
    assert sorted(ending.ticket for step in endings for ending in step) == list(range(ticket))
    assert mover.in_flight == 0
    assert mover.close(LONG_S)
    pages = range(NUM_PAGES)
    return endings, device.read_pages(pages), host.read_pages(pages)


# ------------------------------------------------------------------------- reused too early


def test_a_source_reused_too_early_is_seen(tiers: tuple[KVTensors, KVTensors]):
    device, host = tiers
    mover = DeferredMover(device, host)
    mover.submit(TO_HOST, [Part(1, [0], [0])])
    fill_pages(device, [0], [777], 0)  # the next owner of device page 0 writes
    assert ended(mover) == ok(1)
    assert matches_pages(host, [0], [100], 0) == [False]


def test_a_target_reused_too_early_is_seen(tiers: tuple[KVTensors, KVTensors]):
    device, host = tiers
    mover = DeferredMover(device, host, plan_part=planned({1: PartPlan(2)}))
    mover.submit(TO_HOST, [Part(1, [0], [0])])
    assert ended(mover) == []
    fill_pages(host, [0], [777], 0)  # its copy was aborted, the page handed out again
    assert matches_pages(host, [0], [777], 0) == [True]
    assert [ended(mover), ended(mover)] == [[], ok(1)]
    assert matches_pages(host, [0], [777], 0) == [False], "the late copy overwrote it"


def test_with_holds_the_same_story_is_safe(tiers: tuple[KVTensors, KVTensors]):
    device, host = tiers
    pool = PagePool("host", 2)
    mover = DeferredMover(device, host, plan_part=planned({1: PartPlan(2)}))
    target = pool.reserve_up_to(1)
    assert target == [0]
    pool.hold(target)
    mover.submit(TO_HOST, [Part(1, [0], target)])
    pool.free(target)  # aborted: nobody owns the page, the copy still runs
    other = pool.reserve_up_to(1)
    assert other == [1]
    fill_pages(host, other, [777], 0)
    assert [ended(mover) for _ in range(3)] == [[], [], ok(1)]
    pool.release(target)
    assert matches_pages(host, other, [777], 0) == [True]
    assert pool.reserve(1) == [0], "once the copy has ended the page is used again"


# ----------------------------------------------------------------------------------- waiting


def test_wait_layer_brings_the_bytes_before_they_are_collected(
    make: MakeMover, tiers: tuple[KVTensors, KVTensors]
):
    device, host = tiers
    mover = make()
    mover.submit(TO_HOST, [Part(9, [20], [20])])
    mover.submit(TO_DEVICE, [Part(1, [0], [0]), Part(2, [1], [1])])
    for layer in range(SHAPE.layers):
        assert mover.wait_layer(layer, LONG_S)
        assert matches_pages(device, [0, 1], [200, 201], 0) == [True, True]
    mover.check_integrity()
    assert ended(mover) == ok(9, 1, 2)
    assert matches_pages(host, [20], [120], 0) == [True]
    with pytest.raises(Misuse, match="layer 2 does not exist: there are 2"):
        mover.wait_layer(2, LONG_S)


def test_wait_layer_does_not_wait_for_what_only_a_collect_can_end(make: MakeMover):
    plans = {1: PartPlan(None), 2: PartPlan(1), 4: PartPlan(None)}
    mover = make(plan_part=planned(plans))
    mover.submit(TO_DEVICE, [Part(1, [0], [0]), Part(2, [1], [1]), Part(3, [2], [2])])
    mover.submit(TO_HOST, [Part(4, [3], [3])])
    start = time.monotonic()
    assert not mover.wait_layer(0, LONG_S)
    assert mover.wait_layer(0, LONG_S, tickets=[3]), "another load is no concern of this one"
    assert mover.wait_layer(0, LONG_S, tickets=[4, 99]), "neither are backups"
    assert not mover.wait_layer(0, LONG_S, tickets=[2, 3])
    assert ended(mover) == ok(3)
    assert mover.wait_layer(0, LONG_S, tickets=[2, 3]), "due at the next collect"
    mover.heal()
    assert mover.wait_layer(0, LONG_S)
    assert time.monotonic() - start < LONG_S
    assert ended(mover) == ok(1, 2, 4)


def test_every_wait_is_bounded_while_a_copy_is_stuck(
    tiers: tuple[KVTensors, KVTensors], watched: Watched
):
    watched.gate = gate = threading.Event()
    mover = CpuMover(*tiers)
    mover.submit(TO_DEVICE, [Part(1, [0], [0])])
    assert not mover.wait_layer(0, 0.02)
    assert not mover.wait_all(0.02)
    assert mover.wait_layer(0, 0.0, tickets=[2])
    start = time.monotonic()
    assert mover.collect() == []
    assert time.monotonic() - start < 1.0, "collect must not wait"
    assert not mover.close(0.02)
    mover.check_integrity()
    gate.set()
    assert mover.wait_layer(0, LONG_S)
    assert ended(mover) == ok(1)
    assert mover.close(LONG_S)


def test_a_mover_that_nobody_closed_ends_its_thread(tiers: tuple[KVTensors, KVTensors]):
    mover = CpuMover(*tiers)
    thread = mover._lanes[TO_HOST].thread
    assert thread.daemon
    del mover
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_launches_are_counted(make: MakeMover):
    mover = make()
    assert [mover.mark_launch(), mover.mark_launch()] == [1, 2]
    mover.submit(TO_HOST, [Part(1, [0], [0], after=1)])
    assert ended(mover) == ok(1)


def test_cuda_is_asked_for_only_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, tiers: tuple[KVTensors, KVTensors]
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Misuse, match="CudaMover needs CUDA, which is not available: use CpuMover"):
        CudaMover(*tiers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Misuse, match="between 'cuda' and 'cpu' tensors, not between 'cpu' and"):
        CudaMover(*tiers)
    with pytest.raises(Misuse, match="use CudaMover for a CUDA device"):
        CpuMover(KVTensors(SHAPE, 2, 4, device="meta"), KVTensors(SHAPE, 2, 4))
