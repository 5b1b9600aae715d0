"""Conservation, checked from outside the code that keeps it: every page has exactly one owner."""

from __future__ import annotations

from collections import Counter

from cache.buffer_flush import BufferFlush
from cache.node import Tier
from cache.parts import Parts
from consensus.errors import InternalError

__all__ = ["audit"]


def audit(parts: Parts) -> None:
    """Raise :class:`InternalError` unless pages, pins, slots and ledger all add up."""
    parts.tree.check_integrity()
    parts.manager.check_integrity()
    for tier in Tier:
        _check_pages(parts, tier)
        _check_ledger(parts, tier)
    if parts.tiers.side:
        _check_side_pools(parts)


def _check_pages(parts: Parts, tier: Tier) -> None:
    pool = parts.tiers.pools[tier]
    pool.check_integrity()
    owned = _in_tree(parts, tier)
    if tier is Tier.DEVICE:
        owned += parts.insertion.held_pages() + parts.load_back.held_pages()
        owned += parts.engine_pages.held_pages() + parts.orphans.pages
        owned += [page for request in parts.requests for page in request.private]
    else:
        owned += parts.backup.held_pages()
        if parts.storage is not None:
            owned += parts.storage.prefetch.held_pages()
    twice = [page for page, count in Counter(owned).items() if count > 1]
    if twice:
        raise InternalError(f"{tier.value} pages {twice} have two owners", rank=parts.rank)
    total = len(owned) + pool.num_free + pool.num_limbo
    if total != pool.num_pages:
        raise InternalError(
            f"{tier.value}: {len(owned)} owned + {pool.num_free} free + {pool.num_limbo} in limbo"
            f" are not {pool.num_pages} pages",
            rank=parts.rank,
        )


def _check_ledger(parts: Parts, tier: Tier) -> None:
    name = tier.value
    ledger = parts.manager.ledger
    expected = len(_in_tree(parts, tier)) + ledger.cooling(name)
    expected += sum(intent.need.get(name, 0) for intent in parts.manager.open_intents)
    if tier is Tier.HOST and isinstance(parts.backup, BufferFlush):
        expected += len(parts.backup.written_pages())
    if tier is Tier.DEVICE:
        expected += parts.engine_pages.headroom
        expected += sum(len(request.private) for request in parts.requests)
    if ledger.charged(name) != expected:
        raise InternalError(
            f"{name}: the ledger has {ledger.charged(name)} pages charged, {expected} are used",
            rank=parts.rank,
        )


def _check_side_pools(parts: Parts) -> None:
    side, manager = parts.tiers.side, parts.manager
    nodes = list(parts.tree.nodes())
    carriages = [*parts.insertion.held(), *parts.load_back.held(), *parts.backup.held()]
    owned, kept = side.owned(nodes, carriages), side.owned(nodes, [])
    for one in side:
        for tier, pool in one.pools.items():
            name = one.spec.pool(tier)
            pool.check_integrity()
            pages = list(owned[name])
            if tier is Tier.DEVICE:
                pages += parts.orphans.side_pages_of(one.spec.name)
            total = len(pages) + pool.num_free + pool.num_limbo
            if len(set(pages)) != len(pages) or total != pool.num_pages:
                raise InternalError(
                    f"{name}: {pages} owned + {pool.num_free} free + {pool.num_limbo} in limbo are"
                    f" not {pool.num_pages} pages with one owner each",
                    rank=parts.rank,
                )
            expected = len(kept[name]) + manager.ledger.cooling(name)
            expected += sum(intent.need.get(name, 0) for intent in manager.open_intents)
            if manager.ledger.charged(name) != expected:
                raise InternalError(
                    f"{name}: {manager.ledger.charged(name)} pages charged, {expected} are used",
                    rank=parts.rank,
                )


def _in_tree(parts: Parts, tier: Tier) -> list[int]:
    """Pages that nodes own themselves; those of an open intent are counted with it."""
    return [
        page
        for node in parts.tree.nodes()
        if node.at(tier).carriage is None
        for page in node.at(tier).pages
    ]
