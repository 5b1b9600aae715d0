"""What a scenario file says, as frozen records: the world, and the entries in their order.

:func:`kvpact.harness.scenario.read.read_scenario` builds and checks them. Token ranges are
half-open pairs ``(start, stop)``; page counts are per rank, indexed by ``stage * tp + tp_rank``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpact.consensus.core.errors import BadInput

__all__ = [
    "COPY_ACTIONS",
    "COUNTERS",
    "POOL_ACTIONS",
    "SCHEDULER_ACTIONS",
    "STORAGE_ACTIONS",
    "Abort",
    "Admit",
    "AttachStorage",
    "ClearStorage",
    "Compute",
    "Decide",
    "DetachStorage",
    "Do",
    "Drain",
    "DropNamespace",
    "Entry",
    "Evict",
    "Expect",
    "Fault",
    "Finish",
    "Flush",
    "Free",
    "Headroom",
    "Heal",
    "Idle",
    "Insert",
    "Leave",
    "LoadBack",
    "LoadMatch",
    "Mode",
    "NewWeights",
    "Pause",
    "Prefetch",
    "Raises",
    "Ranges",
    "Reset",
    "Restart",
    "Scenario",
    "Settle",
    "SidePool",
    "Step",
    "Take",
    "TakeMatch",
    "World",
    "actions",
    "expand",
    "num_tokens",
    "parse_prefix",
    "parse_ranges",
]

MAX_TOKENS: Final = 1 << 20  # of one prompt
_INT32_MAX: Final = 2**31 - 1
_RANGE: Final = re.compile(r"(\d{1,10})\.\.(\d{1,10})", re.ASCII)

Ranges = tuple[tuple[int, int], ...]
PerRank = tuple[int, ...]
Amount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Mode = Literal["write_through", "write_through_selective", "write_back", "buffer_only"]

COUNTERS: Final = (
    "commits",
    "aborts",
    "refused",
    "admitted",
    "admissions_refused",
    "admissions_again",
    "deferred",
    "writes_submitted",
    "collectives",
    "divergences",
    "stalls",
    "resets",
)
POOL_ACTIONS: Final = ("refuse", "short")  # short: one page less than asked for
COPY_ACTIONS: Final = ("delay", "hang", "fail", "corrupt")
STORAGE_ACTIONS: Final = {
    "storage.put": ("delay", "hang", "fail"),
    "storage.get": ("delay", "hang", "fail", "corrupt", "miss"),
    "storage.exists": ("delay", "hang", "fail", "miss"),
}
SCHEDULER_ACTIONS: Final = ("skip_step", "extra_step", "stall", "exit", "late", "diverge")


class SidePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool beside the KV pool. ``window`` is in tokens, and 0 unless ``need`` is ``window``."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+$")]
    device_pages: PerRank
    host_pages: PerRank
    need: Literal["per_page", "per_node", "window"]
    window: Count | None = None


#: Whose layout the device tensors have: kvpact's own, or an engine's (harness/rank/layouts.py).
Layout = Literal[
    "own", "sglang", "vllm", "tensorrt", "one_allocation", "latent", "head_major", "quantised"
]


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The replica. ``page_size`` in tokens, ``step_ms`` in (virtual) milliseconds a step."""

    tp: Count
    pp: Count = 1
    lag: Amount
    page_size: Count
    device_pages: PerRank
    host_pages: PerRank
    mode: Mode = "write_through"
    storage: Literal["none", "memory", "file"] = "none"
    policy: Literal["raise", "reset", "detach", "observe"] = "raise"
    deadline_s: Seconds = 5.0
    step_ms: Seconds = 10.0
    copy_timeout_s: Seconds = 30.0
    # Knobs of the cache beyond the format's own; the fuzzer draws them.
    num_slots: Annotated[int, msgspec.Meta(ge=16, le=4096)] = 256
    headroom_pages: Amount = 0
    load_back_minimum_pages: Count = 1
    evicts_whole_nodes: bool = True
    eviction: Literal["lru", "lfu", "slru", "priority"] = "lru"
    layout: Layout = "own"
    low_water_pages: Amount = 0
    prefetch_policy: Literal["wait_complete", "best_effort", "timeout"] = "wait_complete"
    prefetch_timeout_s: Seconds = 1.0
    prefetch_minimum_pages: Count = 1
    storage_queue_pages: Count = 4096
    write_queue_nodes_max: Count = 1 << 16
    waiting_tickets_max: Count = 4096
    mover_parts_max: Count = 1 << 12
    storage_requests_max: Count = 256
    journal_entries_max: Count = 2048
    side_pools: tuple[SidePool, ...] = msgspec.field(default=(), name="side_pool")

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica: tp * pp."""
        return self.tp * self.pp

    def pools(self) -> dict[str, PerRank]:
        """Pages of each pool on each rank, by the names that ``free`` and the fault sites use.

        In buffer-only mode the host's pages are the staging pool.
        """
        host = "staging" if self.mode == "buffer_only" else "host"
        pools = {"device": self.device_pages, host: self.host_pages}
        for pool in self.side_pools:
            pools[f"{pool.name}.device"] = pool.device_pages
            pools[f"{pool.name}.host"] = pool.host_pages
        return pools


class Raises(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error an entry must raise on every rank that still steps; it must name ``rank``."""

    kind: str
    rank: Amount | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """What every entry carries: its place in the file from 1, who runs it, what it must raise."""

    number: int
    ranks: Annotated[tuple[Amount, ...], msgspec.Meta(min_length=1)] | None = None
    raises: Raises | None = None


