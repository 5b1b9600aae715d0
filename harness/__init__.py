"""What proves the library: simulation, faults, invariants, workloads, real ranks and the command.

The top layer. It imports ``cache`` and ``consensus``; nothing in them imports it.
"""

from __future__ import annotations

__all__: list[str] = []
