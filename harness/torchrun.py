"""The soak without Ray: ``torchrun --nproc-per-node N -m kvpact.harness.torchrun FLAGS``.

The same loop and the same flags as ``kvpact soak``, on one host or several, over gloo or NCCL. Each
process runs one rank's loop on a thread of its own; its main thread hands over what the loop tells,
through the store that torchrun's agent serves. That of rank 0 drives: it polls, shows and reports.
``--tp`` × ``--pp`` must be the number of processes; without either ``--tp`` is taken from torchrun.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from typer.exceptions import TyperException

from kvpact.consensus.core.errors import BadInput, KvpactError, StoreSilent
from kvpact.consensus.transport.store import Store, TcpStore
from kvpact.harness.cli.soak import HARNESS_ERROR, read_flags
from kvpact.harness.drive.drive import Options, drive, finish
from kvpact.harness.drive.live import Metrics
from kvpact.harness.soak.config import SoakConfig, check_out, load_requests
from kvpact.harness.soak.feed import Feed, Update
from kvpact.harness.soak.loop import run_soak_rank
from kvpact.harness.soak.resources import own_process
from kvpact.harness.text.console import PlainConsole, complain
from kvpact.harness.verify.journals import require_journals

__all__ = ["Place", "StoreRanks", "main", "place_from"]

TELL_S: Final = 0.25
#: A rank whose process ended says nothing any more; its heartbeat is in the store of its loop.
SILENCE_S: Final = 20.0
#: One that the others have named as gone is not waited for as long.
NAMED_SILENCE_S: Final = 3.0
#: For rank 0 to report, before the others leave.
REPORT_S: Final = 15.0
COMMAND: Final = "torchrun -m kvpact.harness.torchrun"


class Place(msgspec.Struct, frozen=True):
    """Where torchrun put this process."""

    rank: int
    num_ranks: int
    local_rank: int
    host: str
    port: int


def place_from(environ: Mapping[str, str]) -> Place:
    """Read torchrun's variables. Raises BadInput where they are not there."""
    try:
        return Place(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"harness.torchrun is started by torchrun, which sets RANK and the like ({error});"
            " run: torchrun --nproc-per-node 2 -m kvpact.harness.torchrun --smoke"
        ) from None


class StoreRanks:
    """:class:`kvpact.harness.drive.drive.Ranks` through the store, as rank 0 sees them."""

    def __init__(self, own: Feed, num_ranks: int, store: Store) -> None:
        self._own = own
        self._store = store
        self._next = dict.fromkeys((rank for rank in range(num_ranks) if rank != own.rank), 0)
        self._heard_s = dict.fromkeys(self._next, time.monotonic())
        self._lost: dict[int, str] = {}

    def poll(self) -> list[Update]:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        found = [self._own.take()]
        now_s = time.monotonic()
        for rank in self._next:
            try:
                while (update := self._read(rank)) is not None:
                    found.append(update)
                    self._heard_s[rank] = now_s
                    if update.end is not None:
                        self._heard_s[rank] = float("inf")
            except StoreSilent as error:
                self._lost.setdefault(rank, error.message)
            silent_s = now_s - self._heard_s[rank]
            end = self._own.end
            is_named = end is not None and rank in end.ranks
            if silent_s > (NAMED_SILENCE_S if is_named else SILENCE_S):
                self._lost.setdefault(rank, f"its process has said nothing for {silent_s:.0f} s")
        return found

    def _read(self, rank: int) -> Update | None:
        key = _key(rank, self._next[rank])
        data = self._store.get(key)
        if data is None:
            return None
        self._store.delete(key)
        self._next[rank] += 1
        return msgspec.msgpack.decode(data, type=Update)

    def lost(self) -> dict[int, str]:
        """See :class:`kvpact.harness.drive.drive.Ranks`."""
        return self._lost

    def stop(self) -> None:
        """Rank 0's loop tells the others."""
        self._own.stop_asked.set()

    def stacks(self) -> dict[int, str]:
        """Only of this process: the others write theirs where they raise."""
        return {self._own.rank: self._own.stack()}


