"""The Ray actors of a soak: one rank each, and the store where there is no launcher beside it.

One thread of a rank's actor runs the loop; another, of the concurrency group ``health``, answers
while the loop hangs. An actor is never restarted: a rank that dies is a finding.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec
import ray

from kvpact.consensus.transport.gloo import serve_tcp_store
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.feed import Feed
from kvpact.harness.trace.mooncake import TraceRequest

# Ray's stubs are partial.
_api: Any = ray

__all__ = ["RankActor", "StoreActor"]


@_api.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"health": 1})
class RankActor:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self._feed = Feed(rank, socket.gethostname(), os.getpid())

    def run(self, config: bytes, requests: bytes, host: str, port: int, timeout_s: float) -> None:
        """The whole loop; returns when it has ended, however it ended."""
        # Torch takes seconds to import: meanwhile this actor already answers.
        from kvpact.harness.soak.loop import run_soak_rank

        run_soak_rank(
            msgspec.msgpack.decode(config, type=SoakConfig),
            msgspec.msgpack.decode(requests, type=list[TraceRequest]),
            self._feed,
            host,
            port,
            start_timeout_s=timeout_s,
        )

    @_api.method(concurrency_group="health")
    def poll(self) -> bytes:
        """What is new: a packed :class:`kvpact.harness.soak.feed.Update`."""
        return msgspec.msgpack.encode(self._feed.take())

    @_api.method(concurrency_group="health")
    def stop(self) -> None:
        """End at the next agreed step."""
        self._feed.stop_asked.set()

    @_api.method(concurrency_group="health")
    def stack(self) -> str:
        """Where the loop is."""
        return self._feed.stack()


@_api.remote(num_cpus=0, max_restarts=0)
class StoreActor:
    """Serves the store on a node of the cluster, outside every rank."""

    def __init__(self) -> None:
        self._store: Any = None

    def serve(self) -> tuple[str, int]:
        """Its address: this node's, as other nodes reach it, and a free port."""
        self._store, port = serve_tcp_store(host="")
        return _api.util.get_node_ip_address(), port
