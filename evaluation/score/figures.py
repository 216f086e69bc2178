"""The figures of `imagefleet score`: its JSON, the FID-CLIP curve as SVG, and plots like it."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from pydantic import BaseModel

from cli import console
from imagefleet.validation import JSONDict

_WIDTH = 480
_HEIGHT = 340
_LEFT = 62
_RIGHT = 24
_TOP = 18
_BOTTOM = 50

_MIDDLE = 'text-anchor="middle"'

#: Where the names of lines begin, at the right: neither a curve's best end nor its worst.
_NAMES_DOWN = 140

#: As on the report's page.
_COLOURS = ("#2f6db5", "#d9772b", "#3d9a63", "#b0435a", "#7d62b0", "#7a7f87")

_LOOK = (
    'role="img" font-family="system-ui, sans-serif" font-size="14" fill="currentColor"'
)

#: Free space around the points, as a share of their range.
_MARGIN = 0.08


#: Digits after the point, as tables have the figures.
FIGURES = {"fid": 3, "kid": 5, "clip": 3, "cmmd": 4}

#: Groups of few images, in a sentence.
_NAMED = 3

Interval = tuple[float, float]


class Point(NamedTuple):
    """A point of a plot with the intervals of both figures, its label and its tooltip."""

    x: float
    y: float
    x_interval: Interval
    y_interval: Interval
    label: str
    title: str


class GroupScores(BaseModel, extra="ignore", frozen=True, allow_inf_nan=False):
    """One group of a sweep: one point of a curve. What cannot be computed is None."""

    group: str
    cfg_scale: float | None = None
    sampler: str | None = None
    steps: int | None = None
    model: str | None = None
    lora: str | None = None
    lora_strength: float | None = None
    images: int
    left_out: int = 0
    fid: float | None = None
    fid_interval: Interval | None = None
    kid: float | None = None
    kid_interval: Interval | None = None
    kid_std: float | None = None
    kid_subset_size: int | None = None
    clip: float | None = None
    clip_interval: Interval | None = None
    cmmd: float | None = None
    cmmd_interval: Interval | None = None

    def shown(self, name: str) -> str:
        """A figure and how far its interval of 95 % reaches: `12.345 ±0.067`."""
        value = getattr(self, name)
        interval = getattr(self, f"{name}_interval")
        if value is None:
            return "-"
        digits = FIGURES[name]
        reach = (
            ""
            if interval is None
            else f" ±{(interval[1] - interval[0]) / 2:,.{digits}f}"
        )
        return f"{value:z,.{digits}f}{reach}"


class Scores(BaseModel, extra="ignore", frozen=True):
    """All groups, and all that the figures depend on."""

    campaign: str
    reference: str | None
    reference_images: int | None
    #: SHA-256 of the reference's file, or of all pictures of its folder.
    reference_sha256: str | None = None
    extractor: JSONDict | None
    clip_extractor: JSONDict | None
    kid_subsets: int
    groups: tuple[GroupScores, ...]
    #: The first images that are missing, not as recorded, or no images.
    left_out: tuple[str, ...] = ()
    #: Groups, and the reference, of fewer than 1,000 images: their figures say little.
    small: tuple[str, ...] = ()
    of_no_group: int = 0


def facts(scores: Scores) -> dict[str, str]:
    found = {}
    if scores.reference is not None:
        count = scores.reference_images
        images = "" if count is None else f", {count:,} images"
        content = (
            f"; SHA-256 {scores.reference_sha256}" if scores.reference_sha256 else ""
        )
        found["reference"] = f"{scores.reference}{images}{content}"
    if scores.extractor:
        found["FID, KID"] = _extractor(scores.extractor)
    if scores.clip_extractor:
        found["CLIP, CMMD"] = _extractor(scores.clip_extractor)
    if scores.small:
        found["few images"] = f"{_few(scores)}: FID and CMMD are too high"
    return found


def _few(scores: Scores) -> str:
    more = (
        f" and {len(scores.small) - _NAMED:,} more"
        if len(scores.small) > _NAMED
        else ""
    )
    return f"fewer than 1,000 in {', '.join(scores.small[:_NAMED])}{more}"


def _extractor(facts: JSONDict) -> str:
    return (
        f"{facts['name']} ({facts['kind']}, {facts['dimensions']:,} features), {facts['size']}"
        f" pixels, {facts['resize']}; SHA-256 {facts['sha256']}"
    )


def series(scores: Scores) -> dict[str, list[GroupScores]]:
    """The groups with both figures, by what differs but for the guidance, by their guidance."""
    lines: dict[str, list[GroupScores]] = {}
    for group in scores.groups:
        if group.fid is not None and group.clip is not None:
            lines.setdefault(_name(group), []).append(group)
    return {
        name: sorted(groups, key=lambda group: group.cfg_scale or 0)
        for name, groups in lines.items()
    }


def _name(group: GroupScores) -> str:
    strength = "" if group.lora_strength is None else f" {group.lora_strength:g}"
    steps = "" if group.steps is None else f"{group.steps} steps"
    lora = f"{group.lora}{strength}" if group.lora else ""
    return (
        ", ".join(filter(None, (group.model, group.sampler, steps, lora)))
        or group.group
    )


def svg(scores: Scores) -> str:
    """FID over the CLIP score, each point with its guidance; "" without both figures."""
    lines = {}
    for name, groups in series(scores).items():
        lines[name] = [_point(group) for group in groups]
    few = _few(scores) if scores.small else ""
    return plot(
        lines, f"FID and CLIP score of {scores.campaign}", "CLIP score", "FID", few
    )


def _point(group: GroupScores) -> Point:
    clip = group.clip or 0.0
    fid = group.fid or 0.0
    return Point(
        clip,
        fid,
        group.clip_interval or (clip, clip),
        group.fid_interval or (fid, fid),
        "" if group.cfg_scale is None else f"{group.cfg_scale:g}",
        f"{group.group}: FID {group.shown('fid')}, CLIP {group.shown('clip')}",
    )


def plot(
    lines: Mapping[str, Sequence[Point]],
    title: str,
    x_name: str,
    y_name: str,
    note: str = "",
) -> str:
    """Named lines as SVG; "" without points."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    x = _Axis(
        [end for point in points for end in point.x_interval], _LEFT, _WIDTH - _RIGHT
    )
    y = _Axis(
        [end for point in points for end in point.y_interval], _HEIGHT - _BOTTOM, _TOP
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_LOOK}>',
        f"<title>{escape(title)}</title>",
        # A picture by itself has no page whose colours it could take.
        "<style>svg:root { color: #1c1d21; background: #fff; }</style>",
        *_grid(x, y, escape(x_name), escape(y_name)),
    ]
    right = f'x="{_WIDTH - _RIGHT}" text-anchor="end"'
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(
            f"{x.place(point.x):.1f},{y.place(point.y):.1f}" for point in line
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for point in line:
            parts += _drawn(point, x, y, colour)
        if len(lines) > 1:
            place = f'{right} y="{_NAMES_DOWN + 16 * number}" fill="{colour}"'
            parts.append(f"<text {place}>{escape(name)}</text>")
    if note:
        parts.append(f'<text {right} y="{_TOP}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        lowest = min(values)
        highest = max(values)
        margin = _MARGIN * (highest - lowest or abs(values[0]) or 1.0)
        begin = lowest - margin
        end = highest + margin
        self.place = scale(begin, end, low, high)
        step = nice_step(end - begin)
        first = math.ceil(begin / step)
        last = math.floor(end / step + 1e-9)
        self.marks = [number * step for number in range(first, last + 1)]


def _grid(x: _Axis, y: _Axis, x_name: str, y_name: str) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    right = _WIDTH - _RIGHT
    parts = [
        f'<path d="M{_LEFT} {y.place(mark):.1f}H{right}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{_LEFT - 8}" y="{y.place(mark) + 4:.1f}" text-anchor="end">'
        f"{console.significant(mark)}</text>"
        for mark in y.marks
    ]
    parts += [
        f'<text x="{x.place(mark):.1f}" y="{bottom + 20}" text-anchor="middle">'
        f"{console.significant(mark)}</text>"
        for mark in x.marks
    ]
    middle = (_TOP + bottom) / 2
    return [
        *parts,
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 12}" {_MIDDLE}>{x_name}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" {_MIDDLE}>{y_name}</text>',
    ]


def _drawn(point: Point, x: _Axis, y: _Axis, colour: str) -> list[str]:
    across = x.place(point.x)
    down = y.place(point.y)
    (left, right) = point.x_interval
    (low, high) = point.y_interval
    begin = x.place(left)
    end = x.place(right)
    bottom = y.place(low)
    top = y.place(high)
    return [
        (
            f'<path d="M{begin:.1f} {down:.1f}H{end:.1f}M{across:.1f} {bottom:.1f}V{top:.1f}"'
            f' stroke="{colour}" opacity=".5"/>'
        ),
        (
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(point.title)}</title></circle>"
        ),
        f'<text x="{across + 7:.1f}" y="{down - 7:.1f}">{escape(point.label)}</text>',
    ]


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
