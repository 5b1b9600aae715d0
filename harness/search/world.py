"""A small world for the search: the real stepper, manager and closer, and pools that are integers.

Everything of it can be pickled, so the search clones it, lets one thing happen, and looks at what
became of it. Nothing happens by itself: which rank goes on, which copy ends, when time passes and
who dies is always an *action* from outside.
"""

from __future__ import annotations

from functools import partial

import msgspec

from kvpact.consensus.core.ballot import Schema
from kvpact.consensus.core.errors import InternalError, KvpactError, Misuse
from kvpact.consensus.core.journal import Journal, Value
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent, Outcome, OutcomeKind
from kvpact.consensus.core.transaction import State
from kvpact.consensus.epoch.report import Policy, Seal
from kvpact.consensus.step.step import StepLimits, Stepper
from kvpact.harness.search.net import SearchGroup, SearchNet

__all__ = ["LIMITS", "POOLS", "TICK_S", "Member", "Setting", "Wish", "World"]

TICK_S = 1.0
#: One tick outlives a copy's timeout and a grace, two outlive a deadline.
LIMITS = StepLimits(
    warn_s=1e6, deadline_s=2.0, grace_s=0.5, slice_s=0.1, pause_s=1e-9, progress_s=1e6
)
COPY_TIMEOUT_S = 0.5


class Wish(msgspec.Struct, frozen=True):
    """An intent that the engine opens; it waits where there is no slot. ``minimum`` pages: elastic.

    ``grants`` are the words for what a rank that lacks pages can say of it.
    """

    key: str
    need: dict[str, int]
    minimum: int | None = None

    @property
    def grants(self) -> list[str]:
        """Its key: nothing. With a number: so many pages of an elastic one."""
        return [self.key] + [f"{self.key}:1"] * (self.minimum is not None)


