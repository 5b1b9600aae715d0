"""Calls and releases that may hang in C++: each on a daemon thread, with a bound, and a safe end.

A store call hangs as long as the store's host is stopped; dropping a process group with outstanding
collectives hangs until they time out. Neither may stop a rank, so neither runs on its threads.
Nothing here takes part in a collective or decides anything.

The end of the interpreter needs care: a daemon thread that comes back from C++ while Python is
being finalized aborts the process ("terminate called", up to Python 3.13; with torch that takes a
second or two). So at exit no new call is let into C++, those inside get a moment to come out, and
those that hang are parked for good.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from kvpact.consensus.core.errors import ResourceError, StoreSilent

__all__ = ["Completing", "bounded", "drain", "entrust", "inside"]

T = TypeVar("T")

#: Calls that hang in C++ while their caller has long gone on.
MAX_ABANDONED = 16
#: Process groups that were closed and wait to be released.
MAX_UNRELEASED = 64
#: How often the release thread looks whether the collectives of closed groups have ended.
SWEEP_S = 0.02
#: How often :func:`bounded` looks out while it waits.
LOOK_OUT_S = 0.05
#: How long the end of the interpreter waits for calls that hang.
EXIT_WAIT_S = 2.0


class Completing(Protocol):
    """A collective of torch."""

    def is_completed(self) -> bool:
        """Whether it has ended, in any way. Never blocks."""
        ...


# -------------------------------------------------------------------------------------- calls


class _Gate:
    """Knows the daemon threads that are inside C++; closes at exit."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._inside: list[int] = []
        self._closed = False
        atexit.register(self.close)

    @contextlib.contextmanager
    def inside(self) -> Generator[None, None, None]:
        thread_id = threading.get_ident()
        with self._change:
            if self._closed:
                raise StoreSilent("the interpreter is ending")
            self._inside.append(thread_id)
        try:
            yield
        finally:
            with self._change:
                self._inside.remove(thread_id)
                self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.wait_for(lambda: not self._inside, EXIT_WAIT_S)
            if self._inside:
                _park(self._inside)


def _park(thread_ids: Sequence[int]) -> None:
    """Have threads of this process never return from where they hang."""
    if sys.platform != "linux":
        return
    # A signal whose handler is libc's own pause(): it needs neither Python nor the thread's help.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread_id in thread_ids:
        signal.pthread_kill(thread_id, signal.SIGRTMAX)


_gate = _Gate()
inside = _gate.inside
"""Context of a daemon thread's call into C++; raises :class:`StoreSilent` at exit."""

_abandonable = threading.BoundedSemaphore(MAX_ABANDONED)


def bounded(
    call: Callable[[], T],
    timeout_s: float,
    silent: str,
    look_out: Callable[[], None] | None = None,
) -> T:
    """Run ``call`` on a thread of its own and return what it returns, or raise what it raises.

    Meanwhile ``look_out`` is called every now and then; what it raises ends the wait.

    After ``timeout_s`` the thread is abandoned and :class:`StoreSilent` raised with the text
    ``silent``; it ends by itself when its call does. :class:`ResourceError` where too many
    abandoned calls still hang.
    """
    if not _abandonable.acquire(blocking=False):
        raise ResourceError(f"{MAX_ABANDONED} earlier calls still hang; {silent}")
    values: list[T] = []
    errors: list[Exception] = []
    abandoned = threading.Event()

    def run() -> None:
        try:
            with inside():
                values.append(call())
                if abandoned.is_set():
                    values.clear()  # what nobody takes is destroyed here, and not at exit
        except Exception as error:  # noqa: BLE001  raised again on the caller's thread
            errors.append(error)
        finally:
            _abandonable.release()

    thread = threading.Thread(target=run, name="kvpact-bounded", daemon=True)
    thread.start()
    try:
        _join(thread, timeout_s, look_out)
    except BaseException:
        abandoned.set()
        raise
    if errors:
        raise errors[0]
    if thread.is_alive() or not values:
        abandoned.set()
        raise StoreSilent(silent)
    return values[0]


