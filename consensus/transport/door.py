"""The door of a replica: its ranks come in together, as one run, or not at all.

A store may outlive many runs of one name (torchrun's agent restarts the workers, not the store).
So everything that a run writes stands under a number of its own, which its ranks agree on here. One
key per name holds the *door*: which run comes in, who has come, which rounds all have passed, and
how it ended. It changes by compare-and-set only, so that "all are in" and "it failed, because of
this" are one decision, the same for every rank.

Who finds the door of a run that is over opens that of the next one. A run is over when one of its
ranks has left or is gone: without it nobody steps on. While all of them live, a second run of the
name is refused, and so is a second process with a number that is taken.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from kvpact.consensus.core.errors import (
    KvpactError,
    Misuse,
    PeerError,
    PeerLost,
    RankStalled,
    ResourceError,
    StoreForged,
    StoreSilent,
)
from kvpact.consensus.transport.calls import Calls
from kvpact.consensus.transport.envelope import SECRET_VARIABLE, decode
from kvpact.consensus.transport.store import Store
from kvpact.consensus.transport.watch import Life, machine, process_life, process_start

__all__ = ["Caller", "Door", "Doorway", "PatientStore"]

T = TypeVar("T")

POLL_S = 0.02
#: How often who waits at the door shows that it lives, and how long others look for that.
BEAT_S = 0.25
LOOK_S = 8 * BEAT_S

_BEFORE_CHARS = 300
#: Of so many ranks it is seen whether they call with another secret: of more it is told by these.
_LOOKED_AT = 16
_READY = "ready"
_OPEN, _IN, _OVER, _FAILED = "open", "in", "over", "failed"
_KINDS = {
    kind.__name__: kind
    for kind in (Misuse, PeerError, PeerLost, RankStalled, ResourceError, StoreSilent)
}


class Caller(msgspec.Struct, frozen=True):
    """One process that comes to the door. ``key`` is its own; no two processes have the same."""

    rank: int
    key: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def here(cls, rank: int) -> Caller:
        """This process."""
        pid = os.getpid()
        return cls(
            rank, secrets.token_hex(8), socket.gethostname(), machine(), pid,
            process_start(pid),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Door(msgspec.Struct, frozen=True):
    """The door of a replica. ``passed`` gives the ranks that have come through each round."""

    run: int
    ranks: tuple[int, ...]
    callers: dict[int, Caller]
    passed: dict[str, tuple[int, ...]] = {}
    state: str = _OPEN
    kind: str = ""
    message: str = ""
    blamed: tuple[int, ...] = ()
    before: str = ""  # why the run before did not come in: a hint for who waits in vain

    def error(self) -> KvpactError:
        """The error that everybody raises."""
        more: dict[str, Any] = {"phase": "start"} if self.kind == "RankStalled" else {}
        return _KINDS.get(self.kind, PeerError)(self.message, ranks=self.blamed, **more)


class PatientStore:
    """A store whose silence is borne until ``end_s`` (monotonic): each call is tried again.

    Only for calls that may be made twice.
    """

    def __init__(self, store: Store, end_s: float) -> None:
        self._store = store
        self._end_s = end_s

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        return self._patiently(lambda: self._store.get(key))

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        self._patiently(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :meth:`Store.compare_set`."""
        return self._patiently(lambda: self._store.compare_set(key, expected, value))

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._patiently(lambda: self._store.delete(key))

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, self._end_s)


def patiently(call: Callable[[], T], end_s: float) -> T:
    """Make a call again while the store is silent, until ``end_s``: then raise StoreSilent."""
    while True:
        try:
            return call()
        except StoreSilent as error:
            if isinstance(error, StoreForged) or time.monotonic() >= end_s:
                raise
            time.sleep(POLL_S)


