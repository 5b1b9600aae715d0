"""The one collective: an asynchronous MIN over a private group of ranks.

This is the only file that talks to ``torch.distributed``. A group is a bare process group over its
own prefix of the store: there is no ``init_process_group``, so nobody else can reach it, pair a
collective of theirs with one of ours, or shut it down.

What raw gloo does with torch 2.13 (measured; tests/test_group.py pins what matters):

* a vector of another length aborts a process, another type or a second thread decides a wrong
  value in silence: so everything is checked here, before anything reaches gloo;
* ``wait(t)`` below one millisecond is cut to 0, which means "for ever";
* a ``wait`` that times out cancels nothing and the group stays usable; but once the *group's*
  timeout has passed, every connection closes and every later collective fails;
* releasing a group with outstanding collectives blocks until they time out (``abort`` and
  ``shutdown`` do not help), also at the end of the interpreter: so the release thread does it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed

from kvpact.consensus.core.errors import KvpactError, Misuse, PeerLost, StoreSilent
from kvpact.consensus.transport.bounded import bounded
from kvpact.consensus.transport.collective import (
    MAX_OUTSTANDING,
    Group,
    ProcessGroup,
    RawStore,
    Vector,
    Work,
    first_line,
)
from kvpact.consensus.transport.rendezvous import absent, address, announce, forget, not_met

__all__ = [
    "MAX_OUTSTANDING",
    "GlooGroup",
    "Group",
    "NcclGroup",
    "RawStore",
    "SharedStore",
    "Work",
    "backends",
    "connect_tcp_store",
    "open_tcp_store",
    "serve_tcp_store",
    "share_store",
]

#: The resolution of c10d's timeouts.
MIN_WAIT_S = 0.001
#: Ranks that may connect to a store at the same moment.
_BACKLOG = 4096
#: Beyond every deadline of ours.
NEVER_S = 1e6
#: How long a thread waits for NCCL to abort a group that is broken.
ABORT_S = 1.0

# The stubs lack most of what is used here, and some of what they have is wrong.
_c10d: Any = torch.distributed


def backends() -> tuple[str, ...]:
    """Return the backends that this build of torch has, of those that kvpact can use."""
    if not _c10d.is_available():
        return ()
    found = {"gloo": _c10d.is_gloo_available(), "nccl": _c10d.is_nccl_available()}
    return tuple(name for name, is_there in found.items() if is_there)


# ---------------------------------------------------------------------------------- raw store


def serve_tcp_store(port: int = 0, host: str = "127.0.0.1") -> tuple[RawStore, int]:
    """Serve a store, on a free port where ``port`` is 0; returns (store, port).

    It listens at ``host`` alone: by default nobody reaches it from another machine. An empty
    ``host`` listens on all interfaces; then give the run a secret (KVPACT_SECRET).

    It is served by a thread of this process as long as the returned store lives.
    """
    if not host:
        everywhere: Any = _c10d.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        return everywhere, int(everywhere.port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    port = int(listener.getsockname()[1])
    store: Any = _c10d.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


class SharedStore(NamedTuple):
    """A store that one of an engine's ranks serves: where it is, and who this rank is there.

    ``served`` keeps it alive on the rank that serves it.
    """

    host: str
    port: int
    rank: int
    size: int
    served: RawStore | None


def share_store(group: Any) -> SharedStore:
    """Have rank 0 of an engine's own ``group`` serve a store, and tell all its ranks where.

    Once, at start: every rank of ``group`` must call it, for it broadcasts in that group. Over
    several hosts the store listens on all interfaces and is reached by the name of rank 0's host:
    then give the run a secret (KVPACT_SECRET).
    """
    rank, size = int(_c10d.get_rank(group)), int(_c10d.get_world_size(group))
    names: list[Any] = [None] * size
    _c10d.all_gather_object(names, socket.gethostname(), group=group)
    # With one host there is nothing to look up, and nobody else can reach the store.
    is_one_host = len(set(names)) == 1
    served, port = None, 0
    if rank == 0:
        served, port = serve_tcp_store(host="127.0.0.1" if is_one_host else "")
    told: list[Any] = ["127.0.0.1" if is_one_host else names[0], port]
    _c10d.broadcast_object_list(told, src=int(_c10d.get_global_rank(group, 0)), group=group)
    return SharedStore(told[0], told[1], rank, size, served)


_KNOCK_AGAIN_S = 0.2


def connect_tcp_store(host: str, port: int, timeout_s: float) -> RawStore:
    """A new client. May hang far beyond ``timeout_s`` while the host is stopped.

    Raises RuntimeError where nobody answers.
    """
    _knock(host, port, timeout_s)
    store: RawStore = _c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=_timedelta(timeout_s)
    )
    return store


def _knock(host: str, port: int, timeout_s: float) -> None:
    """Wait until something listens there. Torch's client does that too, but it prints a hundred
    lines of frames for each try that fails, and they bury what kvpact says."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.001, end_s - time.monotonic())
            socket.create_connection((host, port), timeout=left_s).close()
        except OSError as error:
            if time.monotonic() + _KNOCK_AGAIN_S >= end_s:
                raise RuntimeError(str(error)) from None
            time.sleep(_KNOCK_AGAIN_S)
        else:
            return


