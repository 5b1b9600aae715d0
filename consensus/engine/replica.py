"""One rank of a replica, put together for an engine that keeps its own tree, pools and copies.

:func:`join` is the start, :class:`Replica` is what an engine holds: it steps, it closes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpact.consensus.core.ballot import Schema
from kvpact.consensus.core.errors import KvpactError, Misuse
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Outcome
from kvpact.consensus.engine.limbo import Limbo
from kvpact.consensus.epoch.report import Policy, Seal
from kvpact.consensus.membership import Membership
from kvpact.consensus.step.progress import Waits
from kvpact.consensus.step.step import Carrier, StepLimits, Stepper

__all__ = ["CarriesNothing", "Replica", "join"]


class CarriesNothing:
    """The :class:`Carrier` of an engine whose policy is ``raise`` or ``observe``.

    A new epoch begins with empty pools. ``usable`` tells this rank's usable pages by pool.
    """

    def __init__(self, manager: TransactionManager, usable: Callable[[], dict[str, int]]) -> None:
        self._manager = manager
        self._usable = usable

    def live(self) -> dict[str, int]:
        """No request is carried."""
        return {}

    def kept(self) -> list[int]:
        """Nothing is kept."""
        return []

    def drop(self, seal: Seal) -> None:
        """Raise :class:`Misuse`: who wants a reset must say what happens to the engine's tree."""
        raise Misuse(f"an epoch that ends with {seal.then!r} needs a carrier of the engine's own")

    def usable(self) -> dict[str, int]:
        """Pages by pool that this rank can use."""
        return self._usable()

    def pools(self) -> dict[str, dict[str, int]]:
        """Usable and charged pages by pool, for the error that all ranks raise."""
        ledger = self._manager.ledger
        return {
            pool: {"usable": ledger.usable(pool), "charged": ledger.charged(pool)}
            for pool in self._manager.schema.pools
        }

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        """Begin ``epoch`` with nothing open and nothing charged."""
        self._manager.begin_epoch(epoch, usable)


class EngineMachine:
    """The :class:`Machine` that an engine's functions make; what it leaves out does nothing."""

    def __init__(
        self,
        manager: TransactionManager,
        *,
        plan: Callable[[], None] | None,
        submit: Callable[[], None] | None,
        settled: Callable[[list[Outcome]], None] | None,
        live: Callable[[], int] | None,
        waits: Waits | None,
    ) -> None:
        self._manager = manager
        self._plan = plan
        self._submit = submit
        self._settled = settled
        self._live = live
        self._waits = waits

    def prepare(self) -> None:
        """Plan, reserve what is open, launch the copies that have started."""
        if self._plan is not None:
            self._plan()
        self._manager.reserve_open()
        if self._submit is not None:
            self._submit()

    def is_at_rest(self) -> bool:
        """False: the engine's own plan may hear of its copies in every step."""
        return False

    def settled(self, outcomes: list[Outcome]) -> None:
        """Tell the engine what was settled."""
        if self._settled is not None:
            self._settled(outcomes)

    def live_digest(self) -> int:
        """Digest the engine's live requests; 0 where it tells none."""
        return 0 if self._live is None else self._live()

    def waits(self) -> Mapping[str, str]:
        """Name who waits in the engine's lines."""
        return {} if self._waits is None else self._waits()


class Replica:
    """This rank's share of a replica: ``manager``, ``stepper``, ``journal``, ``membership``.

    ``agreed`` are the pages of each pool that every rank has; ``limbo`` keeps what quarantined
    copies still use, and is left out of what the ballots call usable. Made by :func:`join`.
    """

    def __init__(
        self,
        *,
        manager: TransactionManager,
        stepper: Stepper,
        journal: Journal,
        membership: Membership,
        limbo: Limbo,
        pools: Mapping[str, int],
        leave_timeout_s: float,
    ) -> None:
        self.manager = manager
        self.stepper = stepper
        self.journal = journal
        self.membership = membership
        self.limbo = limbo
        self.pools = dict(pools)
        self.iteration = 0
        self._leave_timeout_s = leave_timeout_s

    @property
    def agreed(self) -> dict[str, int]:
        """Pages of each pool that every rank has."""
        return self.membership.usable

    def step(self, iteration: int | None = None) -> list[Outcome]:
        """One step: plan, reserve, post, settle; its outcomes, the same on every rank.

        ``iteration`` is the scheduler's own count, by default the number of this call. Raises the
        error that all ranks raise when an epoch ends.
        """
        self.iteration = self.iteration + 1 if iteration is None else iteration
        return self.stepper.run(self.iteration)

    def renew(self) -> None:
        """Agreed, between two steps: the engine has emptied its tree; begin a new epoch."""
        self.stepper.renew(dict(self.agreed))

    def close(self, *, at_once: bool = False) -> None:
        """Wait a bounded time for the other ranks, then close everything. May be called twice."""
        if at_once or self.stepper.error is not None:
            self.membership.close()
        else:
            self.membership.leave(self._leave_timeout_s)
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(at_once=error is not None)


