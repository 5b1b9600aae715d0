"""One rank's way through a scenario file: the same code in the simulator and in a real process.

The agent is a generator that yields whenever it has to wait. What it sees, it records; judging is
done afterwards, over all ranks, by :mod:`kvpact.harness.scenario.world`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.cache.hierarchical_cache import Match, StepResult
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Residency, Tier, Tokens
from kvpact.consensus.core.errors import InternalError, KvpactError, Misuse
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.faults.board import FaultBoard
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import Pause as Wait
from kvpact.harness.rank.sim import Program
from kvpact.harness.scenario.engine import Engine
from kvpact.harness.scenario.model import (
    Abort,
    Admit,
    AttachStorage,
    ClearStorage,
    Compute,
    Decide,
    DetachStorage,
    Do,
    Drain,
    DropNamespace,
    Evict,
    Expect,
    Fault,
    Finish,
    Flush,
    Free,
    Headroom,
    Heal,
    Idle,
    Insert,
    Leave,
    LoadBack,
    LoadMatch,
    NewWeights,
    Pause,
    Prefetch,
    Reset,
    Restart,
    Scenario,
    Settle,
    Step,
    Take,
    TakeMatch,
    expand,
    parse_prefix,
)
from kvpact.harness.scenario.router import Listener
from kvpact.harness.verify.agreement import Snapshot, snapshot
from kvpact.harness.verify.promises import broken_promises, incomplete, leftovers

__all__ = ["Agent", "Observation", "Raised", "RankRecord"]


#: What only an engine that owns its pages asks for, and with it all that is not a scheduler's call.
Driven = Admit | Take | Compute | Free | Headroom
Admin = Reset | NewWeights | DropNamespace | AttachStorage | ClearStorage | DetachStorage
Managed = Driven | Admin | Flush | Fault | Heal | Settle | Leave | Restart


class Observation(msgspec.Struct, frozen=True):
    """What one rank sees at an ``expect``: every key of it that the file asks for."""

    number: int
    seen: dict[str, dict[str, int]]
    story: list[str]


class Raised(msgspec.Struct, frozen=True):
    """An error that an entry raised on one rank; ``kinds`` are the names of its classes.
    ``after_s``: since the rank had entered its last step."""

    number: int
    kinds: list[str]
    ranks: tuple[int, ...]
    text: str
    after_s: float = 0.0


class RankRecord(msgspec.Struct):
    """All that one rank saw. ``left_at``: the entry at which it stalled or died (0: never).
    ``suspended_from``: by run and epoch, as in ``"0/3"``, the step from which on it may differ.
    ``struck`` are the numbers of the faults that struck here; ``has_ended``: the whole file was
    done."""

    rank: int
    incidents: list[Incident] = []
    snapshots: list[Snapshot] = []
    observations: list[Observation] = []
    raised: list[Raised] = []
    broken: list[str] = []
    suspended_from: dict[str, int] = {}
    left_at: int = 0
    struck: list[int] = []
    has_ended: bool = False


class Exit(Exception):
    """The rank dies here."""


class Stall(Exception):
    """The rank never steps again."""


class Agent:
    """Runs ``scenario`` on one rank.

    ``settle_copies`` is called before each step: with real threads it waits for the copies that no
    fault delays. ``exit_now`` ends the process where a fault says so. ``restart`` ends the run of
    this rank and begins another. ``at_entry`` hears the number of each entry that it comes to.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: Rank,
        board: FaultBoard,
        *,
        settle_copies: Callable[[], None],
        exit_now: Callable[[], None],
        restart: Callable[[], Rank],
        at_entry: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.scenario = scenario
        self._at_entry = at_entry
        self.board = board
        self.record = RankRecord(rank.cache.rank)
        self.board.entries = self.record.struck
        self._settle_copies = settle_copies
        self._exit_now = exit_now
        self._restart = restart
        self._run = 0
        self._entered_s = 0.0
        self._begin(rank, ())

    def _begin(self, rank: Rank, stored: Iterable[int]) -> None:
        """A run begins: of what was before, only what is in storage is left."""
        self.rank = rank
        self.cache = rank.cache
        self._iteration = 0
        self._tickets: dict[str, Ticket] = {}
        self._fetches: dict[str, Ticket] = {}
        self._matches: dict[str, Match] = {}
        self._holding: set[str] = set()
        self._recomputed: dict[str, int] = {}
        self._engine = Engine(rank)
        self._listener = Listener(rank, _prompts(self.scenario), stored)

    def program(self) -> Program:
        """All entries in order. Ends early where the rank stalls or dies."""
        for entry in self.scenario.do:
            self._at_entry(entry.number)
            if entry.ranks is not None:
                self._suspend()
                if self.record.rank not in entry.ranks:
                    continue
            try:
                yield from self._do(entry)
            except Stall:
                self.record.left_at = entry.number
                return
            except Exit:
                self.record.left_at = entry.number
                self._exit_now()
                return
            except KvpactError as error:
                self._note_error(entry, error)
                if isinstance(error, InternalError):
                    return
        self.record.has_ended = True
        self.record.broken += self._listener.wrong_in_storage()

    # -- entries ---------------------------------------------------------------------------------

    def _do(self, entry: Do) -> Program:
        match entry:
            case Step() | Decide() | Drain() | Idle() | Pause():
                yield from self._go_on(entry)
            case Insert():
                self._insert(entry)
            case LoadBack():
                self._load_back(entry)
            case TakeMatch():
                self._match(entry)
            case LoadMatch():
                self._load_match(entry)
            case Prefetch():
                self._prefetch(entry)
            case Evict():
                self.cache.evict(Tier(entry.tier), entry.pages)
            case Finish():
                self._end(entry.request)
                if self.cache.core.requests.get(entry.request) is not None:
                    self.cache.finish_request(entry.request)
            case Abort():
                self._end(entry.request)
                self.cache.abort(entry.request)
            case Expect():
                self._expect(entry)
            case _:
                self._manage(entry)

    def _go_on(self, entry: Step | Decide | Drain | Idle | Pause) -> Program:
        """What communicates, or takes its time."""
        match entry:
            case Idle():
                yield Wait(entry.seconds)
            case Pause():
                with self.cache.paused("the scenario says so"):
                    yield Wait(entry.seconds)
            case Step():
                for _ in range(entry.times):
                    yield from self._step()
            case Decide():
                yield from self._round(self.cache.begin_decide)
            case Drain():
                yield from self._drain(entry)

    def _manage(self, entry: Managed) -> None:
        """Faults, admin calls, and the calls of an engine that owns its pages."""
        match entry:
            case Fault():
                if entry.rank == self.record.rank:
                    self.board.arm(entry)
            case Heal():
                self.board.heal()
                self.rank.heal()
            case Reset() | NewWeights() | Leave() | Restart():
                self._end_epoch(entry)
            case Flush():
                self.cache.flush()
            case DropNamespace():
                self.cache.drop_namespace(entry.namespace)
            case Settle():
                self.cache.settle_for_prefetch(entry.request)
            case AttachStorage():
                self._switch_storage(entry, self.cache.attach_storage)
            case ClearStorage():
                self.cache.clear_storage()
            case DetachStorage():
                self._switch_storage(entry, self.cache.detach_storage)
            case _:
                self._drive(entry)

    def _end_epoch(self, entry: Reset | NewWeights | Leave | Restart) -> None:
        match entry:
            case Reset():
                self.cache.reset()
                self._let_go()
            case NewWeights():
                self.cache.new_weights(entry.version)
                self._let_go()
            case Leave():
                self.cache.leave()
            case Restart():
                self.record.broken += self._listener.wrong_in_storage()
                stored = self._listener.stored
                rank, self._run = self._restart(), self._run + 1
                self._begin(rank, stored)

    def _drive(self, entry: Driven) -> None:
        match entry:
            case Admit():
                self._engine.admit(entry)
            case Take():
                self._engine.take(entry.request, entry.pages)
            case Compute():
                self._engine.compute(entry.request)
            case Free():
                self._engine.free(entry.request, entry.pages)
            case Headroom():
                self.cache.expect_pages(entry.pages)

    def _switch_storage(self, entry: Do, call: Callable[[], None]) -> None:
        """On where it is on already, and the like: refused, and nothing has changed."""
        before = self.cache.journal.fingerprint
        try:
            call()
        except Misuse:
            if self.cache.journal.fingerprint != before:
                self.record.broken.append(f"entry {entry.number}: a misuse changed something")
            if entry.raises is not None:
                raise

    def _prefetch(self, entry: Prefetch) -> None:
        tokens = expand(entry.tokens)
        ticket = self.cache.prefetch(entry.request, tokens, namespace=entry.namespace)
        self._fetches[entry.request] = ticket
        self._let_go()

    def _end(self, name: str) -> None:
        self._holding.discard(name)
        self._engine.forget(name)

    def _insert(self, entry: Insert) -> None:
        self.cache.propose_insert(
            entry.request,
            expand(entry.tokens),
            namespace=entry.namespace,
            fill=self.rank.compute,
            fill_side=self.rank.compute_side,
            hold=entry.hold,
            priority=entry.priority,
        )
        if entry.hold:
            self._holding.add(entry.request)

    def _load_back(self, entry: LoadBack) -> None:
        self._end_other(entry.request, expand(entry.tokens), entry.namespace)
        match = self._found(expand(entry.tokens), entry.namespace, entry.request)
        self._tickets[entry.request] = self.cache.request_load_back(
            entry.request, match, pages_max=entry.pages_max
        )
        self._let_go()

    def _end_other(self, name: str, tokens: Tokens, namespace: str) -> None:
        """A name is used for another prompt: its first request is over, as it is for an engine."""
        live = self.cache.core.requests.get(name)
        if live is None or live.held is None:
            return
        try:
            live.requires(tokens, self.cache.core.namespaces.inner(namespace), "matches")
        except Misuse:
            self._end(name)
            self.cache.abort(name)

    def _match(self, entry: TakeMatch) -> None:
        pin = entry.request if entry.pin else None
        tokens = expand(entry.tokens)
        if pin is not None:
            self._end_other(pin, tokens, entry.namespace)
        self._matches[entry.request] = self._found(tokens, entry.namespace, pin)
        tokens[:] = -1  # the caller's buffer is its own: it may be another prompt's by now

    def _found(self, tokens: Tokens, namespace: str, request: str | None) -> Match:
        """Match; what was found is what a peek says, and has all its state in side pools."""
        peeked = self.cache.peek(tokens, namespace=namespace)
        match = self.cache.match_prefix(tokens, namespace=namespace, request=request)
        found = {"device": match.device_pages, "usable": match.device_pages + match.host_pages}
        if found != {name: peeked[name] for name in found}:
            self.record.broken.append(
                f"rank {self.record.rank}: a peek says {peeked}, the match {found}"
            )
        self.record.broken += incomplete(self.cache, match)
        return match

    def _load_match(self, entry: LoadMatch) -> None:
        match = self._matches.pop(entry.request, None)
        if match is not None:
            self._end_other(entry.request, match.tokens, match.namespace)
            self._tickets[entry.request] = self.cache.request_load_back(entry.request, match)
            self.record.broken += self._other_prompts(entry.request, match)
            self._let_go()

    def _other_prompts(self, name: str, match: Match) -> list[str]:
        """What the request of a kept match holds, where it is not the start of that prompt."""
        live = self.cache.core.requests.require(name)
        held = [] if live.held is None else live.held.path()
        tokens = [int(token) for node in held for token in node.tokens]
        spaces = {node.namespace for node in held} - {
            self.cache.core.namespaces.inner(match.namespace)
        }
        if tokens == match.tokens[: len(tokens)].tolist() and not spaces:
            return []
        return [f"rank {self.record.rank}: request {name} holds another prompt than it matched"]

    def _let_go(self) -> None:
        """A load-back holds its prefix until it is decided, not longer: nobody computes here."""
        for name, ticket in [*self._tickets.items(), *self._fetches.items()]:
            if ticket.state is TicketState.PENDING or name in self._holding:
                continue
            if self.cache.core.requests.get(name) is ticket.request:
                self.cache.finish_request(name)

    def _drain(self, entry: Drain) -> Program:
        for _ in range(entry.max_steps):
            if not self.cache.has_pending():
                break
            yield from self._step()
        if not self.cache.has_pending():
            self.record.broken += leftovers(self.cache)
        if self.cache.has_pending():
            waiting = [repr(intent) for intent in self.cache.core.manager.open_intents]
            self.record.broken.append(
                f"entry {entry.number} (drain): not idle after {entry.max_steps} steps:"
                f" {', '.join(waiting) or 'queues are not empty'}"
            )

    # -- one step --------------------------------------------------------------------------------

    def _step(self) -> Program:
        fault = self.board.strike("scheduler")
        action = fault.action if fault is not None else ""
        if action in ("skip_step", "extra_step", "diverge"):
            self._suspend()
        match action:
            case "stall":
                raise Stall
            case "exit":
                raise Exit
            case "late":
                assert fault is not None
                assert fault.seconds is not None
                yield Wait(fault.seconds)
            case "diverge":
                self._lose_a_node()
            case "skip_step":
                self._iteration += 1
                yield Wait(self.scenario.world.step_ms / 1000)
                return
            case _:
                pass
        self._iteration += 1
        yield from self._iterate()
        if action == "extra_step":
            yield from self._iterate()

    def _iterate(self) -> Program:
        yield from self._round(partial(self.cache.begin_step, self._iteration))

    def _round(self, begin: Callable[[], None]) -> Program:
        yield Wait(self.scenario.world.step_ms / 1000)
        self._settle_copies()
        self._entered_s = self.cache.stepper.group.now()
        begin()
        while (result := self.cache.poll_step()) is None:
            yield Wait()
        self._after(result)

    def _note_incident(self) -> None:
        incident = self.cache.stepper.change.incident
        known = self.record.incidents
        if incident is not None and (not known or known[-1] is not incident):
            known.append(incident)

    def _after(self, result: StepResult) -> None:
        self._note_incident()
        for name in result.lost:
            self._end(name)
            self.cache.abort(name)
        for name in result.must_recompute:
            self._recomputed[name] = self._recomputed.get(name, 0) + 1
        self._engine.recompute(result.must_recompute)
        self._let_go()
        self.cache.check_integrity()
        nodes = list(self.cache.core.tree.nodes())
        self.record.broken += self.rank.wrong_bytes(nodes) + broken_promises(self.cache, nodes)
        self.record.broken += self._listener.hear(self.cache.events())
        self.record.broken += self._listener.differences(nodes)
        self.record.snapshots.append(
            snapshot(self.cache, nodes, events=self._listener.digest, run=self._run)
        )

    def _lose_a_node(self) -> None:
        """The tree of this rank alone drops its least recently used unpinned leaf."""
        tree, tiers = self.cache.core.tree, self.cache.core.tiers
        leaves = [
            node
            for node in tree.nodes()
            if not node.children
            and not node.device.pins
            and not node.host.pins
            and not node.carriages
        ]
        if not leaves:
            return
        node = min(leaves, key=lambda leaf: (leaf.last_access, leaf.node_id))
        for tier in Tier:
            if node.at(tier).state is not Residency.ABSENT:
                tiers.drop(node, tier)
        tiers.prune()

    # -- looking ---------------------------------------------------------------------------------

    def _suspend(self) -> None:
        """From here on this rank may differ, until it is reported."""
        manager = self.cache.core.manager
        self.record.suspended_from.setdefault(f"{self._run}/{manager.epoch}", manager.step + 1)

    def _note_error(self, entry: Do, error: KvpactError) -> None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        self._note_incident()
        after_s = self.cache.stepper.group.now() - self._entered_s
        self.record.raised.append(Raised(entry.number, kinds, error.ranks, str(error), after_s))

    def _expect(self, entry: Expect) -> None:
        size = self.scenario.world.page_size
        seen: dict[str, dict[str, int]] = {}
        for tier in ("device", "host", "usable"):
            asked: dict[str, int] | None = getattr(entry, tier)
            if asked is not None:
                seen[tier] = {text: size * self._peek(text)[tier] for text in asked}
        if entry.storage is not None:
            seen["storage"] = {text: size * self._stored_pages(text) for text in entry.storage}
        if entry.free is not None:
            pools = {pool.name: pool for pool in self.cache.core.tiers.pools.values()}
            for side in self.rank.side:
                pools |= {pool.name: pool for pool in side.pools.values()}
            seen["free"] = {name: pools[name].num_free for name in entry.free}
        if entry.pinned is not None:
            pinned = self.cache.core.tree.num_pinned
            seen["pinned"] = {name: pinned[Tier(name)] for name in entry.pinned}
        for what, tickets in (
            ("admitted", self._engine.admissions),
            ("loaded", {**self._fetches, **self._tickets}),
            ("prefetched", self._fetches),
        ):
            names: dict[str, int] | None = getattr(entry, what)
            if names is not None:
                seen[what] = {name: size * _brought(tickets[name]) for name in names}
        if entry.counters is not None:
            known = self.cache.metrics()
            seen["counters"] = {name: known[name] for name in entry.counters}
        if entry.must_recompute is not None:
            seen["must_recompute"] = {n: self._recomputed.get(n, 0) for n in entry.must_recompute}
        if entry.right_bytes is not None:
            seen["right_bytes"] = {text: self._is_right(text) for text in entry.right_bytes}
            seen["covered"] = {text: self._peek(text)["device"] for text in entry.right_bytes}
        story = [str(line) for line in self.cache.journal.tail(12)]
        self.record.observations.append(Observation(entry.number, seen, story))

    def _peek(self, text: str) -> dict[str, int]:
        namespace, ranges = parse_prefix(text)
        return self.cache.peek(expand(ranges), namespace=namespace)

    def _stored_pages(self, text: str) -> int:
        """Leading pages of a prefix whose storage write ended well on every rank."""
        namespace, ranges = parse_prefix(text)
        size = self.scenario.world.page_size
        inner = self.cache.core.namespaces.inner(namespace)
        hashes = page_hashes(expand(ranges), size, namespace=inner)
        return sum(1 for _ in takewhile(self._listener.stored.__contains__, hashes))

    def _is_right(self, text: str) -> int:
        """1: all of the prefix that is on DEVICE has the right bytes."""
        namespace, ranges = parse_prefix(text)
        nodes, _ = self.cache.core.tree.walk(
            expand(ranges), self.cache.core.namespaces.inner(namespace)
        )
        return int(not self.rank.wrong_bytes([n for n in nodes if n.device.is_published]))


def _prompts(scenario: Scenario) -> list[tuple[NDArray[np.int32], str]]:
    """Every prompt that the file names, with the inner names of its namespace."""
    prompts = [
        (entry.tokens, entry.namespace)
        for entry in scenario.do
        if isinstance(entry, Insert | LoadBack | Prefetch | Admit | TakeMatch)
    ]
    drops = Counter(one.namespace for one in scenario.do if isinstance(one, DropNamespace))
    return [
        (expand(tokens), f"{namespace}\0{number}" if number else namespace)
        for tokens, namespace in dict.fromkeys(prompts)
        for number in range(drops[namespace] + 1)
    ]


def _brought(ticket: Ticket) -> int:
    """Pages that came of a ticket."""
    return ticket.num_pages if ticket.state is TicketState.READY else 0