def open_tcp_store(host: str, port: int, timeout_s: float) -> RawStore:
    """A new client within ``timeout_s``, or :class:`StoreSilent` naming host:port."""

    def connect() -> RawStore:
        try:
            return connect_tcp_store(host, port, timeout_s)
        except RuntimeError as error:
            text = f"store {host}:{port} cannot be reached: {first_line(error)}"
            raise StoreSilent(text) from None  # torch's frames say nothing more

    return bounded(connect, timeout_s, f"store {host}:{port} let nobody in for {timeout_s:g} s")


def _timedelta(seconds: float) -> timedelta:
    # Whole milliseconds are all that c10d keeps; 0 would mean "for ever".
    return timedelta(milliseconds=max(1, int(min(seconds, NEVER_S) * 1000)))


# --------------------------------------------------------------------------------------- gloo


_AT_ONCE = _timedelta(1.0)


class _GlooWork:
    """One all_reduce of gloo; ``tensor`` is the copy that is reduced in place."""

    __slots__ = ("_done", "_group", "_tensor", "_work")

    def __init__(self, group: GlooGroup, tensor: torch.Tensor, work: Any) -> None:
        self._group = group
        self._tensor = tensor
        self._work = work
        self._done = False

    def done(self) -> bool:
        if not self._done and self._work.is_completed():
            # It has ended, so this returns at once, or raises what went wrong (is_success and
            # exception are deprecated and warn).
            try:
                self._work.wait(_AT_ONCE)
            except RuntimeError as error:
                raise self._group.lost(error) from None
            self._done = True
        return self._done

    def wait(self, timeout_s: float) -> bool:
        if self.done():
            return True
        if timeout_s < MIN_WAIT_S:
            return False
        try:
            self._work.wait(_timedelta(timeout_s))
        except RuntimeError:
            # Not yet, or failed: the same type of error, so ask the state.
            return self.done()
        self._done = True
        return True

    def result(self) -> Vector:
        if not self._done and not self.done():
            raise Misuse(f"group {self._group.name}: result() before the collective is done")
        vector: Vector = self._tensor.numpy()
        vector.flags.writeable = False
        return vector


