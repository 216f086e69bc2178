"""The way from the first pass of hires fix to the second, as in AUTOMATIC1111.

Latent upscalers interpolate the latents. Others enlarge the decoded image, which is encoded again;
it is resized to the exact size with Lanczos, as often as AUTOMATIC1111 does. What exceeds a target
of another shape is cut off at both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from PIL import Image

from imagefleet import errors
from worker.engine import contract

Enlarge = Callable[[contract.Pixels, float], contract.Pixels]
"""Enlarges an RGB image by a factor, or by its own if it has one. Called on the stager's thread."""

LoadUpscaler = Callable[[Path], Enlarge]
"""Reads an upscaler's file, on one of the threads that prepare requests.

Raises JobError for a file of no known kind, and TransientError if it cannot be read.
"""

#: The mode of torch's `interpolate`, and whether it is antialiased.
LATENT_UPSCALERS: Mapping[str, tuple[str, bool]] = {
    "Latent": ("bilinear", False),
    "Latent (antialiased)": ("bilinear", True),
    "Latent (bicubic)": ("bicubic", False),
    "Latent (bicubic antialiased)": ("bicubic", True),
    "Latent (nearest)": ("nearest", False),
    "Latent (nearest-exact)": ("nearest-exact", False),
}

#: Applications of an upscaler that enlarges too little.
_MOST_TIMES = 3

#: AUTOMATIC1111's upscalers make sides that are multiples of this.
_ALIGNMENT = 8


def _resampled(resampling: Image.Resampling) -> Enlarge:
    def enlarge(pixels: contract.Pixels, scale: float) -> contract.Pixels:
        height, width = pixels.shape[:2]
        return _resize(pixels, int(width * scale), int(height * scale), resampling)

    return enlarge


#: Upscalers of images; None is Lanczos in a single step.
IMAGE_UPSCALERS: Mapping[str, Enlarge | None] = {
    "None": None,
    "Lanczos": _resampled(Image.Resampling.LANCZOS),
    "Nearest": _resampled(Image.Resampling.NEAREST),
}


@dataclass(frozen=True, slots=True)
class Upscaling:
    """How a first pass' latents become those that a second begins with. Sizes in pixels."""

    target: tuple[int, int]
    """Width and height of the second pass."""
    size: tuple[int, int]
    """The size before the rest is cut off, in the first pass' shape. SDXL is told this size."""
    latent_mode: tuple[str, bool] | None
    """None for upscalers of images."""
    enlarge: Enlarge | None

    def enlarge_latents(self, latents: torch.Tensor, factor: int) -> torch.Tensor:
        """Latents [4, height, width] in the size; *factor*: pixels for each of their rows."""
        if self.latent_mode is None:
            raise RuntimeError("this upscaler is for images")
        mode, antialias = self.latent_mode
        width, height = self.size
        sides = height // factor, width // factor
        return F.interpolate(latents[None], size=sides, mode=mode, antialias=antialias)[0]

    def enlarge_pixels(self, pixels: contract.Pixels) -> contract.Pixels:
        """An image in the size."""
        width, height = self.size
        scale = max(width / pixels.shape[1], height / pixels.shape[0])
        if self.enlarge is not None and scale > 1:
            aligned = (int(side * scale // _ALIGNMENT * _ALIGNMENT) for side in pixels.shape[1::-1])
            pixels = _apply(self.enlarge, pixels, scale, *aligned)
        return _resize(pixels, width, height, Image.Resampling.LANCZOS)

    def crop(self, latents: torch.Tensor, factor: int) -> torch.Tensor:
        """Cuts latents [4, height, width] of the size down to the target."""
        columns, rows = (
            _kept((size - target) // factor, size // factor)
            for size, target in zip(self.size, self.target, strict=True)
        )
        return latents[:, rows, columns]


def enlarge(
    pixels: contract.Pixels, upscale: contract.Upscale, upscalers: Sequence[Enlarge]
) -> contract.Pixels:
    """An image as AUTOMATIC1111's extras enlarge it, by one or both of the *upscalers*.

    An image that is large enough is only resized, but for a network at a scale of 1, which may be
    one that restores.
    """
    height, width = pixels.shape[:2]
    is_smaller = width < upscale.whole[0] or height < upscale.whole[1]
    found: list[contract.Pixels] = []
    for upscaler in upscalers:
        if is_smaller or upscale.scale == 1:
            found.append(_apply(upscaler, pixels, upscale.scale, *upscale.whole))
        else:
            found.append(_resize(pixels, *upscale.whole, Image.Resampling.LANCZOS))
    image = Image.fromarray(found[0])
    for other in found[1:]:
        image = Image.blend(image, Image.fromarray(other), upscale.blend)
    left, upper = (
        whole // 2 - kept // 2
        for whole, kept in zip(upscale.whole, (upscale.width, upscale.height), strict=True)
    )
    return np.asarray(image.crop((left, upper, left + upscale.width, upper + upscale.height)))


def find(hires: contract.HiresPass, width: int, height: int, load: LoadUpscaler) -> Upscaling:
    """The upscaling of a first pass of *width* x *height* pixels; *load* reads upscalers' files.

    Raises JobError if there is no such upscaler here.
    """
    target = hires.width, hires.height
    # The shorter way to a size of the same shape that holds the target.
    if width / height < hires.width / hires.height:
        size = hires.width, hires.width * height // width
    else:
        size = hires.height * width // height, hires.height
    if hires.upscaler_path is not None:
        return Upscaling(target, size, None, load(hires.upscaler_path))
    mode = LATENT_UPSCALERS.get(hires.upscaler)
    if mode is None and hires.upscaler not in IMAGE_UPSCALERS:
        raise errors.JobError(
            f"unknown upscaler {hires.upscaler!r}; without a file there are"
            f" {', '.join([*LATENT_UPSCALERS, *IMAGE_UPSCALERS])}"
        )
    return Upscaling(target, size, mode, IMAGE_UPSCALERS.get(hires.upscaler))


def _kept(excess: int, length: int) -> slice:
    """What is left of a side's *length*; of an odd excess, the end loses more."""
    return slice(excess // 2, length - (excess + 1) // 2)


def _apply(
    enlarge: Enlarge, pixels: contract.Pixels, scale: float, width: int, height: int
) -> contract.Pixels:
    """Enlarges an image as often as it takes to reach the size, then resizes it to exactly that."""
    for _ in range(_MOST_TIMES):
        before = pixels.shape
        pixels = enlarge(pixels, scale)
        if pixels.shape == before or (pixels.shape[0] >= height and pixels.shape[1] >= width):
            break
    return _resize(pixels, width, height, Image.Resampling.LANCZOS)


def _resize(
    pixels: contract.Pixels, width: int, height: int, resampling: Image.Resampling
) -> contract.Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), resampling))
