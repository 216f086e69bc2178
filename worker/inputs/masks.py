"""Masks of inpainting, worked on as AUTOMATIC1111 does (`modules/masking.py`), blur included."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

Mask = npt.NDArray[np.uint8]
"""[height, width]."""

Box = tuple[int, int, int, int]
"""Left, upper, right and lower, as Pillow has them."""

#: How far its blur reaches, in units of its sigma.
_REACH = 2.5

#: OpenCV's kernels for 8 bits are multiples of 1/256.
_ONE = 256

_MIDDLE = 128


def read(image: Image.Image) -> Mask:
    """The mask of an image of any mode; one with transparency is a mask where it is opaque."""
    if image.mode == "RGBA":
        alpha = np.asarray(image.getchannel("A"))
        if (alpha != _ONE - 1).any():
            return np.where(alpha > _MIDDLE, np.uint8(_ONE - 1), np.uint8(0))
    return np.array(image.convert("L"))


def blur(mask: Mask, sigma_x: int, sigma_y: int) -> Mask:
    """Blurs rows, then columns, each rounded to 8 bits, as OpenCV's GaussianBlur does.

    Sigmas in pixels; 0 is none.
    """
    if sigma_x:
        mask = _blur_rows(mask, sigma_x)
    if sigma_y:
        mask = _blur_rows(mask.T, sigma_y).T
    return np.ascontiguousarray(mask)


def crop_box(mask: Mask, padding: int, size: tuple[int, int]) -> Box | None:
    """What is drawn of an image whose masked part alone is, with *size*'s ratio where it can be.

    None: the mask is empty.
    """
    box = Image.fromarray(mask).getbbox()
    if box is None:
        return None
    (left, upper, right, lower), (height, width) = box, mask.shape
    left, upper = max(left - padding, 0), max(upper - padding, 0)
    right, lower = min(right + padding, width), min(lower + padding, height)
    ratio = size[0] / size[1]
    if (right - left) / (lower - upper) > ratio:
        upper, lower = _widened(upper, lower, (right - left) / ratio, height)
    else:
        left, right = _widened(left, right, (lower - upper) * ratio, width)
    return left, upper, right, lower


def _widened(start: int, end: int, wanted: float, limit: int) -> tuple[int, int]:
    """Start and end with *wanted* pixels between them, as far as there are that many."""
    more = int(wanted - (end - start))
    start, end = start - more // 2, end + more - more // 2
    if end >= limit:
        start, end = start - (end - limit), limit
    if start < 0:
        start, end = 0, end - start
    return start, min(end, limit)


def _blur_rows(mask: Mask, sigma: int) -> Mask:
    kernel = _kernel(sigma)
    reach = len(kernel) - 1
    width = mask.shape[1]
    if width == 1:
        return mask
    # Mirrored at the pixels of the borders, more than once where the mask is narrow.
    places = np.abs(np.arange(-reach, width + reach)) % (2 * width - 2)
    places = np.minimum(places, 2 * width - 2 - places)
    wide = mask[:, places].astype(np.uint16)
    # Weights are multiples of 1/256 that add up to one, so 16 bits hold every sum.
    total = wide[:, reach : reach + width] * kernel[0]
    for distance, weight in enumerate(kernel[1:], 1):
        if weight:
            left = wide[:, reach - distance : reach - distance + width]
            total += (left + wide[:, reach + distance : reach + distance + width]) * weight
    return ((total.astype(np.uint32) + _ONE // 2) // _ONE).astype(np.uint8)


def _kernel(sigma: int) -> list[np.uint16]:
    """The weights by distance, in units of 1/256; the rounding error goes to the next weight."""
    reach = int(_REACH * sigma + 0.5)
    weights = [math.exp(-(distance**2) / (2 * sigma**2)) for distance in range(reach + 1)]
    total = 2 * sum(weights[1:]) + weights[0]
    rounded, error = [], 0.0
    for weight in reversed(weights[1:]):
        exact = weight / total * _ONE + error
        rounded.append(round(exact))
        error = exact - rounded[-1]
    rounded.append(_ONE - 2 * sum(rounded))
    return [np.uint16(weight) for weight in reversed(rounded)]
