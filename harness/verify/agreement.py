"""The promises, checked from outside after every step.

*Local* checks hold on one rank (conservation, right bytes, bounds); *agreement* is checked by
comparing what the ranks say of themselves after the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.memory.paged import PagedMemory
from kvpact.cache.tree.node import Node, Residency, Tier
from kvpact.harness.verify.content import matches_pages

__all__ = ["Snapshot", "compare", "hashes_of", "snapshot", "tree_lines", "wrong_bytes"]


class Snapshot(msgspec.Struct, frozen=True):
    """What must be equal on all ranks after one step; ``tree`` digests a full walk (0: no walk),
    ``events`` all that was told so far. ``run`` counts runs of the same name from 0."""

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
    events: int = 0
    run: int = 0


_TIERS = tuple(Tier)
_AGREED = tuple(name for name in Snapshot.__struct_fields__ if name != "rank")


def snapshot(
    cache: HierarchicalCache,
    nodes: Iterable[Node] | None = None,
    *,
    walk: bool = True,
    events: int = 0,
    run: int = 0,
) -> Snapshot:
    """The agreed state of one rank; ``walk`` includes a digest of the whole tree.

    ``nodes`` are all nodes of the tree, where the caller has them already.
    """
    manager = cache.core.manager
    tree = 0
    if walk:
        walked = cache.core.tree.nodes() if nodes is None else nodes
        tree = xxhash.xxh3_64_intdigest("\n".join(map(_line, walked)).encode())
    return Snapshot(
        rank=cache.rank,
        epoch=manager.epoch,
        step=manager.step,
        settled=manager.settled_step,
        fingerprint=cache.journal.fingerprint,
        live=cache.core.requests.digest,
        charged=tuple(manager.ledger.charged(pool) for pool in manager.schema.pools),
        pinned=tuple(cache.core.tree.num_pinned[tier] for tier in Tier),
        num_open=len(manager.open_intents),
        tree=tree,
        events=events,
        run=run,
    )


def tree_lines(cache: HierarchicalCache) -> list[str]:
    """Every node in a fixed order, as text: structure, recency, residency and pins."""
    return [_line(node) for node in cache.core.tree.nodes()]


def _line(node: Node) -> str:
    return (
        f"{node.node_id} {node.parent.node_id if node.parent else 0} {node.namespace}"
        f" {node.last_access} {node.num_pages} {xxhash.xxh3_64_hexdigest(node.tokens.tobytes())}"
        f" {node.device.state:d}/{node.device.pins} {node.host.state:d}/{node.host.pins}"
        f" {node.hits} {node.priority} {node.is_queued:d}{node.is_stored:d}{node.is_dropped:d}"
        f"{_side_counts(node)}"
    )


def _side_counts(node: Node) -> str:
    """Where it has side pages, by tier and pool, without page ids."""
    if not node.device.side and not node.host.side:
        return ""
    return "".join(
        f" {tier.value}.{name}{[position for position, _ in pages]}"
        for tier in _TIERS
        for name, pages in sorted(node.at(tier).side.items())
    )


def compare(snapshots: Iterable[Snapshot]) -> list[str]:
    """What differs between ranks after the same step, as readable lines; empty: nothing."""
    first: dict[tuple[int, int, int], Snapshot] = {}
    found: list[str] = []
    for snap in sorted(snapshots, key=lambda one: (one.run, one.epoch, one.step, one.rank)):
        other = first.setdefault((snap.run, snap.epoch, snap.step), snap)
        for name in _AGREED:
            ours, theirs = getattr(other, name), getattr(snap, name)
            if ours != theirs:
                found.append(
                    f"after step {snap.step} of epoch {snap.epoch}: {name} is {ours} on rank"
                    f" {other.rank} and {theirs} on rank {snap.rank}"
                )
    return found


def by_weights(hashes: Iterable[int], weights: str) -> list[int]:
    """What the contents of pages derive from: their hashes, and the weights that computed them."""
    salt = xxhash.xxh3_64_intdigest(weights.encode()) if weights else 0
    return [page_hash ^ salt for page_hash in hashes]


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
    cache: HierarchicalCache,
    tensors: Mapping[Tier, PagedMemory],
    nodes: Iterable[Node] | None = None,
    side: Mapping[str, Mapping[Tier, PagedMemory]] | None = None,
) -> list[str]:
    """Resident pages whose bytes are not what was computed for their prefix on this rank."""
    known: dict[int, Sequence[int]] = {}
    pages: dict[tuple[str, Tier], list[int]] = {}
    wanted: dict[tuple[str, Tier], list[int]] = {}
    owners: dict[tuple[str, Tier], list[Node]] = {}

    def expect(name: str, tier: Tier, node: Node, page: int, page_hash: int) -> None:
        pages.setdefault((name, tier), []).append(page)
        wanted.setdefault((name, tier), []).append(page_hash)
        owners.setdefault((name, tier), []).append(node)

    for node in cache.core.tree.nodes() if nodes is None else nodes:
        hashes = known[node.node_id] = _hashes_below(cache, node, known)
        if _may_be_void(node):
            continue
        for tier in _TIERS:
            presence = node.at(tier)
            if presence.state is not Residency.RESIDENT:
                continue
            pages.setdefault(("", tier), []).extend(presence.pages)
            wanted.setdefault(("", tier), []).extend(hashes)
            owners.setdefault(("", tier), []).extend([node] * len(hashes))
            for name in side or ():
                for position, page in presence.side.get(name, []):
                    expect(name, tier, node, page, hashes[position])
    found: list[str] = []
    for (name, tier), where in pages.items():
        memory = side[name][tier] if name and side is not None else tensors[tier]
        # All pages of a pool in one comparison: a tree has many nodes, and this runs every step.
        right = matches_pages(
            memory, where, by_weights(wanted[name, tier], cache.weights), cache.rank
        )
        wrong = [node for node, good in zip(owners[name, tier], right, strict=True) if not good]
        found += [
            f"rank {cache.rank}: {node!r} has wrong bytes in {name}{'.' * bool(name)}{tier.value}"
            for node in {node.node_id: node for node in wrong}.values()
        ]
    return found


def _hashes_below(
    cache: HierarchicalCache, node: Node, known: Mapping[int, Sequence[int]]
) -> list[int]:
    above = node.parent
    if above is not None and above.node_id in known:
        return page_hashes(node.tokens, cache.config.page_size, known[above.node_id][-1])
    return hashes_of(cache, node)


def _may_be_void(node: Node) -> bool:
    """It was computed on top of a load that has not ended: if that fails, it is withdrawn."""
    return any(load.intent is not None and load.intent.is_open for load in node.built_on)
