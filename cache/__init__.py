"""The hierarchical KV cache of one rank: radix tree, page pools, copies and storage.

The middle layer, and the first user of ``consensus``: whatever changes replicated state is decided
there. It imports ``consensus``, never ``harness``.
"""

from __future__ import annotations

__all__: list[str] = []
