"""Real ranks over gloo for tests/test_closing_real.py: forked from one process that has torch.

The process reads one trial a line from its standard input and answers with one line. Starting an
interpreter with torch takes two seconds, forking one 20 ms: so fifty deaths fit into a minute. The
parent uses neither store nor group, so there is nothing in it that a fork could break.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

from kvpact.consensus.core.errors import KvpactError
from kvpact.consensus.core.participant import Outcome
from kvpact.consensus.epoch.report import Seal
from kvpact.consensus.membership import Membership
from kvpact.consensus.step.step import StepLimits, Stepper
from kvpact.consensus.transport.gloo import serve_tcp_store
from tests.foreign import Engine, Owner, make_manager

NUM_RANKS = 3
#: Nothing that a child does lasts so long.
LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1


class Nothing:
    """A carrier without baggage: the policy is to raise."""

    def live(self) -> dict[str, int]:
        return {}

    def kept(self) -> list[int]:
        return []

    def drop(self, seal: Seal) -> None:
        raise AssertionError("the policy is to raise")

    def usable(self) -> dict[str, int]:
        return {}

    def pools(self) -> dict[str, dict[str, int]]:
        return {}

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        raise AssertionError("the policy is to raise")


# ------------------------------------------------------------------------------------- one rank


def run_rank(trial: dict[str, Any], rank: int, port: int, say: int) -> None:
    """A stream of steps until it ends, or an error; says where it is, one JSON line each."""

    def tell(**what: Any) -> None:
        os.write(say, json.dumps(what).encode() + b"\n")

    deadline_s: float = trial["deadline_s"]
    owner = Owner({"a": 50})
    manager = make_manager(rank, owner, lag=trial["lag"])
    membership = Membership.join(
        "127.0.0.1",
        port,
        name=trial["name"],
        rank=rank,
        ranks=range(NUM_RANKS),
        width=manager.schema.width,
        facts={},
        usable={"a": 50},
        deadline_s=deadline_s,
        beat_s=0.1,
    )
    settled: list[str] = []

    def on_settled(outcomes: list[Outcome]) -> None:
        settled.extend(f"{one.kind.value} {one.intent.key}" for one in outcomes)

    engine = Engine(manager)
    engine.settled = on_settled
    stepper = Stepper(
        manager,
        membership.group,
        membership.store,
        engine,
        limits=StepLimits(deadline_s=deadline_s, warn_s=deadline_s, grace_s=0.3, slice_s=0.05),
        locator=membership.locator,
        carrier=Nothing(),
        beacon=membership.watch,
    )
    membership.watch_over(stepper)
    draw = random.Random(f"{trial['name']} {rank}")
    tell(joined=rank)
    began = time.monotonic()
    ended: dict[str, Any] = {"kind": ""}
    try:
        for iteration in range(1, trial["steps"] + 1):
            if trial.get("late") == [rank, iteration]:
                time.sleep(trial["late_s"])
            if iteration % 3 == 0:
                manager.open("copy", f"x{iteration}", {"a": 1}, owner, ends_on_commit=True)
                owner.free["a"] = 50  # what was published is not the subject here
            time.sleep(draw.random() * trial["think_s"])
            began = time.monotonic()
            stepper.run(iteration)
        membership.leave(2.0)
    except KvpactError as error:
        ended = {"kind": type(error).__name__, "text": str(error), "ranks": list(error.ranks)}
        ended["dead"] = getattr(error, "dead", None)
        membership.close()
    tell(
        rank=rank,
        settled_step=manager.settled_step,
        settled=settled,
        waited_s=time.monotonic() - began,
        **ended,
    )
    if not trial["whole_exit"]:
        os._exit(0)


# --------------------------------------------------------------------------------- the launcher


class Child:
    """A forked process that talks through a pipe."""

    def __init__(self, what: Any, *args: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self.status: int | None = None
        self._rest = b""
        self.pipe, say = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            what(*args, say)
            raise SystemExit(0)  # an ordinary end of the interpreter: it must not hang either
        os.close(say)

    def next_line(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The next line that it says, ``{}`` where it ends or keeps silent."""
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(self.pipe, 1 << 16) if ready else b""
            if not data:
                return {}
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def end(self, limit_s: float = LIMIT_S) -> int | None:
        """Its exit status; ``None``: it hung, and was killed."""
        end_s = time.monotonic() + limit_s
        while self.status is None and time.monotonic() < end_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.005)
        hung = self.status is None
        if hung:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(OSError):
            os.close(self.pipe)
        return None if hung else self.status


def serve(say: int) -> None:
    """A store of its own process: the ranks' launcher."""
    _store, port = serve_tcp_store()
    os.write(say, json.dumps({"port": port}).encode() + b"\n")
    signal.sigwait([signal.SIGTERM])
    os._exit(0)  # its clients are gone or stopped


def run_trial(trial: dict[str, Any], port: int) -> dict[str, Any]:
    """Fork the ranks, do to them what the trial says, and collect what they tell."""
    store = Child(serve) if trial.get("own_store") else None
    if store is not None:
        port = store.next_line()["port"]
    ranks = [Child(run_rank, trial, rank, port) for rank in range(NUM_RANKS)]
    try:
        for rank in ranks:
            rank.next_line()
        for what, number, at_s in trial["signals"]:
            time.sleep(at_s)
            target = store if what == "store" else ranks[int(what)]
            assert target is not None
            target.signal(signal.Signals[number])
        killed = [int(what) for what, number, _ in trial["signals"]
                  if number == "SIGKILL" and what != "store"]  # fmt: skip
        told = {rank: child.next_line() for rank, child in enumerate(ranks) if rank not in killed}
        statuses = [child.end() for child in ranks]
    finally:
        for child in ranks:
            child.end(0.0)
        if store is not None:
            store.signal(signal.SIGCONT)
            store.signal(signal.SIGTERM)
            store.end(5.0)
    return {"told": told, "statuses": statuses}


def main() -> None:
    """Trials in, results out."""
    store = Child(serve)
    port = store.next_line()["port"]
    for line in sys.stdin:
        result = run_trial(json.loads(line), port)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    store.signal(signal.SIGTERM)
    store.end(5.0)


if __name__ == "__main__":
    main()
