"""Multi-turn conversations, made from a seed and written as a trace in the Mooncake format.

Lanes are conversations that run at the same time. All lanes of a group begin with the same shared
prefix (a system prompt); each turn's prompt is the whole conversation so far (former prompt and
output) plus what the user adds. A block's id stands for the prefix up to its end, as a hash of the
content would: a block that is only partly filled in one turn has another id once it is full.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.text.files import write_bytes
from kvpact.harness.trace.mooncake import BLOCK_TOKENS, TraceRequest

__all__ = ["WorkloadConfig", "generate", "shipped_trace", "write_trace"]

MAX_BLOCKS: Final = 4_000_000  # of all prompts together: token ids fit int32, files stay < 100 MB
MAX_SPAN: Final = 1_000_000_000  # tokens or milliseconds

Span = tuple[int, int]
_BlockKey = tuple[str, int, int, int]


class WorkloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate. Spans are inclusive ranges ``(low, high)``, drawn uniformly.

    ``shared_tokens`` is the length of the prefix that the ``lanes_per_group`` lanes of one group
    have in common; ``first_tokens`` is what the first prompt adds to it; ``pause_ms`` is the time
    between two turns of a lane, and also spreads the first turns. Raises BadInput when built wrong.
    """

    seed: int = 0
    lanes: int = 48
    turns: int = 8
    lanes_per_group: int = 8
    shared_tokens: int = 2048
    first_tokens: Span = (200, 1600)
    turn_tokens: Span = (50, 800)
    output_tokens: Span = (50, 600)
    pause_ms: Span = (2_000, 60_000)

    def __post_init__(self) -> None:
        for name in ("lanes", "turns", "lanes_per_group"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "shared_tokens"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}: must not be negative, got {getattr(self, name)}")
        for name in ("first_tokens", "turn_tokens", "output_tokens", "pause_ms"):
            low, high = getattr(self, name)
            least = 0 if name == "pause_ms" else 1
            if not least <= low <= high <= MAX_SPAN:
                raise BadInput(
                    f"{name}: need {least} <= low <= high <= {MAX_SPAN}, got {low}..{high}"
                )
        if self._blocks_at_most() > MAX_BLOCKS:
            raise BadInput(
                f"workload: could reach {self._blocks_at_most()} blocks, more than {MAX_BLOCKS};"
                " use fewer lanes or turns, or shorter prompts"
            )

    def _blocks_at_most(self) -> int:
        longest = self.shared_tokens + self.first_tokens[1]
        longest += (self.turns - 1) * (self.turn_tokens[1] + self.output_tokens[1])
        return self.lanes * self.turns * _num_blocks(longest)


class _Turn(msgspec.Struct, frozen=True):
    """One request before it has its place in the trace. Ordered by (time, lane, turn)."""

    timestamp_ms: int
    lane: int
    turn: int
    input_length: int
    output_length: int


def generate(config: WorkloadConfig) -> list[TraceRequest]:
    """The conversations of ``config``, interleaved by timestamp. Depends on ``config`` alone."""
    draw = random.Random(config.seed)
    turns = [turn for lane in range(config.lanes) for turn in _conversation(config, lane, draw)]
    turns.sort(key=lambda turn: (turn.timestamp_ms, turn.lane, turn.turn))
    ids: dict[_BlockKey, int] = {}
    return [
        TraceRequest(
            index=index,
            timestamp_ms=turn.timestamp_ms,
            input_length=turn.input_length,
            output_length=turn.output_length,
            hash_ids=tuple([ids.setdefault(key, len(ids)) for key in _block_keys(config, turn)]),
        )
        for index, turn in enumerate(turns)
    ]


def write_trace(path: str | os.PathLike[str], requests: Sequence[TraceRequest]) -> None:
    """Write ``requests`` as a trace, whole or not at all. Raises BadInput where it cannot."""
    write_bytes(path, b"".join(_line(request) for request in requests))


def shipped_trace() -> Path:
    """The small trace that comes with kvpact; harness/data/README.md says how it was made."""
    return Path(str(resources.files("kvpact.harness") / "data" / "multi_turn.jsonl"))


def _conversation(config: WorkloadConfig, lane: int, draw: random.Random) -> list[_Turn]:
    now_ms = draw.randint(0, config.pause_ms[1])
    length = config.shared_tokens + draw.randint(*config.first_tokens)
    turns: list[_Turn] = []
    for turn in range(config.turns):
        output_length = draw.randint(*config.output_tokens)
        turns.append(_Turn(now_ms, lane, turn, length, output_length))
        length += output_length + draw.randint(*config.turn_tokens)
        now_ms += draw.randint(*config.pause_ms)
    return turns


def _block_keys(config: WorkloadConfig, turn: _Turn) -> list[_BlockKey]:
    """What the content of each block of a prompt depends on, so that equal keys are equal prefixes.

    A block is known by whose text it is, its position and its end: the end tells a block that is
    still being filled from the same block in a later turn.
    """
    group = turn.lane // config.lanes_per_group
    keys: list[_BlockKey] = []
    for position in range(_num_blocks(turn.input_length)):
        end = min((position + 1) * BLOCK_TOKENS, turn.input_length)
        shared = end <= config.shared_tokens
        keys.append(("group" if shared else "lane", group if shared else turn.lane, position, end))
    return keys


def _line(request: TraceRequest) -> bytes:
    return (
        msgspec.json.encode(
            {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
        )
        + b"\n"
    )


def _num_blocks(length: int) -> int:
    return -(-length // BLOCK_TOKENS)
