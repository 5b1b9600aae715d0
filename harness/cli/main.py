"""The command ``kvpact``: reads its flags, runs one thing, ends with a status.

Status: 0 everything holds; 1 a promise or an expectation fails; 2 the input is not usable (one
line on stderr says where and what); 130 interrupted. A bug in kvpact keeps its traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import typer
from rich.table import Table
from typer.exceptions import Abort, TyperException

from kvpact import __version__
from kvpact.consensus.core.errors import BadInput, InternalError, KvpactError, Misuse
from kvpact.harness.replay.config import check_output, parse_counts, parse_kv_shape, replay_config
from kvpact.harness.scenario.read import read_scenario
from kvpact.harness.text.console import PlainConsole, complain, plain
from kvpact.harness.trace.conversations import WorkloadConfig, generate, shipped_trace, write_trace
from kvpact.harness.trace.mooncake import TraceStats, trace_stats

__all__ = ["app", "main"]

HOLDS: Final = 0
FAILS: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130

app = typer.Typer(
    name="kvpact",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvpact {__version__}")
        raise typer.Exit


@app.callback()
def _command(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which kvpact it is."),
    ] = False,
) -> None:
    """Keeps the KV caches of all ranks of a model replica identical, and proves it."""


RanksFlag = Literal["gloo", "sim"]
ModeFlag = Literal["write_through", "write_through_selective", "write_back", "buffer_only"]
StorageFlag = Literal["none", "memory", "file"]
EvictionFlag = Literal["lru", "lfu", "slru", "priority"]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.")
]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


@app.command()
def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            show_default=False,
            help="A trace in the Mooncake format. Default: the one that comes with kvpact.",
        ),
    ] = None,
    *,
    ranks: Annotated[
        RanksFlag, typer.Option(help="One process per rank, or all simulated in this one.")
    ] = "gloo",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    device_pages: Annotated[
        str, typer.Option(metavar="N[,N..]", help="Device pages, of all or of each rank.")
    ] = "2048",
    host_pages: Annotated[
        str, typer.Option(metavar="N[,N..]", help="Host pages, likewise; 0: no host tier.")
    ] = "8192",
    page_size: Annotated[int, typer.Option(help="Tokens of a page; divides 512.")] = 512,
    lanes: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 4,
    lag: Annotated[
        int | None,
        typer.Option(
            help="Steps between a vote and its verdict. Default: 0, or --pp with stages.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first N requests.", show_default=False)
    ] = None,
    kv_shape: Annotated[
        str, typer.Option(metavar="LxHxD", help="Layers, heads, head dimension of the pages.")
    ] = "1x1x1",
    journal: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write each rank's journal there, and judge them."),
    ] = None,
    mode: Annotated[ModeFlag, typer.Option(help="How pages come to the host.")] = "write_through",
    storage: Annotated[StorageFlag, typer.Option(help="A storage tier, each rank's own.")] = "none",
    storage_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Of --storage file.", show_default=False)
    ] = None,
    storage_mb: Annotated[int, typer.Option(help="Capacity of each rank's storage, MiB.")] = 1024,
    eviction: Annotated[EvictionFlag, typer.Option(help="Who goes first.")] = "lru",
    headroom: Annotated[int, typer.Option(help="Device pages kept voted, had at once.")] = 0,
    decide: Annotated[
        bool, typer.Option("--decide", help="An extra round rather than a wait for pages.")
    ] = False,
    json_out: JsonOut = None,
    seed: Seed = 0,
) -> int:
    """Replay a trace of requests through the caches of all ranks and check every promise."""
    config = replay_config(
        trace=trace if trace is not None else str(shipped_trace()),
        ranks=ranks,
        tp=tp,
        pp=pp,
        lag=lag,
        page_size=page_size,
        device_pages=parse_counts("--device-pages", device_pages),
        host_pages=parse_counts("--host-pages", host_pages),
        lanes=lanes,
        limit=limit,
        kv_shape=parse_kv_shape(kv_shape),
        journal=journal,
        json_out=json_out,
        seed=seed,
        mode=mode,
        storage=storage,
        storage_dir=storage_dir,
        storage_mb=storage_mb,
        eviction=eviction,
        headroom_pages=headroom,
        decides=decide,
    )
    from kvpact.harness.replay import run as replays

    return replays.replay(config)


@app.command()
def scenario(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", show_default=False)],
    *,
    ranks: Annotated[
        RanksFlag, typer.Option(help="All ranks simulated in this process, or one process each.")
    ] = "sim",
    seed: Seed = 0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print what all ranks decided at each entry.")
    ] = False,
    json_out: JsonOut = None,
) -> int:
    """Run scenario files: every expectation in them, and every promise after every step."""
    if seed < 0:
        raise BadInput(f"--seed: must not be negative, got {seed}")
    if json_out is not None:
        check_output("--json", json_out)
    if trace and ranks != "sim":
        raise BadInput("--trace: only simulated ranks tell their story; leave out --ranks gloo")
    checked = [read_scenario(file) for file in files]
    from kvpact.harness.scenario import run as scenarios

    return scenarios.run_files(checked, ranks=ranks, seed=seed, json_out=json_out, traces=trace)


@app.command()
def fuzz(
    *,
    worlds: Annotated[
        int | None,
        typer.Option(help="How many worlds. Default: 200, or what the other limits allow."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Draw worlds for so long.", show_default=False)
    ] = None,
    rank_steps: Annotated[
        int | None,
        typer.Option(help="Draw worlds until they made so many steps, counted per rank."),
    ] = None,
    seed: Seed = 0,
    liveness: Annotated[
        bool, typer.Option("--liveness", help="In every world faults stop and all must drain.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that run worlds.")] = 1,
    journal: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write the journals of all ranks there.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where small failing scenarios go.")
    ] = None,
    failures_max: Annotated[int, typer.Option(help="Stop when so many worlds have failed.")] = 1,
    weighted: Annotated[
        bool,
        typer.Option(
            "--weighted",
            help="Worlds nearer to what has failed before; with --minutes every second one is.",
        ),
    ] = False,
) -> int:
    """Run random worlds with random faults and check every promise after every step."""
    from kvpact.harness.fuzz import run as fuzzes

    return fuzzes.fuzz(
        fuzzes.FuzzConfig(
            worlds=worlds,
            minutes=minutes,
            rank_steps=rank_steps,
            seed=seed,
            liveness=liveness,
            jobs=jobs,
            journal=journal,
            out=out,
            failures_max=failures_max,
            weighted=weighted,
        )
    )


@app.command()
def explain(
    report: Annotated[
        str,
        typer.Argument(
            metavar="REPORT.json",
            show_default=False,
            help="What `kvpact replay`, `scenario` or `soak` wrote.",
        ),
    ],
    *,
    around: Annotated[
        int, typer.Option(help="Journal lines before and after the first difference.")
    ] = 6,
) -> int:
    """Tell the story of a failed run: who differed or stalled, since when, and what to do."""
    if around < 1:
        raise BadInput(f"--around: must be at least 1, got {around}")
    from kvpact.harness.cli import explain as explains

    return explains.explain(report, around=around)


@app.command()
def search(
    *,
    small: Annotated[
        bool, typer.Option("--small", help="Only what takes seconds; else minutes to hours.")
    ] = False,
    states_max: Annotated[
        int, typer.Option(help="Cut each setting short after so many states.")
    ] = 2_000_000,
    jobs: Annotated[int, typer.Option(help="Settings that are searched at the same time.")] = 1,
) -> int:
    """Go through all states of small worlds and check every promise in each."""
    if states_max < 1:
        raise BadInput(f"--states-max: must be at least 1, got {states_max}")
    if not 1 <= jobs <= 256:
        raise BadInput(f"--jobs: must be in 1..256, got {jobs}")
    from kvpact.harness.search import run as searches

    return searches.search(small=small, states_max=states_max, jobs=jobs)


@app.command()
def verify(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="Journals of all ranks: rank<N>.jsonl, or of")
    ],
) -> int:
    """Check the history of a run from the journals of its ranks alone."""
    from kvpact.harness.verify import verify as verifies

    return verifies.verify(folder)


@app.command("generate")
def generate_trace(
    out: Annotated[str, typer.Argument(metavar="OUT", help="The trace to write (JSON lines).")],
    *,
    seed: Seed = 0,
    lanes: Annotated[int, typer.Option(help="Conversations that run at the same time.")] = 48,
    turns: Annotated[int, typer.Option(help="Requests of each conversation.")] = 8,
    lanes_per_group: Annotated[int, typer.Option(help="Lanes with one prefix in common.")] = 8,
    shared_tokens: Annotated[int, typer.Option(help="Length of that prefix.")] = 2048,
    first_tokens: Annotated[
        str, typer.Option(metavar="LO..HI", help="What the first prompt adds to it.")
    ] = "200..1600",
    turn_tokens: Annotated[
        str, typer.Option(metavar="LO..HI", help="What the user adds in a later turn.")
    ] = "50..800",
    output_tokens: Annotated[
        str, typer.Option(metavar="LO..HI", help="Length of an answer.")
    ] = "50..600",
    pause_ms: Annotated[
        str, typer.Option(metavar="LO..HI", help="Time between two turns.")
    ] = "2000..60000",
) -> int:
    """Make a trace of multi-turn conversations; the same flags give the same bytes."""
    requests = generate(
        WorkloadConfig(
            seed=seed,
            lanes=lanes,
            turns=turns,
            lanes_per_group=lanes_per_group,
            shared_tokens=shared_tokens,
            first_tokens=_span("--first-tokens", first_tokens),
            turn_tokens=_span("--turn-tokens", turn_tokens),
            output_tokens=_span("--output-tokens", output_tokens),
            pause_ms=_span("--pause-ms", pause_ms),
        )
    )
    write_trace(out, requests)
    PlainConsole(stderr=True).print(_stats_table(out, trace_stats(requests)))
    return HOLDS


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT",
            show_default=False,
            help="Meet the other hosts there: run it on all of them with one address.",
        ),
    ] = None,
    *,
    ranks: Annotated[
        int | None, typer.Option(help="How many calls meet, one a rank.", show_default=False)
    ] = None,
    wait_s: Annotated[float, typer.Option(help="How long to wait for the others.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Look whether this host is fit for a replica, and whether the hosts can meet."""
    if ranks is not None and not 1 <= ranks <= 4096:
        raise BadInput(f"--ranks: must be in 1..4096, got {ranks}")
    if address is not None and ranks is None:
        raise BadInput("--ranks: how many calls will meet there? Give the same number to all")
    if not 1.0 <= wait_s <= 3600.0:
        raise BadInput(f"--wait-s: must be in 1..3600, got {wait_s:g}")
    from kvpact.harness.operate import doctor as doctors

    return doctors.doctor(address, ranks, wait_s=wait_s, as_json=as_json)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def soak(context: typer.Context) -> int:
    """Run all ranks for a night under load and faults, on Ray, and report. See soak --help."""
    from kvpact.harness.cli import soak as soak_cli

    return soak_cli.run(context.args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; nothing but a bug of ours leaves as a traceback.

    ``arguments`` default to those of the process; none at all show the help.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = typer.main.get_command(app)(words, prog_name="kvpact", standalone_mode=False)
    except Misuse as error:
        return _complain(error.message, BAD_INPUT)
    except InternalError:
        raise
    except KvpactError as error:
        sys.stderr.write(plain(f"kvpact: {type(error).__name__}: {error}") + "\n")
        return FAILS
    except TyperException as error:
        return _complain(error.format_message(), BAD_INPUT)
    except (Abort, KeyboardInterrupt):
        return INTERRUPTED
    return int(status or HOLDS)


def _complain(message: str, status: int) -> int:
    complain(message)
    return status


def _span(flag: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,12})(?:\.\.(\d{1,12}))?", text, re.ASCII)
    if match is None:
        raise BadInput(f"{flag}: expected a range like 50..600, or one number, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def _stats_table(title: str, stats: TraceStats) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("requests", f"{stats.num_requests:,}")
    table.add_row("blocks of 512 tokens", f"{stats.num_blocks:,}")
    table.add_row("different blocks", f"{stats.num_unique_blocks:,}")
    table.add_row("hit rate, unbounded", f"{stats.hit_rate:.4f}")
    table.add_row("prompt tokens", f"{stats.input_tokens:,}")
    table.add_row("output tokens", f"{stats.output_tokens:,}")
    table.add_row("duration", f"{stats.duration_ms / 1000:,.1f} s")
    return table


if __name__ == "__main__":
    sys.exit(main())
