"""The picture of the ladder: images per dollar of each rung, by powers of ten, as SVG."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

_WIDTH, _LABELS, _FIGURES = 640, 190, 150
_BAR, _GAP, _TOP = 18, 10, 34

_LOOK = (
    'role="img" font-family="system-ui, sans-serif" font-size="14" fill="currentColor"'
)


def ladder(report: Mapping[str, Any]) -> str:
    rungs = report["rungs"]
    powers = [math.log10(rung["images_per_dollar"]) for rung in rungs]
    lowest = math.floor(min(powers))
    room = _WIDTH - _LABELS - _FIGURES
    scale = room / (max(powers) - lowest)
    height = _TOP + len(rungs) * (_BAR + _GAP)
    title = (
        f"Images per dollar on {report['hardware']['device']} at"
        f" ${report['dollars_per_hour']:g}/h, each step with those before it"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_LOOK}>',
        f"<title>{escape(title)}</title>",
        "<style>svg:root { color: #1c1d21; background: #fff; }</style>",
        f'<text x="8" y="18" font-weight="600">{escape(title)}</text>',
    ]
    for number, (rung, power) in enumerate(zip(rungs, powers, strict=True)):
        top = _TOP + number * (_BAR + _GAP)
        width = (power - lowest) * scale
        seconds = f"{rung['seconds_per_image']:.3g} s"
        text = f"{rung['images_per_dollar']:,.0f}, {seconds}"
        parts += [
            f'<text x="8" y="{top + 14}">{escape(rung["name"])}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="#2f6db5"/>',
            f'<text x="{_LABELS + width + 6:.1f}" y="{top + 14}">{text}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
