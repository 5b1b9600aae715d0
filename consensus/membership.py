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

from kvpact.consensus.core.errors import StoreSilent
from kvpact.consensus.epoch.closing import Introduction, LastSeen, Locator, Opener, agree
from kvpact.consensus.step.sentinel import Sentinel
from kvpact.consensus.step.step import Stepper
from kvpact.consensus.step.wait import PAUSED, StepLimits
from kvpact.consensus.transport.gloo import GlooGroup, Group
from kvpact.consensus.transport.store import NamedStore, Store, TcpStore
from kvpact.consensus.transport.watch import Life, Position, Watch

__all__ = ["Membership", "WatchLocator", "introduce", "versions"]

_POLL_S = 0.02
#: A heartbeat that stood still for so long will not come back in time for a report.
_BEATS_TO_GIVE_UP = 20


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("kvpact", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def introduce(
    store: Store, name: str, mine: Introduction, ranks: Sequence[int], timeout_s: float
) -> dict[str, int]:
    """Exchange introductions of all ``ranks`` through the store; returns what :func:`agree` says.

    Raises :class:`RankStalled` naming who has not come within ``timeout_s``.
    """
    opener = Opener(store, name, mine, ranks, now_s=time.monotonic(), timeout_s=timeout_s)
    while (found := opener.poll(time.monotonic())) is None:
        time.sleep(_POLL_S)
    return agree([found[rank] for rank in sorted(found)])


class WatchLocator:
    """A :class:`~kvpact.consensus.epoch.closing.Locator` that reads the ranks' heartbeats."""

    def __init__(self, watch: Watch, *, stack_timeout_s: float = 0.6) -> None:
        self._watch = watch
        self._stack_timeout_s = stack_timeout_s

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended, or nothing was heard of it for long (another machine)."""
        try:
            sighting = self._watch.judge([rank], within_s=0.0)[rank]
        except StoreSilent:
            return False
        unheard_s = _BEATS_TO_GIVE_UP * self._watch.interval_s
        is_silent = sighting.life is Life.SILENT and sighting.unseen_s >= unheard_s
        return is_silent or sighting.life is Life.GONE

    def is_paused(self, rank: int) -> bool:
        """Whether it said that it pauses. Raises :class:`StoreSilent`."""
        at = self._watch.positions([rank])[rank]
        return at is not None and at.phase.startswith(PAUSED)

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        """Their last positions, and the stacks of those that can still answer."""
        try:
            if not asks:
                found = self._watch.positions(ranks)
                return {rank: _seen(at, at.since_s) if at else None for rank, at in found.items()}
            sightings = self._watch.judge(ranks)
            beating = [rank for rank in ranks if sightings[rank].life is Life.BEATING]
            stacks = self._watch.stacks(beating, self._stack_timeout_s) if beating else {}
        except StoreSilent:
            return dict.fromkeys(ranks)
        seen: dict[int, LastSeen | None] = dict.fromkeys(ranks)
        for rank, sighting in sightings.items():
            at = sighting.position
            if at is not None:
                stack = stacks.get(rank, "")
                seen[rank] = _seen(at, at.since_s + sighting.unseen_s, sighting.life, stack)
        return seen


def _seen(at: Position, since_s: float, life: Life = Life.BEATING, stack: str = "") -> LastSeen:
    return LastSeen(
        at.step, at.phase, since_s, dead=life is Life.GONE, life=life.value, stack=stack
    )


class Membership:
    """What a rank shares with the others: group, store, watch, and the agreed usable pages."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        group: Group,
        store: TcpStore,
        watch: Watch,
        usable: Mapping[str, int],
        deadline_s: float,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.group = group
        self.connection = store
        self.store: Store = NamedStore(store, name)
        self.watch = watch
        self.usable = dict(usable)
        self._deadline_s = deadline_s
        self.locator: Locator = WatchLocator(watch)
        self._sentinel: Sentinel | None = None

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
        try:
            agreed = introduce(store, name, mine, ranks, start_timeout_s)
            group = _form(store, name, 0, ranks, rank, width, deadline_s, start_timeout_s)
        except BaseException:
            store.close()
            raise
        watch = Watch(TcpStore(host, port), rank, name=f"{name}/watch", interval_s=beat_s)
        watch.beat()  # so that a rank that dies at once was seen
        watch.start()
        return cls(
            name,
            ranks,
            group=group,
            store=store,
            watch=watch,
            usable=agreed,
            deadline_s=deadline_s,
        )

    def regroup(self, epoch: int) -> Group:
        """The group of a new epoch, once all ranks have come; the old one is closed by its user.

        Raises :class:`PeerLost` naming who does not come within the deadline of a step.
        """
        old = self.group
        self.group = _form(
            self.connection,
            self.name,
            epoch,
            self.ranks,
            old.rank,
            old.width,
            self._deadline_s,
            self._deadline_s,
        )
        return self.group

    def watch_over(self, stepper: Stepper) -> None:
        """Have a thread report differences between ranks while the scheduler's thread hangs."""
        self._sentinel = Sentinel(stepper, self.store)
        self._sentinel.start()

    def leave(self, wait_s: float) -> None:
        """Close once all ranks want to leave, or are gone, or ``wait_s`` have passed.

        A rank that breaks its connections while another still waits for the last verdict makes
        that step an error there.
        """
        try:
            self.store.set(self._left(self.group.rank), b"1")
            end_s = time.monotonic() + wait_s
            waiting = [rank for rank in self.ranks if rank != self.group.rank]
            while waiting and time.monotonic() < end_s:
                waiting = [rank for rank in waiting if not self._has_left(rank)]
                if waiting:
                    time.sleep(_POLL_S)
        except StoreSilent:
            pass  # nobody can be asked
        finally:
            self.close()

    def _has_left(self, rank: int) -> bool:
        return self.store.get(self._left(rank)) is not None or self.locator.is_gone(rank)

    def _left(self, rank: int) -> str:
        return f"left/{rank}"

    def close(self) -> None:
        """Break all connections at once; bounded."""
        if self._sentinel is not None:
            self._sentinel.stop()
        self.watch.stop()
        self.group.close()
        self.connection.close()


def _form(
    store: TcpStore,
    name: str,
    epoch: int,
    ranks: Sequence[int],
    rank: int,
    width: int,
    deadline_s: float,
    form_timeout_s: float,
) -> GlooGroup:
    # The group must outlive deadlines and pauses: closing an epoch is our business, not gloo's.
    return GlooGroup.form(
        store.raw(),
        f"{name}/group/{epoch}",
        ranks,
        rank,
        width,
        group_timeout_s=StepLimits().pause_s + 4 * deadline_s + 10.0,
        form_timeout_s=form_timeout_s,
    )
