"""Transactions: propose, reserve, vote, settle.

The manager does no I/O and knows no tensors. It turns open intents into one ballot per step
(:meth:`TransactionManager.post`) and a reduced ballot into outcomes
(:meth:`TransactionManager.settle`); :mod:`kvpact.consensus.step.step` carries the ballot between
ranks.

    open -> reserve -> post ... settle -> commit | abort -> ended on all ranks

Everything here is the same on every rank, except what a participant reserves and when its copies
end, and those two decide nothing before a ballot has made them everyone's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvpact.consensus.core.ballot import (
    Header,
    Schema,
    Status,
    Vector,
    Verdict,
    repeated,
    tally,
    told_the_same,
)
from kvpact.consensus.core.errors import InternalError, Misuse
from kvpact.consensus.core.journal import Journal, Value
from kvpact.consensus.core.ledger import Ledger
from kvpact.consensus.core.participant import Intent, Outcome, OutcomeKind, Participant
from kvpact.consensus.core.slots import SlotTable
from kvpact.consensus.core.transaction import Event, State

__all__ = ["PostedBallot", "TransactionManager"]


class PostedBallot(msgspec.Struct, frozen=True):
    """A ballot as it was posted: the slot map of that step.

    ``intents`` were open then; ``voted`` are those of them whose vote it carries, the rest may only
    end. Slots from ``num_slots`` on were not in use. ``repeats``: it said what the ballot before it
    had said, and this is what it said.
    """

    step: int
    header: Header
    intents: tuple[Intent, ...]
    voted: tuple[Intent, ...]
    num_slots: int
    repeats: Vector | None = None


class TransactionManager:
    """All transactions of one rank.

    ``usable`` tells per pool the pages that this rank can really use: capacity less what
    quarantined and old copies still hold. ``copy_timeout_s`` runs on the agreed clock from the
    verdict on: an intent that is open for longer is quarantined by all ranks in the same step.
    ``lag`` is how many steps a verdict may come later.
    """

    def __init__(
        self,
        *,
        rank: int,
        schema: Schema,
        lag: int,
        copy_timeout_s: float,
        journal: Journal,
        usable: Mapping[str, Callable[[], int]],
    ) -> None:
        if set(usable) != set(schema.pools):
            raise Misuse(f"say what is usable of each of {schema.pools}, got {sorted(usable)}")
        if lag < 0:
            raise Misuse(f"lag must not be negative, got {lag}")
        if not copy_timeout_s > 0:
            raise Misuse(f"copy_timeout_s must be positive, got {copy_timeout_s}")
        self.rank = rank
        self.schema = schema
        self.lag = lag
        self.journal = journal
        self.ledger = Ledger(schema.pools)
        self.epoch = 0
        self.step = 0
        self.settled_step = 0
        self.clock_ms = 0
        self._copy_timeout_ms = round(copy_timeout_s * 1000)
        self._usable = dict(usable)
        self._slots = SlotTable(schema.num_slots, lag)
        self._open: dict[int, Intent] = {}
        self._unposted: list[Intent] = []
        self._by_key: dict[tuple[str, Value], Intent] = {}
        self._posted: deque[PostedBallot] = deque()
        self._num_opened = 0
        self._schema_digest = schema.digest
        #: The ballot posted last; before the first, and in a new epoch, one that was never posted.
        self.newest = PostedBallot(0, Header(self._schema_digest, 0, 0, 0, 0, 0, 0), (), (), 0)
        self.said: Vector | None = None  # the newest ballot, where one without intents could follow
        self._agreed: list[int] = []  # usable pages by pool, of the newest verdict

    # -- proposing: agreed calls, in the same order on every rank ---------------------------------

    def open(
        self,
        kind: str,
        key: Value,
        need: Mapping[str, int],
        participant: Participant,
        *,
        minimum: int | None = None,
        parents: Sequence[Intent] = (),
        ends_on_commit: bool = False,
        payload: object = None,
    ) -> Intent | None:
        """Propose an intent: take a slot and charge the ledger. ``None``: no slot is free.

        ``minimum`` (pages, one pool only) makes it elastic. ``ends_on_commit``: it has no copy of
        its own, so a COMMIT ends it. ``parents`` were opened before. ``payload`` becomes
        ``intent.payload``. Raises :class:`Misuse` for needs that make no sense.
        """
        pages = {pool: need[pool] for pool in sorted(need)}
        total = sum(pages.values())
        if not pages.keys() <= self._usable.keys():
            raise Misuse(f"{kind} {key} needs {list(pages)}, but the pools are {self.schema.pools}")
        if not pages or min(pages.values()) < 0 or total < 1:
            raise Misuse(f"{kind} {key} needs at least one page, got {dict(need)}")
        if minimum is not None and (len(pages) != 1 or not 1 <= minimum <= total):
            raise Misuse(f"{kind} {key}: elastic intents name one pool and 1 <= minimum <= need")
        slot = self._slots.take(self.step + 1)
        if slot is None:
            return None
        intent = Intent(
            kind=kind,
            key=key,
            need=pages,
            minimum=total if minimum is None else minimum,
            parents=tuple(parents),
            participant=participant,
            ends_on_commit=ends_on_commit,
            slot=slot,
            serial=self._num_opened,
            epoch=self.epoch,
            step=self.step + 1,
            clock_ms=self.clock_ms,
            payload=payload,
        )
        self._num_opened += 1
        self._open[intent.serial] = intent
        self._unposted.append(intent)
        self._by_key[kind, key] = intent
        shape: list[Value] = []
        for pool, num_pages in pages.items():
            self.ledger.charge(pool, num_pages)
            shape += (pool, num_pages)
        # All that the verdict will depend on: ranks that differ in it must not get as far as that.
        shape += ("at least", intent.minimum, "ends on commit" if ends_on_commit else "ends")
        shape += [parent.serial for parent in intent.parents]
        self.journal.note("open", kind, key, intent.serial, slot, *shape)
        if (opened := getattr(participant, "opened", None)) is not None:
            opened(intent)
        return intent

    def bind(self, intents: Sequence[Intent]) -> None:
        """Agreed: ``intents``, opened one after the other just now, commit together or not at all.

        So one wish may take pages of several participants. Raises :class:`Misuse`, and has changed
        nothing, where one of them is reserved already or is not the next in the order of opening.
        """
        first = intents[0].serial
        is_run = [intent.serial for intent in intents] == list(range(first, first + len(intents)))
        if not is_run or any(intent.state is not State.PROPOSED for intent in intents):
            raise Misuse(f"only what was just opened in a row can be bound, not {list(intents)}")
        for intent in intents:
            intent.bound = tuple(other for other in intents if other is not intent)
        self.journal.note("bind", *(intent.serial for intent in intents))

    def find(self, kind: str, key: Value) -> Intent | None:
        """The open intent of this kind and key."""
        return self._by_key.get((kind, key))

    def alias(self, intent: Intent, key: Value) -> None:
        """Find ``intent`` under another key too: the node it is about was split."""
        self._by_key[intent.kind, key] = intent
        intent.aliases.append(key)
        self.journal.note("alias", intent.serial, key)

    def withdraw(self, intent: Intent) -> None:
        """Agreed: it shall not be (any longer). Undecided, it will be aborted whatever the votes;
        committed, it counts as unpublished. Its pages stay charged until it has ended."""
        if intent.is_undecided and not intent.withdrawn:
            intent.withdrawn = True
            self.journal.note("withdraw", intent.serial)
        elif intent.state is State.COMMITTED:
            intent.advance(Event.WITHDRAW)
            self.journal.note("withdraw", intent.serial)

    def room(self, pool: str) -> int:
        """Pages that a plan may use now: agreed, less what is spoken for."""
        return self.ledger.room(pool)

    def give_back(self, pool: str, num_pages: int) -> None:
        """Agreed: ``num_pages`` that ended intents had kept in ``pool`` are free for plans again.

        What a DONE intent keeps stays charged until its owner gives it back: when it evicts. Raises
        :class:`Misuse` for more than is charged.
        """
        if not 0 <= num_pages <= self.ledger.charged(pool):
            raise Misuse(
                f"{num_pages} pages of {pool} cannot be given back:"
                f" {self.ledger.charged(pool)} are charged"
            )
        self.journal.note("give_back", pool, num_pages)
        self.ledger.refund(pool, num_pages)

    def hold(self, pool: str, num_pages: int) -> None:
        """Agreed: ``num_pages`` of ``pool`` are spoken for without an intent (until given back)."""
        if num_pages < 0:
            raise Misuse(f"{num_pages} pages of {pool} cannot be held")
        self.journal.note("hold", pool, num_pages)
        self.ledger.charge(pool, num_pages)

    @property
    def num_free_slots(self) -> int:
        """Intents that :meth:`open` takes before it says ``None``: agreed."""
        return self._slots.num_free(self.step + 1)

    def note(self, tag: str, *values: Value) -> None:
        """Put an agreed call of the caller into the journal and so into the fingerprint."""
        self.journal.note(tag, *values)

    # -- local facts -----------------------------------------------------------------------------

    def reserve(self, intent: Intent) -> bool:
        """Reserve every pool of the intent, in canonical order; undo exactly where one fails.

        True: held, and its copy may have started. Where it is withdrawn, or this rank lacks pages
        of a parent or of one bound to it, nothing is reserved: its vote cannot help any more.
        """
        if intent.state is not State.PROPOSED:
            raise Misuse(f"{intent!r} cannot be reserved again")
        if any(parent.state is State.PROPOSED for parent in intent.parents):
            raise Misuse(f"{intent!r} builds on what is not reserved yet: reserve that first")
        held = intent.reservation.num_pages
        is_of_use = all(_holds(parent) for parent in intent.parents)
        is_of_use = is_of_use and not any(_is_refused(other) for other in intent.bound)
        if not intent.withdrawn and is_of_use:
            _take(intent, held)
        if sum(held.values()) >= intent.minimum:
            intent.vote = sum(held.values())
            intent.advance(Event.RESERVE)
            self.journal.fact("reserve", intent.serial, intent.vote)
            intent.participant.start(intent)
            return True
        _undo(intent, held)
        intent.advance(Event.REFUSE)
        intent.local_ended = True
        self.journal.fact("refuse", intent.serial)
        return False

    def reserve_open(self) -> None:
        """Reserve what was proposed and is not reserved yet, in the order of opening."""
        for intent in tuple(self._unposted):
            if intent.state is State.PROPOSED:
                self.reserve(intent)

    def mark_ended(self, intent: Intent, result: int | None = None) -> None:
        """Nothing of it runs on this rank any more; ``result`` pages went well (``None``: all).

        What belongs to an epoch that was closed since changes nothing.
        """
        if not intent.is_open:
            return
        if intent.local_ended or intent.state is State.PROPOSED:
            how = "twice" if intent.local_ended else "before it was reserved"
            raise InternalError(f"{intent!r} ended {how} on rank {self.rank}")
        if result is not None and not 0 <= result <= intent.vote:
            raise Misuse(f"{intent!r} holds {intent.vote} pages, so {result} cannot have gone well")
        intent.local_ended = True
        intent.local_result = intent.vote if result is None else result
        self.journal.fact("ended", intent.serial, intent.local_result)

    # -- the ballot ------------------------------------------------------------------------------

    def post(
        self,
        iteration: int,
        *,
        live: int = 0,
        now_ms: int = 0,
        status: Status = Status.HEALTHY,
        round_number: int = 0,
    ) -> Vector:
        """The ballot of the next step. Every open intent must be reserved or refused.

        ``now_ms`` is this rank's elapsed time of the epoch. A BROKEN rank votes 0 for everything.
        Raises :class:`Misuse`, and has changed nothing, where an intent is not reserved or more
        than ``lag`` ballots are in flight already.
        """
        if len(self._posted) > self.lag:
            raise Misuse(f"{len(self._posted)} ballots are in flight: settle the oldest first")
        is_broken = status is Status.BROKEN
        if not is_broken and any(intent.state is State.PROPOSED for intent in self._unposted):
            raise Misuse("every open intent must be reserved before a ballot is posted")
        # What is broken may be this very callable.
        usable = {pool: 0 if is_broken else self._usable[pool]() for pool in self.schema.pools}
        self.step += 1
        self.journal.step = self.step
        header = Header(
            schema=self._schema_digest,
            epoch=self.epoch,
            step=self.step,
            iteration=iteration,
            round=round_number,
            fingerprint=self.journal.fingerprint,
            live=live,
        )
        vector = self.schema.ballot(self.rank, header, status, now_ms, usable)
        intents = () if is_broken else tuple(self._open.values())
        voted = () if is_broken else tuple(self._unposted)
        num_slots = self._write_slots(vector, intents)
        self.journal.fact("post", iteration, len(intents))
        self.newest = PostedBallot(self.step, header, intents, voted, num_slots)
        self._posted.append(self.newest)
        is_plain = status is Status.HEALTHY and not intents and not round_number
        self.said = vector if is_plain else None
        return vector

    @property
    def can_repeat(self) -> bool:
        """Nothing is open or about to be free, and the newest ballot carried nothing.

        Then the next ballot may say the same: agreed, but for what a caller knows besides.
        """
        is_settled = self.said is not None and not self._open and not self.ledger.is_cooling
        return is_settled and self.num_free_slots == self.schema.num_slots

    def post_again(self, iteration: int, now_ms: int) -> Vector:
        """The ballot of a step before which nothing has happened: it says what the last one said.

        The caller knows that no agreed call and no fact came in between. Raises :class:`Misuse`,
        and has changed nothing, where the last ballot cannot be repeated.
        """
        said = self.said
        if said is None or self._open or len(self._posted) > self.lag:
            raise Misuse("the last ballot cannot be repeated: post a new one")
        self.step += 1
        self.journal.step = self.step
        last = self.newest.header
        header = Header(
            last.schema, last.epoch, self.step, iteration, 0, last.fingerprint, last.live
        )
        vector = repeated(said, self.step, iteration, now_ms)
        if self.journal.is_written:
            self.journal.fact("post", iteration, 0)
        self.newest = PostedBallot(self.step, header, (), (), 0, vector)
        self._posted.append(self.newest)
        return vector

    def _write_slots(self, vector: Vector, intents: tuple[Intent, ...]) -> int:
        """Write the slots of ``intents``; how many slots from 0 on may be in use."""
        num_slots = 1 + max((intent.slot for intent in intents), default=-1)
        columns = [0] * (2 * num_slots)
        for intent in intents:
            position = 2 * intent.slot
            if intent.posted_step < 0:
                columns[position] = intent.vote
                # An ending may share the ballot of the vote, unless it went wrong: the number in
                # this field is the vote, so a failure is reported with the next ballot.
                whole = intent.local_ended and intent.local_result == intent.vote
                columns[position + 1] = int(whole)
                intent.posted_step = self.step
                intent.advance(Event.POST)
            elif intent.local_ended:
                columns[position] = intent.local_result
                columns[position + 1] = 1
            else:
                columns[position] = intent.total
        if intents:
            first = self.schema.first_slot
            vector[first : first + 2 * num_slots] = columns
            self._unposted.clear()
        return num_slots

    @property
    def oldest_posted(self) -> PostedBallot | None:
        """The ballot whose verdict is settled next."""
        return self._posted[0] if self._posted else None

    def read(self, reduced: Vector) -> Verdict:
        """The verdict in the reduced oldest ballot; nothing is applied."""
        return tally(self.schema, reduced, self._posted[0].num_slots if self._posted else None)

    def told_again(self, reduced: Vector) -> int:
        """The agreed clock, if the oldest ballot repeats another and all ranks say the same.

        -1: it does not, and :meth:`read` tells what there is to settle.
        """
        said = self._posted[0].repeats
        return -1 if said is None else told_the_same(reduced, said, self._agreed)

    def settle_again(self, clock_ms: int) -> None:
        """Settle the oldest ballot, which has :meth:`told_again` what was settled before."""
        self.settled_step = self._posted.popleft().step
        self.clock_ms = clock_ms

    def settle(self, verdict: Verdict) -> list[Outcome]:
        """Apply the verdict of the oldest posted ballot; the outcomes, in the order applied.

        Verdicts first, then endings, then quarantine. The order within each is the order of
        opening. Raises :class:`InternalError`, and has changed nothing, where ranks differ (that is
        for the caller to see) or where the verdict is of another ballot.
        """
        if not self._posted:
            raise Misuse("no ballot is in flight: post before you settle")
        if verdict.mismatch or verdict.status is Status.BROKEN:
            raise InternalError("a verdict on which ranks differ cannot be settled")
        if verdict.step != self._posted[0].step:
            raise InternalError(
                f"the verdict of step {verdict.step} was read for step {self._posted[0].step}"
            )
        posted = self._posted.popleft()
        self.settled_step = posted.step
        self.clock_ms = verdict.clock_ms
        agreed = list(verdict.usable.values())
        if agreed != self._agreed:
            self._agreed, self.said = agreed, None  # plans may have more room, or less
        self.ledger.agree(verdict.usable)
        self.ledger.settle(posted.step)
        outcomes: list[Outcome] = []
        for intent in posted.voted:
            is_lost = _lacks_bound(intent, verdict.votes)
            self._decide(intent, 0 if is_lost else verdict.votes[intent.slot], outcomes)
        for intent in posted.intents:
            if (verdict.ended[intent.slot] or intent.ends_on_commit) and intent.is_open:
                self._end(intent, verdict, outcomes)
        self._quarantine(outcomes)
        return outcomes

    def _decide(self, intent: Intent, votes: int, outcomes: list[Outcome]) -> None:
        intent.decided_ms = self.clock_ms
        intent.cause = _why_not(intent, votes)
        if not intent.cause:
            intent.agreed = votes
            self.journal.note("commit", intent.kind, intent.serial, votes)
            intent.advance(Event.COMMIT)
            intent.participant.commit(intent)
            outcomes.append(Outcome(OutcomeKind.COMMIT, intent))
        else:
            self.journal.note("abort", intent.kind, intent.serial, intent.cause)
            intent.advance(Event.ABORT)
            intent.participant.abort(intent)
            outcomes.append(Outcome(OutcomeKind.ABORT, intent))

    def _end(self, intent: Intent, verdict: Verdict, outcomes: list[Outcome]) -> None:
        if intent.ends_on_commit and intent.state is State.COMMITTED:
            intent.result = intent.agreed
        elif verdict.ended[intent.slot]:
            intent.result = min(verdict.votes[intent.slot], intent.agreed)
        else:
            return
        failed = intent.state is State.COMMITTED and intent.result < intent.minimum
        self.journal.note("end", intent.serial, intent.result)
        intent.advance(Event.FAIL if failed else Event.END)
        kept = intent.result if intent.state is State.DONE else 0
        self._close(intent, kept)
        outcomes.append(Outcome(OutcomeKind.FAIL if failed else OutcomeKind.END, intent))

    def _quarantine(self, outcomes: list[Outcome]) -> None:
        # Intents are decided in the order of opening, so those behind the first are younger.
        overdue: list[Intent] = []
        for intent in self._open.values():
            if intent.is_undecided or self.clock_ms - intent.decided_ms <= self._copy_timeout_ms:
                break
            overdue.append(intent)
        for intent in overdue:
            self.journal.note("quarantine", intent.serial)
            intent.advance(Event.QUARANTINE)
            self._close(intent, kept=0)
            outcomes.append(Outcome(OutcomeKind.QUARANTINE, intent))

    def _close(self, intent: Intent, kept: int) -> None:
        """Free the slot, and of the charge everything but the ``kept`` pages of a DONE intent."""
        del self._open[intent.serial]
        for key in (intent.key, *intent.aliases):
            if self._by_key.get((intent.kind, key)) is intent:
                del self._by_key[intent.kind, key]
        self._slots.give_back(intent.slot, self.settled_step + self.lag)
        quarantined = intent.state is State.QUARANTINED
        for pool, num_pages in intent.need.items():
            back = num_pages - kept if len(intent.need) == 1 else (0 if kept else num_pages)
            if quarantined:
                # The first ballot that every rank posts after this: `self.step` is one rank's own.
                self.ledger.cool(self.settled_step + self.lag + 1, pool, back)
            else:
                self.ledger.refund(pool, back)
        lost = getattr(intent.participant, "lost", None) if quarantined else None
        (lost or intent.participant.ended)(intent)
        intent.parents = intent.bound = ()

    # -- epochs ----------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, usable: Mapping[str, int]) -> list[Intent]:
        """Drop all open intents and start anew with ``usable`` pages agreed by all ranks.

        Nothing of the old epoch is left that ranks could differ in: serials count anew. Returns
        what was dropped; its copies may still run, and their endings change nothing.
        """
        if set(usable) != set(self.schema.pools):
            raise Misuse(f"say what is usable of each of {self.schema.pools}, got {sorted(usable)}")
        dropped = list(self._open.values())
        for intent in dropped:
            intent.advance(Event.DROP)
        self._open.clear()
        self._by_key.clear()
        self._unposted.clear()
        self._posted.clear()
        self.said = None
        self._agreed = []
        self._num_opened = 0
        self._slots = SlotTable(self.schema.num_slots, self.lag)
        self.ledger.clear()
        self.ledger.agree(dict(usable))
        self.epoch = epoch
        self.step = 0
        self.settled_step = 0
        self.clock_ms = 0
        self.journal.begin_epoch(epoch)
        return dropped

    # -- looking in ------------------------------------------------------------------------------

    @property
    def open_intents(self) -> tuple[Intent, ...]:
        """Everything that holds a slot, in the order of opening."""
        return tuple(self._open.values())

    @property
    def oldest_open(self) -> Intent | None:
        """The open intent that was opened first."""
        return next(iter(self._open.values()), None)

    @property
    def is_idle(self) -> bool:
        """Nothing is open and no page is cooling: agreed, so the same on every rank."""
        return not self._open and not self.ledger.is_cooling

    def check_integrity(self) -> None:
        """Raise :class:`InternalError` unless slots and open intents match one to one."""
        slots = sorted(intent.slot for intent in self._open.values())
        if len(set(slots)) != len(slots) or len(slots) != self._slots.num_taken:
            raise InternalError(f"slots {slots} do not match {self._slots.num_taken} taken")
        for intent in self._open.values():
            if not intent.is_open:
                raise InternalError(f"{intent!r} is over but still holds its slot")


def _take(intent: Intent, held: dict[str, int]) -> None:
    """Reserve pool after pool into ``held``, as far as this rank has pages; or all in one call."""
    if (reserve_all := getattr(intent.participant, "reserve_all", None)) is not None:
        if reserve_all(intent):
            held.update(intent.need)
        return
    for pool, num_pages in intent.need.items():
        taken = intent.participant.reserve(intent, pool, num_pages)
        if not 0 <= taken <= num_pages:
            raise InternalError(f"{intent!r} reserved {taken} of {num_pages} in {pool}")
        if taken:
            held[pool] = taken
        if taken < num_pages:
            return


def _undo(intent: Intent, held: dict[str, int]) -> None:
    """Return what is ``held``: too little."""
    for pool in reversed(held):
        intent.participant.unreserve(intent, pool)
    held.clear()


def _why_not(intent: Intent, votes: int) -> str:
    """The agreed cause of an ABORT; empty where it is a COMMIT."""
    if intent.withdrawn:
        return "withdrawn"
    if not all(parent.is_whole for parent in intent.parents):
        return "parent"
    return "" if votes >= intent.minimum else "refused"


def _lacks_bound(intent: Intent, votes: Sequence[int]) -> bool:
    """Whether one that commits only together with ``intent`` does not. ``votes`` by slot."""
    return any(
        (_why_not(other, votes[other.slot]) if other.is_undecided else other.cause) != ""
        for other in intent.bound
    )


def _is_refused(other: Intent) -> bool:
    """This rank has voted against ``other``."""
    return other.state is not State.PROPOSED and other.vote < other.minimum


def _holds(parent: Intent) -> bool:
    """Whether what builds on ``parent`` still has a chance on this rank."""
    if parent.is_undecided:
        return parent.vote == parent.total and not parent.withdrawn
    return parent.is_whole
