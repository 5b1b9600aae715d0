"""Carries out a fault plan on one rank, by its own hand: so it works under any launcher.

Faults of pools and copies go through the cache's seams (:class:`SoakBoard`). A rank stops or kills
its own process, at a moment shortly after the step that the plan names, so that it may be anywhere
in its loop; a small shell process continues it. Everything is drawn from seed, line and rank.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from kvpact.cache.copies.mover import NO_FAULT, Direction, Part, PartPlan
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.tree.node import Residency, Tier
from kvpact.consensus.core.errors import Misuse
from kvpact.harness.faults import board
from kvpact.harness.faults.board import FaultBoard
from kvpact.harness.faults.plan import FaultLine, Plan
from kvpact.harness.scenario.model import Fault
from kvpact.harness.soak.feed import FaultEvent

__all__ = ["ProcessFaults", "SoakBoard"]

_COPY_SITES: Final = {Direction.TO_HOST: "write", Direction.TO_DEVICE: "load"}
#: A process fault strikes within so long after its step began.
SCATTER_S: Final = 0.02
#: Before a rank stops or kills itself: what it told of it has to get out first.
TELL_S: Final = 1.0
_HOG: Final = """
import os, sys, time
end, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
while time.monotonic() < end and os.getppid() == parent:
    sum(range(10000))
"""


class SoakBoard(FaultBoard):
    """A board whose faults go on for as long as the soak does, and leave it room to get on.

    What comes again and again strikes a share of the occasions of its site, at most every second
    one, and does not pile up while there are none. It can also skew: from then on a drawn share
    of the copies ends late.
    """

    def __init__(self, struck: Callable[[str], None]) -> None:
        super().__init__()
        self._told = struck
        self._skews: dict[str, tuple[FaultLine, random.Random]] = {}
        self._recurring: dict[str, list[board.Fault]] = {}  # by site, in turn
        self._spared: set[str] = set()  # sites whose last occasion passed; membership only

    def arm_again(self, fault: board.Fault) -> None:
        """``fault`` recurs: it is due for ``fault.times`` occasions, unless it is due already."""
        due = self._recurring.setdefault(fault.site, [])
        if all(one.number != fault.number for one in due):
            due += [fault] * fault.times

    @property
    def is_armed(self) -> bool:
        """Something may strike."""
        return super().is_armed or bool(self._recurring)

    def skew(self, line: FaultLine, draw: random.Random) -> None:
        """From now on ``line.share`` of the copies of its site end 1 to ``line.steps`` later."""
        self._skews[line.site] = (line, draw)

    def heal(self) -> None:
        """Disarm everything."""
        super().heal()
        self._skews.clear()
        self._recurring.clear()

    def strike(self, site: str) -> board.Fault | None:
        """As the board, and tells."""
        fault = super().strike(site) or self._strike_again(site)
        if fault is not None:
            self._told(f"{site} {fault.action}")
        return fault

    def _strike_again(self, site: str) -> board.Fault | None:
        due = self._recurring.get(site)
        if not due:
            return None
        if site not in self._spared:
            self._spared.add(site)
            return None
        self._spared.remove(site)
        fault = due.pop(0)
        self._count(fault)
        return fault

    def plan_part(self, direction: Direction, part: Part) -> PartPlan:
        """As the board; what it leaves alone may be skewed."""
        planned = super().plan_part(direction, part)
        site = _COPY_SITES[direction]
        if planned != NO_FAULT or site not in self._skews:
            return planned
        line, draw = self._skews[site]
        if draw.random() >= (line.share or 0.0):
            return NO_FAULT
        self._told(line.name)
        return PartPlan(delay_collects=draw.randint(1, line.steps or 1))


class _Schedule:
    """When a line strikes on this rank."""

    __slots__ = ("draw", "due", "line")

    def __init__(self, line: FaultLine, draw: random.Random) -> None:
        self.line = line
        self.draw = draw
        self.due: int | None = line.at_step
        if line.every_steps is not None:
            self.due = draw.randint(1, line.every_steps)

    def is_due(self, step: int) -> bool:
        """Whether it strikes in ``step``; plans the next time."""
        if self.due is None or step < self.due:
            return False
        every = self.line.every_steps
        self.due = None
        if every is not None:
            self.due = step + max(1, self.draw.randint(every // 2, every * 3 // 2))
        return True


class ProcessFaults:
    """The faults of one rank. ``tell`` gets every strike; ``clock_s`` is the loop's clock.

    ``is_simulated``: process and network faults are told as skipped, since all ranks share one
    process.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        seed: int,
        tell: Callable[[FaultEvent], None],
        clock_s: Callable[[], float],
        *,
        is_simulated: bool = False,
    ) -> None:
        self._rank = rank
        self._tell = tell
        self._clock_s = clock_s
        self._step = 0
        self._is_over = False
        self._is_simulated = is_simulated
        self._children: list[subprocess.Popen[bytes]] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._heal_rank: Callable[[], None] = _nothing
        self._release_at_s: list[float] = []  # at most one: it ends all
        self._hang_s = {
            line.name: line.seconds for line in plan.fault if line.action == "hang" and line.seconds
        }
        self.board = SoakBoard(self._struck)
        self._schedules: list[_Schedule] = []
        for number, line in enumerate(plan.fault):
            if line.ranks and rank not in line.ranks:
                continue
            draw = random.Random(f"{seed} {number} {rank}")
            if line.action == "skew":
                self.board.skew(line, draw)
            else:
                self._schedules.append(_Schedule(line, draw))

    def attach(self, heal_rank: Callable[[], None]) -> None:
        """``heal_rank`` ends what hangs on this rank: the rank is there now."""
        self._heal_rank = heal_rank

    def before_step(self, step: int, tiers: Tiers | None) -> None:
        """Carry out what is due before ``step`` begins. May sleep, stop or end this process."""
        self._step = step
        self._tidy()
        if any(at_s <= self._clock_s() for at_s in self._release_at_s):
            self._release_at_s.clear()
            self._heal_rank()
        if self._is_over:
            return
        for number, schedule in enumerate(self._schedules, 1):
            if schedule.is_due(step):
                self._carry_out(number, schedule.line, schedule.draw, tiers)

    def heal(self) -> None:
        """Faults are over: disarm, end what hangs, call off what is planned."""
        self._is_over = True
        self.board.heal()
        self._heal_rank()
        self._tidy(everything=True)

    def close(self) -> None:
        """Leave nothing behind."""
        self._is_over = True
        self._tidy(everything=True)
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()

    def _struck(self, name: str, skipped: str = "", in_s: float = 0.0) -> None:
        self._tell(FaultEvent(self._rank, self._step, self._clock_s() + in_s, name, skipped))
        if name in self._hang_s and not self._release_at_s:
            self._release_at_s.append(self._clock_s() + self._hang_s[name])

    def _carry_out(
        self, number: int, line: FaultLine, draw: random.Random, tiers: Tiers | None
    ) -> None:
        match line.site:
            case "scheduler":
                self._disturb(line, tiers)
            case "process" | "network" if self._is_simulated:
                self._struck(line.name, "not in a simulation")
            case "process":
                self._harm_process(line, draw)
            case "network":
                self._harm_network(line)
            case site:
                fault = Fault(
                    number=number,
                    rank=self._rank,
                    site=site,
                    action=line.action,
                    times=line.times,
                    steps=line.steps,
                )
                if line.every_steps is None or line.times < 0:
                    self.board.arm(fault)
                else:
                    self.board.arm_again(fault)

    def _disturb(self, line: FaultLine, tiers: Tiers | None) -> None:
        if line.action == "slow":
            self._struck(line.name)
            if not self._is_simulated:
                time.sleep(line.seconds or 0.0)
            return
        is_done = tiers is not None and _lose_a_node(tiers)
        self._struck(line.name, "" if is_done else "no node was idle")

    # -- the process -----------------------------------------------------------------------------

    def _harm_process(self, line: FaultLine, draw: random.Random) -> None:
        if line.action == "hog":
            self._struck(line.name)
            self._children.append(
                subprocess.Popen([sys.executable, "-S", "-c", _HOG, str(line.seconds)])
            )
            return
        strike = self._kill if line.action == "kill" else self._stop
        in_s = draw.uniform(0, SCATTER_S) + TELL_S
        self._struck(line.name, in_s=in_s)
        timer = threading.Timer(in_s, strike, [line.seconds or 0.0])
        timer.daemon = True
        timer.start()

    def _kill(self, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self, seconds: float) -> None:
        if self._is_over:
            return
        own = os.getpid()
        wake = subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds:.3f}; kill -CONT {own}"])
        os.kill(own, signal.SIGSTOP)
        wake.wait()

    # -- the network -----------------------------------------------------------------------------

    def _harm_network(self, line: FaultLine) -> None:
        interface = line.interface or ""
        why = _why_no_network_faults(interface)
        effect = (
            ["delay", f"{line.delay_ms:g}ms"]
            if line.action == "delay"
            else ["loss", f"{(line.share or 0) * 100:g}%"]
        )
        if not why:
            why = _tc("add", interface, *effect)
        self._struck(line.name, why)
        if not why:
            end_s = time.monotonic() + (line.seconds or 0.0)
            self._undo.append((end_s, lambda: _remove_network_fault(interface)))

    def _tidy(self, *, everything: bool = False) -> None:
        if self._undo:
            now_s = time.monotonic()
            due = [undo for end_s, undo in self._undo if everything or end_s <= now_s]
            self._undo = [] if everything else [pair for pair in self._undo if pair[0] > now_s]
            for undo in due:
                undo()
        if self._children:
            self._children = [child for child in self._children if child.poll() is None]


