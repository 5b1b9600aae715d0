"""A small world for the search: the real stepper, manager and closer, and pools that are integers.

Everything of it can be pickled, so the search clones it, lets one thing happen, and looks at what
became of it. Nothing happens by itself: which rank goes on, which copy ends, when time passes and
who dies is always an *action* from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from consensus.ballot import Schema, Vector
from consensus.collective import Work
from consensus.errors import InternalError, KvpactError, Misuse, PeerLost
from consensus.journal import Journal, Value
from consensus.manager import TransactionManager
from consensus.participant import Intent, Outcome, OutcomeKind
from consensus.report import LastSeen, Policy, Seal
from consensus.step import StepLimits, Stepper
from consensus.transaction import State

__all__ = ["LIMITS", "TICK_S", "WISHES", "Crash", "Member", "Setting", "Wish", "World"]

TICK_S = 1.0
#: One tick outlives a copy's timeout and a grace, two outlive a deadline.
LIMITS = StepLimits(
    warn_s=1e6, deadline_s=2.0, grace_s=0.5, slice_s=0.1, pause_s=1e-9, progress_s=1e6
)
COPY_TIMEOUT_S = 0.5
_CALLS_KEPT = 8  # more than any rank can be behind


class Wish(msgspec.Struct, frozen=True):
    """An intent that the engine opens; it waits where there is no slot."""

    key: str
    need: dict[str, int]


WISHES = (Wish("first", {"a": 1, "b": 1}), Wish("second", {"a": 2}))
POOLS = {"a": 3, "b": 1}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What may happen in a world. ``relation``: the second wish is ``apart`` from the first, its
    ``child``, or waits in ``line`` for the only slot. ``faults``: kinds, of which one happens."""

    ranks: int = 2
    lag: int = 0
    relation: str = "apart"
    refusals: bool = True
    withdraws: int = 0
    failures: int = 0
    ticks: int = 0
    faults: tuple[str, ...] = ()
    policy: str = "raise"

    @property
    def name(self) -> str:
        """All of it in one line."""
        words = [f"{self.ranks} ranks", f"lag {self.lag}", self.relation]
        words += ["refusals"] * self.refusals
        words += ["withdrawal"] * self.withdraws + ["failure"] * self.failures
        words += [f"{self.ticks} ticks"] * bool(self.ticks) + list(self.faults)
        return ", ".join([*words, *[self.policy] * (self.policy != "raise")])


class Crash(BaseException):
    """The process of this rank ends here: no code of ours can catch it."""


class SearchNet:
    """Pairs the k-th call of every rank in each epoch, as raw gloo does, and is the store.

    Counts what becomes visible to others, and ends the process of who has said enough. ``left``
    are ranks that closed the group of an epoch: who still waits for them there learns it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.now_s = 0.0
        self.dead: list[int] = []
        self.left: list[tuple[int, int]] = []
        self.calls: dict[tuple[int, int], dict[int, Vector]] = {}
        self.values: dict[str, bytes] = {}
        self.num_visible = 0
        self.visible_max = -1

    def shows(self) -> None:
        """Something is about to become visible to others."""
        if self.num_visible == self.visible_max:
            raise Crash
        self.num_visible += 1

    def put(self, rank: int, index: tuple[int, int], vector: Vector) -> None:
        """A call of ``rank``: its epoch, and which one it is there."""
        self.shows()
        self.calls.setdefault(index, {})[rank] = vector.copy()
        self.calls.pop((index[0], index[1] - _CALLS_KEPT), None)

    def take(self, index: tuple[int, int]) -> Vector | None:
        """The minimum over all ranks. Raises :class:`PeerLost` where it cannot come any more."""
        found = self.calls[index]
        if len(found) == self.size:
            return np.minimum.reduce([found[rank] for rank in sorted(found)])
        gone = [*self.dead, *(rank for rank, epoch in self.left if epoch == index[0])]
        if any(rank not in found for rank in gone):
            raise PeerLost("the connection was closed by a peer", ranks=tuple(sorted(gone)))
        return None

    # Out of band (consensus.epoch.Locator).

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended."""
        return rank in self.dead

    def is_paused(self, rank: int) -> bool:
        """Nobody pauses here."""
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        """Only whether they live."""
        return {rank: LastSeen(0, "", 0.0, dead=rank in self.dead) for rank in ranks}

    # The store (consensus.store.Store); a process may end before each write.

    def get(self, key: str) -> bytes | None:
        """See :class:`consensus.store.Store`."""
        return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """See :class:`consensus.store.Store`."""
        self.shows()
        self.values[key] = value

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :class:`consensus.store.Store`."""
        self.shows()
        if self.values.get(key) == expected:
            self.values[key] = value
        return self.values.get(key, b"")

    def delete(self, key: str) -> None:
        """See :class:`consensus.store.Store`."""
        self.values.pop(key, None)


class SearchGroup:
    """One rank's group (:class:`consensus.collective.Group`) of one epoch."""

    def __init__(self, net: SearchNet, rank: int, width: int, epoch: int = 0) -> None:
        self.rank = rank
        self.size = net.size
        self.ranks = tuple(range(net.size))
        self.width = width
        self._net = net
        self._epoch = epoch
        self._num_calls = 0

    def min(self, vector: Vector) -> Work:
        """See :class:`consensus.collective.Group`."""
        index = self._epoch, self._num_calls
        self._num_calls += 1
        self._net.put(self.rank, index, vector)
        return SearchWork(self._net, index)

    def now(self) -> float:
        """Virtual seconds."""
        return self._net.now_s

    def close(self) -> None:
        """Peers that still wait see it."""
        if (self.rank, self._epoch) not in self._net.left:
            self._net.left.append((self.rank, self._epoch))


