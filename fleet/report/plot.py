"""Plots as inline SVG and HTML. Plotting libraries need scripts, or weigh tens of megabytes.

Only lines and areas are SVG, which is stretched to the page's width; all text is HTML, so that it
keeps its size on a phone. Colours are classes (`c0` to `c5`), so the page's style sheet serves
light, dark and print. Every mark has a title, which browsers show as its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from markupsafe import Markup

from imagefleet.scores import nice_step, nice_ticks, number_text, scale

#: The SVG's own units; its shape on the page is up to the style sheet.
WIDTH = 1000
HEIGHT = 200
COLOURS = 6

#: Intervals between the labels of a time axis, each with the format of a label.
_TIME_STEPS = (
    *((seconds, "%H:%M:%S") for seconds in (1, 2, 5, 10, 15, 30)),
    *((60 * minutes, "%H:%M") for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *((86_400 * days, "%d %b") for days in (1, 2, 7, 14, 30, 90, 365)),
)
_MAX_TIME_LABELS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A named series over time: Unix seconds and values, in order."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A named amount; *label* is shown to its right."""

    name: str
    value: float
    label: str
    colour: int = 0


def time_plot(lines: Sequence[Line], what: str, *, filled: bool = False) -> Markup:
    """Lines over time, the value axis from zero; *what* names the values and their unit."""
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup()
    begin, end = min(at for at, _ in points), max(at for at, _ in points)
    end = max(end, begin + 1)
    values = [value for _, value in points]
    marks = _marks(max(values))
    x, y = scale(begin, end, 0, WIDTH), scale(0, marks[-1], HEIGHT, 0)
    parts = []
    for number, line in enumerate(lines):
        colour = f"c{number % COLOURS}"
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        if filled and line.points:
            first, last = x(line.points[0][0]), x(line.points[-1][0])
            area = f"{first:.1f},{HEIGHT} {path} {last:.1f},{HEIGHT}"
            parts.append(f'<polygon class="area {colour}" points="{area}"/>')
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        # A line of no length with round ends is a dot, however the drawing is stretched.
        parts.extend(
            f'<path class="point {colour}" d="M{x(at):.1f} {y(value):.1f}h0">'
            f"<title>{escape(line.name)}: {number_text(value)},"
            f" {datetime.fromtimestamp(at, UTC):%d %b %H:%M:%S} UTC</title></path>"
            for at, value in line.points
        )
    spoken = f"{what}: from {number_text(min(values))} to {number_text(max(values))}"
    ticks = [(x(at), label) for at, label in _time_ticks(begin, end)]
    return _plot(parts, marks, ticks, spoken) + _legend(lines)


def histogram(counts: Sequence[tuple[float, float, int]], what: str, unit: str) -> Markup:
    """Vertical bars; each count has its lower and upper bound."""
    if not counts:
        return Markup()
    marks = _marks(max(count for _, _, count in counts))
    begin, end = counts[0][0], counts[-1][1]
    x, y = scale(begin, end, 0, WIDTH), scale(0, marks[-1], HEIGHT, 0)
    parts = [
        f'<rect class="bar c0" x="{x(low):.1f}" y="{y(count):.1f}"'
        f' width="{max(x(high) - x(low) - 3, 1):.1f}" height="{HEIGHT - y(count):.1f}">'
        f"<title>{number_text(low)} to {number_text(high)} {unit}: {count:,}</title></rect>"
        for low, high, count in counts
    ]
    ticks = [(x(tick), f"{number_text(tick)} {unit}") for tick in nice_ticks(begin, end)]
    spoken = f"{what}: from {number_text(begin)} to {number_text(end)} {unit}"
    return _plot(parts, marks, ticks, spoken)


def bars(rows: Sequence[Bar], what: str) -> Markup:
    """Horizontal bars, one per row, each with its name and label."""
    if not rows:
        return Markup()
    longest = max(row.value for row in rows) or 1
    items = "".join(
        f'<li><span class="name">{escape(row.name)}</span>'
        f'<span class="track"><span class="bar c{row.colour}"'
        f' style="width:max({int(row.value > 0)}px, {100 * row.value / longest:.1f}%)">'
        "</span></span>"
        f'<span class="label">{escape(row.label)}</span></li>'
        for row in rows
    )
    return Markup(f'<ul class="bars" aria-label="{escape(what)}">{items}</ul>')  # noqa: S704


def _marks(highest: float) -> list[float]:
    """Marks of a value axis, from zero to at least *highest*."""
    if highest <= 0:
        return [0.0, 1.0]
    step = nice_step(highest)
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _short_text(value: float) -> str:
    """A number short enough for an axis: `50k`, `1.5M`."""
    if value >= 1_000_000:  # noqa: PLR2004
        return number_text(value / 1_000_000) + "M"
    return number_text(value / 1_000) + "k" if value >= 10_000 else number_text(value)  # noqa: PLR2004


def _time_ticks(begin: float, end: float) -> Iterator[tuple[float, str]]:
    step, shown = next(
        (each for each in _TIME_STEPS if (end - begin) / each[0] <= _MAX_TIME_LABELS),
        _TIME_STEPS[-1],
    )
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        yield number * step, datetime.fromtimestamp(number * step, UTC).strftime(shown)


def _legend(lines: Sequence[Line]) -> Markup:
    if len(lines) < 2:  # noqa: PLR2004 - one line needs no legend
        return Markup()
    keys = "".join(
        f'<span class="key c{number % COLOURS}">{escape(line.name)}</span>'
        for number, line in enumerate(lines)
    )
    return Markup(f'<p class="legend">{keys}</p>')  # noqa: S704 - names are escaped


def _plot(
    parts: Sequence[str], marks: Sequence[float], ticks: Sequence[tuple[float, str]], spoken: str
) -> Markup:
    """The drawing with its axes; *ticks* are places on the drawing's width and their labels."""
    lines = "".join(
        f'<path class="grid" d="M0 {HEIGHT * (1 - mark / marks[-1]):.1f}H{WIDTH}"/>'
        for mark in marks
    )
    values = "".join(
        f'<span style="bottom:{100 * mark / marks[-1]:.1f}%">{_short_text(mark)}</span>'
        for mark in marks
    )
    labels = "".join(
        f'<span class="{_side(place)}" style="left:{100 * place / WIDTH:.1f}%">'
        f"{escape(label)}</span>"
        for place, label in ticks
    )
    return Markup(  # noqa: S704 - every text is escaped
        f'<div class="plot" role="img" aria-label="{escape(spoken)}">'
        f'<div class="values">{values}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"{lines}{''.join(parts)}</svg>"
        f'<div class="ticks">{labels}</div></div>'
    )


def _side(place: float) -> str:
    """A label's place at its tick: beside it at the edges, lest it leave the page."""
    share = place / WIDTH
    return "first" if share < 0.1 else "last" if share > 0.88 else "mid"  # noqa: PLR2004
