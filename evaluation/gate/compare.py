"""Compares two sides pair by pair, with flat memory: pixels, features, captions."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from evaluation.gate import images, pair
from evaluation.gate.images import Drawing, Images
from evaluation.gate.pair import Shift
from evaluation.score import metrics
from evaluation.score.extractors import Extractor, TextExtractor, finite
from evaluation.score.statistics import Doubles, Statistics
from imagefleet import concurrency
from imagefleet.caption import caption_of

#: Read and compared at once: of 1024x1024 pixels, some 100 MB.
_BATCH = 16


@dataclass(frozen=True)
class Measures:
    """Networks and reference of the figures; None leaves out the figures that need it."""

    extractor: Extractor | None
    text_extractor: TextExtractor | None
    reference: Statistics | None


@dataclass(frozen=True)
class PairFigures:
    """Differences between two drawings of one job."""

    key: str
    name_a: str
    name_b: str
    caption: str | None
    seed: int | None
    #: Mean square of the difference of all channels, out of 255 squared.
    squares: float
    #: Structural similarity, 1 for the same pixels.
    ssim: float
    ssim_worst_region: float
    #: Change of the edges' height from A to B, in percent.
    sharpness_percent: float
    #: Change of the colours, in percent of how colourful A is.
    colour_percent: float
    #: Change of the brightness, the mean over regions, in levels.
    light_levels: float
    feature_distance: float | None

    @property
    def psnr(self) -> float | None:
        return metrics.psnr(self.squares)


@dataclass
class Comparison:
    """Everything that was found of the pairs."""

    pairs: list[PairFigures] = field(default_factory=list)
    #: Sum of the shifts of all pairs.
    shift: Shift | None = None
    halves_a: list[Statistics] = field(default_factory=list)
    halves_b: list[Statistics] = field(default_factory=list)
    #: Sum of the features of A's images, each scaled to length 1.
    directions: Doubles | None = None
    clip_scores: tuple[list[float], list[float]] = field(
        default_factory=lambda: ([], [])
    )
    #: Fields of the jobs that differ between the sides, with the values of the first pair.
    other_fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    #: Pairs of which an image does not say how it was drawn.
    unknown_jobs: int = 0


async def compare(
    sides: tuple[Images, Images],
    keys: Sequence[str],
    names: tuple[Mapping[str, str], Mapping[str, str]],
    measures: Measures,
    on_pairs: Callable[[int], None],
) -> Comparison:
    """Compares the images of *keys*; raises NotComparableError if a pair is not of one job."""
    found = Comparison()
    for first in range(0, len(keys), _BATCH):
        batch = keys[first : first + _BATCH]
        drawn = await concurrency.gather(
            *(
                images.read(side, by_key[key])
                for key in batch
                for side, by_key in zip(sides, names, strict=True)
            )
        )
        pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
        for key, (a, b) in zip(batch, pairs, strict=True):
            images.check_same_job(key, a, b)
            found.unknown_jobs += a.job is None or b.job is None
            found.other_fields = {**images.other_fields(a, b), **found.other_fields}
        await asyncio.to_thread(_add, found, batch, pairs, names, measures)
        on_pairs(len(batch))
    return found


def _add(
    found: Comparison,
    keys: Sequence[str],
    pairs: Sequence[tuple[Drawing, Drawing]],
    names: tuple[Mapping[str, str], Mapping[str, str]],
    measures: Measures,
) -> None:
    apart: Sequence[float | None] = [None] * len(keys)
    if measures.extractor is not None:
        apart = _add_features(found, pairs, measures.extractor)
    if measures.text_extractor is not None:
        _add_clip_scores(found, pairs, measures.text_extractor)
    for key, (a, b), distance in zip(keys, pairs, apart, strict=True):
        name_a, name_b = (side[key] for side in names)
        add_pair(found, a, b, key, name_a, name_b, distance)


def add_pair(
    found: Comparison,
    a: Drawing,
    b: Drawing,
    key: str,
    name_a: str = "",
    name_b: str = "",
    feature_distance: float | None = None,
) -> None:
    """Adds what two drawings of one job show without a network."""
    known = a if a.job is not None else b
    shift = Shift.of(a.pixels, b.pixels)
    found.shift = found.shift + shift if found.shift else shift
    squares = metrics.mean_square(a.pixels, b.pixels)
    ssim, worst_region = pair.similarity(a.pixels, b.pixels)
    found.pairs.append(
        PairFigures(
            key,
            name_a,
            name_b,
            known.caption,
            known.seed,
            squares,
            ssim,
            worst_region,
            shift.sharpness_percent,
            *pair.tone(a.pixels, b.pixels),
            feature_distance,
        )
    )


def _add_features(
    found: Comparison, pairs: Sequence[tuple[Drawing, Drawing]], extractor: Extractor
) -> list[float]:
    """Adds the statistics of both sides; returns how far apart each pair's features are."""
    a, b = (
        finite(extractor, [Image.fromarray(drawing.pixels) for drawing in side])
        for side in zip(*pairs, strict=True)
    )
    if found.directions is None:
        empty = Statistics.merged([], a.shape[1])
        found.directions = np.zeros(a.shape[1])
        found.halves_a = [empty, empty]
        found.halves_b = [empty, empty]
    first = len(found.pairs) % 2
    for half in (0, 1):
        rows = slice((half + first) % 2, None, 2)
        if len(a[rows]):
            found.halves_a[half] += Statistics.of(a[rows])
            found.halves_b[half] += Statistics.of(b[rows])
    directions = metrics.unit(a)
    found.directions += directions.sum(axis=0)
    apart = (1 - (directions * metrics.unit(b)).sum(axis=1)).clip(0)
    return [float(each) for each in apart]


def _add_clip_scores(
    found: Comparison,
    pairs: Sequence[tuple[Drawing, Drawing]],
    extractor: TextExtractor,
) -> None:
    captions = [words(a, b) for a, b in pairs]
    if not any(captions):
        return
    texts = extractor.text_features([each for each in captions if each])
    for side, scores in zip(zip(*pairs, strict=True), found.clip_scores, strict=True):
        known = [
            drawing for drawing, caption in zip(side, captions, strict=True) if caption
        ]
        features = extractor.features([Image.fromarray(each.pixels) for each in known])
        scores.extend(metrics.clip_score(features, texts).tolist())


def words(a: Drawing, b: Drawing) -> str | None:
    """Caption of a pair: that of its sweep, or the words of the prompt."""
    job = a.job or b.job
    return None if job is None else caption_of(job)
