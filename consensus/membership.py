"""How a rank joins its replica: introduced, compared, connected.

Before any group is formed the ranks tell one another through the store what they are configured
for. A difference is an error on every rank that names the rank and the field, because a group of
ranks that differ could only hang or decide garbage.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Self

import msgspec

from consensus.epoch import LastSeen, Locator
from consensus.errors import Misuse, RankStalled, StoreSilent
from consensus.group import GlooGroup, Group
from consensus.store import Store, TcpStore
from consensus.watch import Life, Watch

__all__ = ["Introduction", "Membership", "WatchLocator", "agree", "introduce", "versions"]

_POLL_S = 0.02


class Introduction(msgspec.Struct, frozen=True):
    """What one rank says of itself: ``facts`` must be equal everywhere, ``usable`` need not be."""

    rank: int
    facts: dict[str, str]
    usable: dict[str, int]


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("kvpact", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def agree(introductions: Sequence[Introduction]) -> dict[str, int]:
    """The usable pages of each pool that every rank has.

    Raises :class:`Misuse` naming the first rank and field that differ from the lowest rank's.
    """
    first = introductions[0]
    for other in introductions[1:]:
        for name in sorted(first.facts.keys() | other.facts.keys()):
            ours, theirs = first.facts.get(name, "nothing"), other.facts.get(name, "nothing")
            if ours != theirs:
                raise Misuse(
                    f"rank {other.rank} has {name} = {theirs}, rank {first.rank} has {ours}:"
                    " start all ranks with the same",
                    rank=other.rank,
                )
    return {pool: min(one.usable[pool] for one in introductions) for pool in first.usable}


def introduce(
    store: Store, name: str, mine: Introduction, ranks: Sequence[int], timeout_s: float
) -> dict[str, int]:
    """Exchange introductions of all ``ranks`` through the store; returns what :func:`agree` says.

    Raises :class:`RankStalled` naming who has not come within ``timeout_s``.
    """
    store.set(f"{name}/introduction/{mine.rank}", msgspec.msgpack.encode(mine))
    found: dict[int, Introduction] = {}
    end_s = time.monotonic() + timeout_s
    while True:
        for rank in ranks:
            data = None if rank in found else store.get(f"{name}/introduction/{rank}")
            if data is not None:
                found[rank] = msgspec.msgpack.decode(data, type=Introduction)
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return agree([found[rank] for rank in sorted(found)])
        if time.monotonic() >= end_s:
            raise RankStalled(
                f"ranks {missing} have not introduced themselves within {timeout_s:g} s",
                ranks=missing,
                phase="start",
            )
        time.sleep(_POLL_S)


class WatchLocator:
    """Tells where other ranks are by their heartbeats (:class:`consensus.epoch.Locator`)."""

    def __init__(self, watch: Watch, *, stack_timeout_s: float = 0.6) -> None:
        self._watch = watch
        self._stack_timeout_s = stack_timeout_s

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended, as far as this machine can see."""
        try:
            return self._watch.judge([rank], within_s=0.0)[rank].life is Life.GONE
        except StoreSilent:
            return False

    def last_seen(self, rank: int) -> LastSeen | None:
        """Its last position, and its stack if it can still answer."""
        try:
            sighting = self._watch.judge([rank])[rank]
            at = sighting.position
            if at is None:
                return None
            dead = sighting.life is Life.GONE
            stacks = {} if dead else self._watch.stacks([rank], self._stack_timeout_s)
            since_s = at.since_s + sighting.unseen_s
            return LastSeen(at.step, at.phase, since_s, dead=dead, stack=stacks.get(rank, ""))
        except StoreSilent:
            return None


class Membership:
    """What a rank shares with the others: group, store, watch, and the agreed usable pages."""

    def __init__(
        self, group: Group, store: TcpStore, watch: Watch, usable: Mapping[str, int]
    ) -> None:
        self.group = group
        self.store = store
        self.watch = watch
        self.usable = dict(usable)
        self.locator: Locator = WatchLocator(watch)

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        name: str,
        rank: int,
        ranks: Sequence[int],
        width: int,
        facts: Mapping[str, str],
        usable: Mapping[str, int],
        deadline_s: float,
        start_timeout_s: float = 60.0,
        beat_s: float = 0.25,
    ) -> Self:
        """Join replica ``name`` through the store at ``host:port``; ends within its bounds.

        ``ranks`` may be any subset: a data-parallel replica or an attention group is a replica of
        its own, under its own name. Raises :class:`Misuse` where configurations differ,
        :class:`RankStalled` or :class:`PeerLost` where a rank does not come,
        :class:`StoreSilent` without a store.
        """
        store = TcpStore(host, port)
        mine = Introduction(rank, {**versions(), **facts}, dict(usable))
        agreed = introduce(store, name, mine, ranks, start_timeout_s)
        # The group must outlive a step's deadline: closing an epoch is our business, not gloo's.
        group = GlooGroup.form(
            store.raw(),
            f"{name}/group/0",
            ranks,
            rank,
            width,
            group_timeout_s=4 * deadline_s + 10.0,
            form_timeout_s=start_timeout_s,
        )
        watch = Watch(TcpStore(host, port), rank, name=f"{name}/watch", interval_s=beat_s)
        watch.start()
        return cls(group, store, watch, agreed)

    def close(self) -> None:
        """Leave; bounded."""
        self.watch.stop()
        self.group.close()
        self.store.close()
