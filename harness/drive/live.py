"""What a person sees while a soak runs, and what Prometheus can fetch.

A terminal gets a panel that is redrawn; a pipe or a log file gets a plain line now and then.
"""

from __future__ import annotations

import time
from typing import Any, Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.drive.gather import Gather

__all__ = ["LiveView", "Metrics"]

LINE_EVERY_S: Final = 5.0


class LiveView:
    """Use as a context manager; call :meth:`show` often, it draws at its own pace."""

    def __init__(self, gather: Gather, console: Console) -> None:
        self._gather = gather
        self._console = console
        self._live: Live | None = None
        self._shown_s = 0.0
        self._last = (time.monotonic(), 0)
        self._rate = 0.0
        self.note = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def show(self) -> None:
        """Draw what is known now."""
        now_s, step = time.monotonic(), self._gather.step
        passed_s = now_s - self._last[0]
        if passed_s >= 1.0:
            self._rate = (step - self._last[1]) / passed_s
            self._last = (now_s, step)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif now_s - self._shown_s >= LINE_EVERY_S:
            self._shown_s = now_s
            self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)

    def _progress(self) -> str:
        config, gather = self._gather.config, self._gather
        if config.steps is not None:
            return f"step {gather.step:,} of {config.steps:,}"
        at_min = max(view.at_s for view in gather.views) / 60
        return f"step {gather.step:,}, {at_min:.1f} of {config.minutes:g} minutes"

    def _slowest(self) -> str:
        """The rank that the others wait for: the one that itself waits least."""
        last = [(v.series[-1].waited_s, v.rank) for v in self._gather.views if v.series]
        return f"rank {min(last)[1]}" if len(last) > 1 else "-"

    def _line(self) -> str:
        gather = self._gather
        phases = sorted({view.phase for view in gather.views})
        return (
            f"{' / '.join(phases)}: {self._progress()}, {self._rate:.0f} steps/s,"
            f" hit rate {gather.hit_rate():.3f}, {sum(gather.struck_in_all().values())} faults,"
            f" slowest {self._slowest()}{', ' + self.note if self.note else ''}"
        )

    def _table(self) -> Table:
        gather = self._gather
        table = Table(title=f"kvpact soak: {self._progress()}", show_header=False)
        table.add_row("steps a second", f"{self._rate:,.0f}")
        table.add_row("hit rate", f"{gather.hit_rate():.3f}")
        table.add_row("slowest", self._slowest())
        struck = gather.struck_in_all()
        table.add_row("faults", f"{sum(struck.values()):,}")
        for name in sorted(struck, key=lambda one: -struck[one])[:6]:
            table.add_row(f"  {name}", f"{struck[name]:,}")
        for view in gather.views:
            table.add_row(f"rank {view.rank}", f"{view.phase}, step {view.step:,}")
        bad = len(gather.failures) + len(gather.differences)
        table.add_row("broken promises", f"[red]{bad}[/red]" if bad else "none")
        if self.note:
            table.add_row("", self.note)
        return table


class Metrics:
    """Gauges on ``http://127.0.0.1:port/metrics``; see ``harness/data/grafana_soak.json``."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        """Raises BadInput where the port is taken or the client library is missing."""
        try:
            import prometheus_client as client
        except ImportError:
            raise BadInput(
                "--metrics-port: needs the package prometheus-client; install kvpact[ray]"
            ) from None
        self._registry: Any = client.CollectorRegistry()
        try:
            self._server, self._thread = client.start_http_server(
                port, addr=address, registry=self._registry
            )
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInput(f"--metrics-port: port {port} cannot be used: {reason}") from None
        self.port = int(self._server.server_port)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return client.Gauge(f"kvpact_{name}", text, labels, registry=self._registry)

        self._step = gauge("step", "The last settled step.", "rank")
        self._step_s = gauge("step_seconds_mean", "Mean duration of a step, last second.", "rank")
        self._max_s = gauge("step_seconds_max", "Longest step, last second.", "rank")
        self._wait_s = gauge("wait_seconds_mean", "Mean wait for other ranks a step.", "rank")
        self._used = gauge("used_pages", "Pages charged.", "rank", "tier")
        self._open = gauge("open_intents", "Intents that hold a slot.", "rank")
        self._rss = gauge("resident_bytes", "Resident memory of the rank.", "rank")
        self._hits = gauge("hit_rate", "Hit pages over pages of finished requests.")
        self._faults = gauge("faults", "How often a fault struck.", "rank", "fault")
        self._broken = gauge("broken_promises", "Promises that did not hold.")

    def show(self, gather: Gather) -> None:
        """Take over what is known now."""
        for view in gather.views:
            rank = str(view.rank)
            self._step.labels(rank).set(view.step)
            if view.series and view.series[-1].steps:
                last = view.series[-1]
                self._step_s.labels(rank).set(last.step_s / last.steps)
                self._max_s.labels(rank).set(last.step_max_s)
                self._wait_s.labels(rank).set(last.waited_s / last.steps)
                self._used.labels(rank, "device").set(last.device_used)
                self._used.labels(rank, "host").set(last.host_used)
                self._open.labels(rank).set(last.num_open)
            if view.resources:
                self._rss.labels(rank).set(view.resources[-1].rss_bytes)
        for name, by_rank in gather.struck.items():
            for rank, times in by_rank.items():
                self._faults.labels(str(rank), name).set(times)
        self._hits.set(gather.hit_rate())
        self._broken.set(len(gather.failures) + len(gather.differences))

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
