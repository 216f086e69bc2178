"""Plots as inline SVG. Hand-written: plotting libraries need scripts, or weigh tens of megabytes.

Colours are classes (`c0` to `c5`), so the page's style sheet serves light, dark and print. Every
mark has a title, which browsers show as its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from markupsafe import Markup

WIDTH = 720
HEIGHT = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 26
_ROW_HEIGHT = 24
_NAME_WIDTH = 190
_VALUE_WIDTH = 130
COLOURS = 6

#: Intervals between the labels of a time axis, each with the format of a label.
_TIME_STEPS = (
    *((seconds, "%H:%M:%S") for seconds in (1, 2, 5, 10, 15, 30)),
    *((60 * minutes, "%H:%M") for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *((86_400 * days, "%d %b") for days in (1, 2, 7, 14, 30, 90, 365)),
)
_MAX_TIME_LABELS = 7


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
    marks = _marks(max(value for _, value in points))
    x = _scale(begin, end, _LEFT, WIDTH - _RIGHT)
    y = _scale(0, marks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [*_value_axis(marks, y), *_time_axis(begin, end, x)]
    for number, line in enumerate(lines):
        colour = f"c{number % COLOURS}"
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        if filled and line.points:
            floor = f"{y(0):.1f}"
            first, last = x(line.points[0][0]), x(line.points[-1][0])
            area = f"{first:.1f},{floor} {path} {last:.1f},{floor}"
            parts.append(f'<polygon class="area {colour}" points="{area}"/>')
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        parts.extend(
            f'<circle class="point {colour}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="5">'
            f"<title>{escape(line.name)}: {number_text(value)},"
            f" {datetime.fromtimestamp(at, UTC):%d %b %H:%M:%S} UTC</title></circle>"
            for at, value in line.points
        )
    return _svg(parts, HEIGHT, what) + _legend(lines)


def histogram(counts: Sequence[tuple[float, float, int]], what: str, unit: str) -> Markup:
    """Vertical bars; each count has its lower and upper bound."""
    if not counts:
        return Markup()
    marks = _marks(max(count for _, _, count in counts))
    begin, end = counts[0][0], counts[-1][1]
    x = _scale(begin, end, _LEFT, WIDTH - _RIGHT)
    y = _scale(0, marks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = list(_value_axis(marks, y))
    parts.extend(
        _text(x(tick), HEIGHT - 8, f"{number_text(tick)} {unit}", "middle")
        for tick in _ticks(begin, end)
    )
    for low, high, count in counts:
        width = max(x(high) - x(low) - 1, 0.5)
        parts.append(
            f'<rect class="bar c0" x="{x(low):.1f}" y="{y(count):.1f}" width="{width:.1f}"'
            f' height="{y(0) - y(count):.1f}"><title>{number_text(low)} to'
            f" {number_text(high)} {unit}: {count:,}</title></rect>"
        )
    return _svg(parts, HEIGHT, what)


def bars(rows: Sequence[Bar], what: str) -> Markup:
    """Horizontal bars, one per row, with the name on the left and the label on the right."""
    if not rows:
        return Markup()
    longest = max(row.value for row in rows) or 1
    length = _scale(0, longest, 0, WIDTH - _NAME_WIDTH - _VALUE_WIDTH)
    parts = []
    for number, row in enumerate(rows):
        middle = number * _ROW_HEIGHT + _ROW_HEIGHT / 2
        width = max(length(row.value), 1 if row.value else 0)
        bar = (
            f'<rect class="bar c{row.colour}" x="{_NAME_WIDTH}" y="{middle - 8:.1f}"'
            f' width="{width:.1f}" height="16"/>'
        )
        name = _text(_NAME_WIDTH - 8, middle + 4, row.name, "end")
        parts += [name, bar, _text(_NAME_WIDTH + width + 6, middle + 4, row.label, "start")]
    return _svg(parts, len(rows) * _ROW_HEIGHT, what)


def _nice_step(span: float) -> float:
    """The interval of about four marks: 1, 2, 2.5 or 5 times a power of ten."""
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if rough <= step * power * 1.0001)


def number_text(value: float) -> str:
    """Three significant digits: `0.0312`, `4.95`, `4,954`."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scale(begin: float, end: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: low + (value - begin) / (end - begin) * (high - low)


def _ticks(begin: float, end: float) -> list[float]:
    step = _nice_step(end - begin)
    first = math.ceil(begin / step)
    return [number * step for number in range(first, math.floor(end / step + 1e-9) + 1)]


def _marks(highest: float) -> list[float]:
    """Marks of a value axis, from zero to at least *highest*."""
    if highest <= 0:
        return [0.0, 1.0]
    step = _nice_step(highest)
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _value_axis(marks: Sequence[float], y: Callable[[float], float]) -> Iterator[str]:
    for value in marks:
        yield f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 8, y(value) + 4, _short_text(value), "end")


def _short_text(value: float) -> str:
    """A number short enough for an axis: `50k`, `1.5M`."""
    if value >= 1_000_000:  # noqa: PLR2004
        return number_text(value / 1_000_000) + "M"
    return number_text(value / 1_000) + "k" if value >= 10_000 else number_text(value)  # noqa: PLR2004


def _time_axis(begin: float, end: float, x: Callable[[float], float]) -> Iterator[str]:
    step, shown = next(
        (each for each in _TIME_STEPS if (end - begin) / each[0] <= _MAX_TIME_LABELS),
        _TIME_STEPS[-1],
    )
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        at = x(number * step)
        label = datetime.fromtimestamp(number * step, UTC).strftime(shown)
        yield _text(at, HEIGHT - 8, label, "middle" if at < WIDTH - 2 * _RIGHT else "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(lines: Sequence[Line]) -> Markup:
    if len(lines) < 2:  # noqa: PLR2004 - one line needs no legend
        return Markup()
    keys = "".join(
        f'<span class="key c{number % COLOURS}">{escape(line.name)}</span>'
        for number, line in enumerate(lines)
    )
    return Markup(f'<p class="legend">{keys}</p>')  # noqa: S704 - names are escaped


def _svg(parts: Sequence[str], height: float, what: str) -> Markup:
    return Markup(  # noqa: S704 - every text in *parts* is escaped
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(what)}">'
        f"{''.join(parts)}</svg>"
    )
