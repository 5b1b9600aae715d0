"""Starts real rank processes on this machine, talks to each, and always ends them.

The launcher serves the store, so that it lives outside the ranks. Each rank is a fresh interpreter
that runs one importable function; a socket pair carries messages both ways, and at the end the
result or the error. Whatever happens, no rank outlives the ``with`` block, nor the launcher itself:
the kernel ends a rank with the thread that started it, and so does the end of its socket.
"""

from __future__ import annotations

import collections
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from kvpact.consensus.core.errors import InternalError, Misuse, PeerLost, RankStalled, ResourceError
from kvpact.consensus.transport.envelope import SECRET_VARIABLE
from kvpact.harness.rank.child import (
    Frame,
    Raised,
    RankContext,
    Returned,
    Said,
    Start,
    Unpacker,
    pack,
)

__all__ = ["Launch", "RankContext", "RankReport", "Report", "launch"]

#: Messages of one rank that nobody has taken yet; beyond it the oldest are dropped and counted.
MAX_MESSAGES = 100_000
#: How much of the end of a rank's output is kept.
MAX_OUTPUT_BYTES = 16 << 10
#: Between asking a rank to end and killing it.
TERMINATE_S = 0.5
POLL_S = 0.02
#: A signal is on its way for a while where cores are few.
STOP_S = 5.0
#: Torch's store looks up the name of every peer that connects, in its one thread: where a name
#: server is slow, all ranks would find the store silent for the 5 s that is the usual patience.
#: (`attempts:0` asks none at all, which everything on one machine can do without, but then torch
#: says at each connection that it missed the name: for tests.)
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


class RankReport(msgspec.Struct):
    """How one rank ended.

    ``ended`` is ``"returned"`` (``result``), ``"raised"`` (``error``), ``"exited"`` (neither: it
    crashed, or a signal from elsewhere; see ``exit_code`` and ``output``) or ``"killed"`` by the
    launcher (what it had reported before is kept). ``output`` is the end of stdout and stderr.
    """

    rank: int
    pid: int
    ended: str
    exit_code: int | None
    result: Any = None
    error: BaseException | None = None
    output: str = ""
    messages: list[Any] = []
    num_dropped: int = 0


class Report(msgspec.Struct):
    """How all ranks ended; ``deadline_passed`` where they had to be ended for it."""

    ranks: list[RankReport]
    deadline_passed: bool
    duration_s: float

    def results(self) -> list[Any]:
        """The results by rank. Raises the error of the first rank that did not return."""
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error
        for rank in self.ranks:
            if rank.ended != "returned":
                raise PeerLost(
                    f"rank {rank.rank} {rank.ended} (exit code {rank.exit_code}"
                    f"{', deadline passed' if self.deadline_passed else ''}):\n{rank.output}",
                    rank=rank.rank,
                )
        return [rank.result for rank in self.ranks]


class _Child:
    """One rank as the launcher sees it."""

    def __init__(self, rank: int, env: dict[str, str]) -> None:
        self.rank = rank
        self.messages: collections.deque[Any] = collections.deque(maxlen=MAX_MESSAGES)
        self.num_dropped = 0
        self.last: Returned | Raised | None = None
        self.was_killed = False
        self.is_open = True
        self.unpacker = Unpacker()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the rank
        self.socket, theirs = socket.socketpair()
        begin = (
            f"import sys; sys.path += [p for p in {sys.path!r} if p not in sys.path];"
            f" from kvpact.harness.rank.child import run_rank;"
            f" run_rank({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                # -P: the working directory comes after all that is installed, and shadows nothing.
                [sys.executable, "-P", "-c", begin],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=env,
            )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def take(self, frame: Frame) -> None:
        if isinstance(frame, Said):
            self.num_dropped += len(self.messages) == MAX_MESSAGES
            self.messages.append(frame.body)
        elif isinstance(frame, Returned | Raised):
            self.last = frame

    def report(self) -> RankReport:
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - MAX_OUTPUT_BYTES))
        report = RankReport(
            rank=self.rank,
            pid=self.process.pid,
            ended="killed" if self.was_killed else "exited",
            exit_code=self.process.returncode,
            output=self.output.read().decode(errors="replace"),
            messages=list(self.messages),
            num_dropped=self.num_dropped,
        )
        if isinstance(self.last, Returned):
            report.result = self.last.result
        elif self.last is not None:
            report.error = _unpickled(self.last, self.rank)
        if self.last is not None and not self.was_killed:
            report.ended = "returned" if isinstance(self.last, Returned) else "raised"
        return report


