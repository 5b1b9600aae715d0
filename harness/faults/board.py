"""Faults at named sites, armed by a plan and counted by occasions. Local to one rank.

Nothing of the cache knows about faults: pools and movers have seams, and this fills them.
"""

from __future__ import annotations

from typing import Protocol

from kvpact.cache.copies.mover import NO_FAULT, Direction, Part, PartPlan
from kvpact.cache.memory.page_pool import PagePool
from kvpact.cache.storage.requests import NO_PAGE_FAULT, PagePlan

__all__ = ["Fault", "FaultBoard", "FaultyPool"]

_COPY_SITES = {Direction.TO_HOST: "write", Direction.TO_DEVICE: "load"}


class Fault(Protocol):
    """What a board needs to know of a fault: where, what, how often, and from when on."""

    @property
    def number(self) -> int:
        """Which entry of a file it is, from 1; 0: of none."""
        ...

    @property
    def site(self) -> str:
        """Where it strikes, such as ``"host.reserve"``."""
        ...

    @property
    def action(self) -> str:
        """What happens there, such as ``"refuse"``."""
        ...

    @property
    def times(self) -> int:
        """How many occasions it strikes, -1: all."""
        ...

    @property
    def after(self) -> int:
        """How many occasions it lets pass first."""
        ...

    @property
    def steps(self) -> int | None:
        """How long a ``delay`` lasts."""
        ...

    @property
    def seconds(self) -> float | None:
        """How late a rank that is ``late`` is."""
        ...


class _Armed:
    """One fault and how often it may still strike."""

    __slots__ = ("fault", "left", "skip")

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.skip = fault.after
        self.left = fault.times


class FaultBoard:
    """The faults of one rank. ``struck`` counts, per site and action, how often one struck, and
    ``entries`` has the numbers of those that did."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []
        self.struck: dict[str, int] = {}
        self.entries: list[int] = []

    def arm(self, fault: Fault) -> None:
        """From now on, after ``fault.after`` occasions, ``fault.times`` times (-1: for ever)."""
        self._armed.append(_Armed(fault))

    def heal(self) -> None:
        """Disarm everything."""
        self._armed.clear()

    def strike(self, site: str) -> Fault | None:
        """An occasion at ``site``: the fault that strikes, the one armed first, if any does."""
        for armed in self._armed:
            if armed.fault.site != site or armed.left == 0:
                continue
            if armed.skip > 0:
                armed.skip -= 1
                continue
            if armed.left > 0:
                armed.left -= 1
            self._count(armed.fault)
            return armed.fault
        return None

    @property
    def is_armed(self) -> bool:
        """Something may strike; where it is not, nobody need ask."""
        return bool(self._armed)

    def _count(self, fault: Fault) -> None:
        name = f"{fault.site} {fault.action}"
        self.struck[name] = self.struck.get(name, 0) + 1
        if fault.number not in self.entries:
            self.entries.append(fault.number)

    def plan_part(self, direction: Direction, part: Part) -> PartPlan:
        """The seam of a mover: one node's part of a merged copy is one occasion."""
        if not self.is_armed:
            return NO_FAULT
        fault = self.strike(_COPY_SITES[direction])
        match fault.action if fault is not None else "":
            case "delay":
                return PartPlan(delay_collects=fault.steps if fault is not None else 0)
            case "hang":
                return PartPlan(delay_collects=None)
            case "fail":
                return PartPlan(ok=False)
            case "corrupt":
                return PartPlan(corrupt=True)
            case _:
                return NO_FAULT

    def plan_page(self, site: str, key: bytes) -> PagePlan:
        """The seam of storage workers: one page of a request is one occasion."""
        if not self.is_armed:
            return NO_PAGE_FAULT
        fault = self.strike(site)
        match fault.action if fault is not None else "":
            case "delay":
                return PagePlan(delay_collects=fault.steps if fault is not None else 0)
            case "hang":
                return PagePlan(delay_collects=None)
            case "fail":
                return PagePlan(ok=False)
            case "corrupt":
                return PagePlan(corrupt=True)
            case "miss":
                return PagePlan(miss=True)
            case _:
                return NO_PAGE_FAULT


class FaultyPool(PagePool):
    """A pool whose reservations are occasions of the site ``<name>.reserve``."""

    __slots__ = ("_board",)

    def __init__(self, name: str, num_pages: int, board: FaultBoard) -> None:
        super().__init__(name, num_pages)
        self._board = board

    def reserve(self, num_pages: int) -> list[int] | None:
        """As the pool, unless a fault refuses."""
        if self._board.strike(f"{self.name}.reserve") is not None:
            return None
        return super().reserve(num_pages)

    def reserve_up_to(self, num_pages: int) -> list[int]:
        """As the pool, unless a fault refuses or leaves it one page short."""
        fault = self._board.strike(f"{self.name}.reserve")
        if fault is None:
            return super().reserve_up_to(num_pages)
        return super().reserve_up_to(max(0, num_pages - 1)) if fault.action == "short" else []
