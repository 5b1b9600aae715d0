"""The flags of ``kvpact soak``, which ``torchrun -m kvpact.harness.torchrun`` takes, too."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from kvpact.consensus.core.errors import BadInput, KvpactError, Misuse
from kvpact.harness.drive.drive import Options
from kvpact.harness.faults.plan import Plan, chaos_plan, fit_plan, read_plan
from kvpact.harness.replay.config import parse_counts, parse_kv_shape
from kvpact.harness.soak.config import DEFAULT_WORKLOAD, Mode, SoakConfig, read_workload
from kvpact.harness.soak.coverage import check_names
from kvpact.harness.text.console import PlainConsole, complain

__all__ = ["SoakRun", "read_flags", "run"]

SMOKE_MINUTES: Final = 2.0
HARNESS_ERROR: Final = 20

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class SoakRun(msgspec.Struct, frozen=True):
    """What the flags ask for; ``replay`` is a folder with an earlier report."""

    config: SoakConfig | None
    options: Options
    replay: str | None


@app.command()
def soak(
    *,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    lag: Annotated[
        int | None,
        typer.Option(help="Steps between a vote and its verdict.", show_default="0, or --pp"),
    ] = None,
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="Of the collective.")] = "gloo",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the device tier lives.")
    ] = "cpu",
    mode: Annotated[Mode, typer.Option(help="How pages come to the other tiers.")] = (
        "write_through"
    ),
    storage: Annotated[
        Literal["none", "memory", "file"], typer.Option(help="Each rank's own.")
    ] = "none",
    storage_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="For --storage file.", show_default=False)
    ] = None,
    storage_mb: Annotated[int, typer.Option(help="Capacity of a rank's storage, MiB.")] = 256,
    policy: Annotated[
        Literal["raise", "reset", "detach", "observe"],
        typer.Option(help="What follows a divergence or a stall."),
    ] = "raise",
    minutes: Annotated[
        float | None, typer.Option(help="How long, on the clock of all ranks.", show_default="10")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Or how many steps.", show_default=False)
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two minutes with --chaos.")] = False,
    workload: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Conversations to generate (TOML).", show_default=False),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Or a trace, round and round.", show_default=False),
    ] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="PLAN", help="A fault plan (TOML).", show_default=False)
    ] = None,
    chaos: Annotated[bool, typer.Option("--chaos", help="Faults drawn from the seed.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    address: Annotated[
        str, typer.Option(help="local, auto, HOST:PORT or ray://HOST:PORT (Ray only).")
    ] = "local",
    spread: Annotated[bool, typer.Option("--spread", help="One node per rank (Ray only).")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="For the report.", show_default=False)
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="For each rank's journal; checked at the end.", show_default=False
        ),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run a reported soak again.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve metrics for Prometheus.", show_default=False)
    ] = None,
    unsafe_no_votes: Annotated[
        bool, typer.Option("--unsafe-no-votes", help="The control: must end in divergence.")
    ] = False,
    device_pages: Annotated[
        str, typer.Option(metavar="N[,N..]", help="Of all ranks, or of each.")
    ] = "96",
    host_pages: Annotated[str, typer.Option(metavar="N[,N..]", help="Likewise.")] = "192",
    page_size: Annotated[int, typer.Option(help="Tokens of a page; divides 512.")] = 256,
    lanes: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 4,
    kv_shape: Annotated[
        str, typer.Option(metavar="LxHxD", help="Layers, heads, head dimension.")
    ] = "2x1x4",
    deadline: Annotated[float, typer.Option(help="Of one step, in seconds.")] = 10.0,
    copy_timeout: Annotated[float, typer.Option(help="Of one copy, in seconds.")] = 2.0,
    pace_ms: Annotated[float, typer.Option(help="What an iteration takes at least.")] = 0.0,
    budget_step_ms: Annotated[
        float | None,
        typer.Option(help="Fail where 1 % of the steps take longer.", show_default=False),
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="For all ranks to come, in s.")] = 60.0,
) -> SoakRun:
    """Run the caches of all ranks under load and faults, check every promise, report.

    Exit status: 0 pass, 10 divergence, 11 hang, 12 leak, 13 slow, 14 not covered, 15 another
    promise broken, 20 the soak itself failed, 2 bad usage, 130 stopped by hand with nothing found.
    """
    options = Options(
        address=address,
        out=out,
        metrics_port=metrics_port,
        spread=spread,
        start_timeout_s=start_timeout,
    )
    if metrics_port is not None and not 0 < metrics_port < 65536:
        raise BadInput(f"--metrics-port: must be between 1 and 65535, got {metrics_port}")
    if replay is not None:
        return SoakRun(None, options, replay)
    if smoke and minutes is None and steps is None:
        minutes = SMOKE_MINUTES
    if minutes is None and steps is None:
        minutes = 10.0
    if workload is not None and trace is not None:
        raise BadInput("--workload: say either --workload or --trace")
    # The counts are spread over the ranks next: a wrong number of ranks is the first thing wrong.
    num_ranks = _num_ranks(tp, pp)
    device_counts = _spread("--device-pages", device_pages, num_ranks)
    host_counts = _spread("--host-pages", host_pages, num_ranks)
    is_chaos = chaos or (smoke and faults is None)
    drawn = chaos_plan(
        seed,
        num_ranks,
        device_counts,
        host_counts,
        has_storage=storage != "none",
        stages=mode == "buffer_only",
    )
    plan = _plan(faults, drawn if is_chaos else Plan(), num_ranks)
    config = SoakConfig(
        tp=tp,
        pp=pp,
        lag=lag if lag is not None else (pp if pp > 1 else 0),
        backend=backend,
        device=device,
        mode=mode,
        storage=storage,
        storage_dir=storage_dir,
        storage_mb=storage_mb,
        policy=policy,
        minutes=minutes,
        steps=steps,
        trace=trace,
        workload=DEFAULT_WORKLOAD if workload is None else read_workload(workload),
        plan=plan,
        seed=seed,
        page_size=page_size,
        device_pages=plan.device_pages or device_counts,
        host_pages=plan.host_pages or host_counts,
        lanes=lanes,
        kv_shape=parse_kv_shape(kv_shape),
        deadline_s=deadline,
        copy_timeout_s=copy_timeout,
        pace_ms=pace_ms,
        unsafe_no_votes=unsafe_no_votes,
        budget_step_ms=budget_step_ms,
        journal=journal,
    )
    return SoakRun(config, options, None)


def _num_ranks(tp: int, pp: int) -> int:
    for flag, value in (("--tp", tp), ("--pp", pp), ("--tp * --pp", tp * pp)):
        if not 1 <= value <= 64:
            raise BadInput(f"{flag}: must be between 1 and 64, got {value}")
    return tp * pp


def _spread(flag: str, text: str, num_ranks: int) -> tuple[int, ...]:
    counts = parse_counts(flag, text)
    return counts * num_ranks if len(counts) == 1 else counts


def _plan(path: str | None, drawn: Plan, num_ranks: int) -> Plan:
    """What is written, and what was drawn besides."""
    if path is None:
        return drawn
    plan = read_plan(path)
    fit_plan(plan, path, num_ranks)
    check_names(plan, path)
    return msgspec.structs.replace(
        plan,
        fault=plan.fault + drawn.fault,
        device_pages=plan.device_pages or drawn.device_pages,
        host_pages=plan.host_pages or drawn.host_pages,
    )


def read_flags(words: Sequence[str], command: str) -> SoakRun | None:
    """What ``words`` ask for; ``None``: for help, which is printed. Raises BadInput."""
    found: Any = typer.main.get_command(app)(list(words), prog_name=command, standalone_mode=False)
    if not isinstance(found, SoakRun):
        return None
    line = f"{command} {shlex.join(words)}".strip()
    return msgspec.structs.replace(
        found, options=msgspec.structs.replace(found.options, command=line)
    )


def run(words: Sequence[str]) -> int:
    """``kvpact soak``; the exit status. Raises BadInput and other errors of kvpact."""
    flags = read_flags(words, "kvpact soak")
    if flags is None:
        return 0
    console = PlainConsole(stderr=False, highlight=False)
    if flags.replay is not None:
        from kvpact.harness.drive.replay import replay_soak

        return replay_soak(flags.replay, flags.options, console)
    if flags.config is None:
        raise BadInput("say what to run")
    try:
        from kvpact.harness.drive.ray import run_soak
    except ModuleNotFoundError as error:
        raise BadInput(
            f"soak: the package {error.name} is missing: install kvpact[ray] (in a clone:"
            " scripts/setup --ray), or run the same loop without Ray: torchrun --nproc-per-node 2"
            " -m kvpact.harness.torchrun"
        ) from None
    try:
        return run_soak(flags.config, flags.options, console)
    except Misuse:
        raise
    except KvpactError as error:
        complain(f"{type(error).__name__}: {error.message}")
        return HARNESS_ERROR
