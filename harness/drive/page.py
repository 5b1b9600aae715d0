"""``report.html``: one page without anything from elsewhere, the verdict first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from kvpact.harness.drive.charts import Line, Mark, line_chart, seconds_text
from kvpact.harness.drive.report import Percentiles, SoakReport
from kvpact.harness.soak.feed import Bucket
from kvpact.harness.text.files import write_bytes

__all__ = ["render", "write_page"]

#: Decisions shown on either side of the first one that differs.
AROUND: Final = 12
MAX_MARKS: Final = 60


def write_page(report: SoakReport, path: Path) -> None:
    """Write the page. Raises BadInput where it cannot be written."""
    write_bytes(path, render(report).encode())


def render(report: SoakReport) -> str:
    """The whole page as text. Pure."""
    style = (resources.files("kvpact.harness") / "data" / "report.css").read_text(encoding="utf-8")
    parts = [
        _header(report),
        _ending(report),
        _journals(report),
        _section("Timelines", _timelines(report)),
        _section("Faults", _faults(report)),
        _section("Latency", _latency(report)),
        _section("Rare points", _points(report)),
        _section("Counts by cause", _counts(report)),
        _section("Resources", _resources(report)),
        _section("Ranks", _ranks(report)),
        _section("Configuration", _configuration(report)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>kvpact soak: {escape(report.verdict)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


# -- the verdict ---------------------------------------------------------------------------------


def _header(report: SoakReport) -> str:
    config = report.config
    if report.verdict == "pass":
        tone, lead = "good", f"All promises held for {report.steps:,} steps."
    elif report.is_expected:
        tone, lead = "planned", "This end was asked for."
        if config.unsafe_no_votes:
            lead = "The control works: with votes ignored, this soak ends in divergence."
    else:
        tone, lead = "bad", report.why[0] if report.why else "It did not hold."
    if report.is_stopped:
        lead += " It was stopped by hand before its end."
    facts = [
        ("steps", f"{report.steps:,}"),
        ("steps a second", f"{report.steps_per_s:,.0f}"),
        ("duration", seconds_text(report.duration_s)),
        ("requests", f"{report.requests:,}"),
        ("hit rate", f"{report.hit_rate:.1%}"),
        ("collectives a step", f"{report.collectives_per_step:g}"),
        ("step, p99", f"{report.step_ms.p99:g} ms"),
        ("faults", f"{sum(sum(row.struck.values()) for row in report.faults):,}"),
        ("trees compared", f"{report.compared_trees:,}"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    world = f"tp {config.tp} × pp {config.pp}, lag {config.lag}, {config.backend}"
    return (
        f'<header class="{tone}"><p class="over">kvpact soak, {escape(world)},'
        f" seed {config.seed}, by {escape(report.launcher)}</p><h1>{escape(report.verdict)}</h1>"
        f'<p class="lead">{escape(lead)}</p><p class="over">exit status {report.status}</p>'
        f'</header><dl class="facts">{cells}</dl>'
        f'<p class="again">Again: <code>{escape(report.command)}</code></p>'
    )


def _ending(report: SoakReport) -> str:
    if not report.why:
        return ""
    lines = [f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in report.why)}</ul>"]
    if report.named_ranks:
        named = ", ".join(map(str, report.named_ranks))
        lines.append(f"<p>Named: <strong>rank {named}</strong>.</p>")
    if report.detection_s is not None:
        lines.append(f"<p>Named {report.detection_s:.2f} s after the fault had struck.</p>")
    stories = sorted({"\n".join(rank.story) for rank in report.ranks if rank.story})
    lines += [f"<pre>{escape(story)}</pre>" for story in stories]
    return _section("What happened", "".join(lines))


def _journals(report: SoakReport) -> str:
    """The last decisions of all ranks side by side, around the first one that differs."""
    tails = {rank.rank: dict(rank.tail) for rank in report.ranks if rank.tail}
    if len(tails) < 2:
        return ""
    indices = sorted({index for tail in tails.values() for index in tail})
    # What only one ring still holds says nothing.
    start = max(min(tail) for tail in tails.values())
    differing = [
        index
        for index in indices
        if index >= start and len({_bare(tail.get(index, "")) for tail in tails.values()}) > 1
    ]
    at = differing[0] if differing else indices[-1]
    rows: list[str] = []
    for index in (one for one in indices if at - AROUND <= one <= at + AROUND):
        tone = ' class="differs"' if index in differing else ""
        cells = "".join(
            f"<td><code>{escape(tail.get(index, 'nothing'))}</code></td>" for tail in tails.values()
        )
        rows.append(f"<tr{tone}>{cells}</tr>")
    head = "".join(f"<th>rank {rank}</th>" for rank in tails)
    lead = (
        f"<p>Decision {at} is the first that differs.</p>"
        if differing
        else "<p>The decisions are the same on all ranks: the last of them.</p>"
    )
    return _section("Journals, aligned", lead + _table(f"<tr>{head}</tr>", rows, "journal"))


def _bare(line: str) -> str:
    """Without the step, which may differ where only the decision counts."""
    return line.partition(" step ")[2].partition(" ")[2]


# -- pictures ------------------------------------------------------------------------------------


def _timelines(report: SoakReport) -> str:
    marks = [
        Mark(event.at_s, f"{event.name} on rank {event.rank}, step {event.step}")
        for event in report.events
        if event.name.partition(" ")[0] in ("process", "network") and not event.skipped
    ][-MAX_MARKS:]
    pages = max(report.config.device_pages), max(report.config.host_pages)

    def lines(name: str, value: _Value, *, faint: bool = False) -> list[Line]:
        return [
            Line(
                f"rank {rank.rank}{name}",
                [(one.at_s, value(one)) for one in rank.series if one.steps],
                rank.rank,
                faint,
            )
            for rank in report.ranks
        ]

    stages = "" if report.config.pp == 1 else ", by rank and stage"
    hits = [
        Line("agreed, so one line", [(b.at_s, _hit_percent(b)) for b in r.series if b.pages], 0)
        for r in report.ranks[:1]
    ]
    charts = [
        line_chart("Step time, mean", "ms", lines("", _step_ms), marks),
        line_chart("Step time, longest", "ms", lines("", _step_max_ms), marks),
        line_chart(f"Wait for others, a step{stages}", "ms", lines("", _wait_ms), marks),
        line_chart("Hit rate", "% of pages", hits, marks, top=100),
        line_chart("Device pages in use", "pages", lines("", _device), marks, top=pages[0]),
        line_chart("Host pages in use", "pages", lines("", _host), marks, top=pages[1]),
        line_chart("Open intents", "slots", lines("", _open), marks),
        line_chart("Requests that wait", "requests", lines("", _waiting), marks),
    ]
    note = "<p>Dashed verticals: a process was stopped, killed or starved.</p>" if marks else ""
    return f'{note}<div class="charts">{"".join(charts)}</div>'


def _hit_percent(bucket: Bucket) -> float:
    return 100 * bucket.hit_pages / bucket.pages


class _Value(msgspec.Struct, frozen=True):
    """What a chart shows of a bucket."""

    numerator: str
    denominator: str = ""
    factor: float = 1.0

    def __call__(self, bucket: Bucket) -> float:
        value = float(getattr(bucket, self.numerator)) * self.factor
        return value / getattr(bucket, self.denominator) if self.denominator else value


_step_ms = _Value("step_s", "steps", 1000)
_step_max_ms = _Value("step_max_s", factor=1000)
_wait_ms = _Value("waited_s", "steps", 1000)
_device = _Value("device_used")
_host = _Value("host_used")
_open = _Value("num_open")
_waiting = _Value("num_waiting")


# -- tables --------------------------------------------------------------------------------------


def _table(head: str, rows: Iterable[str], tone: str = "") -> str:
    return (
        f'<div class="scroll"><table class="{tone}"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Sequence[object], tone: str = "") -> str:
    inner = "".join(
        f'<td class="num">{cell:,}</td>'
        if isinstance(cell, int | float)
        else f"<td>{escape(str(cell))}</td>"
        for cell in cells
    )
    return f'<tr class="{tone}">{inner}</tr>'


def _head(*names: str) -> str:
    """Names that begin with ``>`` stand over numbers."""
    cells = "".join(
        f'<th class="num">{escape(name[1:])}</th>'
        if name.startswith(">")
        else f"<th>{escape(name)}</th>"
        for name in names
    )
    return f"<tr>{cells}</tr>"


def _faults(report: SoakReport) -> str:
    if not report.faults:
        return "<p>None was planned. A soak without faults proves little: use --chaos.</p>"
    drained = all(rank.how in ("done", "stopped") for rank in report.ranks)
    rows: list[str] = []
    for row in report.faults:
        struck = sum(row.struck.values())
        where = ", ".join(f"rank {rank}: {times:,}" for rank, times in row.struck.items())
        seen = ", ".join(f"{name} {times:,}" for name, times in row.shows.items())
        recovered = "" if not struck else ("yes" if drained else "the run ended")
        tone = "" if struck else "weak"
        rows.append(
            _row((row.name, row.planned, struck, where or row.skipped, seen, recovered), tone)
        )
    head = _head("fault", "planned", ">struck", "where", "seen as (all causes)", "recovered")
    return _table(head, rows)


def _latency(report: SoakReport) -> str:
    def cells(name: str, found: Percentiles) -> str:
        return _row((name, found.p50, found.p99, found.p99_9, found.max))

    rows = [cells("step, all ranks", report.step_ms), cells("wait for others", report.wait_ms)]
    for rank in report.ranks:
        rows.append(cells(f"rank {rank.rank}, step", rank.step_ms))
        rows.append(cells(f"rank {rank.rank}, wait", rank.wait_ms))
    return _table(_head("milliseconds", ">p50", ">p99", ">p99.9", ">max"), rows)


def _points(report: SoakReport) -> str:
    rows = [
        _row(
            (row.name, row.times, "missing" if row.is_missing else "", row.meaning),
            "bad" if row.is_missing else ("" if row.times else "weak"),
        )
        for row in sorted(report.points, key=lambda row: (not row.is_missing, -row.times))
    ]
    return _table(_head("point", ">times", "", "what it is"), rows)


def _counts(report: SoakReport) -> str:
    return _table(_head("what", ">times"), [_row(pair) for pair in report.counts.items()])


def _resources(report: SoakReport) -> str:
    memory = [
        Line(
            f"rank {rank.rank}",
            [(one.at_s, one.rss_bytes / 2**20) for one in rank.resources],
            rank.rank,
        )
        for rank in report.ranks
        if rank.resources
    ]
    chart = line_chart("Resident memory", "MiB", memory) if memory else ""
    rows: list[str] = []
    for one in report.growth:
        size = 2**20 if one.name.endswith("_bytes") else 1
        unit = " MiB" if size > 1 else ""
        rows.append(
            _row(
                (
                    f"rank {one.rank}",
                    one.name.removesuffix("_bytes").replace("_", " "),
                    f"{one.first / size:,.1f}{unit}",
                    f"{one.last / size:,.1f}{unit}",
                    f"{one.slope_per_h / size:+,.1f}{unit} an hour",
                    "grows" if one.leaks else "",
                ),
                "bad" if one.leaks else "",
            )
        )
    table = _table(_head("rank", "what", "after warm-up", "at the end", "slope", ""), rows)
    short = "<p>The run was too short to judge memory (under five minutes after warm-up).</p>"
    judged = report.duration_s < 500
    return f'<div class="charts">{chart}</div>{short if judged else ""}{table if rows else ""}'


def _ranks(report: SoakReport) -> str:
    rows = [
        _row((r.rank, r.stage, r.host, str(r.pid), r.steps, r.drain_steps, r.how))
        for r in report.ranks
    ]
    head = _head(">rank", ">stage", "host", "pid", ">steps", ">steps to drain", "ended")
    details: list[str] = []
    for rank in report.ranks:
        for name, text in (("stack", rank.stack), ("traceback", rank.traceback)):
            if text:
                details.append(
                    f"<details><summary>rank {rank.rank}: {name}</summary>"
                    f"<pre>{escape(text)}</pre></details>"
                )
    return _table(head, rows) + "".join(details)


def _configuration(report: SoakReport) -> str:
    rows = [_row((name, version)) for name, version in report.versions.items()]
    rows += [_row((name, value)) for name, value in report.machine.items()]
    for field in msgspec.structs.fields(report.config):
        value = getattr(report.config, field.name)
        if field.name not in ("plan", "workload"):
            rows.append(_row((field.name, str(value))))
    for field in msgspec.structs.fields(report.config.workload):
        rows.append(
            _row((f"workload: {field.name}", str(getattr(report.config.workload, field.name))))
        )
    return _table(_head("setting", "value"), rows)
