"""The protocol: how the ranks of one replica agree, step by step, on what they do to their caches.

The lowest layer. It imports neither ``cache`` nor ``harness``, knows no tree and no tensor copy,
and only ``consensus.group`` talks to other ranks.
"""

from __future__ import annotations

__all__: list[str] = []
