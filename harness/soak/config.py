"""What a soak runs, checked once; shared by Ray, torchrun and the simulator's replay."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from kvpact.cache.config import CacheConfig
from kvpact.cache.memory.shape import KVShape
from kvpact.consensus.core.errors import BadInput
from kvpact.harness.faults.plan import Plan
from kvpact.harness.text.files import parse_toml, read_text
from kvpact.harness.text.toml_errors import Place, convert
from kvpact.harness.trace.conversations import WorkloadConfig, generate
from kvpact.harness.trace.mooncake import BLOCK_TOKENS, TraceRequest, read_trace

Mode = Literal["write_through", "write_through_selective", "write_back", "buffer_only"]

__all__ = [
    "DEFAULT_WORKLOAD",
    "SoakConfig",
    "cache_config",
    "check_out",
    "load_requests",
    "read_workload",
    "require_room",
]

MAX_RANKS: Final = 64
MAX_PAGES: Final = 1 << 24

#: Conversations that do not fit the default pools, so that everything is evicted now and then.
DEFAULT_WORKLOAD: Final = WorkloadConfig(
    lanes=24, turns=6, lanes_per_group=4, shared_tokens=1536, pause_ms=(500, 8000)
)


class SoakConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One soak. Raises BadInput, naming the flag, when it cannot be run.

    It ends after ``minutes`` of the agreed clock, or ``steps``. ``mode`` and ``policy`` are those
    of the cache; ``storage`` is each rank's own, of ``storage_mb`` MiB, ``file`` below
    ``storage_dir``. Page counts are per rank (``stage * tp + tp_rank``), ``page_size`` is in
    tokens. ``walk_every_steps``: how often the ranks compare whole trees and look at the bytes of
    a sample. ``budget_step_ms``: what the 99th
    percentile of a step may take. ``pace_ms``: what a forward pass takes at least. ``journal``: the
    folder, seen by every rank, for their journals.
    """

    tp: int = 2
    pp: int = 1
    lag: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    mode: Mode = "write_through"
    storage: Literal["none", "memory", "file"] = "none"
    storage_dir: str | None = None
    storage_mb: int = 256
    policy: Literal["raise", "reset", "detach", "observe"] = "raise"
    device: Literal["cpu", "cuda"] = "cpu"
    minutes: float | None = None
    steps: int | None = None
    trace: str | None = None
    workload: WorkloadConfig = DEFAULT_WORKLOAD
    plan: Plan = Plan()
    seed: int = 0
    page_size: int = 256
    device_pages: tuple[int, ...] = (96, 96)
    host_pages: tuple[int, ...] = (192, 192)
    lanes: int = 4
    kv_shape: tuple[int, int, int] = (2, 1, 4)
    deadline_s: float = 10.0
    copy_timeout_s: float = 2.0
    drain_s: float = 20.0
    pace_ms: float = 0.0
    walk_every_steps: int = 50
    unsafe_no_votes: bool = False
    budget_step_ms: float | None = None
    journal: str | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica: tp * pp."""
        return self.tp * self.pp

    @property
    def fault_seed(self) -> int:
        """What the times of the faults are drawn from."""
        return self.seed if self.plan.seed is None else self.plan.seed

    def __post_init__(self) -> None:
        _within("--tp", self.tp, 1, MAX_RANKS)
        _within("--pp", self.pp, 1, MAX_RANKS)
        _within("--tp * --pp", self.num_ranks, 1, MAX_RANKS)
        _within("--lag", self.lag, 0, 64)
        if self.pp > 1 and self.lag < self.pp:
            raise BadInput(f"--lag: with --pp {self.pp} must be at least {self.pp}, got {self.lag}")
        if (self.minutes is None) == (self.steps is None):
            raise BadInput("say how long: either --minutes or --steps")
        if self.minutes is not None and not 0 < self.minutes <= 7 * 24 * 60:
            raise BadInput(f"--minutes: must be above 0 and at most a week, got {self.minutes:g}")
        if self.steps is not None:
            _within("--steps", self.steps, 1, 2**40)
        if self.backend == "nccl" and self.device != "cuda":
            raise BadInput("--backend: nccl needs --device cuda: its vector travels on the device")
        _within("--seed", self.seed, 0, 2**62)
        _within("--page-size", self.page_size, 1, BLOCK_TOKENS)
        if BLOCK_TOKENS % self.page_size:
            raise BadInput(f"--page-size: {self.page_size} does not divide {BLOCK_TOKENS} tokens")
        self._check_storage()
        self._check_pages("--device-pages", self.device_pages, 1)
        self._check_pages("--host-pages", self.host_pages, 0)
        _within("--lanes", self.lanes, 1, 4096)
        for name in ("deadline_s", "copy_timeout_s", "drain_s"):
            value = getattr(self, name)
            if not 0 < value <= 86400:
                flag = "--" + name.removesuffix("_s").replace("_", "-")
                raise BadInput(f"{flag}: must be above 0 and at most a day in seconds, got {value}")

    def _check_storage(self) -> None:
        _within("--storage-mb", self.storage_mb, 1, 1 << 30)
        if (self.storage == "file") != (self.storage_dir is not None):
            raise BadInput("--storage-dir: belongs to --storage file, and is needed there")
        if self.mode == "buffer_only" and self.storage == "none":
            raise BadInput("--mode: buffer_only needs a --storage: the host is staging only")
        sites = {line.site for line in self.plan.fault}
        if self.storage == "none" and any(site.startswith("storage.") for site in sites):
            raise BadInput("--faults: the plan has faults of the storage, but --storage is none")

    def _check_pages(self, flag: str, counts: tuple[int, ...], least: int) -> None:
        if len(counts) != self.num_ranks:
            raise BadInput(
                f"{flag}: expected one number, or one for each of {self.num_ranks} ranks,"
                f" got {len(counts)}"
            )
        for count in counts:
            _within(flag, count, least, MAX_PAGES)


def cache_config(config: SoakConfig, rank: int) -> CacheConfig:
    """The cache's configuration of one rank."""
    layers, heads, dim = config.kv_shape
    return CacheConfig(
        page_size=config.page_size,
        device_pages=config.device_pages[rank],
        host_pages=config.host_pages[rank],
        kv_shape=KVShape(layers, heads, dim),
        lag=config.lag,
        deadline_s=config.deadline_s,
        copy_timeout_s=config.copy_timeout_s,
        integrity_every_steps=config.walk_every_steps,
        mode=config.mode,
        policy=config.policy,
        # Write-back keeps a sixteenth of the device free, so that few requests wait.
        low_water_pages=min(config.device_pages) // 16 if config.mode == "write_back" else 0,
    )