def _join(thread: threading.Thread, timeout_s: float, look_out: Callable[[], None] | None) -> None:
    if look_out is None:
        thread.join(timeout_s)
        return
    end_s = time.monotonic() + timeout_s
    thread.join(LOOK_OUT_S)
    while thread.is_alive() and time.monotonic() < end_s:
        look_out()
        thread.join(LOOK_OUT_S)


# ----------------------------------------------------------------------------------- releases


class _Charge:
    """A process group that is to be released, with its collectives (shared with its owner)."""

    __slots__ = ("collectives", "process_group")

    def __init__(self, process_group: object, collectives: collections.deque[Completing]) -> None:
        self.process_group: object = process_group
        self.collectives = collectives

    @property
    def has_ended(self) -> bool:
        return all(collective.is_completed() for collective in self.collectives)

    def leak(self) -> None:
        """See to it that the process group is never destroyed."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.process_group))


class _Releaser:
    """Drops closed process groups on one daemon thread, once their collectives have ended.

    They end at the latest with their group's timeout, so what waits here drains. When too many
    wait, new groups are refused rather than the closing of old ones: so closing never fails.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._open: dict[int, _Charge] = {}
        self._closed: collections.deque[_Charge] = collections.deque()
        self._num_entrusted = 0
        self._num_unreleased = 0
        self._thread: threading.Thread | None = None
        atexit.register(self._leak)

    def entrust(self, charge: _Charge) -> int:
        with self._change:
            if self._num_unreleased >= MAX_UNRELEASED:
                raise ResourceError(
                    f"{MAX_UNRELEASED} closed groups still wait to be released:"
                    " form groups more rarely, or with a shorter group_timeout_s"
                )
            self._num_entrusted += 1
            self._open[self._num_entrusted] = charge
            return self._num_entrusted

    def release(self, number: int) -> None:
        with self._change:
            self._closed.append(self._open.pop(number))
            self._num_unreleased += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvpact-release", daemon=True
                )
                self._thread.start()
            self._change.notify_all()

    def drain(self, timeout_s: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._num_unreleased == 0, timeout_s)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._closed))
            try:
                with inside():
                    is_released = self._sweep()
            except StoreSilent:
                return  # the interpreter is ending
            if not is_released:
                time.sleep(SWEEP_S)

    def _sweep(self) -> bool:
        """Release one group whose collectives have ended; whether there was one."""
        with self._change:
            charge = next((charge for charge in self._closed if charge.has_ended), None)
            if charge is None:
                return False
            self._closed.remove(charge)
        charge.process_group = None  # the last reference
        charge.collectives.clear()
        with self._change:
            self._num_unreleased -= 1
            self._change.notify_all()
        return True

    def _leak(self) -> None:
        # The end of the interpreter would destroy what is left, and wait for peers. So it never
        # is destroyed: the operating system closes the sockets, which tells the peers.
        with self._change:
            for charge in [*self._open.values(), *self._closed]:
                charge.leak()


_releaser = _Releaser()


def entrust(
    owner: object, process_group: object, collectives: collections.deque[Completing]
) -> Callable[[], object]:
    """Give away a process group of ``owner``; returns what releases it, once, without blocking.

    ``collectives`` is the owner's own queue of those that may still run; it leaves it alone after
    the release, and keeps no reference to the process group then. Dropping ``owner`` releases too.
    """
    charge = _Charge(process_group, collectives)
    finalizer = weakref.finalize(owner, _releaser.release, _releaser.entrust(charge))
    finalizer.atexit = False
    return finalizer


def drain(timeout_s: float) -> bool:
    """Wait until every closed process group has been released; ``False``: not yet."""
    return _releaser.drain(timeout_s)
