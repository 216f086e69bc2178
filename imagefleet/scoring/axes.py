"""Scales, marks and numbers of the axes of plots."""

from __future__ import annotations

import math
from collections.abc import Callable


def scale(begin: float, end: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: low + (value - begin) / (end - begin) * (high - low)


def nice_ticks(begin: float, end: float) -> list[float]:
    step = nice_step(end - begin)
    first = math.ceil(begin / step)
    return [number * step for number in range(first, math.floor(end / step + 1e-9) + 1)]


def nice_step(span: float) -> float:
    """The interval of about four marks: 1, 2, 2.5 or 5 times a power of ten."""
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if rough <= step * power * 1.0001)


def number_text(value: float) -> str:
    """Three significant digits: `0.0312`, `4.95`, `4,954`."""
    if value == 0:
        return "0"
    if not 1e-9 < abs(value) < 1e12:  # noqa: PLR2004 - too many digits; and infinite, not a number
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