class Insert(Entry, frozen=True, kw_only=True, tag="insert"):
    """The engine computed these tokens; ``hold`` pins the path until the request ends."""

    request: Name
    tokens: Ranges
    hold: bool = False
    namespace: str = ""
    priority: Amount = 0


class LoadBack(Entry, frozen=True, kw_only=True, tag="load_back"):
    """Match, and propose loading what is on HOST but not on DEVICE, at most ``pages_max``."""

    request: Name
    tokens: Ranges
    namespace: str = ""
    pages_max: Count | None = None


class TakeMatch(Entry, frozen=True, kw_only=True, tag="match"):
    """Match, and keep the handle for a later ``load_match``; with ``pin`` the request lives from
    now on, and pins what is on DEVICE, until ``finish`` or ``abort``."""

    request: Name
    tokens: Ranges
    pin: bool = False
    namespace: str = ""


class LoadMatch(Entry, frozen=True, kw_only=True, tag="load_match"):
    """Propose loading what of the request's kept match is on HOST, whatever happened meanwhile."""

    request: Name


class Prefetch(Entry, frozen=True, kw_only=True, tag="prefetch"):
    """Propose fetching from STORAGE to HOST what is not cached."""

    request: Name
    tokens: Ranges
    namespace: str = ""


class Settle(Entry, frozen=True, kw_only=True, tag="settle"):
    """Admission does not wait for the request's prefetch any longer (policy best_effort)."""

    request: Name


class Evict(Entry, frozen=True, kw_only=True, tag="evict"):
    """The engine asks for so many pages of one tier back."""

    tier: Literal["device", "host"]
    pages: Count


class Finish(Entry, frozen=True, kw_only=True, tag="finish"):
    """The request ends well."""

    request: Name


class Flush(Entry, frozen=True, kw_only=True, tag="flush"):
    """Backups that are queued are planned and started now, not in the step."""


class Abort(Entry, frozen=True, kw_only=True, tag="abort"):
    """The request is aborted in whatever state it is."""

    request: Name


class Admit(Entry, frozen=True, kw_only=True, tag="admit"):
    """The engine's own path: match the prompt and pin what of it is on DEVICE; with ``load`` ask
    for what is on HOST. With ``whole`` load and pages are one wish, which waits in line by
    ``priority``; ``extra`` pages beyond the prompt, and ``least`` of its own are enough. The
    request lives until ``finish`` or ``abort``."""

    request: Name
    tokens: Ranges
    load: bool = False
    whole: bool = False
    extra: Amount = 0
    least: Count | None = None
    priority: Amount = 0
    namespace: str = ""


class Take(Entry, frozen=True, kw_only=True, tag="take"):
    """An admitted request wants so many pages: out of the headroom, or by a ticket."""

    request: Name
    pages: Count


class Compute(Entry, frozen=True, kw_only=True, tag="compute"):
    """An admitted request computes its prompt as far as its pages reach, and inserts that."""

    request: Name


class Free(Entry, frozen=True, kw_only=True, tag="free"):
    """An admitted request gives back up to so many of its own pages."""

    request: Name
    pages: Count


class Headroom(Entry, frozen=True, kw_only=True, tag="headroom"):
    """So many pages shall be kept voted for what is taken at once."""

    pages: Amount


class Step(Entry, frozen=True, kw_only=True, tag="step"):
    """``times`` scheduler iterations."""

    times: Steps = 1


class Decide(Entry, frozen=True, kw_only=True, tag="decide"):
    """An extra round between two steps, for an engine that cannot wait; not with pp > 1."""


class Drain(Entry, frozen=True, kw_only=True, tag="drain"):
    """Steps until nothing is pending; not idle after ``max_steps`` is a failure."""

    max_steps: Steps = 100


class Reset(Entry, frozen=True, kw_only=True, tag="reset"):
    """Admin: an empty cache in a new epoch."""


class NewWeights(Entry, frozen=True, kw_only=True, tag="new_weights"):
    """The engine has loaded weights ``version``: nothing of others is served."""

    version: Name


class DropNamespace(Entry, frozen=True, kw_only=True, tag="drop_namespace"):
    """Nothing that was computed under this name is served again."""

    namespace: str = ""


class AttachStorage(Entry, frozen=True, kw_only=True, tag="attach_storage"):
    """Admin: the storage tier on."""


class ClearStorage(Entry, frozen=True, kw_only=True, tag="clear_storage"):
    """Admin: the storage of every rank is emptied."""


