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
  ``shutdown`` do not help), also at the end of the interpreter: so the janitor does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed

from consensus.collective import (
    MAX_OUTSTANDING,
    Group,
    ProcessGroup,
    RawStore,
    Vector,
    Work,
    first_line,
)
from consensus.errors import Misuse, PeerLost, ResourceError, StoreSilent
from consensus.janitor import bounded

__all__ = [
    "MAX_OUTSTANDING",
    "GlooGroup",
    "Group",
    "NcclGroup",
    "RawStore",
    "Work",
    "connect_tcp_store",
    "open_tcp_store",
    "serve_tcp_store",
]

#: The resolution of c10d's timeouts.
MIN_WAIT_S = 0.001

# The stubs lack most of what is used here, and some of what they have is wrong.
_c10d: Any = torch.distributed


# ---------------------------------------------------------------------------------- raw store


def serve_tcp_store(port: int = 0) -> tuple[RawStore, int]:
    """Serve a store, on a free port where ``port`` is 0; returns (store, port).

    It is served by a thread of this process as long as the returned store lives.
    """
    store: Any = _c10d.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    return store, int(store.port)


def connect_tcp_store(host: str, port: int, timeout_s: float) -> RawStore:
    """A new client. May hang far beyond ``timeout_s`` while the host is stopped."""
    store: RawStore = _c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=_timedelta(timeout_s)
    )
    return store


def open_tcp_store(host: str, port: int, timeout_s: float) -> RawStore:
    """A new client within ``timeout_s``, or :class:`StoreSilent` naming host:port."""

    def connect() -> RawStore:
        try:
            return connect_tcp_store(host, port, timeout_s)
        except RuntimeError as error:
            text = f"store {host}:{port} cannot be reached: {first_line(error)}"
            raise StoreSilent(text) from error

    return bounded(connect, timeout_s, f"store {host}:{port} let nobody in for {timeout_s:g} s")


def _address(store: Any) -> str:
    return f"{store.host}:{store.port}" if hasattr(store, "port") else type(store).__name__


def _timedelta(seconds: float) -> timedelta:
    # Whole milliseconds are all that c10d keeps; 0 would mean "for ever".
    return timedelta(milliseconds=max(1, int(min(seconds, 1e6) * 1000)))


# --------------------------------------------------------------------------------------- gloo


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
                self._work.wait(_timedelta(1.0))
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
        if not self.done():
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
    ) -> Self:
        """Meet all ``ranks`` under ``name`` in the store; returns when every one has come.

        ``store`` is a client that nobody else uses meanwhile; ``name`` must be new for every
        attempt. ``group_timeout_s`` is how long one collective may take before the whole group
        breaks for good: a little more than the deadline of a step. ``form_timeout_s`` (default:
        the same) is how long the ranks wait for each other here. Success leaves no key behind.

        Raises :class:`Misuse` where this rank wants another shape than the first that came,
        :class:`PeerLost` naming the ranks that did not come, :class:`StoreSilent` where the store
        failed or hung (at most ``2 * form_timeout_s + 1``).
        """
        group = cls(name, ranks, rank, width)
        limit_s = group_timeout_s if form_timeout_s is None else form_timeout_s
        # Both halves of meeting, connecting and the first collective, take up to limit_s.
        silent = f"store {_address(store)} hung while rank {rank} formed group {name}"
        group._take(bounded(lambda: _meet(store, group, limit_s), 2 * limit_s + 1.0, silent))
        group._options = _min_options(group_timeout_s)
        return group

    def min(self, vector: Vector) -> Work:
        """See :meth:`Group.min`; :class:`ResourceError` with MAX_OUTSTANDING in flight."""
        self._check(vector)
        outstanding = self._outstanding
        while outstanding and outstanding[0].is_completed():
            outstanding.popleft()
        if len(outstanding) >= MAX_OUTSTANDING:
            raise ResourceError(f"group {self.name}: {MAX_OUTSTANDING} collectives in flight")
        tensor = torch.from_numpy(vector.copy())
        try:
            work = self._group.allreduce([tensor], self._options)
        except RuntimeError as error:
            raise self.lost(error) from None
        outstanding.append(work)
        return _GlooWork(self, tensor, work)


def _min_options(timeout_s: float) -> Any:
    options = _c10d.AllreduceOptions()
    options.reduceOp = _c10d.ReduceOp.MIN
    options.timeout = _timedelta(timeout_s)
    return options


