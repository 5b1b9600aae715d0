"""The part of the cache that survives the end of an epoch.

``reset``: nothing but the pages that live requests hold; those are *orphaned*: out of use, in no
tree, given back when their request ends. ``detach``: what every rank has on the device stays, in a
tree that is built anew; the other tiers are off from then on.
Copies of the old epoch may still run; the pages they touch stay in limbo until they have ended.

Ranks that differed may differ in anything. So an epoch begins with what all ranks computed from
the seal, and agreed on when they met: what is kept, the lost requests, usable pages, the wanted
headroom, whether storage is attached. All else begins as in a new cache. The first decision of the
epoch is a digest of it, so that its first ballot proves it equal.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import xxhash

from kvpact.cache.core import CacheCore
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.status import pools_of
from kvpact.cache.tree.node import Node, Residency, Tier, Tokens
from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.epoch.report import Seal

__all__ = ["Carryover"]

#: Agreed when an epoch opens, beside the usable pages of each pool; the MIN over the ranks counts.
_HEADROOM = "headroom wanted"
_ATTACHED = "storage attached"
#: A digest and its negative: equal on all ranks iff the one MIN is the negative of the other.
_DROPPED, _DROPPED_NEGATIVE = "namespaces dropped", "namespaces dropped, negative"


class _Page:
    """One device page, and the side pages at its position by pool."""

    __slots__ = ("page", "side")

    def __init__(self, page: int, side: dict[str, int]) -> None:
        self.page = page
        self.side = side


class Carryover:
    """The cache's :class:`kvpact.consensus.step.step.Carrier`."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self.lost: tuple[str, ...] = ()

    # -- what the others must know ---------------------------------------------------------------

    def live(self) -> dict[str, int]:
        """Pages of each live request."""
        return {
            request.name: request.held_pages + len(request.private)
            for request in self._core.requests
        }

    def kept(self) -> list[int]:
        """Hashes of the pages that have arrived on DEVICE with all before them, sorted."""
        return sorted(self._arrived())

    def _arrived(self) -> dict[int, _Page]:
        """By chained hash, the pages of nodes whose whole path has arrived on DEVICE."""
        found: dict[int, _Page] = {}
        last: dict[int, int] = {}  # node id -> hash of its last page
        size = self._core.config.page_size
        for node in self._core.tree.nodes():
            above = node.parent
            if above is None:
                continue
            is_first = above.is_root
            reached = 0 if is_first else last.get(above.node_id, -1)
            if reached < 0 or node.device.state is not Residency.RESIDENT:
                continue
            hashes = page_hashes(node.tokens, size, reached, node.namespace if is_first else "")
            last[node.node_id] = hashes[-1]
            for position, (key, page) in enumerate(zip(hashes, node.device.pages, strict=True)):
                side = {
                    name: one
                    for name, pages in node.device.side.items()
                    for at, one in pages
                    if at == position
                }
                found[key] = _Page(page, side)
        return found

    def usable(self) -> dict[str, int]:
        """Pages per pool that this rank can use: capacity less limbo and orphans.

        And what else must be one value on all ranks when the next epoch begins.
        """
        core = self._core
        usable = {pool: core.usable(pool) for pool in core.manager.schema.pools}
        usable[_HEADROOM] = core.engine_pages.expected
        usable[_DROPPED] = core.namespaces.digest
        usable[_DROPPED_NEGATIVE] = -core.namespaces.digest
        if core.storage is not None:
            usable[_ATTACHED] = int(core.storage.is_attached)
        return usable

    def pools(self) -> dict[str, dict[str, int]]:
        """Count the pages of each tier, for the report of this rank."""
        pools = pools_of(self._core)
        told = ("pages", "free", "limbo", "pinned", "evictable", "charged")
        return {
            tier.value: {name: getattr(pools[tier.value], name) for name in told} for tier in Tier
        }

    # -- the end of an epoch ---------------------------------------------------------------------

    def drop(self, seal: Seal | None) -> None:
        """Drop what ``seal.then`` says (``None``: an ordered reset, which loses nobody)."""
        core = self._core
        self.lost = seal.lost if seal is not None else ()
        for name in self.lost:
            request = core.requests.get(name)
            if request is not None:
                core.orphans.take([request], among=core.requests)
                core.orphans.lose(request)
                core.requests.forget(request)
        if seal is not None:
            core.requests.start_anew()
            core.namespaces.start_anew()
        for path in core.paths:
            path.clear()
        for tier in Tier:
            core.event_log.cleared(tier.value)
            core.journal.fact("forget", tier.value)
        if seal is not None and seal.then == "detach":
            core.is_detached = True
            self._rebuild_device_tier(set(seal.kept))
        else:
            core.orphans.take(core.requests, among=core.requests)
            core.tree.clear()
            self._reset_pools([], [])

    def _reset_pools(self, kept: list[int], side_kept: list[tuple[str, int]]) -> None:
        """All pages come back but those that are kept, orphaned, or still being copied."""
        core = self._core
        core.tiers.pools[Tier.DEVICE].reset(keep=[*kept, *core.orphans.pages])
        core.tiers.pools[Tier.HOST].reset()
        self._reset_side_pools([*side_kept, *core.orphans.side_pages])

    def _reset_side_pools(self, kept: list[tuple[str, int]]) -> None:
        for side in self._core.tiers.side:
            pages = [page for name, page in kept if name == side.spec.name]
            side.pools[Tier.DEVICE].reset(keep=pages)
            side.pools[Tier.HOST].reset()

    def _rebuild_device_tier(self, kept: set[int]) -> None:
        """A new tree of the pages that every rank has, the same on all ranks whatever parted them.

        ``kept`` are hashes, for membership only. Recency begins anew, in the order of the tokens.
        A request whose whole path is kept goes on with it. Another must recompute; it holds what
        is kept of its path, so that nobody else gets what it may still read, and the rest of its
        pages are orphaned.
        """
        core = self._core
        arrived = self._arrived()
        prefixes = self._prefixes(kept)
        held = {
            request.name: request.held.path()
            for request in core.requests
            if request.held is not None
        }
        paths = {name: np.concatenate([n.tokens for n in path]) for name, path in held.items()}
        spaces = {name: path[-1].namespace for name, path in held.items()}
        going_on = [
            request
            for request in core.requests
            if request.held is None or self._is_kept(request.held, kept)
        ]
        cut = [request for request in core.requests if request not in going_on]
        stays = [page for key, page in arrived.items() if key in kept]
        core.orphans.take(
            cut,
            among=core.requests,
            but={page.page for page in stays},
            but_side={pair for page in stays for pair in page.side.items()},
        )
        for request in going_on:
            request.held = None
        core.tree.clear()
        pages: list[int] = []
        side: list[tuple[str, int]] = []
        for namespace, tokens in prefixes:
            for node in core.tree.insert(tokens, namespace):
                if node.device.state is Residency.ABSENT:
                    own = [arrived[key] for key in self._hashes_of(node)]
                    self._place(node, own)
                    pages += node.device.pages
                    side += [(name, one) for entry in own for name, one in entry.side.items()]
        for request in sorted(going_on, key=lambda one: one.name):
            pages += request.private
            if request.name in paths:
                path = core.tree.match(paths[request.name], spaces[request.name])
                core.requests.hold(request, path[-1])
        for request in sorted(cut, key=lambda one: one.name):
            request.must_recompute = True
            tokens, space = paths[request.name], spaces[request.name]
            path = core.tree.match(tokens[: self._num_kept(tokens, space, kept)], space)
            core.requests.hold(request, path[-1] if path else None)
        self._reset_pools(pages, side)

    def _num_kept(self, tokens: Tokens, namespace: str, kept: set[int]) -> int:
        """How many leading tokens are kept."""
        size = self._core.config.page_size
        hashes = page_hashes(tokens, size, 0, namespace)
        return size * sum(1 for _ in takewhile(kept.__contains__, hashes))

    def _place(self, node: Node, pages: list[_Page]) -> None:
        names = {name for page in pages for name in page.side}
        node.device.side = {
            name: [(at, page.side[name]) for at, page in enumerate(pages) if name in page.side]
            for name in sorted(names)
        }
        self._core.tree.place(node, Tier.DEVICE, Residency.RESIDENT, [one.page for one in pages])

    def _hashes_of(self, node: Node) -> list[int]:
        size = self._core.config.page_size
        path = node.path()
        tokens = np.concatenate([one.tokens for one in path])
        return page_hashes(tokens, size, 0, node.namespace)[-node.num_pages :]

    def _is_kept(self, node: Node, kept: set[int]) -> bool:
        return self._hashes_of(node)[-1] in kept

    def _prefixes(self, kept: set[int]) -> list[tuple[str, Tokens]]:
        """The longest kept prefixes, in an order that follows from the tokens alone."""
        found: list[tuple[str, Tokens]] = []
        for node in self._core.tree.nodes():
            tokens = np.concatenate([one.tokens for one in node.path()])
            if num_tokens := self._num_kept(tokens, node.namespace, kept):
                found.append((node.namespace, tokens[:num_tokens]))
        found.sort(key=lambda one: (one[0], one[1].tobytes()))
        # What another one begins with comes just before it. Ranks have it cut into other nodes, and
        # each insert counts as a use: so each page is inserted once.
        longest: list[tuple[str, Tokens]] = []
        for namespace, tokens in reversed(found):
            is_start = bool(longest) and longest[-1][0] == namespace
            if not is_start or not _begins(longest[-1][1], tokens):
                longest.append((namespace, tokens))
        return longest[::-1]

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """Begin ``epoch`` with ``usable`` pages; what was kept is charged again.

        An ordered reset agrees on nothing: ranks that are equal stay so.
        """
        core = self._core
        agreed = dict(usable)
        core.engine_pages.expect(agreed.pop(_HEADROOM, core.engine_pages.expected))
        lowest, negative = agreed.pop(_DROPPED, 0), agreed.pop(_DROPPED_NEGATIVE, 0)
        if lowest != -negative:
            core.namespaces.drop_all(epoch)
        if core.storage is not None:
            core.storage.resume(attached=bool(agreed.pop(_ATTACHED, core.storage.is_attached)))
        core.manager.begin_epoch(epoch, agreed)
        pages = sum(len(node.device.pages) for node in core.tree.nodes())
        pages += sum(len(request.private) for request in core.requests)
        core.manager.ledger.charge(Tier.DEVICE.value, pages)
        for name, owned in core.tiers.side.owned(list(core.tree.nodes()), []).items():
            core.manager.ledger.charge(name, len(owned))
        core.manager.note("start", self._start_digest())

    def _start_digest(self) -> int:
        """A number that is equal on two ranks that begin this epoch with the same state."""
        core, digest = self._core, xxhash.xxh3_64()
        for node in core.tree.nodes():
            if node.parent is not None:
                at = (node.node_id, node.parent.node_id, node.namespace, node.num_pages)
                digest.update(repr(at).encode())
                digest.update(node.tokens.tobytes())
        for request in sorted(core.requests, key=lambda one: one.name):
            held = -1 if request.held is None else request.held.node_id
            found = (request.prompt_pages, request.device_hit_pages, request.host_hit_pages)
            owned = (request.name, held, len(request.private), request.must_recompute, found)
            digest.update(repr(owned).encode("utf-8", "backslashreplace"))
        ledger, attached = (
            core.manager.ledger,
            core.storage is not None and core.storage.is_attached,
        )
        pools = [
            (name, ledger.usable(name), ledger.charged(name)) for name in core.manager.schema.pools
        ]
        names = core.namespaces.digest
        state = (pools, core.engine_pages.expected, attached, core.is_detached, core.weights, names)
        digest.update(repr(state).encode("utf-8", "backslashreplace"))
        return digest.intdigest() & MASK62


def _begins(tokens: Tokens, start: Tokens) -> bool:
    return tokens[: len(start)].tobytes() == start.tobytes()
