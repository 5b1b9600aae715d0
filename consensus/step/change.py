"""How one epoch follows another: closed by all ranks together, and the next one opened.

The stepper says that it gives up; this files the report, finds the seal, and, where the policy
allows it, carries the rank over into a new epoch. Polled, like everything that waits for others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvpact.consensus.core.ballot import Header, Vector
from kvpact.consensus.core.errors import KvpactError, Misuse, StoreSilent
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.epoch.closing import Closer, Introduction, Locator, Opener, agree
from kvpact.consensus.epoch.report import Incident, Policy, Report, Seal, SealedError
from kvpact.consensus.step.progress import describe
from kvpact.consensus.step.wait import StepLimits
from kvpact.consensus.transport.gloo import Group
from kvpact.consensus.transport.store import Store

__all__ = ["Carrier", "EpochChange"]

_log = logging.getLogger("kvpact")


class Carrier(Protocol):
    """The state that an epoch's end carries over: the cache, or an engine's own tree and pools."""

    def live(self) -> dict[str, int]:
        """Pages of each live request on this rank: those that differ are lost."""
        ...

    def kept(self) -> list[int]:
        """Names, as sorted numbers, of what a ``detach`` could keep on this rank."""
        ...

    def drop(self, seal: Seal) -> None:
        """This epoch is over: drop what ``seal.then`` says; what live requests hold stays out."""
        ...

    def usable(self) -> dict[str, int]:
        """Pages per pool that this rank can use now, after :meth:`drop`. A local fact."""
        ...

    def pools(self) -> dict[str, dict[str, int]]:
        """Count the pages of each pool, for a person to read."""
        ...

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """Begin ``epoch`` with ``usable`` pages on every rank."""
        ...


class EpochChange:
    """The ends and beginnings of epochs on one rank.

    ``regroup(epoch)`` forms the group of a new epoch; without it a divergence always raises.
    ``endings`` counts the seals by the kind of their error, ``incident`` is the last of them, and
    ``on_incident`` is told each; it may be set at any time, and what it raises is only logged.
    """

    def __init__(
        self,
        manager: TransactionManager,
        group: Group,
        store: Store,
        *,
        limits: StepLimits,
        locator: Locator,
        carrier: Carrier,
        policy: Policy,
        regroup: Callable[[int], Group] | None,
        on_incident: Callable[[Incident], None] | None = None,
    ) -> None:
        self.endings: Counter[str] = Counter()
        self.incident: Incident | None = None
        self.num_resets = 0
        self.group_epoch = manager.epoch
        self._manager = manager
        self._group = group
        self._store = store
        self._limits = limits
        self._locator = locator
        self._carrier = carrier
        self._policy = policy if regroup is not None or policy.kind == "observe" else Policy()
        self._regroup = regroup
        self.on_incident = on_incident
        self._seal: Seal | None = None
        self._ends_at = 0.0
        self._resets_at: list[float] = []
        self._opener: Opener | None = None
        self.closer = self._new_closer()

    # -- closing ---------------------------------------------------------------------------------

    def file(
        self,
        cause: str,
        at_step: int,
        *,
        headers: dict[int, Header],
        held: dict[int, Vector],
        waited_s: float,
        broken_rank: int,
        raised: str,
        detail: str,
        phase: str,
        waiting: list[str],
    ) -> None:
        """This rank gives up at ``at_step``: report it to the others."""
        manager, now = self._manager, self._group.now()
        self._resets_at = [at for at in self._resets_at if now - at < self._policy.window_s]
        grace_s = self._limits.grace_s
        if cause not in ("waited", "late"):
            grace_s += self._limits.deadline_s  # the others have not waited yet
        manager.journal.flush()
        oldest = manager.oldest_open
        report = Report(
            rank=self._group.rank,
            cause=cause,
            at_step=at_step,
            posted=manager.step,
            settled=manager.settled_step,
            headers=dict(headers),
            tail=manager.journal.tail(),
            held={step: vector.tolist() for step, vector in held.items()},
            broken_rank=broken_rank,
            raised=raised,
            detail=detail,
            epoch=manager.epoch,
            live=self._carrier.live(),
            kept=self._carrier.kept() if self._policy.kind == "detach" else [],
            pools=self._carrier.pools(),
            pending=describe(manager),
            owes_ending=oldest is not None and not oldest.local_ended,
            waiting=waiting,
            phase=phase,
            waited_s=waited_s,
            num_resets=len(self._resets_at),
        )
        self.closer.file(report, now, grace_s)

    def poll(self) -> Seal | None:
        """The seal of this epoch, once it stands, and, where it ends all, others have read it.

        For the others this rank waits at most ``grace_s``: it may be the one that serves the store.
        """
        now = self._group.now()
        if self._seal is None:
            self._seal = self._find_seal()
            self._ends_at = now + self._limits.grace_s
        seal = self._seal
        if seal is None or (seal.then == "raise" and now < self._ends_at and self._is_read_late()):
            return None
        self._seal = None
        return seal

    def _is_read_late(self) -> bool:
        try:
            return not self.closer.have_all_read()
        except StoreSilent:
            return False  # it is known how this epoch ends; nobody else can be helped

    def _find_seal(self) -> Seal | None:
        seal = self.closer.poll(self._group.now())
        if seal is not None:
            self.endings[seal.error.kind] += 1
            self._manager.journal.fact("sealed", seal.error.kind, seal.through)
            try:
                incident = self.closer.incident(seal)
            except StoreSilent:
                bare = msgspec.structs.replace(seal, verdicts={})
                incident = Incident(self._group.rank, self._manager.epoch, bare, [])
            self._publish(incident)
        return seal

    def tell(self, error: KvpactError) -> None:
        """Tell the end of observing on this rank alone: there is no seal of it."""
        manager = self._manager
        self.endings[type(error).__name__] += 1
        sealed = SealedError(
            type(error).__name__, error.message, (), manager.epoch, manager.step, error.story
        )
        seal = Seal(sealed, manager.settled_step, {}, "off")
        self._publish(Incident(self._group.rank, manager.epoch, seal, self.closer.known()))

    def _publish(self, incident: Incident) -> None:
        self.incident = incident
        if self.on_incident is None:
            return
        try:
            self.on_incident(incident)
        except Exception:  # noqa: BLE001 - whoever listens, the epoch goes on ending
            _log.exception("on_incident failed")

    def known(self) -> list[str]:
        """Return this rank's knowledge of the end that is under way, as lines."""
        return [
            f"rank {report.rank} gave up at step {report.at_step}"
            f" (settled through {report.settled}): {report.cause}"
            + (f": {report.detail}" if report.detail else "")
            for report in self.closer.known()
        ]

    # -- opening ---------------------------------------------------------------------------------

    def drop(self, seal: Seal) -> None:
        """Drop what was decided in this epoch, then meet the others for the next one."""
        _log.error("all ranks %s: %s", seal.then, seal.error.build())
        self._carrier.drop(seal)
        self._group.close()
        self._opener = Opener(
            self._store,
            f"epoch/{self._manager.epoch + 1}",
            Introduction(self._group.rank, {}, self._carrier.usable()),
            self._group.ranks,
            now_s=self._group.now(),
            timeout_s=self._limits.deadline_s + self._limits.grace_s,
        )

    def open(self) -> Group | None:
        """The group of the new epoch, once all ranks are there; ``None``: ask again.

        Raises :class:`RankStalled` or :class:`PeerLost` naming who does not come in time.
        """
        if self._opener is None or self._regroup is None:
            raise Misuse("no epoch has been closed for another to begin")
        found = self._opener.poll(self._group.now())
        if found is None:
            return None
        self._opener = None
        self.closer.tidy()
        self._group = self._regroup(self._manager.epoch + 1)
        self.group_epoch = self._manager.epoch + 1
        self.restart(agree([found[rank] for rank in sorted(found)]))
        self.num_resets += 1
        self._resets_at.append(self._group.now())
        return self._group

    def look_on(self) -> None:
        """The end of this epoch was only observed: it goes on, and may end again."""
        self.closer = self._new_closer(self.closer.round_number + 1)

    def restart(self, usable: dict[str, int]) -> None:
        """Begin the next epoch with ``usable`` pages on every rank."""
        self._carrier.restart(self._manager.epoch + 1, usable)
        is_new_group = self.group_epoch == self._manager.epoch
        self.closer = self._new_closer(0 if is_new_group else self.closer.round_number)

    def _new_closer(self, round_number: int = 0) -> Closer:
        return Closer(
            store=self._store,
            rank=self._group.rank,
            ranks=self._group.ranks,
            epoch=self._manager.epoch,
            locator=self._locator,
            policy=self._policy,
            group_epoch=self.group_epoch,
            round_number=round_number,
        )
