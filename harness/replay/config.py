"""What ``kvpact replay`` runs, checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.trace.mooncake import BLOCK_TOKENS

__all__ = ["ReplayConfig", "check_output", "parse_counts", "parse_kv_shape", "replay_config"]

Ranks = Literal["gloo", "sim"]
KvShape = tuple[int, int, int]
Mode = Literal["write_through", "write_through_selective", "write_back", "buffer_only"]
Storage = Literal["none", "memory", "file"]
Eviction = Literal["lru", "lfu", "slru", "priority"]

MAX_RANKS: Final = 64
MAX_PAGES: Final = 1 << 24  # of one tier on one rank
MAX_LANES: Final = 4096


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. Raises BadInput, naming the flag, when it cannot be run.

    ``device_pages`` and ``host_pages`` hold one count per rank (``stage * tp + tp_rank``); a host
    of 0 pages is no host tier. ``page_size`` is in tokens, ``lanes`` is how many requests run at
    the same time, ``kv_shape`` is (layers, heads, head dimension) of the pages' real tensors.
    ``mode`` and ``eviction`` are those of the cache; ``storage`` is each rank's own, of
    ``storage_mb`` MiB, ``file`` below ``storage_dir``. ``headroom_pages`` are kept voted, to be had
    at once; what they do not have is asked for in the next step, or, with ``decides``, in an extra
    round before it.
    """

    trace: str
    ranks: Ranks
    tp: int
    pp: int
    lag: int
    page_size: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    lanes: int
    limit: int | None
    kv_shape: KvShape
    journal: str | None
    json_out: str | None
    seed: int
    mode: Mode = "write_through"
    storage: Storage = "none"
    storage_dir: str | None = None
    storage_mb: int = 1024
    eviction: Eviction = "lru"
    headroom_pages: int = 0
    decides: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica: tp * pp."""
        return self.tp * self.pp

    def __post_init__(self) -> None:
        if self.ranks not in ("gloo", "sim"):
            raise BadInput(f"--ranks: must be gloo or sim, got {self.ranks!r}")
        _within("--tp", self.tp, 1, MAX_RANKS)
        _within("--pp", self.pp, 1, MAX_RANKS)
        _within("--tp * --pp", self.num_ranks, 1, MAX_RANKS)
        _within("--lag", self.lag, 0, 64)
        if self.pp > 1 and self.lag < self.pp:
            raise BadInput(f"--lag: with --pp {self.pp} must be at least {self.pp}, got {self.lag}")
        _within("--page-size", self.page_size, 1, BLOCK_TOKENS)
        if BLOCK_TOKENS % self.page_size:
            raise BadInput(
                f"--page-size: {self.page_size} does not divide the trace's block of"
                f" {BLOCK_TOKENS} tokens; use a power of two"
            )
        for flag, counts, least in (
            ("--device-pages", self.device_pages, 1),
            ("--host-pages", self.host_pages, 0),
        ):
            _check_length(flag, counts, self.num_ranks)
            for count in counts:
                _within(flag, count, least, MAX_PAGES)
        _within("--lanes", self.lanes, 1, MAX_LANES)
        _within("--headroom", self.headroom_pages, 0, min(self.device_pages) - 1)
        if self.decides and self.pp > 1:
            raise BadInput("--decide: would deadlock against the activations of --pp stages")
        if self.limit is not None:
            _within("--limit", self.limit, 1, 2**31 - 1)
        for size in self.kv_shape:
            _within("--kv-shape", size, 1, 1 << 16)
        _within("--seed", self.seed, 0, 2**63 - 1)
        _within("--storage-mb", self.storage_mb, 1, 1 << 30)
        if (self.storage == "file") != (self.storage_dir is not None):
            raise BadInput("--storage-dir: belongs to --storage file, and is needed there")
        if self.mode == "buffer_only" and self.storage == "none":
            raise BadInput("--mode: buffer_only needs a --storage: the host is staging only")
        _check_paths(self.trace, self.journal, self.json_out)


def replay_config(
    *,
    trace: str,
    ranks: Ranks = "gloo",
    tp: int = 2,
    pp: int = 1,
    lag: int | None = None,
    page_size: int = BLOCK_TOKENS,
    device_pages: Sequence[int] = (2048,),
    host_pages: Sequence[int] = (8192,),
    lanes: int = 4,
    limit: int | None = None,
    kv_shape: KvShape = (1, 1, 1),
    journal: str | None = None,
    json_out: str | None = None,
    seed: int = 0,
    mode: Mode = "write_through",
    storage: Storage = "none",
    storage_dir: str | None = None,
    storage_mb: int = 1024,
    eviction: Eviction = "lru",
    headroom_pages: int = 0,
    decides: bool = False,
) -> ReplayConfig:
    """Build a config: one count stands for every rank, the lag is 0, or ``pp`` with stages."""
    # Before the counts are spread over the ranks: a wrong number of ranks is the first thing wrong.
    _within("--tp", tp, 1, MAX_RANKS)
    _within("--pp", pp, 1, MAX_RANKS)
    return ReplayConfig(
        trace=trace,
        ranks=ranks,
        tp=tp,
        pp=pp,
        lag=lag if lag is not None else (pp if pp > 1 else 0),
        page_size=page_size,
        device_pages=_per_rank(device_pages, tp * pp),
        host_pages=_per_rank(host_pages, tp * pp),
        lanes=lanes,
        limit=limit,
        kv_shape=kv_shape,
        journal=journal,
        json_out=json_out,
        seed=seed,
        mode=mode,
        storage=storage,
        storage_dir=storage_dir,
        storage_mb=storage_mb,
        eviction=eviction,
        headroom_pages=headroom_pages,
        decides=decides,
    )


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Read ``"4096"`` or ``"4096,4000"``. Raises BadInput."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,12}", part, re.ASCII) for part in parts):
        raise BadInput(f"{flag}: expected a number, or one per rank like 4096,4000, got {text!r}")
    return tuple(int(part) for part in parts)


def parse_kv_shape(text: str) -> KvShape:
    """Read ``"2x2x8"``: layers, heads, head dimension. Raises BadInput."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6})", text, re.ASCII)
    if match is None:
        raise BadInput(f"--kv-shape: expected LAYERSxHEADSxDIM like 2x2x8, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3])


def _per_rank(counts: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    return tuple(counts) * num_ranks if len(counts) == 1 else tuple(counts)


def _check_length(flag: str, counts: Sequence[int], num_ranks: int) -> None:
    if len(counts) != num_ranks:
        raise BadInput(
            f"{flag}: expected one number, or one for each of {num_ranks} ranks, got {len(counts)}"
        )


def _within(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadInput(f"{flag}: must be between {least} and {most}, got {value}")


def _check_paths(trace: str, journal: str | None, json_out: str | None) -> None:
    """Find out now, not after an hour, that something cannot be read or written."""
    if not Path(trace).exists():
        raise BadInput(f"{trace}: no such file; expected a trace")
    if journal is not None:
        place = Path(journal)
        if place.exists() and not place.is_dir():
            raise BadInput(f"--journal: {journal} is not a directory")
        if not place.absolute().parent.is_dir():
            raise BadInput(f"--journal: {journal}: its parent directory does not exist")
    if json_out is not None:
        check_output("--json", json_out)


def check_output(flag: str, path: str) -> None:
    """Raise BadInput where a file could not be written at ``path`` later."""
    if os.path.isdir(path):  # unlike Path.is_dir it takes any name
        raise BadInput(f"{flag}: {path} is a directory; expected a file to write")
    if not Path(path).absolute().parent.is_dir():
        raise BadInput(f"{flag}: {path}: its parent directory does not exist")
    target = Path(path)
    try:
        existed = target.exists()
        target.open("ab").close()
    except OSError as error:
        raise BadInput(f"{flag}: {path} cannot be written: {error.strerror}") from None
    if not existed:
        target.unlink(missing_ok=True)
