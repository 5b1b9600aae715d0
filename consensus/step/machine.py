"""The machine that a stepper drives: one rank's replicated state, as far as a step must know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvpact.consensus.core.participant import Outcome

__all__ = ["Machine"]


class Machine(Protocol):
    """One rank's part of the replicated state: the cache, or an engine's own tree and pools.

    A step calls ``prepare`` before it posts and ``settled`` after each verdict, on the scheduler's
    thread. An exception in either ends the epoch with the same error on all ranks.
    """

    def prepare(self) -> None:
        """Plan from agreed state, reserve what is open, start copies."""
        ...

    def is_at_rest(self) -> bool:
        """Say whether nothing can change before the next call: no copy runs, nobody waits.

        Waiting for room, for a slot or for the clock is waiting, too.

        Then, if ``prepare`` decided nothing, it would again decide nothing: until the next agreed
        call neither it nor ``settled`` is called. A fact of this rank. False is always right.
        """
        ...

    def settled(self, outcomes: list[Outcome], /) -> None:
        """Hear the outcomes of one settled ballot; the participants have heard of theirs."""
        ...

    def live_digest(self) -> int:
        """Digest the live requests into a number from 0 to 2**62 - 1; each ballot compares it."""
        ...

    def waits(self) -> Mapping[str, str]:
        """Name who waits in a line and is no intent yet, and what each lacks. Agreed."""
        ...
