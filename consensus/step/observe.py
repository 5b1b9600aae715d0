"""The policy ``observe``: what is found is told, nothing changes, and no engine is ended by it.

After a finding all ranks compare anew from the same place of their loops, so that the next one is
found too. Where ranks cannot go on together (one is missing, broken, or in another step; the store
is silent) each goes on alone: its own ballot is its verdict, and nothing is compared any more.
"""

from __future__ import annotations

from typing import Final

from kvpact.consensus.core.ballot import Vector, Verdict
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.transport.gloo import Group

__all__ = ["QUIET_STEPS", "Alone", "Observation", "OwnVote"]

#: After a finding that was told, differences within so many steps are only counted.
QUIET_STEPS: Final = 16


class Observation:
    """The findings of this epoch's ballots under ``observe``. Agreed, but for ``is_off``.

    ``is_off``: this rank goes on alone, for the rest of its life.
    """

    def __init__(self, manager: TransactionManager, *, is_on: bool) -> None:
        self.is_on = is_on
        self.is_off = False
        self._manager = manager
        self.forget()

    def forget(self) -> None:
        """A new epoch: all is equal again."""
        self.through = 0  # ballots up to this step carry decisions of before the last finding
        self._quiet_until = 0
        self._is_live_known = False
        self._owes_start = False

    def is_known(self, verdict: Verdict) -> bool:
        """Whether the mismatch of ``verdict`` is what was told already."""
        if not self.is_on:
            return False
        if verdict.mismatch == "live":
            return self._is_live_known
        return verdict.mismatch == "fingerprint" and verdict.step <= self.through

    def is_too_soon(self, verdict: Verdict) -> bool:
        """Whether this is new, but follows so soon that it is only counted: compare anew."""
        is_soon = verdict.mismatch == "fingerprint" and verdict.step <= self._quiet_until
        if self.is_on and is_soon:
            self.start_anew()
            return True
        return False

    def saw_equal(self) -> None:
        """A verdict without any difference: the live requests are equal again."""
        self._is_live_known = False

    def told(self, field: str, *, is_between_steps: bool) -> None:
        """A difference in ``field`` has been sealed. Between steps, calls may still be due."""
        if field == "live":
            self._is_live_known = True
            return
        self._quiet_until = self._manager.step + QUIET_STEPS
        self._owes_start = is_between_steps
        if not is_between_steps:
            self.start_anew()

    def entered_step(self) -> None:
        """All calls before this step have been made, as on the ranks that met the finding in it."""
        if self._owes_start:
            self._owes_start = False
            self.start_anew()

    def start_anew(self) -> None:
        """Compare from here on: called at the same place of every rank's loop."""
        self.through = self._manager.step
        self._manager.journal.start_anew()


class OwnVote:
    """This rank's own ballot as the verdict: a :class:`Work` that has always ended."""

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout_s: float) -> bool:
        """True, at once."""
        return True

    def result(self) -> Vector:
        """The ballot as it was posted."""
        return self._vector


class Alone:
    """A :class:`Group` of one, in the place of ``group``: nothing is communicated."""

    def __init__(self, group: Group) -> None:
        self.rank: int = group.rank
        self.ranks: tuple[int, ...] = group.ranks
        self.size: int = group.size
        self.width: int = group.width
        self.now = group.now

    def min(self, vector: Vector) -> OwnVote:
        """``vector`` itself."""
        return OwnVote(vector)

    def close(self) -> None:
        """Nothing is open."""
