"""What proves it: simulation, faults, checkers, traces, rank processes, the command ``kvpact``.

The highest layer: it may import ``cache`` and ``consensus``; neither imports it. These exports are
for the tests of whoever puts kvpact under an engine; everything else is the command's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.consensus.lazy import public

if TYPE_CHECKING:
    from kvpact.harness.rank.launch import Launch, RankContext, RankReport, Report, launch
    from kvpact.harness.rank.sim import Pause, SimBeacon, SimClock, SimGroup, SimNet, run_programs
    from kvpact.harness.trace.conversations import (
        WorkloadConfig,
        generate,
        shipped_trace,
        write_trace,
    )
    from kvpact.harness.trace.mooncake import TraceRequest, read_trace
    from kvpact.harness.verify.agreement import Snapshot, compare, snapshot
    from kvpact.harness.verify.promises import broken_promises

__all__ = [
    "Launch",
    "Pause",
    "RankContext",
    "RankReport",
    "Report",
    "SimBeacon",
    "SimClock",
    "SimGroup",
    "SimNet",
    "Snapshot",
    "TraceRequest",
    "WorkloadConfig",
    "broken_promises",
    "compare",
    "generate",
    "launch",
    "read_trace",
    "run_programs",
    "shipped_trace",
    "snapshot",
    "write_trace",
]

_HOMES = {
    "kvpact.harness.rank.launch": ("Launch", "RankContext", "RankReport", "Report", "launch"),
    "kvpact.harness.rank.sim": (
        "Pause",
        "SimBeacon",
        "SimClock",
        "SimGroup",
        "SimNet",
        "run_programs",
    ),
    "kvpact.harness.trace.conversations": (
        "WorkloadConfig",
        "generate",
        "shipped_trace",
        "write_trace",
    ),
    "kvpact.harness.trace.mooncake": ("TraceRequest", "read_trace"),
    "kvpact.harness.verify.agreement": ("Snapshot", "compare", "snapshot"),
    "kvpact.harness.verify.promises": ("broken_promises",),
}

__getattr__, __dir__ = public(__name__, _HOMES)
