"""``kvpact soak`` on Ray: a local one that it starts and ends, or the cluster that it is given."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Final, Self

import msgspec
import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from kvpact.consensus.core.errors import BadInput, ResourceError
from kvpact.consensus.transport.envelope import SECRET_VARIABLE
from kvpact.harness.drive.actor import RankActor, StoreActor
from kvpact.harness.drive.drive import Options, drive, finish
from kvpact.harness.drive.live import Metrics
from kvpact.harness.rank.launch import RESOLVER
from kvpact.harness.soak.config import SoakConfig, check_out, load_requests
from kvpact.harness.soak.feed import Update
from kvpact.harness.trace.mooncake import TraceRequest
from kvpact.harness.verify.journals import require_journals

__all__ = ["LocalRay", "RayRanks", "run_soak"]

# Ray's stubs are partial.
_api: Any = ray

ASK_S: Final = 5.0
STORE_BYTES: Final = 80 << 20

#: Waits until its standard input closes, which is when the soak has ended in whatever way; then
#: ends what carries the soak's mark in its environment, and removes the folder.
_GUARD: Final = """
import os, shutil, signal, sys, time
mark, folder = sys.argv[1].encode(), sys.argv[2]
sys.stdin.buffer.read()
def marked():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and mark in open(f"/proc/{pid}/environ", "rb").read():
                yield int(pid)
        except OSError:
            pass
for attempt in range(20):
    left = list(marked())
    if not left:
        break
    for pid in left if attempt > 2 else ():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.25)
