"""The gate's result as JSON, and as a page of the worst pairs with their difference."""

import base64
import io
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from evaluation.gate.compare import Comparison, Measures, PairFigures
from evaluation.gate.images import Drawing, Pixels
from evaluation.gate.verdict import Verdict
from imagefleet.validation import JSONDict

#: The longer side on the page: larger images are made smaller.
_PIXELS = 512

#: A difference is shown so many times as large, so that a few levels are seen.
_AMPLIFIED = 8


@dataclass(frozen=True)
class Picture:
    """A pair for the page, each image as a PNG or WebP in base64."""

    pair: PairFigures
    a: str
    b: str
    difference: str
    width: int
    height: int


@dataclass(frozen=True)
class Result:
    """The verdict, with the sides, networks and figures that it is based on."""

    labels: tuple[str, str]
    measures: Measures
    comparison: Comparison
    verdict: Verdict
    pictures: tuple[Picture, ...]

    def as_json(self) -> JSONDict:
        """The comparison and its verdict as `--json` prints them."""
        facts = {
            name: None if each is None else each.facts.as_json()
            for name, each in (
                ("extractor", self.measures.extractor),
                ("clip", self.measures.text_extractor),
            )
        }
        return {
            "a": self.labels[0],
            "b": self.labels[1],
            **self.verdict.as_json(),
            **facts,
            "fid_against": self.fid_against,
            "other_fields": {
                name: list(values)
                for name, values in self.comparison.other_fields.items()
            },
            "unknown_jobs": self.comparison.unknown_jobs,
        }

    @property
    def left_out(self) -> list[str]:
        """Figures that need an extractor which was not given, or more pairs."""
        figures = {
            "FID and the feature distance (--extractor)": self.measures.extractor,
            "the CLIP score (--clip)": self.measures.text_extractor,
        }
        missing = [name for name, extractor in figures.items() if extractor is None]
        if self.measures.extractor is not None and self.verdict.fid_a is None:
            missing.append("FID (fewer than four pairs)")
        return missing

    @property
    def fid_against(self) -> str:
        """The image set that FID is measured against."""
        return (
            "the reference"
            if self.measures.reference
            else "the other half of A's images"
        )


def picture(pair: PairFigures, a: Drawing, b: Drawing) -> Picture:
    """The pair, with the difference of its pixels amplified."""
    difference = np.abs(a.pixels.astype(np.int16) - b.pixels) * _AMPLIFIED
    height, width, _ = a.pixels.shape
    amplified = _webp(difference.clip(0, 255).astype(np.uint8))
    return Picture(pair, _webp(a.pixels), _webp(b.pixels), amplified, width, height)


def render(result: Result, made_at: datetime) -> str:
    """The page as one file: pictures inline, no scripts."""
    environment = Environment(
        loader=PackageLoader("evaluation.gate", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
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
