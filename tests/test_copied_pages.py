"""Pages copied between host memories: neighbours in runs, strays through the buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.copies import pages as copies
from kvpact.cache.copies.pages import HostCopier, runs
from kvpact.cache.memory.engine_tensors import host_pages_for
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.consensus.core.errors import Misuse

NUM_PAGES = 32
ORDERS = st.permutations(range(NUM_PAGES))


def index(pages: list[int]) -> copies.PageIndex:
    return np.array(pages, dtype=np.int64)


@pytest.mark.parametrize(
    "source, target, expected",
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [1, 2, 3], [(4, 1, 3)]),
        ([4, 5, 6], [1, 2, 9], [(4, 1, 2), (6, 9, 1)]),
        ([6, 5, 4], [3, 2, 1], [(6, 3, 1), (5, 2, 1), (4, 1, 1)]),
        ([4, 5, 7, 8], [1, 2, 3, 4], [(4, 1, 2), (7, 3, 2)]),
    ],
)
def test_neighbours_that_go_to_neighbours_are_one_run(
    source: list[int], target: list[int], expected: list[tuple[int, int, int]]
):
    assert list(runs(index(source), index(target))) == expected


@given(ORDERS, ORDERS, st.integers(0, NUM_PAGES))
def test_runs_say_the_same_as_the_pages(source: list[int], target: list[int], count: int):
    found = [
        (first + at, into + at)
        for first, into, length in runs(index(source[:count]), index(target[:count]))
        for at in range(length)
    ]
    assert found == list(zip(source, target, strict=True))[:count]


@pytest.mark.parametrize("min_run_bytes", [0, 1 << 40], ids=["runs", "buffer"])
@pytest.mark.parametrize("buffer_bytes", [100, 1 << 20])
@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("in_one_piece", [False, True])
def test_both_ways_copy_the_same_bytes_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
    min_run_bytes: int,
    buffer_bytes: int,
    to_device: bool,
    in_one_piece: bool,
):
    monkeypatch.setattr(copies, "MIN_RUN_BYTES", min_run_bytes)
    monkeypatch.setattr(copies, "BUFFER_BYTES", buffer_bytes)
    shape = KVShape(layers=3, heads=1, dim=4, dtype="float16")
    device = KVTensors(shape, NUM_PAGES, 2)
    host = host_pages_for(device, NUM_PAGES) if in_one_piece else KVTensors(shape, NUM_PAGES, 2)
    rng = np.random.default_rng(7)
    for memory in (device, host):
        size = (NUM_PAGES, memory.bytes_per_page)
        memory.scatter(range(NUM_PAGES), rng.integers(0, 256, size, dtype=np.uint8))
    source, target = (host, device) if to_device else (device, host)
    before, expected = source.read_pages(range(NUM_PAGES)), target.read_pages(range(NUM_PAGES))
    pages, into = [9, 3, 4, 5, 31, 0], [1, 7, 8, 9, 0, 20]
    for page, other in zip(pages, into, strict=True):
        expected[other] = before[page]
    HostCopier(device, host).copy(to_device, index(pages), index(into))
    assert target.read_pages(range(NUM_PAGES)) == expected
    assert source.read_pages(range(NUM_PAGES)) == before


def test_a_device_that_is_not_the_host_needs_another_mover():
    shape = KVShape(1, 1, 1)
    with pytest.raises(Misuse, match="between CPU tensors: use CudaMover"):
        HostCopier(KVTensors(shape, 1, 1, "meta"), KVTensors(shape, 1, 1))
