"""Traces: what is read, what is refused, and that the numbers match an independent LRU."""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.trace.conversations import shipped_trace
from kvpact.harness.trace.mooncake import TraceRequest, prompt_tokens, read_trace, trace_stats

REAL = Path(__file__).parents[1] / ".." / "shared" / "data"
GOOD = {"timestamp": 3, "input_length": 600, "output_length": 7, "hash_ids": [11, 12]}

needs_real_traces = pytest.mark.skipif(
    not (REAL / "conversation_trace.jsonl").exists(), reason="the real traces are not beside us"
)


def lru_hits(requests: Sequence[TraceRequest], capacity: int | None) -> int:
    """The dumb twin: blocks hit while all before them hit; touched left to right; LRU out."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hitting = True
        for block in request.hash_ids:
            hitting = hitting and block in held
            hits += hitting
            held[block] = None
            held.move_to_end(block)
            if capacity is not None and len(held) > capacity:
                held.popitem(last=False)
    return hits


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    path.write_text(text)
    return path


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


@needs_real_traces
@pytest.mark.parametrize(
    "name, num_requests, num_blocks, hits, capacity, rate",
    [
        ("conversation", 12_031, 288_500, 105_710, 30_000, 0.3257),
        ("synthetic", 3_993, 121_877, 77_953, 10_000, 0.4235),
    ],
)
def test_real_traces_match_the_independent_lru(
    name: str, num_requests: int, num_blocks: int, hits: int, capacity: int, rate: float
) -> None:
    requests = read_trace(REAL / f"{name}_trace.jsonl")
    stats = trace_stats(requests)
    assert (stats.num_requests, stats.num_blocks) == (num_requests, num_blocks)
    assert stats.num_hits == lru_hits(requests, None) == hits
    assert round(lru_hits(requests, capacity) / num_blocks, 4) == rate


def test_shipped_trace_has_reuse_that_a_small_cache_loses() -> None:
    requests = read_trace(shipped_trace())
    stats = trace_stats(requests)
    assert 300 <= stats.num_requests <= 500
    assert 2_000 <= stats.num_blocks <= 9_000
    assert stats.num_hits == lru_hits(requests, None)
    assert stats.hit_rate > 0.6
    assert lru_hits(requests, 200) < 0.8 * stats.num_hits


def test_ids_are_renumbered_by_first_appearance_and_any_64_bit_id_works(tmp_path: Path) -> None:
    big, low = 2**64 - 1, -(2**63)
    path = write(
        tmp_path / "t.jsonl",
        {**GOOD, "timestamp": 9, "hash_ids": [big, low]},
        {**GOOD, "timestamp": 2, "hash_ids": [big, 5]},
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0, 9, 600, 7, (0, 1))
    assert second == TraceRequest(1, 2, 600, 7, (0, 2))
    assert read_trace(path, limit=1) == [first]
    assert read_trace(path, limit=5) == [first, second]


def test_a_last_line_without_newline_crlf_and_unknown_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes((json.dumps({**GOOD, "chat": "x"}) + "\r\n" + json.dumps(GOOD)).encode())
    assert [request.index for request in read_trace(path)] == [0, 1]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "is not JSON"),
        ('{"timestamp": 1} x', "is missing"),
        ("", "the line is empty"),
        ("[1]", "expected a table, got a list; expected one request as a JSON object"),
        (without("timestamp"), "timestamp: is missing"),
        (without("hash_ids"), "hash_ids: is missing"),
        ({**GOOD, "timestamp": 1.5}, "timestamp: expected an integer, got a number"),
        ({**GOOD, "timestamp": None}, "timestamp: expected an integer, got nothing"),
        ({**GOOD, "input_length": "600"}, "input_length: expected an integer, got a text"),
        ({**GOOD, "output_length": True}, "output_length: expected an integer, got true or false"),
        ({**GOOD, "timestamp": -1}, "timestamp: must be at least 0"),
        ({**GOOD, "input_length": -600}, "input_length: must be at least 0"),
        ({**GOOD, "output_length": -1}, "output_length: must be at least 0"),
        ({**GOOD, "timestamp": 2**70}, "timestamp: must be at most"),
        ({**GOOD, "hash_ids": []}, "hash_ids: must not be empty"),
        ({**GOOD, "hash_ids": [1, "2"]}, "hash_ids[1]: expected an integer, got a text"),
        ({**GOOD, "hash_ids": [1, 2**64]}, "hash_ids: 18446744073709551616 does not fit 64 bits"),
        ({**GOOD, "hash_ids": [1]}, "hash_ids: input_length 600 needs 2 ids"),
        ({**GOOD, "input_length": 1024, "hash_ids": [1, 2, 3]}, "1024 needs 2 ids"),
        ({**GOOD, "input_length": 0, "hash_ids": [1]}, "input_length 0 needs 0 ids"),
        ('{"x": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: dict[str, Any] | str, complaint: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(BadInput) as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert complaint in caught.value.message
    assert len(read_trace(path, limit=1)) == 1


def test_a_path_that_is_no_trace_is_one_clear_error(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    blank = write(tmp_path / "blank.jsonl", "")
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(GOOD).encode() + b'\n{"caf\xe9": 1}\n')
    for path, complaint in (
        (tmp_path / "none.jsonl", "none.jsonl: no such file"),
        (tmp_path, ": is a directory"),
        (empty, "empty.jsonl: the file is empty"),
        (blank, "blank.jsonl: the file is empty"),
        (packed, "is gzip-compressed; unpack it first"),
        (latin, "latin.jsonl:2: is not UTF-8"),
        (Path("/dev/zero"), "/dev/zero: is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(BadInput) as caught:
            read_trace(path)
        assert complaint in caught.value.message
    with pytest.raises(BadInput, match="limit: must be at least 1"):
        read_trace(empty, limit=0)


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.sampled_from([1, 3, 4, 16, 700]))
def test_prompt_tokens_name_their_block(
    draw: random.Random, num_blocks: int, page_size: int
) -> None:
    blocks = tuple(draw.randrange(4_000_000) for _ in range(num_blocks))
    request = TraceRequest(0, 0, num_blocks * 512 - 3, 1, blocks)
    tokens = prompt_tokens(request, page_size)
    assert tokens.dtype == np.int32
    assert tokens.shape == (num_blocks * 512 // page_size * page_size,)
    expected = [block * 512 + offset for block in blocks for offset in range(512)]
    assert tokens.tolist() == expected[: tokens.size]


def test_prompt_tokens_refuse_what_does_not_fit() -> None:
    last = 2**31 // 512 - 1
    assert prompt_tokens(TraceRequest(0, 0, 512, 1, (last,)), 512)[-1] == 2**31 - 1
    with pytest.raises(BadInput, match="request 4: block 4194304"):
        prompt_tokens(TraceRequest(4, 0, 512, 1, (last + 1,)), 16)
    with pytest.raises(BadInput, match="must be positive"):
        prompt_tokens(TraceRequest(0, 0, 512, 1, (0,)), 0)
    assert prompt_tokens(TraceRequest(0, 0, 40, 1, (2, 1)), 4, 8).tolist() == [
        *range(16, 24),
        *range(8, 16),
    ]