def read_workload(path: str) -> WorkloadConfig:
    """Read a TOML file with the fields of :class:`WorkloadConfig`. Raises BadInput."""
    raw = parse_toml(read_text(path, what="a workload (TOML)"), path)
    try:
        return convert(raw, WorkloadConfig, Place(path))
    except BadInput as error:
        text = error.message
        raise BadInput(text if text.startswith(path) else f"{path}: {text}") from None


def load_requests(config: SoakConfig) -> list[TraceRequest]:
    """The requests of one round. Raises BadInput."""
    if config.trace is not None:
        requests = read_trace(config.trace)
    else:
        requests = generate(msgspec.structs.replace(config.workload, seed=config.seed))
    require_room(config, requests)
    return requests


def require_room(config: SoakConfig, requests: list[TraceRequest]) -> None:
    """Every request must fit into the smallest device pool, or it could never run."""
    capacity = min(config.device_pages)
    for request in requests:
        num_pages = len(request.hash_ids) * BLOCK_TOKENS // config.page_size
        if num_pages > capacity:
            raise BadInput(
                f"--device-pages: request {request.index} needs {num_pages} pages of"
                f" {config.page_size} tokens, the smallest device pool has {capacity}"
            )


def check_out(out: str) -> Path:
    """Make the folder of the report and prove that it can be written to. Raises BadInput."""
    folder = Path(out)
    probe = folder / ".kvpact-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # As much as a report takes, so that a full disk is found now and not in the morning.
        probe.write_bytes(b"\0" * (4 << 20))
        probe.unlink()
    except OSError as error:
        try:
            probe.unlink(missing_ok=True)
        except OSError:
            pass
        raise BadInput(f"--out: {out} cannot be written to: {error.strerror or error}") from None
    return folder


def _within(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadInput(f"{flag}: must be between {least} and {most}, got {value}")
