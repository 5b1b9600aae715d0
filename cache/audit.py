"""Conservation, checked from outside the code that keeps it: every page has exactly one owner."""

from __future__ import annotations

from collections import Counter

from kvpact.cache.core import Parts
from kvpact.cache.paths.buffer_flush import BufferFlush
from kvpact.cache.tree.node import STORAGE, Node, Tier
from kvpact.consensus.core.errors import InternalError

__all__ = ["audit"]


def audit(parts: Parts) -> None:
    """Raise :class:`InternalError` unless pages, pins, slots and ledger all add up."""
    parts.tree.check_integrity()
    parts.manager.check_integrity()
    nodes = list(parts.tree.nodes())
    for tier in Tier:
        in_tree = _in_tree(nodes, tier)
        _check_pages(parts, tier, in_tree)
        _check_ledger(parts, tier, len(in_tree))
    _require_charged(parts, STORAGE, 0)
    if parts.tiers.side:
        _check_side_pools(parts, nodes)


def _check_pages(parts: Parts, tier: Tier, in_tree: list[int]) -> None:
    pool = parts.tiers.pools[tier]
    pool.check_integrity()
    owned = list(in_tree)
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


def _check_ledger(parts: Parts, tier: Tier, num_pages: int) -> None:
    if tier is Tier.HOST and isinstance(parts.backup, BufferFlush):
        num_pages += len(parts.backup.written_pages())
    if tier is Tier.DEVICE:
        num_pages += parts.engine_pages.headroom
        num_pages += sum(len(request.private) for request in parts.requests)
    _require_charged(parts, tier.value, num_pages)


def _require_charged(parts: Parts, name: str, num_pages: int) -> None:
    """Of pool ``name`` is charged what has ``num_pages``, open intents, and what is cooling."""
    ledger = parts.manager.ledger
    expected = num_pages + ledger.cooling(name)
    expected += sum(intent.need.get(name, 0) for intent in parts.manager.open_intents)
    if ledger.charged(name) != expected:
        raise InternalError(
            f"{name}: the ledger has {ledger.charged(name)} pages charged, {expected} are used",
            rank=parts.rank,
        )


def _check_side_pools(parts: Parts, nodes: list[Node]) -> None:
    side = parts.tiers.side
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
            _require_charged(parts, name, len(kept[name]))


def _in_tree(nodes: list[Node], tier: Tier) -> list[int]:
    """Pages that nodes own themselves; those of an open intent are counted with it."""
    there = (node.at(tier) for node in nodes)
    return [page for presence in there if presence.carriage is None for page in presence.pages]