shutil.rmtree(folder, ignore_errors=True)
"""


class LocalRay:
    """A Ray of our own on this machine; nothing of it outlives this process, even after kill -9."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._folder = ""
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Short: the paths of Ray's sockets begin with it.
        self._folder = tempfile.mkdtemp(prefix="kvp")
        mark = f"KVPACT_SOAK={self._folder}"
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-c", _GUARD, mark, self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        _set_environment(self._folder)
        try:
            ray.init(
                num_cpus=self._num_cpus,
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._folder,
            )
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ResourceError(f"Ray could not be started here: {reason}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End Ray, and remove what it left. Bounded."""
        try:
            ray.shutdown()
        finally:
            guard, self._guard = self._guard, None
            if guard is not None and guard.stdin is not None:
                guard.stdin.close()
                try:
                    guard.wait(10.0)
                except subprocess.TimeoutExpired:
                    guard.kill()
                    guard.wait()
                shutil.rmtree(self._folder, ignore_errors=True)
            os.environ.pop("KVPACT_SOAK", None)


class JoinedRay:
    """The cluster at ``address``; it goes on when the soak has ended."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_ours = False

    def __enter__(self) -> Self:
        if ray.is_initialized():
            return self  # who joined it leaves it
        self._is_ours = True
        _require_reachable(self._address)
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise BadInput(f"--address: {self._address} cannot be joined: {reason}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            ray.shutdown()


class RayRanks:
    """One actor per rank in one placement group. Raises BadInput where it cannot be placed."""

    def __init__(self, config: SoakConfig, options: Options, requests: list[TraceRequest]) -> None:
        self._config = config
        self._options = options
        self._requests = requests
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._asked: dict[int, Any] = {}
        self._lost: dict[int, str] = {}
        self._group: Any = None
        self._store: Any = None

    def __enter__(self) -> Self:
        try:
            self._place()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self) -> None:
        config, timeout_s = self._config, self._options.start_timeout_s
        bundle: dict[str, float] = {"CPU": 1}
        if config.device == "cuda":
            bundle["GPU"] = 1
        total: dict[str, Any] = _api.cluster_resources()
        for name in bundle:
            has = float(total.get(name, 0))
            if has < config.num_ranks:
                raise BadInput(
                    f"{config.num_ranks} ranks need {config.num_ranks} {name}s, the cluster has"
                    f" {has:g}: use fewer ranks (--tp, --pp), or a larger cluster (--address)"
                )
        strategy = "STRICT_SPREAD" if self._options.spread else "STRICT_PACK"
        self._group = placement_group([bundle] * config.num_ranks, strategy=strategy)
        if not self._group.wait(timeout_s):
            free: dict[str, Any] = _api.available_resources()
            raise BadInput(
                f"{config.num_ranks} ranks ({strategy}, each {bundle}) could not be placed within"
                f" {timeout_s:g} s; free now: CPU {free.get('CPU', 0):g}, GPU"
                f" {free.get('GPU', 0):g}"
                + ("; --spread needs a node per rank" if self._options.spread else "")
            )

    def _start(self) -> None:
        config, options = self._config, self._options
        host, port = self._serve_store()
        packed = msgspec.msgpack.encode(config)
        requests = msgspec.msgpack.encode(self._requests)
        # torch's own threads would compete with the ranks for the cores.
        environment = {
            "env_vars": {
                "OMP_NUM_THREADS": "1",
                SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16),
            }
        }
        for rank in range(config.num_ranks):
            strategy = PlacementGroupSchedulingStrategy(self._group, rank)
            actor_class: Any = RankActor
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=1 if config.device == "cuda" else 0,
                scheduling_strategy=strategy,
                **({} if options.address == "local" else {"runtime_env": environment}),
            ).remote(rank)
            self._actors.append(actor)
        self._runs = [
            actor.run.remote(packed, requests, host, port, options.start_timeout_s)
            for actor in self._actors
        ]

    def _serve_store(self) -> tuple[str, int]:
        if self._options.address == "local":
            from kvpact.consensus.transport.gloo import serve_tcp_store

            for name, value in RESOLVER.items():
                os.environ.setdefault(name, value)
            self._store, port = serve_tcp_store()
            return "127.0.0.1", port
        actor_class: Any = StoreActor
        self._store = actor_class.remote()
        try:
            return _api.get(self._store.serve.remote(), timeout=self._options.start_timeout_s)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise BadInput(
                f"--address: the cluster started no store (is kvpact installed there?): {reason}"
            ) from error

    # -- harness.soak_drive.Ranks ----------------------------------------------------------------

    def poll(self) -> list[Update]:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked and rank not in self._lost:
                self._asked[rank] = actor.poll.remote()
        if not self._asked:
            return []
        asked = list(self._asked.values())
        ready, _ = _api.wait(asked, num_returns=len(asked), timeout=0.5)
        updates: list[Update] = []
        for rank, ref in list(self._asked.items()):
            if ref in ready:
                del self._asked[rank]
                data = self._get(rank, ref)
                if data is not None:
                    updates.append(msgspec.msgpack.decode(data, type=Update))
        return updates

    def _get(self, rank: int, ref: Any) -> Any:
        try:
            return _api.get(ref, timeout=ASK_S)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            self._lost[rank] = f"its process ended: {_last_line(error)}"
            return None

    def lost(self) -> dict[int, str]:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        return self._lost

    def stop(self) -> None:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        for rank, actor in enumerate(self._actors):
            if rank not in self._lost:
                actor.stop.remote()

    def stacks(self) -> dict[int, str]:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        asked = {
            rank: actor.stack.remote()
            for rank, actor in enumerate(self._actors)
            if rank not in self._lost
        }
        if not asked:
            return {}
        ready, _ = _api.wait(list(asked.values()), num_returns=len(asked), timeout=ASK_S)
        found = {rank: self._get(rank, ref) for rank, ref in asked.items() if ref in ready}
        return {rank: text for rank, text in found.items() if text}

    def pids(self) -> dict[int, int]:
        """The process of each rank, as far as it has told."""
        return {update.rank: update.pid for update in self.poll()}

    def close(self) -> None:
        """End what still runs, and give back what was reserved."""
        if self._runs:
            _api.wait(self._runs, num_returns=len(self._runs), timeout=2.0)
        for actor in self._actors:
            _api.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._options.address != "local" and self._store is not None:
            _api.kill(self._store)
        self._store = None


def run_soak(config: SoakConfig, options: Options, console: Console) -> int:
    """The whole command: start, drive, report; the exit status. Raises BadInput, ResourceError."""
    if options.out is not None:
        check_out(options.out)
    require_journals(config.journal, config.num_ranks)
    requests = load_requests(config)
    metrics = None if options.metrics_port is None else Metrics(options.metrics_port)
    try:
        with _ray(config, options), RayRanks(config, options, requests) as ranks:
            gather, conclusion = drive(ranks, config, options, console, metrics)
        return finish(gather, conclusion, options, console).status
    finally:
        if metrics is not None:
            metrics.close()


def _ray(config: SoakConfig, options: Options) -> LocalRay | JoinedRay:
    if options.address != "local":
        return JoinedRay(options.address)
    if config.device == "cuda":
        import torch

        if torch.cuda.device_count() < config.num_ranks:
            raise BadInput(
                f"{config.num_ranks} ranks with --device cuda need {config.num_ranks} GPUs, this"
                f" machine has {torch.cuda.device_count()}"
            )
    return LocalRay(max(config.num_ranks, os.cpu_count() or 1))


def _last_line(error: Exception) -> str:
    """What Ray says, without colours and the text around it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+(Error|Exception)\b", line)]
    last = (named or lines or [""])[-1]
    return f"{type(error).__name__}: {last}"[:300]


def _set_environment(folder: str) -> None:
    """Ray's processes and the ranks inherit it."""
    environ = os.environ
    environ["KVPACT_SOAK"] = folder
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A token of this run only: else Ray makes one and leaves it in the home folder.
    environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _require_reachable(address: str) -> None:
    """Ray itself tries for half a minute."""
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        if address == "auto":
            return
        raise BadInput(f"--address: expected local, auto, HOST:PORT or ray://HOST:PORT: {address}")
    end_s = time.monotonic() + 3.0
    try:
        socket.create_connection((host, int(port)), timeout=end_s - time.monotonic()).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"--address: no Ray answers at {address}: {error}") from None