class GlooGroup(ProcessGroup):
    """A group over gloo, on the CPU. Made by :meth:`form`."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, width: int) -> None:
        super().__init__(name, ranks, rank, width)
        self._options: Any = None

    @classmethod
    def form(
        cls,
        store: RawStore,
        name: str,
        ranks: Sequence[int],
        rank: int,
        width: int,
        group_timeout_s: float,
        *,
        form_timeout_s: float | None = None,
        bound_to: str = "",
        look_out: Callable[[], None] | None = None,
    ) -> Self:
        """Meet all ``ranks`` under ``name`` in the store; returns when every one has come.

        ``store`` is a client that nobody else uses meanwhile; ``name`` must be new for every
        attempt. ``group_timeout_s`` is how long one collective may take before the whole group
        breaks for good: a little more than the deadline of a step. ``form_timeout_s`` (default:
        the same) is how long the ranks wait for each other here. Success leaves no key behind.
        ``bound_to`` is the address where this rank listens, unless GLOO_SOCKET_IFNAME names
        interfaces; without
        either gloo takes the address of the host's name. ``look_out`` is called while it waits, and
        ends the wait by raising.

        Raises :class:`Misuse` where this rank wants another shape than the first that came,
        :class:`PeerLost` naming the ranks that did not come, :class:`StoreSilent` where the store
        failed or hung (at most ``2 * form_timeout_s + 1``).
        """
        group = cls(name, ranks, rank, width)
        limit_s = group_timeout_s if form_timeout_s is None else form_timeout_s
        # Both halves of meeting, connecting and the first collective, take up to limit_s.
        silent = f"store {address(store)} hung while rank {rank} formed group {name}"
        group._take(
            bounded(
                lambda: _meet(store, group, limit_s, bound_to), 2 * limit_s + 1.0, silent, look_out
            )
        )
        group._options = _min_options(group_timeout_s)
        return group

    def min(self, vector: Vector) -> Work:
        """See :meth:`Group.min`; :class:`ResourceError` with MAX_OUTSTANDING in flight."""
        self._check(vector)
        self._admit()
        tensor = torch.from_numpy(vector.copy())
        try:
            work = self._group.allreduce([tensor], self._options)
        except RuntimeError as error:
            raise self.lost(error) from None
        self._outstanding.append(work)
        return _GlooWork(self, tensor, work)


def _min_options(timeout_s: float) -> Any:
    options = _c10d.AllreduceOptions()
    options.reduceOp = _c10d.ReduceOp.MIN
    options.timeout = _timedelta(timeout_s)
    return options


def _gloo_options(limit_s: float, address: str) -> Any:
    make: Any = _c10d.ProcessGroupGloo
    options = make._Options()
    options._timeout = _timedelta(limit_s)
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [make.create_device(interface=one) for one in interfaces.split(",")]
    elif address:
        options._devices = [make.create_device(hostname=address)]
    else:
        options._devices = [make.create_default_device()]
    return options


def _meet(store: RawStore, group: GlooGroup, limit_s: float, address: str = "") -> Any:
    """Compare the shape through the store, connect to all ranks, prove it by one collective."""
    announce(store, group)
    name, ranks, rank = group.name, group.ranks, group.rank
    try:
        process_group: Any = _c10d.ProcessGroupGloo(
            _c10d.PrefixStore(name, store),
            ranks.index(rank),
            len(ranks),
            _gloo_options(limit_s, address),
        )
        # Its result says that all are connected to all: nobody needs the keys any more.
        first = process_group.allreduce([torch.zeros(1, dtype=torch.int64)], _min_options(limit_s))
        first.wait(_timedelta(limit_s))
    except RuntimeError as error:
        raise not_met(store, group, first_line(error)) from None
    if rank == ranks[0]:
        forget(store, group)
    return process_group


# --------------------------------------------------------------------------------------- NCCL


class _Health:
    """The health that the works of one NCCL group share; no reference to the group itself."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.timeout_s = 0.0
        self.is_broken = False  # for good: a collective outlived timeout_s
        self.process_group: Any = None

    def give_up(self) -> None:
        """Free the device of what waits there; peers that come later wait for their own timeout."""
        self.is_broken = True
        group, self.process_group = self.process_group, None
        if group is not None:
            with contextlib.suppress(KvpactError, RuntimeError):
                bounded(group.abort, ABORT_S, f"NCCL does not abort group {self.name}")

    def lost(self, reason: str) -> PeerLost:
        return PeerLost(f"group {self.name}: a collective failed: {reason}")


