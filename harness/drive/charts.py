"""Line charts as inline SVG that stay readable at any width: only lines are stretched, never text.

Colours are classes (``c0`` to ``c7``), so that the page's style sheet decides for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

__all__ = ["Line", "Mark", "line_chart", "nice_top", "seconds_text"]

WIDTH, HEIGHT = 1000.0, 100.0
NUM_COLOURS = 8


class Line(msgspec.Struct, frozen=True):
    """One line: ``points`` are (seconds, value); ``colour`` is 0 to 7; ``is_faint`` for maxima."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_faint: bool = False


class Mark(msgspec.Struct, frozen=True):
    """A moment worth a vertical line."""

    at_s: float
    text: str


def line_chart(
    title: str, unit: str, lines: Sequence[Line], marks: Sequence[Mark] = (), top: float = 0.0
) -> str:
    """One figure; ``top`` is the least upper end of the vertical axis."""
    span_s = max((x for line in lines for x, _ in line.points), default=0.0) or 1.0
    most = nice_top(max([top, *(y for line in lines for _, y in line.points)], default=1.0))
    drawn = [
        f'<line class="grid" x1="0" x2="{WIDTH:g}" y1="{y:g}" y2="{y:g}"/>'
        for y in (0.0, HEIGHT / 2, HEIGHT)
    ]
    drawn += [
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT:g}">'
        f"<title>{escape(mark.text)}</title></line>"
        for mark in marks
        for x in [min(WIDTH, mark.at_s / span_s * WIDTH)]
    ]
    for line in lines:
        points = line.points
        if not points:
            continue
        if len(points) == 1:  # a run too short for a line: as wide as the chart
            points = [(0.0, points[0][1]), (span_s, points[0][1])]
        path = " ".join(
            f"{x / span_s * WIDTH:.1f},{HEIGHT - min(y, most) / most * HEIGHT:.1f}"
            for x, y in points
        )
        faint = " faint" if line.is_faint else ""
        drawn.append(
            f'<polyline class="c{line.colour % NUM_COLOURS}{faint}" points="{path}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    legend = "".join(
        f'<li><i class="c{line.colour % NUM_COLOURS}{" faint" if line.is_faint else ""}"></i>'
        f"{escape(line.name)}</li>"
        for line in lines
    )
    ticks = "".join(f"<span>{seconds_text(span_s * part / 4)}</span>" for part in range(5))
    what = f"{title}, {unit}" if unit else title
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<small>{escape(unit)}</small>'
        f'</figcaption><div class="plot"><div class="y"><span>{_short(most)}</span>'
        f"<span>{_short(most / 2)}</span><span>0</span></div>"
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(what)}">{"".join(drawn)}</svg></div>'
        f'<div class="x">{ticks}</div><ul class="legend">{legend}</ul></figure>'
    )


def nice_top(most: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below ``most``."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most * 0.999)


def seconds_text(seconds: float) -> str:
    """``90`` as 1:30, ``5400`` as 1:30:00."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    tail = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
