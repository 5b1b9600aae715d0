"""What proves it: simulation, faults, checkers, traces, rank processes, the command ``kvpact``.

The highest layer: it may import ``cache`` and ``consensus``; neither imports it. These exports are
for the tests of whoever puts kvpact under an engine; everything else is the command's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.checkers import Snapshot, compare, snapshot
    from harness.launch import Launch, RankContext, RankReport, Report
    from harness.promises import broken_promises
    from harness.sim import Pause, SimBeacon, SimClock, SimGroup, SimNet, run_programs
    from harness.traces import TraceRequest, read_trace
    from harness.workload import WorkloadConfig, generate, shipped_trace, write_trace

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
    "read_trace",
    "run_programs",
    "shipped_trace",
    "snapshot",
    "write_trace",
]

# Each comes from its module when it is first asked for: errors and a ballot need no torch.
_MODULES = {
    "checkers": ("Snapshot", "compare", "snapshot"),
    "launch": ("Launch", "RankContext", "RankReport", "Report"),
    "promises": ("broken_promises",),
    "sim": ("Pause", "SimBeacon", "SimClock", "SimGroup", "SimNet", "run_programs"),
    "traces": ("TraceRequest", "read_trace"),
    "workload": ("WorkloadConfig", "generate", "shipped_trace", "write_trace"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
