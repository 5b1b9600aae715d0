"""What a process holds of its machine, sampled, and whether that grows.

Source of the slope: least squares over the samples after the warm-up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.soak.feed import Resources

if TYPE_CHECKING:
    import psutil

__all__ = ["Growth", "growth", "own_process", "sample", "shm_segments"]

#: The share of a run at its start that is not judged: buffers and trees fill up.
WARM_UP: Final = 0.4
#: Memory is judged only over so long: allocators return it late.
JUDGED_S: Final = 300.0
RSS_GROWTH_BYTES: Final = 64 << 20
RSS_SLOPE_BYTES_PER_S: Final = (1 << 20) / 60
COUNT_GROWTH: Final = 16

_SHM: Final = "/dev/shm"


class Growth(msgspec.Struct, frozen=True):
    """One kind of resource of one rank: first and last judged value, and its slope an hour."""

    rank: int
    name: str
    first: float
    last: float
    largest: float
    slope_per_h: float
    leaks: bool


def own_process() -> psutil.Process:
    """This process, for :func:`sample`. Raises BadInput without psutil, which only soaks need."""
    try:
        import psutil
    except ModuleNotFoundError:
        raise BadInput(
            "soak: the package psutil is missing: install kvpact[ray] (in a clone: scripts/setup"
            " --ray), or without Ray: pip install psutil prometheus-client"
        ) from None
    return psutil.Process()


def sample(process: psutil.Process, at_s: float) -> Resources:
    """Look at ``process`` now; under a millisecond."""
    with process.oneshot():
        memory = process.memory_info()
        threads = process.num_threads()
    return Resources(
        at_s=at_s,
        rss_bytes=int(memory.rss),
        shared_bytes=int(getattr(memory, "shared", 0)),
        fds=_num_fds(process),
        threads=threads,
        shm_segments=len(shm_segments()),
    )


def shm_segments() -> list[str]:
    """The names of what lies in shared memory on this machine (Linux; elsewhere nothing)."""
    try:
        return sorted(os.listdir(_SHM))
    except OSError:
        return []


def _num_fds(process: psutil.Process) -> int:
    import psutil

    try:
        return int(process.num_fds())
    except (AttributeError, psutil.Error):
        return 0


def growth(rank: int, samples: Sequence[Resources]) -> list[Growth]:
    """How each resource developed after the warm-up; ``leaks`` where it clearly kept growing."""
    if len(samples) < 4:
        return []
    begin_s = samples[0].at_s + WARM_UP * (samples[-1].at_s - samples[0].at_s)
    judged = [one for one in samples if one.at_s >= begin_s]
    if len(judged) < 3:
        return []
    span_s = judged[-1].at_s - judged[0].at_s
    found: list[Growth] = []
    for name in ("rss_bytes", "shared_bytes", "fds", "threads", "shm_segments"):
        values = [float(getattr(one, name)) for one in judged]
        slope = _slope([one.at_s for one in judged], values)
        grown = values[-1] - values[0]
        if name == "rss_bytes":
            leaks = (
                span_s >= JUDGED_S
                and grown > RSS_GROWTH_BYTES
                and slope > RSS_SLOPE_BYTES_PER_S
                and min(values[len(values) // 2 :]) > max(values[: len(values) // 4])
            )
        elif name in ("fds", "threads"):
            leaks = grown > COUNT_GROWTH and slope > 0
        else:
            leaks = False  # belongs to the machine, not to this rank: shown, not judged
        found.append(Growth(rank, name, values[0], values[-1], max(values), slope * 3600, leaks))
    return found


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Per second."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if spread <= 0:
        return 0.0
    pairs = zip(times, values, strict=True)
    return sum((t - mean_t) * (v - mean_v) for t, v in pairs) / spread
