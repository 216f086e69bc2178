"""The gate's page: the figures, and the worst pairs side by side with their difference."""

from __future__ import annotations

import base64
import io
from datetime import datetime

import jinja2
import numpy as np
from PIL import Image

from evaluation.gate.compare import PairFigures
from evaluation.gate.images import Drawing, Pixels
from evaluation.gate.result import Picture, Result

#: The longer side on the page: larger images are made smaller.
_PIXELS = 512

#: A difference is shown so many times as large, so that a few levels are seen.
_AMPLIFIED = 8


def picture(pair: PairFigures, a: Drawing, b: Drawing) -> Picture:
    """The pair, with the difference of its pixels amplified."""
    difference = np.abs(a.pixels.astype(np.int16) - b.pixels) * _AMPLIFIED
    height, width, _ = a.pixels.shape
    amplified = _webp(difference.clip(0, 255).astype(np.uint8))
    return Picture(pair, _webp(a.pixels), _webp(b.pixels), amplified, width, height)


def render(result: Result, made_at: datetime) -> str:
    """The page as one file: pictures inline, no scripts."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evaluation.gate", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = figure
    return environment.get_template("page.html.jinja").render(
        result=result, verdict=result.verdict, amplified=_AMPLIFIED, made_at=made_at
    )


def figure(value: float | None, unit: str = "", digits: int = 3) -> str:
    """A figure with its unit; None is that of the same images."""
    if value is None:
        return "identical"
    return f"{value:,.{digits}f}{' ' + unit if unit else ''}"


def _webp(pixels: Pixels) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((_PIXELS, _PIXELS), Image.Resampling.LANCZOS)
    stored = io.BytesIO()
    image.save(stored, "WEBP", lossless=max(image.size) <= _PIXELS // 2, quality=90)
    return base64.b64encode(stored.getvalue()).decode()
