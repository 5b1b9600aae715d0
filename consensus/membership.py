"""How a rank joins its replica: introduced, compared, connected.

Before any group is formed the ranks tell one another through the store what they are configured
for. A difference is an error on every rank that names the rank and the field, because a group of
ranks that differ could only hang or decide garbage.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from typing import Self

import msgspec

from kvpact.consensus.core.errors import KvpactError, Misuse, PeerLost, StoreSilent
from kvpact.consensus.epoch.closing import Introduction, LastSeen, Locator, agree
from kvpact.consensus.step.sentinel import Sentinel
from kvpact.consensus.step.step import Stepper
from kvpact.consensus.step.wait import PAUSED, StepLimits
from kvpact.consensus.transport.calls import Calls
from kvpact.consensus.transport.door import Doorway
from kvpact.consensus.transport.envelope import SignedStore, decode, scope_of, secret_of_run
from kvpact.consensus.transport.gloo import GlooGroup, Group
from kvpact.consensus.transport.reach import Reach, Where, apart
from kvpact.consensus.transport.store import NamedStore, Store, TcpStore
from kvpact.consensus.transport.watch import Life, Position, Watch

__all__ = ["DEFAULT_NAME", "Membership", "WatchLocator", "check_ranks", "versions"]

#: The name of a replica that is alone in its store.
DEFAULT_NAME = "replica"

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


def check_ranks(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a replica, sorted; :class:`Misuse` where they cannot be, or lack ``rank``."""
    if any(type(one) is not int or one < 0 for one in (rank, *ranks)):
        raise Misuse(f"rank and ranks are numbers from 0 on, got {rank!r} and {list(ranks)!r}")
    members = tuple(sorted(ranks))
    if len(set(members)) < len(members):
        raise Misuse(f"each rank is there once, got ranks {list(ranks)}", rank=rank)
    if rank not in members:
        raise Misuse(f"rank {rank} is not one of the ranks {list(ranks)}", rank=rank)
    return members


