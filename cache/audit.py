"""Conservation, checked from outside the code that keeps it: every page has exactly one owner."""

from __future__ import annotations

from collections import Counter

from kvpact.cache.core import CacheCore
from kvpact.cache.tree.node import STORAGE, Node, Tier
from kvpact.consensus.core.errors import ConservationBroken

__all__ = ["audit"]


def audit(core: CacheCore) -> None:
    """Raise :class:`ConservationBroken` unless pages and ledger add up.

    And :class:`InternalError` unless pins, slots and the tree do.
    """
    core.tree.check_integrity()
    core.manager.check_integrity()
    nodes = list(core.tree.nodes())
    for tier in Tier:
        in_tree = _in_tree(nodes, tier)
        _check_pages(core, tier, in_tree)
        _check_ledger(core, tier, len(in_tree))
    _require_charged(core, STORAGE, 0)
    if core.tiers.side:
        _check_side_pools(core, nodes)


def _check_pages(core: CacheCore, tier: Tier, in_tree: list[int]) -> None:
    pool = core.tiers.pools[tier]
    pool.check_integrity()
    owned = in_tree + [page for path in core.paths for page in path.held_pages(tier)]
    if tier is Tier.DEVICE:
        owned += core.orphans.pages
        owned += [page for request in core.requests for page in request.private]
    twice = [page for page, count in Counter(owned).items() if count > 1]
    if twice:
        raise ConservationBroken(f"{tier.value} pages {twice} have two owners", rank=core.rank)
    total = len(owned) + pool.num_free + pool.num_limbo
    if total != pool.num_pages:
        raise ConservationBroken(
            f"{tier.value}: {len(owned)} owned + {pool.num_free} free + {pool.num_limbo} in limbo"
            f" are not {pool.num_pages} pages",
            rank=core.rank,
        )


def _check_ledger(core: CacheCore, tier: Tier, num_pages: int) -> None:
    num_pages += sum(path.charged_pages(tier) for path in core.paths)
    if tier is Tier.DEVICE:
        num_pages += sum(len(request.private) for request in core.requests)
    _require_charged(core, tier.value, num_pages)


def _require_charged(core: CacheCore, name: str, num_pages: int) -> None:
    """Of pool ``name`` is charged what has ``num_pages``, open intents, and what is cooling."""
    ledger = core.manager.ledger
    expected = num_pages + ledger.cooling(name)
    expected += sum(intent.need.get(name, 0) for intent in core.manager.open_intents)
    if ledger.charged(name) != expected:
        raise ConservationBroken(
            f"{name}: the ledger has {ledger.charged(name)} pages charged, {expected} are used",
            rank=core.rank,
        )


def _check_side_pools(core: CacheCore, nodes: list[Node]) -> None:
    side = core.tiers.side
    carriages = [carriage for path in core.paths for carriage in path.held()]
    owned, kept = side.owned(nodes, carriages), side.owned(nodes, [])
    for one in side:
        for tier, pool in one.pools.items():
            name = one.spec.pool(tier)
            pool.check_integrity()
            pages = list(owned[name])
            if tier is Tier.DEVICE:
                pages += core.orphans.side_pages_of(one.spec.name)
            total = len(pages) + pool.num_free + pool.num_limbo
            if len(set(pages)) != len(pages) or total != pool.num_pages:
                raise ConservationBroken(
                    f"{name}: {pages} owned + {pool.num_free} free + {pool.num_limbo} in limbo are"
                    f" not {pool.num_pages} pages with one owner each",
                    rank=core.rank,
                )
            _require_charged(core, name, len(kept[name]))


def _in_tree(nodes: list[Node], tier: Tier) -> list[int]:
    """Pages that nodes own themselves; those of an open intent are counted with it."""
    there = (node.at(tier) for node in nodes)
    return [page for presence in there if presence.carriage is None for page in presence.pages]
