"""Prepares images for networks that judge them: size and normalisation."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

#: OpenAI's mean and deviation of red, green and blue, out of 255, which others kept.
CLIP_MEAN = (122.7709383, 116.7460125, 104.0937362)
CLIP_STD = (68.5005327, 66.6321579, 70.3231631)

Features = npt.NDArray[np.float32]

#: Of red, green and blue, out of 255.
Channels = tuple[float, float, float]


def normalised(images: Sequence[Features], mean: Channels, std: Channels) -> Features:
    """[images, 3, size, size] of images [size, size, 3] in 0..255."""
    found = (np.stack(images) - np.array(mean, np.float32)) / np.array(std, np.float32)
    return np.ascontiguousarray(found.transpose(0, 3, 1, 2), np.float32)


def clip_crop(image: Image.Image, size: int) -> Features:
    """[size, size, 3] in 0..255: the shorter side resized in 8 bits, and the centre of the rest."""
    image = image.convert("RGB")
    width, height = (int(size * side / min(image.size)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left = (width - size) // 2
    top = (height - size) // 2
    centre = image.crop((left, top, left + size, top + size))
    return np.asarray(centre, np.float32)
