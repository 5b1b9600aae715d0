"""CudaMover on a real device (skipped where there is none), and its order on a pretended one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvpact.cache.copies.cpu import Direction, Ending, Part, PartPlan
from kvpact.cache.copies.cuda import MAX_LAUNCHES, CudaMover
from kvpact.cache.memory.engine_tensors import host_pages_for
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.harness.rank.layouts import LAYOUTS, Layout
from kvpact.harness.verify.content import fill_pages, matches_pages

SHAPE = KVShape(layers=3, heads=2, dim=4)
TO_HOST, TO_DEVICE = Direction.TO_HOST, Direction.TO_DEVICE
LONG_S = 20.0
SLEEP_CYCLES = 200_000_000  # of the device's clock: 0.1 to 0.2 s


@pytest.fixture
def tiers() -> tuple[KVTensors, KVTensors]:
    device = KVTensors(SHAPE, 16, 4, "cuda")
    host = KVTensors(SHAPE, 16, 4, pin_memory=True)
    fill_pages(device, range(16), range(100, 116), 0)
    fill_pages(host, range(16), range(200, 216), 0)
    return device, host


@pytest.fixture
def mover(tiers: tuple[KVTensors, KVTensors]) -> Iterator[CudaMover]:
    mover = CudaMover(*tiers)
    yield mover
    assert mover.wait_all(LONG_S)
    mover.check_integrity()
    assert mover.close(LONG_S)


def ended(mover: CudaMover) -> list[Ending]:
    assert mover.wait_all(LONG_S)
    return mover.collect()


@pytest.mark.gpu
def test_bytes_move_both_ways(mover: CudaMover, tiers: tuple[KVTensors, KVTensors]):
    device, host = tiers
    mover.submit(TO_HOST, [Part(1, [3, 0], [5, 6]), Part(2, [7], [1])])
    assert ended(mover) == [Ending(1, True), Ending(2, True)]
    assert all(matches_pages(host, [5, 6, 1, 0], [103, 100, 107, 200], 0))
    mover.submit(TO_DEVICE, [Part(3, [5, 9], [10, 11])])
    assert ended(mover) == [Ending(3, True)]
    assert all(matches_pages(device, [10, 11, 9], [103, 209, 109], 0))


@pytest.mark.gpu
def test_a_part_without_pages_ends_well(mover: CudaMover):
    mover.submit(TO_HOST, [Part(1, (), ())])
    assert ended(mover) == [Ending(1, True)]


@pytest.mark.gpu
def test_a_copy_waits_for_the_forward_that_writes_its_source(
    mover: CudaMover, tiers: tuple[KVTensors, KVTensors]
):
    device, host = tiers
    torch.cuda._sleep(SLEEP_CYCLES)
    device.words[:, 2] = device.words[:, 9]  # a forward still on its way
    launch = mover.mark_launch()
    torch.cuda._sleep(SLEEP_CYCLES)
    mover.submit(TO_HOST, [Part(1, [2], [2], after=launch), Part(2, [3], [3], after=0)])
    assert ended(mover) == [Ending(1, True), Ending(2, True)]
    assert all(matches_pages(host, [2, 3], [109, 103], 0))


@pytest.mark.gpu
def test_a_copy_after_nothing_overtakes_the_forward(
    mover: CudaMover, tiers: tuple[KVTensors, KVTensors]
):
    busy = torch.cuda.Event()
    mover.submit(TO_HOST, [Part(0, [0], [0], after=0)])  # warms up
    assert ended(mover) == [Ending(0, True)]
    torch.cuda._sleep(20 * SLEEP_CYCLES)
    busy.record()
    mover.submit(TO_DEVICE, [Part(1, [2], [2], after=0)])
    assert ended(mover) == [Ending(1, True)]
    assert not busy.query(), "the copy was meant to run beside the forward"
    assert all(matches_pages(tiers[0], [2], [202], 0))


@pytest.mark.gpu
def test_the_forward_waits_for_its_layer(mover: CudaMover, tiers: tuple[KVTensors, KVTensors]):
    device, _ = tiers
    seen: list[torch.Tensor] = []
    torch.cuda._sleep(SLEEP_CYCLES)
    mover.submit(TO_DEVICE, [Part(1, [4, 5], [6, 7])])
    for layer in range(SHAPE.layers):
        assert mover.wait_layer(layer, LONG_S)
        seen.append(device.words[layer, 6:8].clone())
    assert ended(mover) == [Ending(1, True)]
    for layer in range(SHAPE.layers):
        assert torch.equal(seen[layer], device.words[layer, 6:8])
    assert all(matches_pages(device, [6, 7], [204, 205], 0))


@pytest.mark.gpu
def test_old_launches_wait_for_the_oldest_kept(mover: CudaMover):
    first = mover.mark_launch()
    for _ in range(2 * MAX_LAUNCHES):
        mover.mark_launch()
    mover.submit(TO_HOST, [Part(1, [0], [0], after=first)])
    assert ended(mover) == [Ending(1, True)]


@pytest.mark.gpu
def test_faults_are_the_same_as_elsewhere(tiers: tuple[KVTensors, KVTensors]):
    device, host = tiers
    plans = {1: PartPlan(1), 2: PartPlan(ok=False), 3: PartPlan(corrupt=True)}

    def plan(direction: Direction, part: Part) -> PartPlan:
        return plans.get(part.ticket, PartPlan())

    mover = CudaMover(device, host, plan_part=plan)
    mover.submit(TO_HOST, [Part(i, [i], [i]) for i in range(4)])
    first = ended(mover)
    assert [(ending.ticket, ending.ok) for ending in first] == [(0, True), (2, False), (3, True)]
    assert ended(mover) == [Ending(1, True)]
    assert matches_pages(host, range(4), range(100, 104), 0) == [True, True, False, False]
    mover.submit(TO_DEVICE, [Part(i, [i + 8], [i + 8]) for i in range(4)])
    assert len(ended(mover) + ended(mover)) == 4
    expected = [True, True, False, False]
    assert matches_pages(device, range(8, 12), range(208, 212), 0) == expected
    assert mover.close(LONG_S)


# ------------------------------------------------------------------- without a device: order


class PretendedCuda:
    """Stands in for streams and events: all work is done at once, the order is written down."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log
        numbers = iter(range(1000))

        class Event:
            def __init__(self) -> None:
                self.number = next(numbers)

            def record(self, stream: Stream) -> None:
                log.append(f"{stream.name} records {self.number}")

        class Stream:
            def __init__(self, device: object, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                log.append(f"{self.name} waits for {event.number}")

            def synchronize(self) -> None:
                log.append(f"{self.name} is idle")

        select, copy, empty = torch.Tensor.index_select, torch.Tensor.index_copy_, torch.empty

        def index_select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
            log.append("gather")
            return select(tensor, dim, index)

        def index_copy_(tensor: torch.Tensor, dim: int, *pages: torch.Tensor) -> torch.Tensor:
            log.append("scatter")
            return copy(tensor, dim, *pages)

        def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty(*size, **options)

        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        forward = Stream(None, "forward")
        patch.setattr(torch.cuda, "current_stream", lambda device: forward)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        patch.setattr(torch, "empty", pageable)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        patch.setattr(torch.Tensor, "index_select", index_select)
        patch.setattr(torch.Tensor, "index_copy_", index_copy_)

    def taken(self) -> list[str]:
        found = self.log.copy()
        self.log.clear()
        return found


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return PretendedCuda(monkeypatch)


@pytest.fixture
def pretended_mover(pretended: PretendedCuda) -> Iterator[CudaMover]:
    device, host = KVTensors(SHAPE, 16, 4), KVTensors(SHAPE, 16, 4)
    fill_pages(device, range(16), range(100, 116), 0)
    fill_pages(host, range(16), range(200, 216), 0)
    device.device = torch.device("cuda")  # it says so; its memory is ordinary
    mover = CudaMover(device, host)
    yield mover
    assert mover.close(LONG_S)


def test_a_backup_is_one_gather_after_the_forward(
    pretended: PretendedCuda, pretended_mover: CudaMover
):
    mover = pretended_mover
    mover.submit(TO_HOST, [Part(1, [3, 0], [5, 6]), Part(2, [7], [1])])
    assert ended(mover) == [Ending(1, True), Ending(2, True)]
    assert pretended.taken() == ["forward records 0", "side waits for 0", "gather", "side is idle"]
    assert all(matches_pages(mover.host, [5, 6, 1, 0], [103, 100, 107, 200], 0))


def test_a_load_goes_layer_by_layer_and_the_forward_waits_for_its_own(
    pretended: PretendedCuda, pretended_mover: CudaMover
):
    mover = pretended_mover
    mover.submit(TO_DEVICE, [Part(1, [5, 9], [10, 11], after=0)])
    assert ended(mover) == [Ending(1, True)]
    layer = ["scatter", "scatter"]
    expected = [*layer, "side records 0", *layer, "side records 1", *layer, "side records 2"]
    assert pretended.taken() == [*expected, "side is idle"]
    assert all(matches_pages(mover.device, [10, 11, 9], [205, 209, 109], 0))


def test_the_fence_is_the_last_launch_that_matters(
    pretended: PretendedCuda, pretended_mover: CudaMover
):
    mover = pretended_mover
    launches = [mover.mark_launch() for _ in range(3)]  # events 0, 1, 2
    pretended.taken()

    def fence(*after: int | None) -> list[str]:
        mover.submit(TO_HOST, [Part(i, [i], [i], after=number) for i, number in enumerate(after)])
        assert all(ending.ok for ending in ended(mover))
        return [line for line in pretended.taken() if "waits" in line or "forward" in line]

    assert fence(0, 0) == []
    assert fence(launches[1], launches[0]) == ["side waits for 1"]
    assert fence(launches[0], None) == ["forward records 3", "side waits for 3"]
    assert fence(launches[2] + 1) == ["forward records 4", "side waits for 4"]
    for _ in range(MAX_LAUNCHES):
        mover.mark_launch()
    pretended.taken()
    assert fence(launches[0]) == ["side waits for 5"], "the oldest kept, which is later"


def test_a_withheld_load_is_carried_out_when_due(
    pretended: PretendedCuda, pretended_mover: CudaMover
):
    mover = pretended_mover

    def plan(direction: Direction, part: Part) -> PartPlan:
        return PartPlan(1, corrupt=part.ticket == 2)

    mover.plan_part = plan
    mover.submit(TO_DEVICE, [Part(1, [1], [1]), Part(2, [2], [2])])
    assert not mover.wait_layer(0, LONG_S)
    assert mover.collect() == []
    assert mover.wait_layer(0, LONG_S)
    assert matches_pages(mover.device, [1, 2], [201, 202], 0) == [True, False]
    assert ended(mover) == [Ending(1, True), Ending(2, True)]


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_an_engines_own_tensors_are_copied_group_by_group(
    pretended: PretendedCuda, make: Callable[[int, int], Layout]
):
    device = make(8, 4).memory
    host = host_pages_for(device, 8)
    fill_pages(device, range(8), range(100, 108), 0)
    fill_pages(host, range(8), range(200, 208), 0)
    device.device = torch.device("cuda")
    mover = CudaMover(device, host)
    mover.submit(TO_HOST, [Part(1, [3, 0], [5, 6], after=0)])
    assert ended(mover) == [Ending(1, True)]
    assert pretended.taken() == ["gather"] * len(device.groups) + ["side is idle"]
    mover.submit(TO_DEVICE, [Part(2, [5, 1], [7, 2], after=0)])
    assert ended(mover) == [Ending(2, True)]
    assert pretended.taken().count("scatter") == sum(map(len, device.layer_planes))
    device.device = torch.device("cpu")
    assert all(matches_pages(device, [7, 2, 3], [103, 201, 103], 0))
    assert mover.close(LONG_S)