class SearchWork:
    """One collective in flight."""

    def __init__(self, net: SearchNet, index: tuple[int, int]) -> None:
        self._net = net
        self._index = index

    def done(self) -> bool:
        """See :class:`consensus.collective.Work`."""
        return self._net.take(self._index) is not None

    def wait(self, timeout_s: float) -> bool:
        """See :class:`consensus.collective.Work`."""
        return self.done()

    def result(self) -> Vector:
        """See :class:`consensus.collective.Work`."""
        reduced = self._net.take(self._index)
        if reduced is None:
            raise Misuse("result() before the collective is done")
        return reduced


class SearchJournal(Journal):
    """Keeps every fingerprint, so that a digest can speak of their order instead."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, tail_entries_max=256)
        self.prints = [0]

    def note(self, tag: str, *values: Value) -> None:
        """See :class:`Journal`."""
        super().note(tag, *values)
        self.prints.append(self.fingerprint)

    def begin_epoch(self, epoch: int) -> None:
        """See :class:`Journal`."""
        super().begin_epoch(epoch)
        self.prints = [0]


class Member:
    """One rank: its integer pools (a participant), its stepper, and its engine's loop.

    Pages are ``free``, ``held`` by an open intent, kept (``tree``), or ``stuck`` under a copy that
    was given up and still runs. ``published`` keys can be read.
    """

    def __init__(self, world: World, rank: int) -> None:
        setting = world.setting
        self.world = world
        self.rank = rank
        self.free = dict(POOLS)
        self.held: dict[str, dict[str, int]] = {}
        self.tree: dict[str, dict[str, int]] = {}
        self.stuck: dict[str, dict[str, int]] = {}
        self.published: set[str] = set()  # membership only
        self.intents: dict[str, Intent] = {}
        self.refuse: frozenset[str] = frozenset()
        self.iteration = 0
        self.is_idle = True  # between two steps
        self.error: tuple[str, ...] | None = None
        self.bug = ""
        self.journal = SearchJournal(rank)
        schema = Schema(tuple(sorted(POOLS)), 1 if setting.relation == "line" else 3)
        group = partial(SearchGroup, world.net, rank, schema.width)
        self.manager = TransactionManager(
            rank=rank,
            schema=schema,
            lag=setting.lag,
            copy_timeout_s=COPY_TIMEOUT_S,
            journal=self.journal,
            usable={pool: partial(self.usable_of, pool) for pool in schema.pools},
        )
        self.manager.begin_epoch(0, dict(POOLS))
        self.stepper = Stepper(
            self.manager,
            group(),
            world.net,
            limits=LIMITS,
            prepare=self._prepare,
            settled=self._settled,
            live=int,
            locator=world.net,
            carrier=self,
            policy=Policy(setting.policy),
            regroup=group if setting.policy != "raise" else None,
        )

    # -- the engine's loop -----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """It has raised, or it is between two steps and everything has been decided and ended."""
        if self.error is not None or self.bug:
            return True
        return self.is_idle and len(self.intents) == len(WISHES) and self.manager.is_idle

    def go(self, refuse: frozenset[str], withdraw: str) -> None:
        """Enter the next step, or go on in this one, as far as it goes without waiting."""
        try:
            if self.is_idle:
                self.refuse = refuse
                if withdraw:
                    self.withdraw(withdraw)
                self.stepper.begin(self.iteration)
                self.iteration += 1
                self.is_idle = False
            if self.stepper.poll() is not None:
                self.is_idle = True
        except (InternalError, Misuse) as error:
            self.bug = f"rank {self.rank}: {type(error).__name__}: {error.message}"
        except KvpactError as error:
            where = error.ranks, error.epoch, error.step
            self.error = (type(error).__name__, error.message, *map(str, where))

    def withdraw(self, key: str) -> None:
        """An agreed call; what builds on it goes too."""
        for name in (key, *self._children(key)):
            if name in self.intents and self.intents[name].is_open:
                self.manager.withdraw(self.intents[name])
                self.published.discard(name)
            elif name in self.tree:
                self._evict(name)

    def _evict(self, key: str) -> None:
        """An agreed call: what is done leaves the tree, here and in the ledger."""
        pages = self.tree.pop(key)
        self.published.discard(key)
        self._give(pages)
        self.manager.note("evict", key)
        for pool, num_pages in pages.items():
            self.manager.ledger.refund(pool, num_pages)

    def due(self) -> list[Wish]:
        """What this rank will try to open in its next step."""
        return [wish for wish in WISHES if wish.key not in self.intents]

    def _children(self, key: str) -> list[str]:
        return ["second"] if self.world.setting.relation == "child" and key == "first" else []

    def _prepare(self) -> None:
        for wish in self.due():
            parents = [self.intents["first"]] if wish.key in self._children("first") else []
            intent = self.manager.open("copy", wish.key, wish.need, self, parents=parents)
            if intent is not None:
                self.intents[wish.key] = intent
        self.manager.reserve_open()

    def _settled(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.kind in (OutcomeKind.FAIL, OutcomeKind.QUARANTINE):
                for name in self._children(str(outcome.intent.key)):
                    if name in self.intents:
                        self.withdraw(name)

    # -- Participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """See :class:`consensus.participant.Participant`."""
        # What is refused gets its first pool and lacks its last, so that there is a rollback.
        is_last = pool == list(intent.need)[-1]
        if str(intent.key) in self.refuse and is_last:
            return 0
        taken = min(num_pages, self.free[pool])
        self.free[pool] -= taken
        self.held.setdefault(str(intent.key), {})[pool] = taken
        return taken

    def unreserve(self, intent: Intent, pool: str) -> None:
        """See :class:`consensus.participant.Participant`."""
        held = self.held[str(intent.key)]
        self.free[pool] += held.pop(pool)
        if not held:
            del self.held[str(intent.key)]

    def start(self, intent: Intent) -> None:
        """See :class:`consensus.participant.Participant`."""

    def commit(self, intent: Intent) -> None:
        """See :class:`consensus.participant.Participant`."""
        self.published.add(str(intent.key))

    def abort(self, intent: Intent) -> None:
        """See :class:`consensus.participant.Participant`."""

    def ended(self, intent: Intent) -> None:
        """See :class:`consensus.participant.Participant`."""
        key = str(intent.key)
        held = self.held.pop(key, {})
        if intent.state is State.DONE:
            self.tree[key] = held
            return
        self.published.discard(key)
        if intent.state is State.QUARANTINED and not intent.local_ended:
            self.stuck[key] = held
        else:
            self._give(held)

    def stops(self, key: str) -> None:
        """A copy that was given up has really ended."""
        self._give(self.stuck.pop(key))

    def _give(self, pages: dict[str, int]) -> None:
        for pool, num_pages in pages.items():
            self.free[pool] += num_pages

    def usable_of(self, pool: str) -> int:
        """Pages that no lost copy holds."""
        return POOLS[pool] - sum(pages.get(pool, 0) for pages in self.stuck.values())

    # -- Carrier ---------------------------------------------------------------------------------

    def live(self) -> dict[str, int]:
        """See :class:`consensus.succession.Carrier`."""
        return {}

    def kept(self) -> list[int]:
        """See :class:`consensus.succession.Carrier`."""
        return []

    def drop(self, seal: Seal) -> None:
        """See :class:`consensus.succession.Carrier`."""
        for key, held in list(self.held.items()):
            if not self.intents[key].local_ended:
                self.stuck[key] = held
            else:
                self._give(held)
        for held in self.tree.values():
            self._give(held)
        self.held.clear()
        self.tree.clear()
        self.published.clear()

    def usable(self) -> dict[str, int]:
        """See :class:`consensus.succession.Carrier`."""
        return {pool: self.usable_of(pool) for pool in sorted(POOLS)}

    def pools(self) -> dict[str, dict[str, int]]:
        """See :class:`consensus.succession.Carrier`."""
        return {}

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """See :class:`consensus.succession.Carrier`."""
        self.manager.begin_epoch(epoch, usable)


class World:
    """All ranks of ``setting``, its clock, network and store. ``script``: agreed calls by step."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.net = SearchNet(setting.ranks)
        self.script: dict[tuple[int, int], str] = {}
        self.withdraws = setting.withdraws
        self.failures = setting.failures
        self.ticks = setting.ticks
        self.fault = ""
        self.faulty_rank = -1
        self.members = [Member(self, rank) for rank in range(setting.ranks)]

    @property
    def alive(self) -> list[Member]:
        """The ranks whose process lives."""
        return [member for member in self.members if member.rank not in self.net.dead]

    @property
    def is_drained(self) -> bool:
        """Nobody has anything left to do."""
        return all(member.is_over and not _runs(member) for member in self.alive)


def _runs(member: Member) -> bool:
    return bool(member.stuck) and member.error is None
