"""Real request traces in the Mooncake format, read strictly.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one id per block of 512 prompt tokens, where equal ids mean an equal prefix up to and
including that block. The last block of a prompt is usually only partly filled; it has an id like
any other, so every listed block is treated as a whole one.

Source of the format: Mooncake (FAST'25), repository kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.text.files import read_text
from kvpact.harness.text.toml_errors import explain

__all__ = [
    "BLOCK_TOKENS",
    "TraceRequest",
    "TraceStats",
    "prompt_tokens",
    "read_trace",
    "trace_stats",
]

BLOCK_TOKENS: Final = 512
_INT32_MAX: Final = 2**31 - 1
_ID_MIN: Final = -(2**63)
_ID_MAX: Final = 2**64 - 1

_Amount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Line(msgspec.Struct, frozen=True):
    """One line as it stands in the file. Keys that are not named here are ignored."""

    timestamp: _Amount
    input_length: _Amount
    output_length: _Amount
    hash_ids: Annotated[list[int], msgspec.Meta(min_length=1)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request. ``hash_ids`` are dense block numbers: 0, 1, 2 … in order of first appearance."""

    index: int
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceStats(msgspec.Struct, frozen=True):
    """What a trace holds; ``num_hits`` is what one unbounded cache would hit, in blocks."""

    num_requests: int
    num_blocks: int
    num_unique_blocks: int
    num_hits: int
    input_tokens: int
    output_tokens: int
    duration_ms: int

    @property
    def hit_rate(self) -> float:
        """Hits over all blocks of an unbounded cache, 0.0 … 1.0."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, in the order of the file.

    Timestamps need not be ordered. Raises BadInput, naming the file, the line and what is wrong,
    for the first line that is not a valid request, and for a file that cannot be read as a trace.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"limit: must be at least 1, got {limit}")
    text = read_text(path, what="a trace")
    if not text.strip():
        raise BadInput(f"{path}: the file is empty; expected one JSON object per line")
    lines = text.removesuffix("\n").split("\n")
    decode = msgspec.json.Decoder(_Line).decode
    dense: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for index, written in enumerate(lines if limit is None else lines[:limit]):
        try:
            line = decode(written)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadInput(f"{path}:{index + 1}: {_explain(written, error)}") from None
        fault = _fault_of(line, dense)
        if fault:
            raise BadInput(f"{path}:{index + 1}: {fault}")
        hash_ids = tuple([dense.setdefault(block, len(dense)) for block in line.hash_ids])
        requests.append(
            TraceRequest(index, line.timestamp, line.input_length, line.output_length, hash_ids)
        )
    return requests


def prompt_tokens(
    request: TraceRequest, page_size: int, block_tokens: int = BLOCK_TOKENS
) -> NDArray[np.int32]:
    """Token ids of a request's prompt, shape ``[tokens]``, int32, whole pages only.

    Block ``b`` becomes the tokens ``b * block_tokens .. (b + 1) * block_tokens``; what is left of
    the last page is cut off. Raises BadInput where the sizes are not positive or a token id
    would not fit int32.
    """
    if page_size < 1 or block_tokens < 1:
        raise BadInput(f"page_size {page_size} and block_tokens {block_tokens} must be positive")
    if (max(request.hash_ids) + 1) * block_tokens - 1 > _INT32_MAX:
        raise BadInput(
            f"request {request.index}: block {max(request.hash_ids)} of {block_tokens} tokens"
            f" has token ids above {_INT32_MAX}; use a shorter trace or smaller blocks"
        )
    starts = np.asarray(request.hash_ids, dtype=np.int32) * np.int32(block_tokens)
    tokens = (starts[:, None] + np.arange(block_tokens, dtype=np.int32)).reshape(-1)
    return tokens[: tokens.size // page_size * page_size]


def trace_stats(requests: Sequence[TraceRequest]) -> TraceStats:
    """Count a trace. A block hits if it and all blocks before it in its request were seen."""
    seen: set[int] = set()
    num_hits = 0
    for request in requests:
        num_hits += _leading_hits(request.hash_ids, seen)
        seen.update(request.hash_ids)
    times = [request.timestamp_ms for request in requests]
    return TraceStats(
        num_requests=len(requests),
        num_blocks=sum(len(request.hash_ids) for request in requests),
        num_unique_blocks=len(seen),
        num_hits=num_hits,
        input_tokens=sum(request.input_length for request in requests),
        output_tokens=sum(request.output_length for request in requests),
        duration_ms=max(times) - min(times) if times else 0,
    )


def _leading_hits(blocks: Iterable[int], seen: set[int]) -> int:
    hits = 0
    for block in blocks:
        if block not in seen:
            break
        hits += 1
    return hits


def _fault_of(line: _Line, dense: dict[int, int]) -> str:
    """What a well-formed line still says wrong, or an empty string."""
    expected = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != expected:
        return (
            f"hash_ids: input_length {line.input_length} needs {expected} ids"
            f" (one per {BLOCK_TOKENS} tokens), found {len(line.hash_ids)}"
        )
    for block in line.hash_ids:
        if block not in dense and not _ID_MIN <= block <= _ID_MAX:
            return f"hash_ids: {block} does not fit 64 bits"
    return ""


def _explain(text: str, error: Exception) -> str:
    """A decoder's complaint in the words of the format."""
    if not text.strip():
        return "the line is empty; expected one JSON object"
    if not isinstance(error, msgspec.ValidationError):
        return f"is not JSON: {error}"
    key, what = explain(str(error), _Line)
    return f"{key}: {what}" if key else f"{what}; expected one request as a JSON object"
