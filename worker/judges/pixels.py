"""Scores that need no network: blank or broken images, and a hash that near-duplicates share."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from PIL import Image

from imagefleet.keeping.rule import OF_PIXELS
from worker.engine.contract import Pixels

_Luma = npt.NDArray[np.float64]

#: Side of the picture whose frequencies are hashed, and of the lowest of these.
_HASHED = 32
_FREQUENCIES = 8

_ROWS = np.arange(_FREQUENCIES)[:, None]
_COLUMNS = 2 * np.arange(_HASHED)[None] + 1

#: [8, 32]: the lowest frequencies of the discrete cosine transform (type II).
_COSINES = np.cos(np.pi * _ROWS * _COLUMNS / (2 * _HASHED))


def _luma(pixels: Pixels) -> _Luma:
    return np.asarray(Image.fromarray(pixels).convert("L"), np.float64)


def contrast(pixels: Pixels) -> float:
    """Standard deviation of the luminance, 0 to 127.5: a blank image has next to none."""
    return float(_luma(pixels).std())


def coherence(pixels: Pixels) -> float:
    """Correlation of each pixel's luminance with its neighbours', 1 at most: noise has none."""
    luma = _luma(pixels)
    luma -= luma.mean()
    power = (luma**2).mean()
    if not power:
        return 1.0
    across = (luma[:, 1:] * luma[:, :-1]).mean()
    down = (luma[1:] * luma[:-1]).mean()
    return float((across + down) / (2 * power))


#: The scores by their names in rules.
SCORES: Mapping[str, Callable[[Pixels], float]] = dict(
    zip(OF_PIXELS, (contrast, coherence), strict=True)
)


def perceptual_hash(pixels: Pixels) -> str:
    """The pHash of an image in hexadecimal, as the library ImageHash has it.

    A bit says whether one of the 64 lowest frequencies is above their median.
    """
    image = Image.fromarray(pixels).convert("L")
    small = image.resize((_HASHED, _HASHED), Image.Resampling.LANCZOS)
    low = _COSINES @ np.asarray(small, np.float64) @ _COSINES.T
    return np.packbits(low > np.median(low)).tobytes().hex()
