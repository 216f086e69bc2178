"""An image for models that enlarge one, where a program draws without a job."""

from __future__ import annotations

import numpy as np

from imagefleet.pricing import families
from worker.engine.contract import InitImage, Pixels

#: The sides of what is drawn are this many times those of the sample.
_SHARE = 4

#: The level of the noise on it that DeepFloyd IF's third stage has.
_NOISE = 0.1


def init_of(family: str, width: int, height: int) -> InitImage | None:
    """What an image of this size begins with; None for families that draw from text alone."""
    if not families.find(family).enlarges:
        return None
    return InitImage(_colours(width // _SHARE, height // _SHARE), _NOISE)


def _colours(width: int, height: int) -> Pixels:
    """Red grows to the right, green downwards, and blue is in squares."""
    across = np.linspace(0, 255, width, dtype=np.uint8)
    down = np.linspace(0, 255, height, dtype=np.uint8)
    red, green = np.broadcast_arrays(across[None], down[:, None])
    squares = (across[None] // 64 + down[:, None] // 64) % 2 * 255
    return np.stack([red, green, squares.astype(np.uint8)], axis=2)