def join(
    host: str,
    port: int,
    *,
    name: str,
    rank: int,
    ranks: Sequence[int],
    pools: Mapping[str, int],
    plan: Callable[[], None] | None = None,
    submit: Callable[[], None] | None = None,
    settled: Callable[[list[Outcome]], None] | None = None,
    live: Callable[[], int] | None = None,
    waits: Waits | None = None,
    carrier: Carrier | None = None,
    lag: int = 0,
    num_slots: int = 256,
    copy_timeout_s: float = 60.0,
    limits: StepLimits | None = None,
    policy: Policy | None = None,
    facts: Mapping[str, str] | None = None,
    journal_path: Path | None = None,
    start_timeout_s: float = 60.0,
    leave_timeout_s: float = 5.0,
    on_alarm: Callable[[KvpactError], None] | None = None,
) -> Replica:
    """Meet the other ranks of replica ``name`` through the store at ``host:port``.

    ``pools`` are this rank's pages by pool; the smallest number of each becomes the agreed one. A
    step calls ``plan()`` (open intents, from agreed state), reserves what is open, then calls
    ``submit()`` (one launch for all copies that have started) and, once the verdict is there,
    ``settled(outcomes)``. ``live()`` digests the live requests, ``waits()`` names who waits.
    ``facts`` must be equal on all ranks. ``on_alarm`` is called from a thread of its own where
    ranks differ or give up while this rank's scheduler is somewhere else, with the error that its
    next step will raise.

    Raises :class:`Misuse` where ranks are configured differently or a policy needs a carrier,
    :class:`RankStalled` or :class:`PeerLost` where one does not come within ``start_timeout_s``,
    :class:`StoreSilent` without a store. Nothing is left behind.
    """
    policy, limits = policy or Policy(), limits or StepLimits()
    if carrier is None and policy.kind not in ("raise", "observe"):
        raise Misuse(f"the policy '{policy.kind}' needs a carrier: what becomes of the tree?")
    schema = Schema(pools=tuple(sorted(pools)), num_slots=num_slots)
    limbo = Limbo()

    def usable(pool: str) -> int:
        return pools[pool] - limbo.num_pages(pool)

    with ExitStack() as parts:
        journal = Journal(rank, path=journal_path)
        parts.callback(journal.close)
        manager = TransactionManager(
            rank=rank,
            schema=schema,
            lag=lag,
            copy_timeout_s=copy_timeout_s,
            journal=journal,
            usable={pool: partial(usable, pool) for pool in schema.pools},
        )
        membership = Membership.join(
            host,
            port,
            name=name,
            rank=rank,
            ranks=ranks,
            width=schema.width,
            facts={**(facts or {}), "lag": str(lag), "policy": policy.kind},
            usable=pools,
            deadline_s=limits.deadline_s,
            start_timeout_s=start_timeout_s,
        )
        parts.callback(membership.close)
        manager.begin_epoch(0, membership.usable)
        stepper = Stepper(
            manager,
            membership.group,
            membership.store,
            EngineMachine(
                manager, plan=plan, submit=submit, settled=settled, live=live, waits=waits
            ),
            carrier=carrier
            or CarriesNothing(manager, lambda: {pool: usable(pool) for pool in schema.pools}),
            limits=limits,
            locator=membership.locator,
            policy=policy,
            regroup=membership.regroup,
            beacon=membership.watch,
        )
        membership.watch_over(stepper, on_alarm)
        parts.pop_all()
    return Replica(
        manager=manager,
        stepper=stepper,
        journal=journal,
        membership=membership,
        limbo=limbo,
        pools=pools,
        leave_timeout_s=leave_timeout_s,
    )
