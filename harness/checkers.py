"""The promises, checked from outside after every step.

*Local* checks hold on one rank (conservation, right bytes, bounds); *agreement* is checked by
comparing what the ranks say of themselves after the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import xxhash

from cache.content import matches_pages, page_hashes
from cache.hierarchical_cache import HierarchicalCache
from cache.node import Node, Residency, Tier
from cache.tensors import KVTensors

__all__ = ["Snapshot", "compare", "hashes_of", "snapshot", "tree_lines", "wrong_bytes"]


class Snapshot(msgspec.Struct, frozen=True):
    """What must be equal on all ranks after one step; ``tree`` digests a full walk (0: no walk)."""

    rank: int
    epoch: int
    step: int
    settled: int
    fingerprint: int
    live: int
    charged: tuple[int, ...]
    pinned: tuple[int, ...]
    num_open: int
    tree: int


_AGREED = tuple(name for name in Snapshot.__struct_fields__ if name != "rank")


def snapshot(cache: HierarchicalCache, *, walk: bool = True) -> Snapshot:
    """The agreed state of one rank; ``walk`` includes a digest of the whole tree."""
    manager = cache.manager
    tree = 0
    if walk:
        tree = xxhash.xxh3_64_intdigest("\n".join(tree_lines(cache)).encode())
    return Snapshot(
        rank=cache.rank,
        epoch=manager.epoch,
        step=manager.step,
        settled=manager.settled_step,
        fingerprint=cache.journal.fingerprint,
        live=cache.requests.digest,
        charged=tuple(manager.ledger.charged(tier.value) for tier in Tier),
        pinned=tuple(cache.tree.num_pinned[tier] for tier in Tier),
        num_open=len(manager.open_intents),
        tree=tree,
    )


def tree_lines(cache: HierarchicalCache) -> list[str]:
    """Every node in a fixed order, as text: structure, recency, residency and pins."""
    return [
        f"{node.node_id} {node.parent.node_id if node.parent else 0} {node.namespace}"
        f" {node.last_access} {node.num_pages} {xxhash.xxh3_64_hexdigest(node.tokens.tobytes())}"
        f" {node.device.state:d}/{node.device.pins} {node.host.state:d}/{node.host.pins}"
        for node in cache.tree.nodes()
    ]


def compare(snapshots: Iterable[Snapshot]) -> list[str]:
    """What differs between ranks after the same step, as readable lines; empty: nothing."""
    first: dict[tuple[int, int], Snapshot] = {}
    found: list[str] = []
    for snap in sorted(snapshots, key=lambda one: (one.epoch, one.step, one.rank)):
        other = first.setdefault((snap.epoch, snap.step), snap)
        for name in _AGREED:
            ours, theirs = getattr(other, name), getattr(snap, name)
            if ours != theirs:
                found.append(
                    f"after step {snap.step} of epoch {snap.epoch}: {name} is {ours} on rank"
                    f" {other.rank} and {theirs} on rank {snap.rank}"
                )
    return found


def hashes_of(cache: HierarchicalCache, node: Node) -> list[int]:
    """The chained hashes of the pages of ``node``: what its contents derive from."""
    size = cache.config.page_size
    previous = 0
    hashes: list[int] = []
    for above in node.path():
        namespace = "" if previous else above.namespace
        hashes = page_hashes(above.tokens, size, previous, namespace)
        previous = hashes[-1]
    return hashes


def wrong_bytes(
    cache: HierarchicalCache, tensors: Mapping[Tier, KVTensors], nodes: Iterable[Node] | None = None
) -> list[str]:
    """Resident pages whose bytes are not what was computed for their prefix on this rank."""
    found: list[str] = []
    known: dict[int, int] = {}
    for node in cache.tree.nodes() if nodes is None else nodes:
        parent = node.parent
        if parent is not None and parent.node_id in known:
            hashes = page_hashes(node.tokens, cache.config.page_size, known[parent.node_id])
        else:
            hashes = hashes_of(cache, node)
        known[node.node_id] = hashes[-1]
        for tier in Tier:
            presence = node.at(tier)
            if presence.state is not Residency.RESIDENT or _may_be_void(node):
                continue
            right = matches_pages(tensors[tier], presence.pages, hashes, cache.rank)
            if not all(right):
                found.append(f"rank {cache.rank}: {node!r} has wrong bytes in {tier.value}")
    return found


def _may_be_void(node: Node) -> bool:
    """It was computed on top of a load that has not ended: if that fails, it is withdrawn."""
    return any(load.intent is not None and load.intent.is_open for load in node.built_on)