class Doorway:
    """One process at the door of replica ``name``: it comes in with the others by ``end_s``.

    ``hello`` is what it has to say to the others. ``scope`` is where its keys stand, and ``calls``
    tells who stands before the door of another secret.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hello: bytes,
        *,
        timeout_s: float,
        scope: str = "",
        calls: Calls | None = None,
    ) -> None:
        self.me = Caller.here(rank)
        self.run = 0
        self._name = name
        self._scope = scope or name
        self._calls = calls
        self._ranks = tuple(ranks)
        self._hello = hello
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._store: Store = PatientStore(store, self._end_s)
        self._num_tries = 4 * len(self._ranks) + 8  # each lost to another rank's change
        self._num_beats = 0
        self._beat_at = 0.0

    # -- coming in -----------------------------------------------------------------------------

    def enter(self) -> dict[int, bytes]:
        """Wait until all ranks are here at the same time; returns what each has to say.

        Raises :class:`Misuse` where this is a second process with its number, or a second run while
        the first one lives; :class:`RankStalled` naming who did not come.
        """
        self._beat()  # first: who finds us looks whether we live
        self._store.set(self._key("hello", self.me.key), self._hello)
        while not self._pass(_READY):
            self._wait()
        door = self._look()
        found: dict[int, bytes] = {}
        for rank in self._ranks:
            hello = self._store.get(self._key("hello", door.callers[rank].key))
            found[rank] = hello or b""
        return found

    def meet(self, round_name: str) -> None:
        """Wait until all ranks have come here too; raises what any of them failed with."""
        while not self._pass(round_name):
            self.look_out()
            self._wait()

    def come_in(self) -> None:
        """The last round: all are in, from now on, or none is."""
        self.meet(_IN)
        self._store.delete(self._key("hello", self.me.key))
        self._store.delete(self._key("beat", self.me.key))
        if self._calls is not None:
            self._calls.hide()

    def look_out(self) -> None:
        """Raise what another rank failed with meanwhile, and name one whose process has ended."""
        door = self._look()
        for rank in self._ranks:
            caller = door.callers.get(rank)
            if caller is not None and rank not in door.passed.get(_IN, ()) and _is_gone(caller):
                text = f"rank {rank} ({caller}) ended while replica '{self._name}' started"
                raise self.fail(PeerLost(text, ranks=[rank]))
        self._show()

    def fail(self, error: BaseException) -> KvpactError:
        """This start has failed, on all ranks: with ``error``, unless with another one before."""
        known = error if isinstance(error, KvpactError) else None
        kind = type(known).__name__ if type(known).__name__ in _KINDS else "PeerError"
        message = known.message if known else f"{type(error).__name__}: {error}"
        ranks = known.ranks if known else ()
        if not ranks:
            message, ranks = f"rank {self.me.rank} could not start: {message}", (self.me.rank,)
        own = known or PeerError(message, ranks=ranks)
        for _ in range(self._num_tries):
            try:
                raw, door = self._read()
                if door is None or not self._is_mine(door):
                    return own
                if door.state == _FAILED:
                    return door.error()
                failed = msgspec.structs.replace(
                    door, state=_FAILED, kind=kind, message=message, blamed=tuple(ranks)
                )
                if self._write(raw, failed):
                    return failed.error()
            except StoreSilent:
                return own  # nobody can be told
        return own

    def leave(self) -> None:
        """This run is over: it cannot step on without this rank. May raise StoreSilent."""
        for _ in range(self._num_tries):
            raw, door = self._read()
            if door is None or not self._is_mine(door) or door.state != _IN:
                return
            if self._write(raw, msgspec.structs.replace(door, state=_OVER)):
                return

    def left_s(self) -> float:
        """How much of the start's time is left."""
        return max(0.0, self._end_s - time.monotonic())

    def patiently(self, call: Callable[[], T]) -> T:
        """Make a call again while the store is silent, as long as the start may take."""
        return patiently(call, self._end_s)

    def outlive_start(self, store: Store) -> None:
        """From now on ``store`` is asked directly, each call once."""
        self._store = store

    # -- one round -----------------------------------------------------------------------------

    def _pass(self, round_name: str) -> bool:
        """Come to a round, and say whether all have; raises what the door failed with."""
        for _ in range(self._num_tries):
            raw, door = self._read()
            if door is None or not self._is_mine(door):
                if round_name != _READY:
                    raise self._displaced()
                self._sit(raw, door)
                continue
            if door.state == _FAILED:
                raise door.error()
            self.run = door.run
            came = door.passed.get(round_name, ())
            if self.me.rank in came or len(door.callers) < len(self._ranks):
                return len(came) == len(self._ranks)
            self._write(raw, _came(door, round_name, self.me.rank))
        return False

    def _sit(self, raw: bytes | None, door: Door | None) -> None:
        """Take this rank's place at the door of the run that comes in, or open a door."""
        me, mine = self.me, {self.me.rank: self.me}
        if door is None:
            self._write(raw, Door(1, self._ranks, mine))
            return
        following = Door(door.run + 1, self._ranks, mine, before=_why(door))
        if door.state == _IN:
            if not any(self._have_left(door)):
                who = ", ".join(f"rank {r}: {c}" for r, c in sorted(door.callers.items())[:4])
                raise Misuse(
                    f"replica '{self._name}' runs already in this store ({who}): end it first, or"
                    " give every replica a name of its own",
                    ranks=[me.rank],
                )
            self._write(raw, following)
        elif door.state != _OPEN:
            self._write(raw, following)
        elif door.ranks != self._ranks:
            if not self._lives(list(door.callers.values())):
                self._write(raw, following)
                return
            first = min(door.callers)
            self._refuse(
                raw, door, f"rank {me.rank} ({me}) says that replica '{self._name}' has the ranks"
                f" {_listed(self._ranks)}, rank {first} ({door.callers[first]}) says"
                f" {_listed(door.ranks)}: give every rank the same, and every replica a name of"
                " its own",
            )  # fmt: skip
        elif (other := door.callers.get(me.rank)) is None:
            self._write(raw, msgspec.structs.replace(door, callers={**door.callers, **mine}))
        elif not self._lives([other]):
            self._write(raw, following)
        else:
            self._refuse(
                raw, door, f"two processes say that they are rank {me.rank} of replica"
                f" '{self._name}': {other}, and {me}: give each rank its own number, and every"
                " replica a name of its own",
            )  # fmt: skip

    def _refuse(self, raw: bytes | None, door: Door, message: str) -> None:
        """All who wait at the door are told, and so is this process."""
        blamed = (self.me.rank,)
        failed = msgspec.structs.replace(
            door, state=_FAILED, kind="Misuse", message=message, blamed=blamed
        )
        if self._write(raw, failed):
            raise failed.error()

    def _wait(self) -> None:
        """A moment; past the end, agree with the others on who was missing."""
        if time.monotonic() >= self._end_s:
            door = self._look()
            missing = [rank for rank in self._ranks if rank not in door.callers]
            told = f"ranks {missing} have not introduced themselves"
            if strangers := self._strangers(missing):
                told += f", but ranks {strangers} call with another {SECRET_VARIABLE}"
            if not missing:
                came = min(door.passed.values(), key=len, default=())
                missing = [rank for rank in self._ranks if rank not in came]
                told = f"ranks {missing} came, and have not answered since"
            text = f"{told} to replica '{self._name}' within {self._timeout_s:g} s"
            if strangers:
                text += f": give {SECRET_VARIABLE} one value on all ranks"
            if door.before:
                text += f" (the start before this one failed: {door.before})"
            raise self.fail(RankStalled(text, ranks=missing, phase="start"))
        self._show()
        time.sleep(POLL_S)

    def _strangers(self, missing: Sequence[int]) -> list[int]:
        """Those of ``missing`` that stand before the door of another secret."""
        return sorted(self._calls.strangers & {*missing}) if self._calls is not None else []

    # -- who lives -----------------------------------------------------------------------------

    def _show(self) -> None:
        if time.monotonic() >= self._beat_at + BEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._num_beats += 1
        self._beat_at = time.monotonic()
        self._store.set(self._key("beat", self.me.key), b"%d" % self._num_beats)
        if self._calls is not None:
            self._calls.show()
            self._calls.look(self._ranks[:_LOOKED_AT])

    def _lives(self, callers: Sequence[Caller]) -> bool:
        """Whether any of these, who wait at the door, lives."""
        if any(_is_here(one) and not _is_gone(one) for one in callers):
            return True
        apart = [one for one in callers if not _is_here(one)]
        return any(self._moved([self._key("beat", one.key) for one in apart]))

    def _have_left(self, door: Door) -> list[bool]:
        """For each rank of a run that came in: whether it is gone or has left."""
        callers = [caller for _, caller in sorted(door.callers.items())]
        gone = [_is_gone(caller) for caller in callers]
        if any(gone):
            return gone
        apart = [caller for caller in callers if not _is_here(caller)]
        keys = [f"{self._scope}/{door.run}/watch/at/{caller.rank}" for caller in apart]
        return [not moved for moved in self._moved(keys)]

    def _moved(self, keys: Sequence[str]) -> list[bool]:
        """Which of these keys changes within a few beats."""
        before = [self._store.get(key) for key in keys]
        moved = [False] * len(keys)
        end_s = min(time.monotonic() + LOOK_S, self._end_s)
        while not all(moved) and time.monotonic() < end_s:
            self._show()
            time.sleep(BEAT_S / 2)
            now = [self._store.get(key) for key in keys]
            moved = [was or a != b for was, a, b in zip(moved, before, now, strict=True)]
        return moved

    # -- the key -------------------------------------------------------------------------------

    def _look(self) -> Door:
        """The door, where this process still stands at it; raises what it failed with."""
        _, door = self._read()
        if door is None or not self._is_mine(door):
            raise self._displaced()
        if door.state == _FAILED:
            raise door.error()
        return door

    def _is_mine(self, door: Door) -> bool:
        return door.callers.get(self.me.rank) == self.me

    def _displaced(self) -> PeerLost:
        text = f"replica '{self._name}' was started anew while rank {self.me.rank} still started"
        return PeerLost(text, ranks=[self.me.rank])

    def _read(self) -> tuple[bytes | None, Door | None]:
        raw = self._store.get(self._key("door"))
        return raw, None if raw is None else decode(self._key("door"), raw, Door)

    def _write(self, raw: bytes | None, door: Door) -> bool:
        """Whether the door is so now, and not what another has made of it meanwhile."""
        data = msgspec.msgpack.encode(door)
        return self._store.compare_set(self._key("door"), raw, data) == data

    def _key(self, *parts: str) -> str:
        return "/".join((self._scope, *parts))


def _why(door: Door) -> str:
    return door.message[:_BEFORE_CHARS] if door.state == _FAILED else ""


def _came(door: Door, round_name: str, rank: int) -> Door:
    came = tuple(sorted({*door.passed.get(round_name, ()), rank}))
    is_in = round_name == _IN and len(came) == len(door.ranks)
    return msgspec.structs.replace(
        door,
        passed={**door.passed, round_name: came},
        state=_IN if is_in else door.state,
    )


def _is_here(caller: Caller) -> bool:
    return caller.machine == machine()


def _is_gone(caller: Caller) -> bool:
    return _is_here(caller) and process_life(caller.pid, caller.started) is Life.GONE


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}, … {len(ranks)} in all]" if len(ranks) > 8 else f"[{shown}]"
