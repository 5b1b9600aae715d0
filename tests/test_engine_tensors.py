"""An engine's own tensors as pages: every layout keeps its bytes on every way, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.pages import HostCopier
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import join_cache
from kvpact.cache.memory.engine_tensors import EngineTensors, TensorView, host_pages_for
from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.storage import open_backend
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import Misuse, ResourceError
from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.rank.layouts import LAYOUTS, Layout, sglang, vllm
from kvpact.harness.scenario import model

NUM_PAGES, PAGE_SIZE = 8, 4
MakeLayout = Callable[[int, int], Layout]
EVERY = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


def pages_of(*pages: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(pages, dtype=np.int64)


@EVERY
def test_a_page_copied_out_and_in_is_what_the_engine_wrote(make: MakeLayout):
    layout = make(NUM_PAGES, PAGE_SIZE)
    written = {page: layout.fill(page, page) for page in range(NUM_PAGES)}
    host = host_pages_for(layout.memory, 5)
    copier = HostCopier(layout.memory, host)
    copier.copy(False, pages_of(6, 2, 3), pages_of(0, 3, 4))
    assert host.read_pages([0, 3, 4]) == layout.memory.read_pages([6, 2, 3])
    assert not any(host.read_page(1)), "another page was touched"
    copier.copy(True, pages_of(0, 4), pages_of(7, 1))
    moved = written | {7: written[6], 1: written[3]}
    for page, wanted in moved.items():
        assert layout.holds(page, wanted), f"page {page}"


@EVERY
def test_a_page_is_all_bytes_of_its_tokens_and_no_other(make: MakeLayout):
    layout = make(NUM_PAGES, PAGE_SIZE)
    total = sum(tensor.numel() * tensor.element_size() for tensor in layout.tensors)
    assert layout.memory.bytes_per_page * NUM_PAGES == total
    before = [layout.fill(page, page) for page in range(NUM_PAGES)]
    layout.memory.write_page(5, bytes(layout.memory.bytes_per_page))
    assert not any(part.any() for part in layout.read(5))
    assert all(layout.holds(page, before[page]) for page in range(NUM_PAGES) if page != 5)


@EVERY
def test_each_plane_belongs_to_one_layer(make: MakeLayout):
    memory = make(NUM_PAGES, PAGE_SIZE).memory
    planes = [plane for layer in memory.layer_planes for plane in layer]
    expected = [
        (group, at) for group, (count, _) in enumerate(memory.layout) for at in range(count)
    ]
    assert sorted(planes) == expected


# ------------------------------------------------------------------------- through a whole cache


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store, port = serve_tcp_store()
    yield port
    del store


CONFIG = CacheConfig(page_size=PAGE_SIZE, device_pages=NUM_PAGES, host_pages=6, deadline_s=10.0)
TOKENS = np.arange(3 * PAGE_SIZE, dtype=np.int32)


def drain(cache: HierarchicalCache, clock: Iterator[int]) -> None:
    for _ in range(200):
        cache.step(next(clock))
        if not cache.has_pending():
            return
    raise AssertionError("still pending after 200 steps")


@EVERY
@pytest.mark.ranks
def test_backup_load_back_and_storage_keep_the_bytes(make: MakeLayout, port: int, tmp_path: Path):
    open_storage = partial(open_backend, "file", path=tmp_path, capacity_bytes=1 << 20)
    written: list[list[torch.Tensor]] = []
    for life in ("first", "second"):
        layout = make(NUM_PAGES + 2, PAGE_SIZE)
        clock = iter(range(1, 1000))
        with join_cache(
            CONFIG,
            "127.0.0.1",
            port,
            name=f"{make.__name__} {life}",
            rank=0,
            ranks=[0],
            device_tensors=layout.memory,
            open_storage=open_storage,
            model="m",
        ) as cache:
            if life == "first":
                cache.request_pages("a", 3)
                cache.step(next(clock))
                written = [layout.fill(page, page + 50) for page in cache.pages("a")]
                cache.finish_request("a", TOKENS)
                drain(cache, clock)
                assert cache.evict(Tier.DEVICE, 3) == 3
                for page in range(NUM_PAGES):
                    layout.fill(page, 0)  # who is served from here gets wrong bytes
            else:
                cache.prefetch("b", TOKENS)
                drain(cache, clock)
            assert cache.peek(TOKENS) == {"device": 0, "host": 3, "usable": 3}
            match = cache.match_prefix(TOKENS, request="b")
            ticket = cache.request_load_back("b", match)
            drain(cache, clock)
            assert ticket.state is TicketState.READY
            found = cache.pages("b")
            assert all(map(layout.holds, found, written)), life
            assert cache.wait_layer(0, [], 1.0)
            with pytest.raises(Misuse, match="layer"):
                cache.wait_layer(3, [], 1.0)
            with pytest.raises(Misuse, match="the engine has the tensors of its pages itself"):
                cache.tensors(Tier.DEVICE)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"page_size": 8}, "8 pages of 4 tokens, the configuration wants 8 of 8"),
        ({"device_pages": 9}, "8 pages of 4 tokens, the configuration wants 9 of 4"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_refused(config: dict[str, int], words: str):
    layout = sglang(NUM_PAGES, PAGE_SIZE)
    sizes = {"page_size": 4, "device_pages": 8, "host_pages": 8}
    with pytest.raises(Misuse, match=words):
        join_cache(
            CacheConfig(**(sizes | config)),  # pyright: ignore[reportArgumentType]
            "127.0.0.1",
            1,
            rank=0,
            ranks=[0],
            device_tensors=layout.memory,
        )


def test_pages_of_another_layout_have_another_description():
    texts = {make(NUM_PAGES, PAGE_SIZE).memory.described for make in LAYOUTS.values()}
    assert len(texts) == len(LAYOUTS)
    assert vllm(3, 4).memory.described == vllm(9, 4).memory.described
    assert vllm(3, 4).memory.described == "3 x float16[2, pages, 4, 2, 8]"


# ------------------------------------------------------------------------------------- bad input


def slots(count: int = 32, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(count, 2, 8, dtype=dtype)


def view(tensor: torch.Tensor) -> TensorView:
    return TensorView(tensor, tokens=0)


SHARED = slots()


REFUSED: list[tuple[list[list[TensorView]], str]] = [
    ([], "pool 'kv' has no tensors"),
    ([[]], "pool 'kv' has no tensors"),
    ([[TensorView(slots())]], "layer 0, tensor 0: give the dimension of its pages, or of its"),
    ([[TensorView(slots(), 0, 0)]], "give the dimension of its pages, or of its tokens"),
    ([[TensorView(slots(), tokens=3)]], "tensor 0 has dimensions 0 to 2, there is no 3"),
    ([[TensorView(slots(), pages=-1)]], "has dimensions 0 to 2, there is no -1"),
    ([[view(slots()), view(slots(30))]], "tensor 1 has 30 tokens: no multiple of page_size 4"),
    ([[view(slots())], [view(slots(28))]], "tensor 0 has 7 pages, its neighbours have 8"),
    ([[view(slots())], [view(slots(dtype=torch.bfloat16))]],
     "layer 1, tensor 0 is torch.bfloat16, that of its neighbours is torch.float16"),
    ([[view(slots()), view(slots().to("meta"))]], "layer 0, tensor 1 is on 'meta'"),
    ([[view(slots().transpose(1, 2))]], r"shape \(4, 8, 2\) has strides \(16, 1, 8\)"),
    ([[TensorView(torch.zeros(4, 2, 8).transpose(0, 1), tokens=1)]], "is not contiguous"),
    ([[view(torch.zeros(1, 2, 8).expand(32, 2, 8))]], "is not contiguous"),
    ([[TensorView(torch.zeros(1, 4, 8).expand(8, 4, 8), pages=0)]],
     "pages overlap, each has 128 bytes and begins 0 bytes after the other"),
    ([[view(SHARED), view(SHARED)]], "pages overlap: .*tensor 0 and .*tensor 1 share memory"),
    ([[view(SHARED)], [view(SHARED.flatten()[:256].view(16, 2, 8)), view(slots(16))]], "pages"),
]  # fmt: skip


@pytest.mark.parametrize("layers, words", REFUSED)
def test_what_is_no_paged_tensor_is_refused_in_one_line(layers: list[list[TensorView]], words: str):
    with pytest.raises(Misuse, match=words) as refused:
        EngineTensors(layers, page_size=4, pool="kv")
    assert "pool 'kv'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_interleaved_tensors_do_not_overlap():
    pool = torch.zeros(8, 2, 4, 2, 8, dtype=torch.float16)
    apart = [[TensorView(pool[:, 0], pages=0), TensorView(pool[:, 1], pages=0)]]
    assert EngineTensors(apart, page_size=4).num_pages == 8
    shifted = pool.flatten()[64:-64].view(7, 2, 4, 2, 8)
    with pytest.raises(Misuse, match="share memory"):
        EngineTensors([[TensorView(pool[:7], pages=0), TensorView(shifted, pages=0)]], page_size=4)


def test_a_host_tier_that_cannot_be_had_says_how_much():
    with pytest.raises(ResourceError, match="cannot allocate 1099511627776 pages of 768 bytes"):
        host_pages_for(sglang(2, 4).memory, 1 << 40)


def test_a_host_may_have_no_pages():
    host = host_pages_for(sglang(2, 4).memory, 0)
    assert host.num_pages == 0


def test_a_page_size_below_one_is_refused():
    with pytest.raises(Misuse, match="page_size must be at least 1, not 0"):
        EngineTensors([[view(slots())]], page_size=0)


def test_scenarios_know_every_layout():
    assert set(get_args(model.Layout)) == {"own", *LAYOUTS}
