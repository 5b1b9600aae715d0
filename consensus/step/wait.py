"""How long one rank waits for one verdict: when it warns, when it gives up, and who is excused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvpact.consensus.core.errors import Misuse, StoreSilent
from kvpact.consensus.epoch.closing import Closer, Locator

__all__ = ["PAUSED", "StepLimits", "VerdictWait"]

_log = logging.getLogger("kvpact")

#: How the phase of a rank begins that pauses.
PAUSED = "paused"
_POSITIVE = ("warn_s", "deadline_s", "grace_s", "slice_s", "pause_s", "progress_s")


class StepLimits(msgspec.Struct, frozen=True):
    """Bounds of one step, in seconds.

    A rank that waits says so after ``warn_s``, gives up after ``deadline_s`` and then waits
    ``grace_s`` for what the others know. While it waits it looks every ``slice_s`` whether others
    have given up. It waits up to ``pause_s`` for a rank that has said that it pauses. What is open
    or waits for longer than ``progress_s`` on the agreed clock is a loss of progress.
    """

    warn_s: float = 10.0
    deadline_s: float = 30.0
    grace_s: float = 0.5
    slice_s: float = 0.1
    pause_s: float = 3600.0
    progress_s: float = 300.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise Misuse(f"{name} must be positive, got {getattr(self, name)}")


class VerdictWait:
    """The wait of ``rank`` for the verdict of one step; begun anew with :meth:`begin`.

    ``clock`` tells the time, in seconds, after a call that may have lasted.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        limits: StepLimits,
        locator: Locator,
        clock: Callable[[], float],
    ) -> None:
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._limits = limits
        self._locator = locator
        self._clock = clock
        self._began = 0.0
        self._counts_from = 0.0  # the deadline runs from here: after a pause, from its end
        self._looked_at = 0.0
        self._warned = False
        self._num_deadlines = 1
        self._has_excused = False
        self._is_store_silent = False

    def begin(self, now: float) -> None:
        """The wait begins."""
        self._began = self._counts_from = self._looked_at = now
        self._warned = self._has_excused = False
        self._num_deadlines = 1

    def waited_s(self, now: float) -> float:
        """How long it has lasted."""
        return now - self._began

    def look_around(self, step: int, now: float, closer: Closer) -> str:
        """Why this rank gives ``step`` up now: ``asked``, ``waited``, or nothing (empty).

        May ask the store; raises :class:`StoreSilent` only where the deadline has passed.
        """
        limits = self._limits
        if now - self._looked_at >= limits.slice_s:
            if self.are_others_closing(step, now, closer):
                return "asked"
            self._excuse_pauses(now)
            if self._is_store_silent:
                return ""  # that took a while: first see whether the verdict has come
        counted_s = now - self._counts_from
        if counted_s >= limits.warn_s and not self._warned:
            self._warned = True
            if not self._is_store_silent:
                self._warn(step, self.waited_s(now))
        if counted_s < limits.deadline_s * self._num_deadlines:
            return ""
        if self._num_deadlines == 1 and not closer.claim_given_up(step):
            # A straggler has settled this step: its verdict is on the way to this rank too.
            self._num_deadlines = 2
            return ""
        return "waited"

    def are_others_closing(self, step: int, now: float, closer: Closer) -> bool:
        """Whether this rank, which waits for ``step``, is asked to report."""
        self._looked_at = now
        self._is_store_silent = False
        try:
            return closer.is_closing(step)
        except StoreSilent:
            self._be_silent()
            return False

    def _be_silent(self) -> None:
        """The store is not needed while all ranks come; each try may last, so the next is far."""
        self._is_store_silent = True
        self._looked_at = self._clock() + self._limits.deadline_s / 4

    def _excuse_pauses(self, now: float) -> None:
        """A rank that pauses is waited for; the whole deadline begins when its pause has ended."""
        limits = self._limits
        if self._is_store_silent:
            return
        soon = now - self._counts_from < min(limits.warn_s, limits.deadline_s / 2)
        if soon and not self._has_excused:
            return
        if now - self._began >= limits.pause_s:
            return
        try:
            is_excused = any(self._locator.is_paused(rank) for rank in self._others)
        except StoreSilent:
            self._be_silent()
            return
        if is_excused:
            self._counts_from = now
            self._has_excused = True

    def _warn(self, step: int, waited_s: float) -> None:
        """Say early whom this rank waits for; nothing follows from it."""
        for rank, seen in self._locator.last_seen(self._others, asks=False).items():
            if seen is None or seen.step < step:
                at = "never seen" if seen is None else f"{seen.phase} of step {seen.step}"
                _log.warning(
                    "rank %d waits for rank %d in step %d for %.1f s: %s",
                    self._rank, rank, step, waited_s, at,
                )  # fmt: skip
