"""Processes that work for one command, and never longer than it lives."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kvpact.harness.rank.child import end_with

__all__ = ["worker_processes"]


@contextlib.contextmanager
def worker_processes(jobs: int) -> Generator[ProcessPoolExecutor]:
    """``jobs`` processes. However the block is left, they are gone: what they had begun with it.

    They end when this process does, in whatever way, and leave a Ctrl-C to it.
    """
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        yield pool
    except BaseException:
        # Nobody wants what is still running, and a world may take long.
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent_pid: int) -> None:
    end_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
