"""Random worlds by the thousand, each from one seed; what fails shrinks to a small scenario file.

One seed is one world, one workload, one set of faults and one order of events. A failure prints
its seed and the command that runs it again.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash
from rich.console import Console

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.fuzz.shrink import shrink
from kvpact.harness.fuzz.worlds import draw_scenario, numbered
from kvpact.harness.rank.jobs import worker_processes
from kvpact.harness.scenario.model import Finish, Restart, Scenario
from kvpact.harness.scenario.world import run_sim
from kvpact.harness.scenario.write import scenario_text
from kvpact.harness.text.console import PlainConsole
from kvpact.harness.text.files import write_bytes
from kvpact.harness.text.quiet import quiet
from kvpact.harness.verify.journals import check_journals

__all__ = ["FuzzConfig", "WorldResult", "fuzz", "run_world", "signature", "small_scenario"]

FAILS: Final = 1
INTERRUPTED: Final = 130
DEFAULT_WORLDS: Final = 200
_BATCH_WORLDS: Final = 8  # handed to one process at a time
_SHRUNK_MAX: Final = 3  # of them made small


class FuzzConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: the worlds ``seed .. seed + worlds - 1``, or as many as fit into ``minutes``,
    or as many as make ``rank_steps``; whichever comes first, or until ``failures_max`` fail.

    ``weighted``: towards what has failed before. By ``minutes`` every second world is."""

    worlds: int | None = None
    minutes: float | None = None
    rank_steps: int | None = None
    seed: int = 0
    liveness: bool = False
    jobs: int = 1
    journal: str | None = None
    out: str | None = None
    failures_max: int = 1
    weighted: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.failures_max <= 1000:
            raise BadInput(f"--failures-max: must be in 1..1000, got {self.failures_max}")
        if self.worlds is not None and self.worlds < 1:
            raise BadInput(f"--worlds: must be at least 1, got {self.worlds}")
        if self.minutes is not None and not 0 < self.minutes <= 24 * 60:
            raise BadInput(f"--minutes: must be above 0 and at most a day, got {self.minutes}")
        if self.rank_steps is not None and self.rank_steps < 1:
            raise BadInput(f"--rank-steps: must be at least 1, got {self.rank_steps}")
        if not 0 <= self.seed < 1 << 63:
            raise BadInput(f"--seed: must be in 0..2**63-1, got {self.seed}")
        if not 1 <= self.jobs <= 256:
            raise BadInput(f"--jobs: must be in 1..256, got {self.jobs}")


class WorldResult(msgspec.Struct, frozen=True):
    """What came of one world. ``digest`` is of all that its ranks agreed on, step by step."""

    seed: int
    num_ranks: int
    rank_steps: int
    digest: int
    failures: list[str]
    weighted: bool = False


def run_world(
    seed: int, *, liveness: bool = False, weighted: bool = False, journals: Path | None = None
) -> WorldResult:
    """Draw and run one world; nothing escapes, whatever it raises is a failure."""
    scenario = draw_scenario(seed, liveness=liveness, weighted=weighted).scenario
    folder = journals / f"world{seed}" if journals is not None else None
    rank_steps, digest, failures = _run(scenario, seed, folder)
    if folder is not None and not failures:
        # A restart ends the run in this folder wherever it is: its ranks are closed, not drained.
        is_cut = any(isinstance(entry, Restart) for entry in scenario.do)
        ranks = range(scenario.world.num_ranks)
        if wrong := check_journals(str(folder), ranks, is_cut=is_cut):
            failures.append(wrong)
    return WorldResult(seed, scenario.world.num_ranks, rank_steps, digest, failures, weighted)


def _run(scenario: Scenario, seed: int, journals: Path | None = None) -> tuple[int, int, list[str]]:
    try:
        with quiet():
            result = run_sim(scenario, seed, journals=journals)
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - a crash of the code under test is a finding
        return 0, 0, [f"crash: {type(error).__name__}: {error}, at {_place(error)}"]
    snapshots = [snap for record in result.records for snap in record.snapshots]
    raised = [one.text for record in result.records for one in record.raised]
    said = msgspec.json.encode((snapshots, raised, result.failures))
    return len(snapshots), xxhash.xxh3_64_intdigest(said), result.failures