class Idle(Entry, frozen=True, kw_only=True, tag="idle"):
    """Nothing happens for so long, between two steps; the agreed clock goes on."""

    seconds: Seconds


class Pause(Entry, frozen=True, kw_only=True, tag="pause"):
    """Who does this is away for so long and says so: nobody's deadline runs meanwhile."""

    seconds: Seconds


class DetachStorage(Entry, frozen=True, kw_only=True, tag="detach_storage"):
    """Admin: the storage tier off."""


class Leave(Entry, frozen=True, kw_only=True, tag="leave"):
    """Who does this leaves in good order: the step after its ballot was settled raises
    ``PeerLeft`` everywhere."""


class Restart(Entry, frozen=True, kw_only=True, tag="restart"):
    """The run ends on all ranks, and another begins under the same name in the same store. Only
    what is in storage outlives it; counters begin anew."""


class Fault(Entry, frozen=True, kw_only=True, tag="fault"):
    """Armed from here on. ``times`` is -1 for ever; ``steps`` comes with ``delay``, ``seconds``
    with ``late``, and neither with another action. One that never strikes fails the file unless it
    ``may_miss``."""

    rank: Amount
    site: str
    action: str
    times: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 1
    after: Amount = 0
    steps: Count | None = None
    seconds: Seconds | None = None
    may_miss: bool = False


class Heal(Entry, frozen=True, kw_only=True, tag="heal"):
    """Disarms all faults; what hung ends at the next step."""


class Expect(Entry, frozen=True, kw_only=True, tag="expect"):
    """``None`` where the file is silent. Prefixes are kept as written: ``"0..8,100..108"``, or
    ``"tenant: 0..8"`` in a namespace; :func:`parse_prefix` reads them. ``right_bytes`` that finds
    nothing on the device fails the file unless it ``may_miss``. ``must_recompute`` counts how often
    a request was told to. Token counts per prefix or request,
    page counts in ``free`` (per rank) and ``pinned``."""

    device: dict[str, int] | None = None
    host: dict[str, int] | None = None
    storage: dict[str, int] | None = None
    usable: dict[str, int] | None = None
    free: dict[str, PerRank] | None = None
    pinned: dict[str, int] | None = None
    admitted: dict[str, int] | None = None
    loaded: dict[str, int] | None = None
    prefetched: dict[str, int] | None = None
    counters: dict[str, int] | None = None
    must_recompute: dict[str, int] | None = None
    right_bytes: tuple[str, ...] | None = None
    may_miss: bool = False


Do = (
    Insert
    | LoadBack
    | TakeMatch
    | LoadMatch
    | Prefetch
    | Evict
    | Finish
    | Flush
    | Abort
    | Admit
    | Take
    | Compute
    | Free
    | Headroom
    | Settle
    | Step
    | Decide
    | Drain
    | Reset
    | NewWeights
    | DropNamespace
    | AttachStorage
    | ClearStorage
    | DetachStorage
    | Idle
    | Pause
    | Leave
    | Restart
    | Fault
    | Heal
    | Expect
)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario file. ``path`` is as the caller gave it, for messages."""

    path: str
    name: str
    source: str = ""
    about: str = ""
    world: World
    do: tuple[Do, ...]


def parse_ranges(text: str) -> Ranges:
    """Read ``"0..8,100..108"``. Raises BadInput saying what is wrong with the text."""
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise BadInput(f"{part.strip()!r} is not a token range; write it like '0..8'")
        start, stop = int(match[1]), int(match[2])
        if start >= stop:
            raise BadInput(f"'{start}..{stop}' is empty: the end of a range is not part of it")
        if stop > _INT32_MAX:
            raise BadInput(f"'{start}..{stop}' leaves the 32-bit token ids")
        ranges.append((start, stop))
        if num_tokens(ranges) > MAX_TOKENS:
            raise BadInput(f"more than {MAX_TOKENS} tokens")
    return tuple(ranges)


def parse_prefix(text: str) -> tuple[str, Ranges]:
    """Namespace and ranges of ``"tenant: 0..8"``. Raises BadInput like :func:`parse_ranges`."""
    namespace, _, ranges = text.rpartition(":")
    return namespace.strip(), parse_ranges(ranges)


def num_tokens(ranges: Sequence[tuple[int, int]]) -> int:
    """Length of the ranges together, in tokens."""
    return sum(stop - start for start, stop in ranges)


def expand(ranges: Ranges) -> NDArray[np.int32]:
    """Token ids of the ranges, one after the other: shape ``[tokens]``, int32."""
    parts = [np.arange(start, stop, dtype=np.int32) for start, stop in ranges]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def actions(world: World) -> dict[str, tuple[str, ...]]:
    """What can go wrong where in this world: the actions of each fault site."""
    sites: dict[str, tuple[str, ...]] = {f"{pool}.reserve": POOL_ACTIONS for pool in world.pools()}
    sites["write"] = sites["load"] = COPY_ACTIONS
    sites.update(STORAGE_ACTIONS)
    sites["scheduler"] = SCHEDULER_ACTIONS
    return sites