def _unpickled(raised: Raised, rank: int) -> BaseException:
    if not raised.error:
        return InternalError(f"rank {rank} raised what cannot be pickled:\n{raised.text}")
    error: BaseException = pickle.loads(raised.error)  # noqa: S301  from our own rank
    error.add_note(f"raised by rank {rank}:\n{raised.text}")
    return error


class Launch:
    """Rank processes while they run; use it as a context manager, from one thread.

    ``target`` is ``"module:function"``, called in every rank as ``function(context, args)``, with
    ``args[rank]`` of the launcher; arguments, messages and results are what msgpack can carry.
    ``deadline_s`` counts from the start. Once it has passed, or one rank has ended in any other
    way than by returning, the others have ``grace_s`` to end by themselves.
    """

    def __init__(
        self,
        target: str,
        num_ranks: int,
        args: Sequence[Any] = (),
        *,
        deadline_s: float = 60.0,
        grace_s: float = 5.0,
        env: dict[str, str] | None = None,
        serve_store: bool = True,
    ) -> None:
        if args and len(args) != num_ranks:
            raise Misuse(f"{num_ranks} ranks need as many args, got {len(args)}")
        if ":" not in target:
            raise Misuse(f"a target reads 'module:function', got '{target}'")
        self.num_ranks = num_ranks
        self.deadline_passed = False
        self.store_host = "127.0.0.1"
        self.store_port = 0
        self._target = target
        self._args = list(args) or [None] * num_ranks
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._env = _environment(env or {})
        self._serve_store = serve_store
        self._store: object = None
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._began_s = 0.0

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        if self._serve_store:
            # Only here: ranks that need no store need not wait two seconds for torch either.
            from kvpact.consensus.transport.gloo import serve_tcp_store

            for name, value in RESOLVER.items():
                os.environ.setdefault(name, value)
            self._store, self.store_port = serve_tcp_store()
        try:
            for rank in range(self.num_ranks):
                self._start(rank)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        for child in self._children:
            child.output.close()
        self._selector.close()

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._children[rank].process.pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank that has not ended yet; after SIGSTOP none of it runs."""
        process = self._children[rank].process
        process.send_signal(number)
        end_s = time.monotonic() + STOP_S
        while number is signal.SIGSTOP and not _is_stopped(process.pid):
            if time.monotonic() >= end_s:
                raise ResourceError(f"rank {rank} did not stop within {STOP_S:g} s", rank=rank)
            time.sleep(0.001)

    def send(self, rank: int, message: Any) -> None:
        """Send one message to a rank; :class:`ResourceError` where it does not read."""
        self._write(self._children[rank], Said(message))

    def receive(self, rank: int, timeout_s: float) -> Any:
        """The next message of a rank.

        Raises its own error where it raised one, :class:`PeerLost` where it has ended,
        :class:`RankStalled` after ``timeout_s``.
        """
        child = self._children[rank]
        end_s = time.monotonic() + timeout_s
        while not child.messages:
            if child.has_ended and not child.is_open:
                report = child.report()
                raise report.error or PeerLost(
                    f"rank {rank} {report.ended} (exit code {report.exit_code}) without a further"
                    f" message:\n{report.output}",
                    rank=rank,
                )
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise RankStalled(f"rank {rank} sent nothing for {timeout_s:g} s", rank=rank)
            self._pump(min(POLL_S, left_s))
        return child.messages.popleft()

    def join(self) -> Report:
        """Wait until all ranks have ended, or end them (see the class); never raises for them."""
        end_s = self._began_s + self._deadline_s
        is_grace = False
        while not all(child.has_ended for child in self._children):
            now_s = time.monotonic()
            if is_grace and now_s >= end_s:
                break
            if not is_grace:
                self.deadline_passed = now_s >= end_s
                if self.deadline_passed or any(map(_has_failed, self._children)):
                    is_grace, end_s = True, now_s + self._grace_s
            self._pump(POLL_S)
        self._end_all()
        return Report(
            ranks=[child.report() for child in self._children],
            deadline_passed=self.deadline_passed,
            duration_s=time.monotonic() - self._began_s,
        )

    def _start(self, rank: int) -> None:
        child = _Child(rank, self._env)
        self._children.append(child)
        child.socket.setblocking(False)
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        start = Start(
            self._target, rank, self.num_ranks, self.store_host, self.store_port, self._args[rank]
        )
        self._write(child, start)

    def _write(self, child: _Child, frame: Frame) -> None:
        data = pack(frame)
        child.socket.settimeout(5.0)
        try:
            child.socket.sendall(data)
        except OSError as error:
            raise ResourceError(
                f"rank {child.rank} takes no message: {error}", rank=child.rank
            ) from error
        finally:
            child.socket.setblocking(False)

    def _pump(self, timeout_s: float) -> None:
        """Take what the ranks have sent, waiting at most ``timeout_s`` for the first."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            child: _Child = key.data
            try:
                data = child.socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            for frame in child.unpacker.feed(data):
                child.take(frame)
            if not data:
                child.is_open = False
                self._selector.unregister(child.socket)

    def _end_all(self) -> None:
        """End every rank by its pid: ask, then kill, then reap. Also drains and closes sockets."""
        for child in self._children:
            if not child.has_ended:
                child.was_killed = True
                child.process.terminate()
                child.process.send_signal(signal.SIGCONT)  # a stopped process hears nothing
        end_s = time.monotonic() + TERMINATE_S
        while time.monotonic() < end_s and not all(child.has_ended for child in self._children):
            self._pump(POLL_S)
        for child in self._children:
            if not child.has_ended:
                child.process.kill()
            child.process.wait()
        while any(child.is_open for child in self._children) and self._selector.select(0):
            self._pump(0)
        for child in self._children:
            if child.is_open:
                child.is_open = False
                self._selector.unregister(child.socket)
            child.socket.close()
        self._store = None


def _has_failed(child: _Child) -> bool:
    return child.has_ended and not isinstance(child.last, Returned)


def _environment(extra: dict[str, str]) -> dict[str, str]:
    env = RESOLVER | dict(os.environ)
    # Imports find what the launcher finds.
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    env["PYTHONUNBUFFERED"] = "1"
    env["GLOO_SOCKET_IFNAME"] = "lo"
    env["OMP_NUM_THREADS"] = "1"
    env.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    # What c10d prints about broken connections is in the errors too, without its stacks.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return {**env, **extra}


def launch(
    target: str,
    num_ranks: int,
    args: Sequence[Any] = (),
    *,
    deadline_s: float = 60.0,
    grace_s: float = 5.0,
    env: dict[str, str] | None = None,
    serve_store: bool = True,
) -> Report:
    """Start, wait, end: see :class:`Launch`. Messages end up in the report."""
    with Launch(
        target,
        num_ranks,
        args,
        deadline_s=deadline_s,
        grace_s=grace_s,
        env=env,
        serve_store=serve_store,
    ) as ranks:
        return ranks.join()


def _is_stopped(pid: int) -> bool:
    """Every thread of the process has stopped, or is gone."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = task.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # this thread has ended
        if state not in "TtZX":
            return False
    return True
