"""Images as networks take them: resized with antialiasing as clean-fid does, or as CLIP does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[np.float32]

#: For people, by the name of the resize.
DESCRIPTIONS = {
    "clean-fid": "PIL bicubic with antialiasing in float32, as clean-fid",
    "clip": "PIL bicubic with antialiasing of the shorter side, then the centre, as CLIP",
}

_WHITE = 255.0


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is done to an image before a network sees it; *mean* and *std* are out of 255."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: Literal["clean-fid", "clip"] = "clean-fid"

    def array(self, images: Sequence[Image.Image]) -> Array:
        """[images, 3, size, size], normalised."""
        resized = clean_fid if self.resize == "clean-fid" else clip_crop
        stacked = np.stack([resized(image, self.size) for image in images])
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        normalised = (stacked - mean) / std
        return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2), np.float32)


def clean_fid(image: Image.Image, size: int) -> Array:
    """[size, size, 3] in 0..255: each channel resized in float32, without rounding to 8 bits.

    https://github.com/GaParmar/clean-fid, `make_resizer("PIL", False, "bicubic", ...)`
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    channels = [
        np.asarray(
            Image.fromarray(pixels[..., channel]).resize((size, size), Image.Resampling.BICUBIC)
        )
        for channel in range(3)
    ]
    return np.stack(channels, axis=2).clip(0, _WHITE)


def clip_crop(image: Image.Image, size: int) -> Array:
    """[size, size, 3] in 0..255: the shorter side resized in 8 bits, and the centre of the rest."""
    image = image.convert("RGB")
    short = min(image.size)
    width, height = (max(size, int(size * side / short)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)), np.float32)