_WHOLE = (Wish("first", {"a": 1, "b": 1}), Wish("second", {"a": 2}))
_ELASTIC = (Wish("first", {"a": 2}, minimum=1), Wish("second", {"a": 1, "b": 1}))
POOLS = {"a": 3, "b": 1}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What may happen in a world. ``relation``: the second wish is ``apart`` from the first, its
    ``child``, an ``heir`` (a child that is opened once the first is decided), ``bound`` to it, or
    waits in ``line`` for the only slot. ``elastic``: the first may get less than it
    asks for. ``faults``: kinds, of which one happens."""

    ranks: int = 2
    lag: int = 0
    relation: str = "apart"
    elastic: bool = False
    refusals: bool = True
    withdraws: int = 0
    failures: int = 0
    ticks: int = 0
    faults: tuple[str, ...] = ()
    policy: str = "raise"

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """What the engine of every rank opens."""
        return _ELASTIC if self.elastic else _WHOLE

    @property
    def has_child(self) -> bool:
        """The second wish builds on the first."""
        return self.relation in ("child", "heir")

    @property
    def name(self) -> str:
        """All of it in one line."""
        words = [f"{self.ranks} ranks", f"lag {self.lag}", self.relation]
        words += ["elastic"] * self.elastic
        words += ["refusals"] * self.refusals
        words += ["withdrawal"] * self.withdraws + ["failure"] * self.failures
        words += [f"{self.ticks} ticks"] * bool(self.ticks) + list(self.faults)
        return ", ".join([*words, *[self.policy] * (self.policy != "raise")])


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
            self,
            carrier=self,
            limits=LIMITS,
            locator=world.net,
            policy=Policy(setting.policy),
            regroup=group if setting.policy != "raise" else None,
        )

    # -- the engine's loop -----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """It has raised, or it is between two steps and everything has been decided and ended."""
        if self.error is not None or self.bug:
            return True
        return (
            self.is_idle
            and len(self.intents) == len(self.world.setting.wishes)
            and self.manager.is_idle
        )

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
        wishes = [one for one in self.world.setting.wishes if one.key not in self.intents]
        first = self.intents.get("first")
        if self.world.setting.relation == "heir" and (first is None or first.is_undecided):
            return wishes[:1] if first is None else []
        return wishes

    def _children(self, key: str) -> list[str]:
        return ["second"] if self.world.setting.has_child and key == "first" else []

    # -- Machine ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See :class:`kvpact.consensus.step.machine.Machine`."""
        for wish in self.due():
            parents = [self.intents["first"]] if wish.key in self._children("first") else []
            intent = self.manager.open(
                "copy", wish.key, wish.need, self, minimum=wish.minimum, parents=parents
            )
            if intent is not None:
                self.intents[wish.key] = intent
                if self.world.setting.relation == "bound" and wish.key == "second":
                    self.manager.bind([self.intents["first"], intent])
        self.manager.reserve_open()

    def settled(self, outcomes: list[Outcome]) -> None:
        """See :class:`kvpact.consensus.step.machine.Machine`."""
        for outcome in outcomes:
            intent = outcome.intent
            lacks = outcome.kind is OutcomeKind.END and intent.result < intent.agreed
            if lacks or outcome.kind in (OutcomeKind.FAIL, OutcomeKind.QUARANTINE):
                for name in self._children(str(intent.key)):
                    if name in self.intents:
                        self.withdraw(name)

    def is_at_rest(self) -> bool:
        """See :class:`kvpact.consensus.step.machine.Machine`."""
        return not self.manager.open_intents and not self.due()

    def live_digest(self) -> int:
        """See :class:`kvpact.consensus.step.machine.Machine`."""
        return 0

    def waits(self) -> dict[str, str]:
        """See :class:`kvpact.consensus.step.machine.Machine`."""
        return {}

    # -- Participant -----------------------------------------------------------------------------

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        """See :class:`kvpact.consensus.core.participant.Participant`."""
        # What is refused gets its first pool and lacks its last, so that there is a rollback.
        is_last = pool == list(intent.need)[-1]
        if str(intent.key) in self.refuse and is_last:
            return 0
        limit = 1 if f"{intent.key}:1" in self.refuse else num_pages
        taken = min(limit, self.free[pool])
        self.free[pool] -= taken
        self.held.setdefault(str(intent.key), {})[pool] = taken
        return taken

    def unreserve(self, intent: Intent, pool: str) -> None:
        """See :class:`kvpact.consensus.core.participant.Participant`."""
        held = self.held[str(intent.key)]
        self.free[pool] += held.pop(pool)
        if not held:
            del self.held[str(intent.key)]

    def start(self, intent: Intent) -> None:
        """See :class:`kvpact.consensus.core.participant.Participant`."""

    def commit(self, intent: Intent) -> None:
        """See :class:`kvpact.consensus.core.participant.Participant`."""
        self.published.add(str(intent.key))

    def abort(self, intent: Intent) -> None:
        """See :class:`kvpact.consensus.core.participant.Participant`."""

    def ended(self, intent: Intent) -> None:
        """See :class:`kvpact.consensus.core.participant.Participant`."""
        key = str(intent.key)
        held = self.held.pop(key, {})
        if intent.state is State.DONE:
            # Over several pools all is kept; of an elastic one what arrived everywhere.
            kept = held if len(held) > 1 else dict.fromkeys(held, intent.result)
            self.tree[key] = kept
            self._give({pool: num_pages - kept[pool] for pool, num_pages in held.items()})
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
        """See :class:`kvpact.consensus.step.change.Carrier`."""
        return {}

    def kept(self) -> list[int]:
        """See :class:`kvpact.consensus.step.change.Carrier`."""
        return []

    def drop(self, seal: Seal) -> None:
        """See :class:`kvpact.consensus.step.change.Carrier`."""
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
        """See :class:`kvpact.consensus.step.change.Carrier`."""
        return {pool: self.usable_of(pool) for pool in sorted(POOLS)}

    def pools(self) -> dict[str, dict[str, int]]:
        """See :class:`kvpact.consensus.step.change.Carrier`."""
        return {}

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """See :class:`kvpact.consensus.step.change.Carrier`."""
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
