"""The generator: deterministic, shaped like chats, and the source of the shipped trace."""

from __future__ import annotations

import random
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.cli import main as cli
from kvpact.harness.trace.conversations import WorkloadConfig, generate, shipped_trace, write_trace
from kvpact.harness.trace.mooncake import BLOCK_TOKENS, TraceRequest, read_trace

SMALL = WorkloadConfig(
    seed=3, lanes=6, turns=4, lanes_per_group=3, shared_tokens=1100, first_tokens=(100, 900),
    turn_tokens=(20, 700), output_tokens=(30, 900), pause_ms=(0, 5_000),
)  # fmt: skip


def conversations(requests: list[TraceRequest], config: WorkloadConfig) -> list[list[TraceRequest]]:
    """Requests by lane, found from their content: a turn continues the lane whose text it holds."""
    lanes: list[list[TraceRequest]] = []
    for request in requests:
        own = (request.input_length, request.hash_ids)
        for lane in lanes:
            full = lane[-1].input_length // BLOCK_TOKENS
            grown = own[0] - lane[-1].input_length - lane[-1].output_length
            private = full > config.shared_tokens // BLOCK_TOKENS
            if private and grown > 0 and own[1][:full] == lane[-1].hash_ids[:full]:
                lane.append(request)
                break
        else:
            lanes.append([request])
    return lanes


def test_later_turns_hold_the_former_prompt_and_output() -> None:
    # First prompts of at least one private block, so that a lane can be told by its content.
    config = WorkloadConfig(
        seed=5, lanes=6, turns=4, lanes_per_group=3, shared_tokens=1100, first_tokens=(600, 900),
        turn_tokens=(20, 700), output_tokens=(30, 900), pause_ms=(0, 5_000),
    )  # fmt: skip
    requests = generate(config)
    lanes = conversations(requests, config)
    assert [len(lane) for lane in lanes] == [4] * 6
    shared = {lane[0].hash_ids[:2] for lane in lanes}
    assert len(shared) == 2
    assert all(sum(lane[0].hash_ids[:2] == one for lane in lanes) == 3 for one in shared)
    for lane in lanes:
        for former, later in pairwise(lane):
            assert later.timestamp_ms >= former.timestamp_ms
            added = later.input_length - former.input_length - former.output_length
            assert 20 <= added <= 700
            full = former.input_length // BLOCK_TOKENS
            assert later.hash_ids[:full] == former.hash_ids[:full]
            if former.input_length % BLOCK_TOKENS:
                # The block that was still being filled is another prefix once it has grown.
                assert later.hash_ids[full] != former.hash_ids[full]


def test_an_id_always_stands_for_one_prefix() -> None:
    before: dict[int, int | None] = {}
    for request in generate(SMALL):
        for former, block in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(block, former) == former
        assert len(set(request.hash_ids)) == len(request.hash_ids)
    assert sorted(before) == list(range(len(before)))


def test_lanes_are_interleaved_by_timestamp() -> None:
    requests = generate(SMALL)
    assert [request.index for request in requests] == list(range(24))
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    groups = [request.hash_ids[0] for request in requests]
    assert groups != sorted(groups)


def test_depends_on_the_seed_alone() -> None:
    random.seed(1)  # noqa: TID251  the global generators must not matter
    np.random.seed(1)  # noqa: NPY002
    first = generate(SMALL)
    random.seed(2)  # noqa: TID251
    np.random.seed(2)  # noqa: NPY002
    assert generate(SMALL) == first
    assert generate(WorkloadConfig(seed=4)) != generate(WorkloadConfig(seed=5))


@given(
    st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3),
    st.integers(0, 1200),
)  # fmt: skip
def test_what_is_written_is_a_trace(
    seed: int, lanes: int, turns: int, lanes_per_group: int, shared_tokens: int
) -> None:
    config = WorkloadConfig(
        seed=seed, lanes=lanes, turns=turns, lanes_per_group=lanes_per_group,
        shared_tokens=shared_tokens, first_tokens=(1, 600), turn_tokens=(1, 600),
        output_tokens=(1, 600), pause_ms=(0, 10),
    )  # fmt: skip
    requests = generate(config)
    assert len(requests) == lanes * turns
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)


def test_write_then_read_gives_the_same_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    write_trace(path, generate(SMALL))
    assert read_trace(path) == generate(SMALL)
    assert [one.name for one in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "t.jsonl", "cannot be written: No such file or directory"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        with pytest.raises(BadInput) as caught:
            write_trace(path, generate(SMALL))
        assert complaint in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"lanes": 0}, "lanes: must be at least 1, got 0"),
        ({"turns": -1}, "turns: must be at least 1"),
        ({"lanes_per_group": 0}, "lanes_per_group: must be at least 1"),
        ({"seed": -1}, "seed: must not be negative"),
        ({"shared_tokens": -1}, "shared_tokens: must not be negative"),
        ({"first_tokens": (0, 5)}, "first_tokens: need 1 <= low <= high"),
        ({"turn_tokens": (9, 5)}, "turn_tokens: need 1 <= low <= high"),
        ({"output_tokens": (1, 10**10)}, "output_tokens: need 1 <= low <= high"),
        ({"pause_ms": (-1, 5)}, "pause_ms: need 0 <= low <= high"),
        ({"lanes": 10**6}, "workload: could reach"),
    ],
)
def test_a_config_that_cannot_be_generated_is_refused(
    wrong: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BadInput) as caught:
        WorkloadConfig(**wrong)
    assert complaint in caught.value.message


def test_the_shipped_trace_is_what_its_readme_says(tmp_path: Path) -> None:
    readme = (shipped_trace().parent / "README.md").read_text()
    match = re.search(r"^    kvpact (generate) \S+ (.*)$", readme, re.MULTILINE)
    assert match is not None
    out = tmp_path / "again.jsonl"
    assert cli.main([match[1], str(out), *shlex.split(match[2])]) == 0
    assert out.read_bytes() == shipped_trace().read_bytes()
