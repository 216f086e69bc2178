"""The pictures of the documents, scaling.svg and reference-run.svg, as SVG."""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cli import console
from evaluation.score import figures as curve
from imagefleet.validation import JSONObject

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 24, 50

_LOOK = (
    'role="img" font-family="system-ui, sans-serif" font-size="14" fill="currentColor"'
)
_COLOURS = ("#2f6db5", "#d9772b", "#3d9a63")


def _picture(title: str, parts: Sequence[str], height: int = _HEIGHT) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_LOOK}>',
        f"<title>{escape(title)}</title>",
        "<style>svg:root { color: #1c1d21; background: #fff; }</style>",
    )
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def scaling(rows: Sequence[JSONObject]) -> str:
    """Images/s over replicas, both by powers of ten, with what is perfectly linear."""
    counts = [row["replicas"] for row in rows]
    rates = [row["images_per_second"] for row in rows]
    linear = [row["images_per_second"] / row["linear_fraction"] for row in rows]
    low = math.floor(math.log10(min(rates)))
    high = math.ceil(math.log10(max(linear)))
    most = math.ceil(math.log10(max(counts)))
    across = curve.scale(0, most, _LEFT, _WIDTH - _RIGHT)
    down = curve.scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<path d="M{_LEFT} {down(power):.1f}H{_WIDTH - _RIGHT}" stroke="currentColor"'
        f' opacity=".15"/><text x="{_LEFT - 8}" y="{down(power) + 4:.1f}" text-anchor="end">'
        f"{console.significant(10.0**power)}</text>"
        for power in range(low, high + 1)
    ]
    parts += [
        f'<text x="{across(math.log10(count)):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">'
        f"{count:,}</text>"
        for count in counts
    ]
    lines = (("perfectly linear", linear, "#7a7f87"), ("simulated", rates, _COLOURS[0]))
    for number, (name, values, colour) in enumerate(lines):
        places = [
            (across(math.log10(count)), down(math.log10(value)))
            for count, value in zip(counts, values, strict=True)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = "" if number else ' stroke-dasharray="5 4"'
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        label = _TOP + 14 + 18 * number
        parts.append(
            f'<text x="{_LEFT + 10}" y="{label}" fill="{colour}">{name}</text>'
        )
    for row in rows:
        x = across(math.log10(row["replicas"]))
        y = down(math.log10(row["images_per_second"]))
        text = f"{row['images_per_second']:,.1f} images/s, {row['linear_fraction']:.1%} of linear"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[0]}"><title>'
            f"{row['replicas']:,} replicas: {text}</title></circle>"
        )
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">replicas</text>'
    )
    parts.append(
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        "images/s</text>"
    )
    return _picture("Images per second by the number of replicas, simulated", parts)


def reference(report: JSONObject) -> str:
    """Images a day and images per dollar: published, replayed, and of this engine."""
    published, ours = report["published"], report["ours"]
    day = 86_400 / ours["seconds"]
    groups = (
        (
            "images in 24 hours",
            (published["images"], report["images"], ours["images"] * day),
        ),
        (
            "images per dollar",
            (
                published["images_per_dollar"],
                report["images_per_dollar"],
                ours["images_per_dollar"],
            ),
        ),
    )
    names = ("published", "replayed", "this engine, simulated")
    parts: list[str] = []
    top = 20
    for title, values in groups:
        parts.append(f'<text x="12" y="{top + 8}" font-weight="600">{title}</text>')
        longest = curve.scale(0, max(values), 0, _WIDTH - 300)
        for name, value, colour in zip(names, values, _COLOURS, strict=True):
            top += 26
            width = longest(value)
            parts.append(
                f'<text x="12" y="{top + 9}">{name}</text><rect x="180" y="{top - 6}"'
                f' width="{width:.1f}" height="18" fill="{colour}"/>'
                f'<text x="{188 + width:.1f}" y="{top + 9}">{value:,.0f}</text>'
            )
        top += 44
    return _picture(
        "The public run, replayed, and this engine on the same cards", parts, top
    )


def write(results: Path, folder: Path) -> None:
    """Draws both from a file of results."""
    found = json.loads(results.read_text(encoding="utf-8"))
    for name, text in (
        ("scaling.svg", scaling(found["scaling"]["rows"])),
        ("reference-run.svg", reference(found["reference"])),
    ):
        (folder / name).write_text(text, encoding="utf-8")
