"""Ranks can wait together for ever in perfect agreement: what is open or waits has an age here.

Everything in it follows from agreed state and the agreed clock, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.core.participant import Intent

__all__ = ["Progress", "Waits", "describe"]

#: What waits and is no intent yet (tickets in a line), by name, with what it waits for. Agreed.
Waits = Callable[[], Mapping[str, str]]

#: Looks within the bound.
_LOOKS = 16
#: So many open intents are described in a report.
MAX_DESCRIBED = 32
#: So many of those who wait in line are told with the one that outlived its bound.
MAX_WAITING_TOLD = 8


class Progress:
    """Ages of open intents and of those who wait in line. ``bound_s`` runs on the agreed clock."""

    def __init__(
        self, manager: TransactionManager, *, bound_s: float, waits: Waits | None = None
    ) -> None:
        self._manager = manager
        self._bound_ms = round(bound_s * 1000)
        self._waits = waits
        self._since: dict[str, int] = {}
        self.look_at_ms = 0  # before this nothing can be overdue that was not told
        self._looked_ms = self._woke_ms = 0

    def restart(self) -> None:
        """A new epoch, and so a new clock: all ages begin anew."""
        self._since.clear()
        self.look_at_ms = 0
        self._looked_ms = self._woke_ms = 0

    def overdue(self) -> str:
        """Say who has outlived its bound, and what it waits for; empty: nobody.

        Called with each settled step. It looks a few times within the bound, at the same moments of
        the agreed clock on all ranks, so what is overdue is told so much later at most.
        """
        now_ms = self._manager.clock_ms
        if now_ms < self.look_at_ms:
            return ""
        self.look_at_ms = now_ms + self._bound_ms // _LOOKS
        # While nobody stepped nothing could get on: an engine that was idle for an hour opens its
        # next intent by the clock of its last step, and must not find it an hour old.
        if now_ms - self._looked_ms > self._bound_ms // 2:
            self._woke_ms = now_ms
        self._looked_ms = now_ms
        oldest = self._manager.oldest_open
        if oldest is not None:
            age_ms = now_ms - max(oldest.opened_ms, self._woke_ms)
            if age_ms > self._bound_ms:
                return _line(f"{oldest.kind} {oldest.key}", age_ms, _lacks(oldest))
        if self._waits is None:
            return ""
        waits = self._waits()
        self._since = {name: self._since.get(name, now_ms) for name in waits}
        for name, since_ms in self._since.items():
            age_ms = now_ms - max(since_ms, self._woke_ms)
            if age_ms > self._bound_ms:
                return _line(name, age_ms, waits[name])
        return ""

    def waiting(self) -> list[str]:
        """Say who waits in line, longest first, and what each lacks: lines for a person. Agreed."""
        waits: Mapping[str, str] = self._waits() if self._waits is not None else {}
        since = {name: self._since.get(name, self._manager.clock_ms) for name in waits}
        names = sorted(waits, key=since.__getitem__)
        lines = [
            _line(name, self._manager.clock_ms - max(since[name], self._woke_ms), waits[name])
            for name in names[:MAX_WAITING_TOLD]
        ]
        left = len(names) - MAX_WAITING_TOLD
        return lines + ([f"and {left} more"] if left > 0 else [])


def _line(what: str, age_ms: int, lacks: str) -> str:
    return f"{what} has waited for {age_ms / 1000:.1f} s: {lacks}"


def _lacks(intent: Intent) -> str:
    if intent.is_undecided:
        return "it has no verdict yet"
    return "it has not ended on all ranks"


def describe(manager: TransactionManager) -> list[str]:
    """The oldest open intents as this rank has them, for a person: local facts too."""
    lines: list[str] = []
    for intent in manager.open_intents[:MAX_DESCRIBED]:
        pages = " ".join(f"{pool}={num_pages}" for pool, num_pages in intent.need.items())
        age_s = (manager.clock_ms - intent.opened_ms) / 1000
        ended = "ended here" if intent.local_ended else "not ended here"
        lines.append(
            f"{intent.kind} {intent.key} (#{intent.serial}, slot {intent.slot}, {pages}):"
            f" {intent.state.value}, {ended}, open for {age_s:.1f} s"
        )
    left = len(manager.open_intents) - MAX_DESCRIBED
    return lines + ([f"and {left} more"] if left > 0 else [])
