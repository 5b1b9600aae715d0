"""Conservation, checked from outside the code that keeps it: every page has exactly one owner."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.buffer_flush import BufferFlush
from cache.node import Tier
from consensus.errors import InternalError

if TYPE_CHECKING:
    from cache.hierarchical_cache import HierarchicalCache

__all__ = ["audit"]


def audit(cache: HierarchicalCache) -> None:
    """Raise :class:`InternalError` unless pages, pins, slots and ledger all add up."""
    cache.tree.check_integrity()
    cache.manager.check_integrity()
    for tier in Tier:
        _check_pages(cache, tier)
        _check_ledger(cache, tier)
    if cache.tiers.side:
        _check_side_pools(cache)


def _check_pages(cache: HierarchicalCache, tier: Tier) -> None:
    pool = cache.tiers.pools[tier]
    pool.check_integrity()
    owned = _in_tree(cache, tier)
    if tier is Tier.DEVICE:
        owned += cache.insertion.held_pages() + cache.load_back.held_pages()
        owned += cache.engine_pages.held_pages() + cache.carryover.orphaned_pages
        owned += [page for request in cache.requests for page in request.private]
    else:
        owned += cache.backup.held_pages()
        if cache.storage is not None:
            owned += cache.storage.prefetch.held_pages()
    twice = [page for page, count in Counter(owned).items() if count > 1]
    if twice:
        raise InternalError(f"{tier.value} pages {twice} have two owners", rank=cache.rank)
    total = len(owned) + pool.num_free + pool.num_limbo
    if total != pool.num_pages:
        raise InternalError(
            f"{tier.value}: {len(owned)} owned + {pool.num_free} free + {pool.num_limbo} in limbo"
            f" are not {pool.num_pages} pages",
            rank=cache.rank,
        )


def _check_ledger(cache: HierarchicalCache, tier: Tier) -> None:
    name = tier.value
    ledger = cache.manager.ledger
    expected = len(_in_tree(cache, tier)) + ledger.cooling(name)
    expected += sum(intent.need.get(name, 0) for intent in cache.manager.open_intents)
    if tier is Tier.HOST and isinstance(cache.backup, BufferFlush):
        expected += len(cache.backup.written_pages())
    if tier is Tier.DEVICE:
        expected += cache.engine_pages.headroom
        expected += sum(len(request.private) for request in cache.requests)
    if ledger.charged(name) != expected:
        raise InternalError(
            f"{name}: the ledger has {ledger.charged(name)} pages charged, {expected} are used",
            rank=cache.rank,
        )


def _check_side_pools(cache: HierarchicalCache) -> None:
    side, manager = cache.tiers.side, cache.manager
    nodes = list(cache.tree.nodes())
    carriages = [*cache.insertion.held(), *cache.load_back.held(), *cache.backup.held()]
    owned, kept = side.owned(nodes, carriages), side.owned(nodes, [])
    for one in side:
        for tier, pool in one.pools.items():
            name = one.spec.pool(tier)
            pool.check_integrity()
            pages = list(owned[name])
            if tier is Tier.DEVICE:
                pages += cache.carryover.side_orphans(one.spec.name)
            total = len(pages) + pool.num_free + pool.num_limbo
            if len(set(pages)) != len(pages) or total != pool.num_pages:
                raise InternalError(
                    f"{name}: {pages} owned + {pool.num_free} free + {pool.num_limbo} in limbo are"
                    f" not {pool.num_pages} pages with one owner each",
                    rank=cache.rank,
                )
            expected = len(kept[name]) + manager.ledger.cooling(name)
            expected += sum(intent.need.get(name, 0) for intent in manager.open_intents)
            if manager.ledger.charged(name) != expected:
                raise InternalError(
                    f"{name}: {manager.ledger.charged(name)} pages charged, {expected} are used",
                    rank=cache.rank,
                )


def _in_tree(cache: HierarchicalCache, tier: Tier) -> list[int]:
    """Pages that nodes own themselves; those of an open intent are counted with it."""
    return [
        page
        for node in cache.tree.nodes()
        if node.at(tier).carriage is None
        for page in node.at(tier).pages
    ]