def _place(error: BaseException) -> str:
    """The function that raised: lines move, names stay."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    code = trace.tb_frame.f_code
    return f"{Path(code.co_filename).name}:{code.co_qualname}"


def signature(failure: str) -> str:
    """What kind of failure a line is: the line without numbers and names."""
    return re.sub(r"\d+|0x[0-9a-f]+", "#", failure.partition("; the journal before it")[0])


def small_scenario(
    seed: int, *, liveness: bool = False, weighted: bool = False, runs_max: int = 1500
) -> Scenario:
    """The smallest scenario found that fails as the world of ``seed`` does, which must fail."""
    draw = draw_scenario(seed, liveness=liveness, weighted=weighted)
    wanted = {signature(line) for line in _run(draw.scenario, seed)[2]}
    # The order of events of seed 0 is what `kvpact scenario` runs with unless told otherwise.
    order = 0 if wanted & _signatures(draw.scenario, 0) else seed

    def fails(candidate: Scenario) -> bool:
        return bool(wanted & _signatures(candidate, order))

    small = shrink(draw.scenario, fails, keep_last=draw.num_tail, runs_max=runs_max)
    tidy = _without_idle_finishes(small)
    small = tidy if fails(tidy) else small
    failure = _run(small, order)[2][0]
    about = f"Found by {_again(seed, liveness, weighted)}. It said: "
    about += failure.partition("; the journal before it")[0]
    about += f". Run it with --seed {order}." if order else ""
    return msgspec.structs.replace(small, name=f"fuzz {seed}", about=about)


def _again(seed: int, liveness: bool, weighted: bool) -> str:
    """The command that runs one world again."""
    flags = " --liveness" * liveness + " --weighted" * weighted
    return f"kvpact fuzz --seed {seed} --worlds 1{flags}"


def _signatures(scenario: Scenario, order: int) -> set[str]:
    return {signature(line) for line in _run(scenario, order)[2]}


def _without_idle_finishes(scenario: Scenario) -> Scenario:
    """The tail finishes every request that could be there; keep those that are."""
    others = [entry for entry in scenario.do if not isinstance(entry, Finish)]
    named = {getattr(entry, "request", "") for entry in others}
    kept = [one for one in scenario.do if not isinstance(one, Finish) or one.request in named]
    return msgspec.structs.replace(scenario, do=numbered(kept))


# -- the command ---------------------------------------------------------------------------------


def fuzz(config: FuzzConfig) -> int:
    """Run worlds and print what came of them; 0: all promises hold, 1: one does not.

    Writes a scenario file per shrunken failure into ``config.out`` (default: where it runs).
    """
    console = PlainConsole(highlight=False, soft_wrap=True)
    started = time.monotonic()
    failed: list[WorldResult] = []
    num_worlds = rank_steps = 0
    digest = xxhash.xxh3_64()
    ending = ""
    try:
        for result in _results(config, started):
            num_worlds += 1
            rank_steps += result.rank_steps
            digest.update(result.digest.to_bytes(8, "little"))
            if result.failures:
                failed.append(result)
                _print_failure(console, config, result)
                if len(failed) == config.failures_max:
                    ending = f"stopped at failure {len(failed)} (--failures-max goes on): "
                    break
            if config.rank_steps is not None and rank_steps >= config.rank_steps:
                break
        spent_s = time.monotonic() - started
        _write_all_small(console, config, failed)
    except KeyboardInterrupt:
        spent_s = time.monotonic() - started
        ending = "stopped by hand: "
    told = _totals(num_worlds, rank_steps, spent_s, digest.hexdigest(), len(failed))
    console.print(ending + told)
    return FAILS if failed else (INTERRUPTED if ending else 0)


def _write_all_small(console: Console, config: FuzzConfig, failed: Sequence[WorldResult]) -> None:
    """One small scenario for each kind of failure, as far as it goes."""
    kinds: set[str] = set()
    for result in failed:
        kind = signature(result.failures[0])
        if kind not in kinds and len(kinds) < _SHRUNK_MAX:
            kinds.add(kind)
            _write_small(console, config, result)


def _results(config: FuzzConfig, started: float) -> Iterator[WorldResult]:
    """Results in the order of their seeds, whatever process ran them."""
    batches = _batches(config, started)
    if config.jobs == 1:
        for batch in batches:
            yield from _run_batch(config, batch)
        return
    with worker_processes(config.jobs) as pool:
        waiting = [
            pool.submit(_run_batch, config, batch)
            for batch in itertools.islice(batches, 2 * config.jobs)
        ]
        try:
            while waiting:
                yield from waiting.pop(0).result()
                following = next(batches, None)
                if following is not None:
                    waiting.append(pool.submit(_run_batch, config, following))
        finally:
            for future in waiting:
                future.cancel()


def _batches(config: FuzzConfig, started: float) -> Iterator[range]:
    first, end = config.seed, None
    if config.worlds is not None:
        end = config.seed + config.worlds
    elif config.minutes is None and config.rank_steps is None:
        end = config.seed + DEFAULT_WORLDS
    while end is None or first < end:
        spent_s = time.monotonic() - started
        if config.minutes is not None and spent_s >= config.minutes * 60:
            return
        last = first + _BATCH_WORLDS if end is None else min(first + _BATCH_WORLDS, end)
        yield range(first, last)
        first = last


def _run_batch(config: FuzzConfig, seeds: range) -> list[WorldResult]:
    journals = Path(config.journal) if config.journal is not None else None
    return [
        run_world(
            seed,
            liveness=config.liveness,
            weighted=config.weighted or (config.minutes is not None and seed % 2 == 1),
            journals=journals,
        )
        for seed in seeds
    ]


def _print_failure(console: Console, config: FuzzConfig, result: WorldResult) -> None:
    again = _again(result.seed, config.liveness, result.weighted)
    console.print(f"[red]FAILS[/red]  seed {result.seed}; again with: {again}")
    for line in result.failures[:5]:
        console.print(f"    {line}", markup=False)
    if len(result.failures) > 5:
        console.print(f"    and {len(result.failures) - 5} more")


def _totals(num_worlds: int, rank_steps: int, spent_s: float, digest: str, failed: int) -> str:
    verdict = f"[red]{failed} worlds fail[/red]" if failed else "[green]all promises hold[/green]"
    return (
        f"{verdict}: {num_worlds} worlds, {rank_steps:,} rank-steps in {spent_s:.1f} s"
        f" ({rank_steps / max(spent_s, 1e-9) * 60:,.0f} per minute), digest {digest}"
    )


def _write_small(console: Console, config: FuzzConfig, result: WorldResult) -> None:
    seed = result.seed
    if all(line.startswith("history:") for line in result.failures):
        console.print(f"seed {seed}: only its journals show it, so it is not made small")
        return
    console.print(f"making seed {seed} small ...")
    small = small_scenario(seed, liveness=config.liveness, weighted=result.weighted)
    folder = Path(config.out) if config.out is not None else Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {folder} cannot be made: {error.strerror}") from None
    path = folder / f"fuzz_{seed}.toml"
    write_bytes(path, scenario_text(small).encode())
    console.print(
        f"written: {path} ({len(small.do)} entries, {small.world.num_ranks} ranks);"
        f" kvpact scenario {path}"
    )
