"""The agreed account of pages: what every rank may plan with.

All amounts here are the same on every rank, because they follow from agreed state alone. What a
rank *really* has free is its own business; a reservation that the ledger allows may still fail
there, and then the vote says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvpact.consensus.core.errors import InternalError

__all__ = ["Ledger"]


class Ledger:
    """Pages charged per pool, against the usable pages that all ranks agreed on."""

    def __init__(self, pools: Iterable[str]) -> None:
        self._usable = dict.fromkeys(pools, 0)
        self._charged = dict.fromkeys(self._usable, 0)
        self._cooling: deque[tuple[int, str, int]] = deque()

    def agree(self, usable: dict[str, int]) -> None:
        """Take over the usable pages of a settled ballot (the MIN over all ranks)."""
        self._usable.update(usable)

    def usable(self, pool: str) -> int:
        """Pages of ``pool`` that every rank can use."""
        return self._usable[pool]

    def charged(self, pool: str) -> int:
        """Pages of ``pool`` that are spoken for: resident, reserved, copying or cooling."""
        return self._charged[pool]

    def room(self, pool: str) -> int:
        """Pages of ``pool`` that a plan may still use."""
        return max(0, self._usable[pool] - self._charged[pool])

    def charge(self, pool: str, num_pages: int) -> None:
        """``num_pages`` are spoken for from now on. Raises :class:`InternalError` below zero."""
        if num_pages < 0:
            raise InternalError(f"charge of {num_pages} pages to pool {pool}")
        self._charged[pool] += num_pages

    def refund(self, pool: str, num_pages: int) -> None:
        """``num_pages`` are free for plans again. Raises :class:`InternalError` below zero."""
        if not 0 <= num_pages <= self._charged[pool]:
            raise InternalError(
                f"refund of {num_pages} pages to pool {pool}, which has {self._charged[pool]}"
                " charged"
            )
        self._charged[pool] -= num_pages

    def cool(self, step: int, pool: str, num_pages: int) -> None:
        """Refund once ballot ``step`` is settled.

        For quarantined pages: where their copy still runs they are not usable, and only a ballot
        that was posted after the quarantine tells everyone so.
        """
        if num_pages:
            self._cooling.append((step, pool, num_pages))

    def settle(self, step: int) -> None:
        """Ballot ``step`` is settled: what was cooling until then comes back."""
        while self._cooling and self._cooling[0][0] <= step:
            _, pool, num_pages = self._cooling.popleft()
            self.refund(pool, num_pages)

    def cooling(self, pool: str) -> int:
        """Pages of ``pool`` that wait for a later ballot."""
        return sum(num_pages for _, name, num_pages in self._cooling if name == pool)

    @property
    def is_cooling(self) -> bool:
        """Some pages wait for a later ballot."""
        return bool(self._cooling)

    def clear(self) -> None:
        """A new epoch: nothing is charged."""
        self._charged = dict.fromkeys(self._charged, 0)
        self._cooling.clear()
