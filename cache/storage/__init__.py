"""The storage tier: pages under content keys, in a backend that is chosen by name.

`keys` says what a page is called, `checksum` how its bytes are bound to that, `protocol` what
every backend promises, `workers` who calls it. The backends: `memory`, `segments` (``file``, the
embedded default) and `mooncake` (the extra ``mooncake``).
"""

from __future__ import annotations

import os

from kvpact.cache.storage.checksum import Page, SealedPage, seal
from kvpact.cache.storage.keys import Identity, PageKeys
from kvpact.cache.storage.memory import MemoryBackend
from kvpact.cache.storage.protocol import Backend, BackendBase
from kvpact.cache.storage.segments import SegmentBackend
from kvpact.cache.storage.workers import (
    DeferredWorkers,
    Kind,
    PagePlan,
    StorageEnding,
    StorageRequest,
    StorageWorkers,
    Workers,
)
from kvpact.consensus.core.errors import BadInput

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendBase",
    "DeferredWorkers",
    "Identity",
    "Kind",
    "Page",
    "PageKeys",
    "PagePlan",
    "SealedPage",
    "StorageEnding",
    "StorageRequest",
    "StorageWorkers",
    "Workers",
    "open_backend",
    "seal",
]

BACKENDS = ("memory", "file", "mooncake")


def open_backend(
    name: str,
    identity: Identity,
    *,
    capacity_bytes: int = 1 << 30,
    path: str | os.PathLike[str] | None = None,
    durable: bool = False,
    master: str | None = None,
) -> BackendBase:
    """Open a storage for the pages of ``identity``, that is of one rank.

    ``path`` belongs to ``file``: a directory that all ranks may share, each works in one of its
    own below it. ``master`` belongs to ``mooncake``: ``host:port`` of a running master, and
    ``capacity_bytes`` is then what this process lends to the store. Raises `BadInput` for a name,
    a directory or a master that cannot be used.
    """
    if (name == "file") != (path is not None) or (name == "mooncake") != (master is not None):
        needs = {"file": "path, and no master", "mooncake": "master, and no path"}
        if name in BACKENDS:
            raise BadInput(f"storage {name} needs {needs.get(name, 'neither path nor master')}")
    if name == "memory":
        return MemoryBackend(capacity_bytes)
    if name == "file" and path is not None:
        directory = os.path.join(path, identity.directory)
        return SegmentBackend(directory, identity, capacity_bytes=capacity_bytes, durable=durable)
    if name == "mooncake" and master is not None:
        from kvpact.cache.storage.mooncake import (
            MooncakeBackend,  # an extra: only where it is asked for
        )

        return MooncakeBackend(master, identity, lent_bytes=capacity_bytes)
    raise BadInput(f"there is no storage {name!r}: choose one of {', '.join(BACKENDS)}")
