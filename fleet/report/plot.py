"""Plots as inline SVG and HTML. Plotting libraries need scripts, or weigh tens of megabytes.

Only lines are SVG, which is stretched to the page's width; all text is HTML, so that it keeps its
size on a phone. Colours are classes (`c0` to `c5`), so the page's style sheet serves light, dark
and print. Every point has a title, which browsers show as its tooltip.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from markupsafe import Markup

from cli.console import significant

#: The SVG's own units; its shape on the page is up to the style sheet.
WIDTH = 1000
HEIGHT = 200
COLOURS = 6

#: Intervals between the labels of a time axis, each with the format of a label.
_TIME_STEPS = (
    *((seconds, "%H:%M:%S") for seconds in (1, 2, 5, 10, 15, 30)),
    *(
        (60 * minutes, "%H:%M")
        for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)
    ),
    *((86_400 * days, "%d %b") for days in (1, 2, 7, 14, 30, 90, 365)),
)
_MAX_TIME_LABELS = 6

Points = Sequence[tuple[float, float]]
"""A series over time: Unix seconds and values, in order."""


class Bar(NamedTuple):
    """A named amount; *label* is shown to its right."""

    name: str
    value: float
    label: str
    colour: int = 0


def time_plot(lines: Mapping[str, Points], what: str) -> Markup:
    """Named lines over time, the value axis from zero; *what* names the values and their unit."""
    places = [at for points in lines.values() for at, _ in points]
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return Markup()
    begin, end = min(places), max(*places, min(places) + 1)
    marks = _marks(max(values))
    x, y = scale(begin, end, 0, WIDTH), scale(0, marks[-1], HEIGHT, 0)
    drawn = [
        _joined(
            '<path class="grid" d="M0 {:.1f}H{}"/>',
            ((y(mark), WIDTH) for mark in marks),
        )
    ]
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        colour = number % COLOURS
        drawn.append(
            Markup('<polyline class="line c{}" points="{}"/>').format(colour, path)
        )
        # A line of no length with round ends is a dot, however the drawing is stretched.
        drawn.append(
            _joined(
                '<path class="point c{}" d="M{:.1f} {:.1f}h0"><title>{}: {}, {:%d %b %H:%M:%S} UTC'
                "</title></path>",
                (
                    (colour, x(at), y(value), name, significant(value), _moment(at))
                    for at, value in points
                ),
            )
        )
    beside = ((100 * mark / marks[-1], significant(mark)) for mark in marks)
    below = [(100 * x(at) / WIDTH, label) for at, label in _time_ticks(begin, end)]
    keys = enumerate(lines if len(lines) > 1 else ())  # one line needs no legend
    return Markup(
        '<div class="plot" role="img" aria-label="{}: from {} to {}">'
        '<div class="values">{}</div>'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none">{}</svg>'
        '<div class="ticks">{}</div></div>'
        '<p class="legend">{}</p>'
    ).format(
        *(what, significant(min(values)), significant(max(values))),
        _joined('<span style="bottom:{:.1f}%">{}</span>', beside),
        *(WIDTH, HEIGHT, Markup().join(drawn)),
        _joined(
            '<span class="{}" style="left:{:.1f}%">{}</span>',
            ((_side(share), share, label) for share, label in below),
        ),
        _joined('<span class="key c{}">{}</span>', keys),
    )


def bars(rows: Sequence[Bar], what: str) -> Markup:
    """Horizontal bars, one per row, each with its name and label."""
    if not rows:
        return Markup()
    longest = max(row.value for row in rows) or 1
    items = _joined(
        '<li><span class="name">{}</span><span class="track"><span class="bar c{}"'
        ' style="width:max({}px, {:.1f}%)"></span></span><span class="label">{}</span></li>',
        (
            (
                row.name,
                row.colour,
                int(row.value > 0),
                100 * row.value / longest,
                row.label,
            )
            for row in rows
        ),
    )
    return Markup('<ul class="bars" aria-label="{}">{}</ul>').format(what, items)


def _joined(template: str, rows: Iterable[tuple[object, ...]]) -> Markup:
    """The template filled with each row, whose texts are escaped."""
    return Markup().join(Markup(template).format(*row) for row in rows)  # noqa: S704


def _marks(highest: float) -> list[float]:
    """Marks of a value axis, from zero to at least *highest*."""
    if highest <= 0:
        return [0.0, 1.0]
    step = nice_step(highest)
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _time_ticks(begin: float, end: float) -> Iterator[tuple[float, str]]:
    fitting = (
        each for each in _TIME_STEPS if (end - begin) / each[0] <= _MAX_TIME_LABELS
    )
    step, shown = next(fitting, _TIME_STEPS[-1])
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        yield number * step, _moment(number * step).strftime(shown)


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _side(share: float) -> str:
    """A label's place at its tick: beside it at the edges, lest it leave the page."""
    return "first" if share < 10 else "last" if share > 88 else "mid"  # noqa: PLR2004


def scale(
    begin: float, end: float, low: float, high: float
) -> Callable[[float], float]:
    return lambda value: low + (value - begin) / (end - begin) * (high - low)


def nice_step(span: float) -> float:
    """The interval of about four marks: 1, 2, 2.5 or 5 times a power of ten."""
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        step * power for step in (1, 2, 2.5, 5, 10) if rough <= step * power * 1.0001
    )