class _NcclWork:
    """One all_reduce on the device with the copies in and out, seen through one event.

    NCCL does not notice a peer that died: its collective is merely never done, so the group's
    timeout is kept here. And a collective that is aborted lets the event pass, with what this rank
    had put in: so behind the vector each rank has a place that only it lowers to 0.
    """

    __slots__ = ("_end_s", "_event", "_health", "_host", "_is_over", "_vector")

    def __init__(
        self, health: _Health, host: torch.Tensor, vector: torch.Tensor, event: Any
    ) -> None:
        self._health = health
        self._host = host
        self._vector = vector  # kept until the event has passed
        self._event = event
        self._end_s = time.monotonic() + health.timeout_s
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether it has ended, in any way: what the release thread waits for."""
        try:
            return self.done()
        except PeerLost:
            return True

    def done(self) -> bool:
        health = self._health
        if self._is_over:
            return True
        try:
            has_passed = bool(self._event.query())
        except RuntimeError as error:
            raise health.lost(first_line(error)) from None
        if health.is_broken:  # asked after the event: it may have passed because of that
            raise health.lost("the group is broken")
        if has_passed and self._host[-health.size :].any():
            health.give_up()
            raise health.lost("it was aborted")
        if not has_passed and time.monotonic() >= self._end_s:
            health.give_up()
            raise health.lost(f"it did not end within {health.timeout_s:g} s")
        self._is_over = has_passed
        return self._is_over

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0001)  # an event has no wait with a timeout
        return True

    def result(self) -> Vector:
        if not self.done():
            raise Misuse(f"group {self._health.name}: result() before the collective is done")
        vector: Vector = self._host.numpy()[: -self._health.size]
        vector.flags.writeable = False
        return vector


class NcclGroup(ProcessGroup):
    """A group over NCCL: the vector travels on the device, on a stream of the group's own.

    A ballot is a few kilobytes, and two NCCL communicators at work at once are advised against:
    prefer gloo. Never run yet: several ranks need a CUDA device each, or NCCL 2.30 and
    ``NCCL_MULTI_RANK_GPU_ENABLE=1``. Set ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``, or torch ends the
    process where NCCL hears of a peer's death, before this class can name it.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, width: int) -> None:
        super().__init__(name, ranks, rank, width)
        self._health = _Health(name, self.size)
        self.device: Any = None
        self._stream: Any = None

    @classmethod
    def form(
        cls,
        store: RawStore,
        name: str,
        ranks: Sequence[int],
        rank: int,
        width: int,
        group_timeout_s: float,
        *,
        form_timeout_s: float | None = None,
        device_index: int = 0,
    ) -> Self:
        """Like :meth:`GlooGroup.form`, on CUDA device ``device_index``; Misuse without CUDA.

        NCCL's own keys stay in the store under ``name``.
        """
        group = cls(name, ranks, rank, width)
        if not torch.cuda.is_available() or not _c10d.is_nccl_available():
            raise Misuse("NcclGroup needs CUDA and a torch built with NCCL: use GlooGroup")
        limit_s = group_timeout_s if form_timeout_s is None else form_timeout_s
        group.device = torch.device("cuda", device_index)
        group._stream = torch.cuda.Stream(group.device)
        silent = f"store {address(store)} or NCCL hung while rank {rank} formed group {name}"
        met = bounded(lambda: _meet_nccl(store, group, limit_s), 2 * limit_s + 1.0, silent)
        group._take(met)
        group._health.process_group = met
        group._health.timeout_s = group_timeout_s
        return group

    def min(self, vector: Vector) -> Work:
        """See :meth:`Group.min`; :class:`ResourceError` with MAX_OUTSTANDING in flight."""
        self._check(vector)
        if self._health.is_broken:
            raise self._health.lost("an earlier one did not end, which broke the group")
        self._admit()
        return self._post(vector)

    def _post(self, vector: Vector) -> _NcclWork:
        here = [int(member != self.rank) for member in self.ranks]
        host = torch.from_numpy(np.append(vector, here)).pin_memory()
        event: Any = torch.cuda.Event()
        try:
            with torch.cuda.stream(self._stream):
                device = host.to(self.device, non_blocking=True)
                options = _min_options(NEVER_S)
                self._group.allreduce([device], options).wait()  # orders the stream only
                host.copy_(device, non_blocking=True)
                event.record(self._stream)
        except RuntimeError as error:
            raise self.lost(error) from None
        work = _NcclWork(self._health, host, device, event)
        self._outstanding.append(work)
        return work


def _meet_nccl(store: RawStore, group: NcclGroup, limit_s: float) -> Any:
    """Meet in the store, connect, prove it by one collective. NCCL itself waits without a bound."""
    announce(store, group)
    end_s = time.monotonic() + limit_s
    try:
        while absent(store, group):
            if time.monotonic() >= end_s:
                raise not_met(store, group, f"within {limit_s:g} s")
            time.sleep(0.01)
        options = _c10d.ProcessGroupNCCL.Options()
        # When this has passed, torch's watchdog ends the process: what is late is ours to tell.
        options._timeout = _timedelta(NEVER_S)
        prefix, index = _c10d.PrefixStore(group.name, store), group.ranks.index(group.rank)
        process_group = _c10d.ProcessGroupNCCL(prefix, index, group.size, options)
        first = torch.zeros(1, dtype=torch.int64, device=group.device)
        process_group.allreduce([first], _min_options(NEVER_S)).wait()
        first.item()  # its result says that all are connected to all
    except RuntimeError as error:
        raise not_met(store, group, first_line(error)) from None
    if group.rank == group.ranks[0]:
        forget(store, group)
    return process_group