def _meet(store: RawStore, group: GlooGroup, limit_s: float) -> Any:
    """Compare the shape through the store, connect to all ranks, prove it by one collective."""
    name, ranks, rank = group.name, group.ranks, group.rank
    shape = f"width={group.width} ranks={','.join(map(str, ranks))}"
    try:
        stands = store.compare_set(f"{name}/shape", "", shape).decode()
        if stands != shape:
            raise Misuse(
                f"group {name}: this rank wants [{shape}], the first that came [{stands}]:"
                " give every rank the same configuration",
                rank=rank,
            )
        store.set(f"{name}/here/{rank}", "1")
    except RuntimeError as error:
        raise _store_failed(store, error) from error
    try:
        process_group: Any = _c10d.ProcessGroupGloo(
            _c10d.PrefixStore(name, store), ranks.index(rank), len(ranks), _timedelta(limit_s)
        )
        # Its result says that all are connected to all: nobody needs the keys any more.
        first = process_group.allreduce([torch.zeros(1, dtype=torch.int64)], _min_options(limit_s))
        first.wait(_timedelta(limit_s))
    except RuntimeError as error:
        raise _not_met(store, group, error) from error
    if rank == ranks[0]:
        _forget(store, group)
    return process_group


def _not_met(store: RawStore, group: GlooGroup, error: RuntimeError) -> PeerLost | StoreSilent:
    try:
        absent = [rank for rank in group.ranks if not store.check([f"{group.name}/here/{rank}"])]
    except RuntimeError as silent:
        return _store_failed(store, silent)
    who = f"ranks {absent} did not come" if absent else "all came, one left"
    return PeerLost(f"group {group.name} not formed: {who}: {first_line(error)}", ranks=absent)


def _store_failed(store: RawStore, error: RuntimeError) -> StoreSilent:
    return StoreSilent(f"store {_address(store)} failed: {first_line(error)}")


def _forget(store: RawStore, group: GlooGroup) -> None:
    """Delete what meeting left in the store; gloo itself leaves one key a rank, of its device 0."""
    keys = [f"{group.name}/shape"]
    for index, rank in enumerate(group.ranks):
        keys += [f"{group.name}/here/{rank}", f"{group.name}/0/{index}"]
    try:
        for key in keys:
            store.delete_key(key)
    except RuntimeError as error:
        raise _store_failed(store, error) from error


# --------------------------------------------------------------------------------------- NCCL


class _NcclWork:
    """One all_reduce on the device with the copies in and out, seen through one event."""

    __slots__ = ("_event", "_group", "_host", "_vector")

    def __init__(
        self, group: NcclGroup, host: torch.Tensor, vector: torch.Tensor, event: Any
    ) -> None:
        self._group = group
        self._host = host
        self._vector = vector  # kept until the event has passed
        self._event = event

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise self._group.lost(error) from None

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0001)  # an event has no wait with a timeout
        return True

    def result(self) -> Vector:
        if not self.done():
            raise Misuse(f"group {self._group.name}: result() before the collective is done")
        vector: Vector = self._host.numpy()
        vector.flags.writeable = False
        return vector


class NcclGroup(ProcessGroup):
    """A group over NCCL: the vector travels on the device, on a stream of the group's own.

    Never run yet: it needs one CUDA device per rank. What differs from gloo: NCCL does not notice
    a peer that died, its collective is merely never done and the caller's deadline finds it; and
    torch's own watchdog ends the process after ``group_timeout_s`` unless
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` is set. A ballot is a few kilobytes: prefer gloo.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, width: int) -> None:
        super().__init__(name, ranks, rank, width)
        self._device: Any = None
        self._stream: Any = None
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
        device_index: int = 0,
    ) -> Self:
        """Like :meth:`GlooGroup.form`, on CUDA device ``device_index``; Misuse without CUDA.

        The shape is not compared and NCCL connects at the first ``min``.
        """
        group = cls(name, ranks, rank, width)
        if not torch.cuda.is_available() or not _c10d.is_nccl_available():
            raise Misuse("NcclGroup needs CUDA and a torch built with NCCL: use GlooGroup")
        group._device = torch.device("cuda", device_index)
        group._stream = torch.cuda.Stream(group._device)
        group._options = _min_options(group_timeout_s)

        def meet() -> Any:
            prefix = _c10d.PrefixStore(name, store)
            return _c10d.ProcessGroupNCCL(prefix, group.ranks.index(rank), group.size)

        silent = f"store {_address(store)} hung while rank {rank} formed group {name}"
        group._take(bounded(meet, group_timeout_s, silent))
        return group

    def min(self, vector: Vector) -> Work:
        """See :meth:`Group.min`."""
        self._check(vector)
        host = torch.from_numpy(vector.copy()).pin_memory()
        event: Any = torch.cuda.Event()
        try:
            with torch.cuda.stream(self._stream):
                device = host.to(self._device, non_blocking=True)
                self._group.allreduce([device], self._options).wait()  # orders the stream only
                host.copy_(device, non_blocking=True)
                event.record(self._stream)
        except RuntimeError as error:
            raise self.lost(error) from None
        return _NcclWork(self, host, device, event)