class _Hello(msgspec.Struct, frozen=True):
    """One rank's message to all others at the door."""

    introduction: Introduction
    where: Where


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
    """A rank's share in its replica: group, store, watch, and the agreed usable pages."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        group: Group,
        connection: TcpStore,
        store: Store,
        prefix: str,
        watch: Watch,
        watch_store: TcpStore,
        usable: Mapping[str, int],
        deadline_s: float,
        doorway: Doorway,
        address: str,
    ) -> None:
        self.name = name
        self.run = doorway.run
        self.ranks = tuple(ranks)
        self.group = group
        self.connection = connection
        self.prefix = prefix
        self.store = store
        self.watch = watch
        self.usable = dict(usable)
        self._watch_store = watch_store
        self._deadline_s = deadline_s
        self._doorway = doorway
        self._address = address
        self.locator: Locator = WatchLocator(watch)
        self._sentinel: Sentinel | None = None

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        name: str = DEFAULT_NAME,
        rank: int,
        ranks: Sequence[int],
        width: int,
        facts: Mapping[str, str],
        usable: Mapping[str, int],
        deadline_s: float,
        start_timeout_s: float = 60.0,
        beat_s: float = 0.25,
    ) -> Self:
        """Join replica ``name`` through the store at ``host:port``, within ``start_timeout_s``.

        ``ranks`` may be any subset: a data-parallel replica or an attention group is a replica of
        its own, under its own name. The store may have served earlier runs of this name: nothing of
        theirs is read. All ranks are in when this returns, or it raises the same on all of them:
        :class:`Misuse` where configurations differ, two processes have one number, or such a
        replica runs already; :class:`RankStalled` or :class:`PeerLost` where a rank does not come
        or cannot be reached; :class:`StoreSilent` without a store. Nothing is left open then.
        """
        members = check_ranks(rank, ranks)
        introduction = Introduction(
            rank, {**versions(), "ballot_width": str(width), **facts}, dict(usable)
        )
        with ExitStack() as undo:
            secret = secret_of_run()
            scope = scope_of(name, secret)
            store = TcpStore(host, port)
            undo.callback(store.close)
            signed = SignedStore(store, secret)
            key = secrets.token_hex(8)
            reach = undo.enter_context(Reach(rank, key, host, port))
            hello = msgspec.msgpack.encode(_Hello(introduction, reach.where))
            calls = Calls(store, name, rank, scope)
            undo.callback(calls.hide)
            doorway = Doorway(
                signed, name, rank, members, hello,
                timeout_s=start_timeout_s, scope=scope, calls=calls,
            )  # fmt: skip
            try:
                agreed = _meet(doorway, reach)
                prefix = f"{scope}/{doorway.run}"
                group = _form(
                    store, f"{prefix}/group/0", members, rank, width, deadline_s,
                    doorway.left_s(), reach.where.address, doorway.look_out,
                )  # fmt: skip
                undo.callback(group.close)
                watch_store = TcpStore(host, port)
                undo.callback(watch_store.close)
                signed_watch = SignedStore(watch_store, secret)
                watch = Watch(signed_watch, rank, name=f"{prefix}/watch", interval_s=beat_s)
                undo.callback(watch.stop)
                # What the end of an epoch needs is opened now: a new connection may take seconds.
                doorway.patiently(lambda: store.open_lines(2))
                doorway.patiently(watch.beat)  # so that a rank that dies at once was seen
                watch.start()
                doorway.come_in()
            except BaseException as error:
                told = doorway.fail(error)
                if isinstance(error, KvpactError) and str(told) != str(error):
                    raise told from error
                raise
            doorway.outlive_start(signed)
            undo.pop_all()
            reach.close()
        return cls(
            name,
            members,
            group=group,
            connection=store,
            store=NamedStore(signed, prefix),
            prefix=prefix,
            watch=watch,
            usable=agreed,
            deadline_s=deadline_s,
            doorway=doorway,
            address=reach.where.address,
            watch_store=watch_store,
        )

    def regroup(self, epoch: int) -> Group:
        """The group of a new epoch, once all ranks have come; the old one is closed by its user.

        Raises :class:`PeerLost` naming who does not come within the deadline of a step.
        """
        old = self.group
        self.group = _form(
            self.connection,
            f"{self.prefix}/group/{epoch}",
            self.ranks,
            old.rank,
            old.width,
            self._deadline_s,
            self._deadline_s,
            self._address,
        )
        return self.group

    def watch_over(
        self, stepper: Stepper, on_alarm: Callable[[KvpactError], None] | None = None
    ) -> None:
        """Have a thread tell what ends the epoch while the scheduler's thread hangs."""
        self._sentinel = Sentinel(stepper, self.store, on_alarm=on_alarm)
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
        """Break all connections at once, and say that this run is over; bounded."""
        if self._sentinel is not None:
            self._sentinel.stop()
        self.watch.stop()
        self.group.close()
        if self.watch.silent_since_s is None:
            with contextlib.suppress(KvpactError):  # silent, or closed before
                self._doorway.leave()
        self.connection.close()
        self._watch_store.close()


def _meet(doorway: Doorway, reach: Reach) -> dict[str, int]:
    """Hear all ranks at the door and try to reach them; returns the agreed usable pages."""
    heard = doorway.enter()
    hellos = [decode(f"hello/{rank}", data, _Hello) for rank, data in sorted(heard.items())]
    agreed = agree([hello.introduction for hello in hellos])
    places = [hello.where for hello in hellos]
    if trouble := apart(places):
        raise Misuse(trouble)
    if trouble := reach.try_all(places, doorway.left_s):
        raise PeerLost(f"the ranks cannot be connected: {trouble}", rank=reach.where.rank)
    doorway.meet("reached")  # nobody closes its listener before
    return agreed


def _form(
    store: TcpStore,
    name: str,
    ranks: Sequence[int],
    rank: int,
    width: int,
    deadline_s: float,
    form_timeout_s: float,
    address: str,
    look_out: Callable[[], None] | None = None,
) -> GlooGroup:
    limit_s = max(1.0, form_timeout_s)
    # The group must outlive deadlines and pauses: closing an epoch is our business, not gloo's.
    return GlooGroup.form(
        store.raw(limit_s),
        name,
        ranks,
        rank,
        width,
        group_timeout_s=StepLimits().pause_s + 4 * deadline_s + 10.0,
        form_timeout_s=limit_s,
        bound_to=address,
        look_out=look_out,
    )