def _nothing() -> None:
    """Before there is a rank, nothing hangs."""


def _lose_a_node(tiers: Tiers) -> bool:
    """This rank alone drops its least recently used unpinned leaf; False: there is none."""
    leaves = [
        node
        for node in tiers.tree.nodes()
        if not (node.children or node.device.pins or node.host.pins or node.carriages)
    ]
    if not leaves:
        return False
    node = min(leaves, key=lambda leaf: (leaf.last_access, leaf.node_id))
    for tier in Tier:
        if node.at(tier).state is not Residency.ABSENT:
            tiers.drop(node, tier)
    tiers.prune()
    return True


def _why_no_network_faults(interface: str) -> str:
    """Why the network must not or cannot be disturbed here; empty: it can."""
    if shutil.which("tc") is None:
        return "the command tc is not installed (Debian: iproute2)"
    try:
        own, first = os.readlink("/proc/self/ns/net"), os.readlink("/proc/1/ns/net")
    except OSError:
        own, first = "", "unknown"
    if interface == "lo" and own == first:
        return "lo is shared with everything on this machine: run the soak in `unshare -rn`"
    return ""


def _tc(verb: str, interface: str, *effect: str) -> str:
    """Run tc; what it complained about, empty where it worked."""
    command = ["tc", "qdisc", verb, "dev", interface, "root", "netem", *effect]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"tc: {error}"
    return "" if done.returncode == 0 else f"tc: {' '.join(done.stderr.split())}"


def _remove_network_fault(interface: str) -> None:
    why = _tc("del", interface)
    if why:
        raise Misuse(f"the network fault on {interface} cannot be taken back: {why}")
