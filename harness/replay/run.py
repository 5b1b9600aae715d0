"""``kvpact replay``: a trace through the caches of all ranks, every promise checked on the way."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvpact.consensus.core.errors import BadInput, KvpactError
from kvpact.consensus.epoch.report import Incident
from kvpact.harness.rank.launch import Launch
from kvpact.harness.replay.config import ReplayConfig
from kvpact.harness.replay.rank import Played, RankSummary, replay_sim
from kvpact.harness.replay.report import print_report, summarise
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.files import write_bytes
from kvpact.harness.text.incident import print_incidents
from kvpact.harness.trace.mooncake import BLOCK_TOKENS, TraceRequest, read_trace
from kvpact.harness.verify.agreement import Snapshot, compare
from kvpact.harness.verify.journals import check_journals, require_journals

__all__ = ["replay"]

_TARGET = "kvpact.harness.replay.rank:run_rank"
#: A replay that makes no progress for so long is ended.
_SILENCE_S = 120.0


def replay(config: ReplayConfig) -> int:
    """Run it, print the table, write the JSON; 0: every promise held, 1: one did not."""
    requests = read_trace(config.trace, limit=config.limit)
    _require_room(config, requests)
    require_journals(config.journal, config.num_ranks)
    started = time.monotonic()
    if config.ranks == "sim":
        played = replay_sim(config, requests)
    else:
        played = _replay_gloo(config, requests)
    summaries, failures = played.summaries, played.failures
    failures += compare(played.snapshots)
    ended = min((summary.totals.requests for summary in summaries), default=0)
    if ended != len(requests):
        failures.append(f"only {ended} of {len(requests)} requests came to their end")
    if wrong := check_journals(config.journal, range(config.num_ranks)):
        failures.append(wrong)
    report = summarise(config, summaries, failures, time.monotonic() - started)
    report = msgspec.structs.replace(report, incidents=played.told())
    console = PlainConsole(highlight=False)
    print_report(report, console)
    if report.verdict != "agree":
        print_incidents(report.incidents, console)
    if config.json_out is not None:
        write_bytes(config.json_out, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return int(report.verdict != "agree")


def _require_room(config: ReplayConfig, requests: list[TraceRequest]) -> None:
    """Every request must fit into the smallest device pool, or it could never run."""
    capacity = min(config.device_pages) - config.headroom_pages
    beside = f" beside a headroom of {config.headroom_pages}" if config.headroom_pages else ""
    for request in requests:
        num_pages = len(request.hash_ids) * BLOCK_TOKENS // config.page_size
        if num_pages > capacity:
            raise BadInput(
                f"--device-pages: request {request.index} of {config.trace} needs {num_pages}"
                f" pages of {config.page_size} tokens, the smallest device pool has"
                f" {capacity}{beside}"
            )


def _replay_gloo(config: ReplayConfig, requests: list[TraceRequest]) -> Played:
    packed = msgspec.msgpack.encode(config)
    played = Played()
    snapshots, failures = played.snapshots, played.failures
    with (
        _progress() as progress,
        Launch(_TARGET, config.num_ranks, [packed] * config.num_ranks, deadline_s=1e6) as launch,
    ):
        bar = progress.add_task("requests", total=len(requests))
        open_ranks = list(range(config.num_ranks))
        summaries: dict[int, RankSummary] = {}
        while open_ranks:
            for rank in list(open_ranks):
                try:
                    message: dict[str, Any] = launch.receive(rank, _SILENCE_S)
                except KvpactError as error:
                    failures.append(f"rank {rank}: {error}")
                    open_ranks.remove(rank)
                    continue
                snapshots += msgspec.convert(message["snapshots"], list[Snapshot])
                if rank == 0:
                    progress.update(bar, completed=message["requests"])
                if message["incident"] is not None:
                    played.incidents[rank] = msgspec.convert(message["incident"], Incident)
                if message["summary"] is not None:
                    summaries[rank] = msgspec.convert(message["summary"], RankSummary)
                    open_ranks.remove(rank)
            failures += _settle(snapshots, config.num_ranks)
        launch.join()
    played.summaries = [summaries[rank] for rank in sorted(summaries)]
    return played


def _settle(snapshots: list[Snapshot], num_ranks: int) -> list[str]:
    """Compare the steps that all ranks have reported and drop them: memory stays bounded."""
    steps = np.array([snap.step for snap in snapshots], dtype=np.int64)
    values, counts = np.unique(steps, return_counts=True)
    whole = set(values[counts == num_ranks].tolist())
    found = compare(snap for snap in snapshots if snap.step in whole)
    snapshots[:] = [snap for snap in snapshots if snap.step not in whole]
    return found


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=PlainConsole(stderr=True),
        transient=True,
    )