def main(words: Sequence[str] | None = None) -> int:
    """One process of the replica; its exit status is that of the soak, on rank 0."""
    try:
        place = place_from(os.environ)
        config, options = _read(list(sys.argv[1:] if words is None else words), place)
        own_process()  # or the loop's thread would be the first to miss its package
        if place.rank == 0 and options.out is not None:
            check_out(options.out)
        if place.rank == 0:
            require_journals(config.journal, config.num_ranks)
        return _run(place, config, options)
    except TyperException as error:
        return _complain(error.format_message(), 2)
    except BadInput as error:
        return _complain(error.message, 2)
    except KvpactError as error:
        return _complain(f"{type(error).__name__}: {error.message}", HARNESS_ERROR)


def _read(words: list[str], place: Place) -> tuple[SoakConfig, Options]:
    if not any(word.startswith(("--tp", "--pp")) for word in words):
        words = ["--tp", str(place.num_ranks), *words]
    flags = read_flags(words, COMMAND)
    if flags is None:
        raise SystemExit(0)
    if flags.config is None or flags.replay is not None:
        raise BadInput("--replay: use kvpact soak --replay DIR")
    if flags.config.num_ranks != place.num_ranks:
        raise BadInput(
            f"--tp: {flags.config.tp} x --pp {flags.config.pp} ranks, but torchrun started"
            f" {place.num_ranks} processes"
        )
    line = flags.options.command.replace(
        "torchrun -m", f"torchrun --nproc-per-node {place.num_ranks} -m", 1
    )
    options = msgspec.structs.replace(flags.options, launcher="torchrun", command=line)
    return flags.config, options


def _run(place: Place, config: SoakConfig, options: Options) -> int:
    requests = load_requests(config)
    feed = Feed(place.rank, socket.gethostname(), os.getpid())

    def run() -> None:
        if config.device == "cuda":
            import torch

            # Of this thread. Ranks may share a GPU, but not with NCCL.
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        run_soak_rank(
            config,
            requests,
            feed,
            place.host,
            place.port,
            start_timeout_s=options.start_timeout_s,
        )

    loop = threading.Thread(target=run, name="kvpact-loop", daemon=True)
    loop.start()
    store = TcpStore(place.host, place.port)
    try:
        if place.rank:
            return _tell(feed, loop, store)
        return _drive(feed, config, options, store)
    finally:
        loop.join(5.0)
        store.close()


def _drive(feed: Feed, config: SoakConfig, options: Options, store: Store) -> int:
    console = PlainConsole(highlight=False)
    metrics = None if options.metrics_port is None else Metrics(options.metrics_port)
    try:
        ranks = StoreRanks(feed, config.num_ranks, store)
        gather, conclusion = drive(ranks, config, options, console, metrics)
        return finish(gather, conclusion, options, console).status
    finally:
        if metrics is not None:
            metrics.close()
        store.set("soak/over", b"1")


def _tell(feed: Feed, loop: threading.Thread, store: Store) -> int:
    """Hand over what the loop tells, until it has ended and all is handed over."""
    # The end is rank 0's to decide, so that all come to the same step. torchrun passes a Ctrl-C on
    # as both of these, and kills after 30 s.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    number = 0
    while True:
        update = feed.take()
        store.set(_key(feed.rank, number), msgspec.msgpack.encode(update))
        number += 1
        if update.end is not None:
            break
        loop.join(TELL_S)
    # torchrun ends everybody when the first one leaves badly: rank 0 has to have reported.
    end_s = time.monotonic() + REPORT_S
    while time.monotonic() < end_s and store.get("soak/over") is None:
        time.sleep(TELL_S)
    return 0


def _key(rank: int, number: int) -> str:
    return f"soak/told/{rank}/{number}"


def _complain(text: str, status: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        complain(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
