"""The work on an image to begin with away from the GPU: its mask, and what is below the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from imagefleet import errors
from imagefleet.job.samplers import Noise
from worker.engine import contract
from worker.engine.noise import NoiseStream

#: AUTOMATIC1111's: the radii of the blurs that are laid upon each other, and how often each is.
_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """Shared by all images of a job."""

    pixels: contract.Pixels
    """[height, width, 3]: to be encoded."""
    kept: torch.Tensor | None
    """[1, height, width] of the latents: 1 where they stay, else 0; None without a mask."""
    masked_content: Literal["fill", "original", "latent noise", "latent nothing"]
    hidden: torch.Tensor | None = None
    """[1, height, width] of the pixels: 1 where inpainting checkpoints' UNets do not see the image,
    else 0; None without a mask, when they see nothing of it."""

    def with_content(self, latents: torch.Tensor, request: contract.ImageRequest) -> torch.Tensor:
        """The image's latents [4, height, width] with noise or nothing below the mask, if so asked.

        The noise is the first of the seed, whatever its subseed; AUTOMATIC1111 takes that of a
        job's first images for all of them.
        """
        if self.kept is None or self.masked_content in ("fill", "original"):
            return latents
        kept = self.kept.to(latents.device)
        if self.masked_content == "latent nothing":
            return latents * kept
        settings = Noise(source=request.noise.source)
        channels, height, width = latents.shape
        shape = channels, height, width
        stream = NoiseStream(request.seed, shape, settings, factor=1, draws=0)
        return latents * kept + stream.first().to(latents.device) * (1 - kept)


def prepare(init: contract.InitImage, width: int, height: int, factor: int) -> PreparedImage:
    """Checks and prepares the image of a request for *width* x *height* pixels.

    *factor*: pixels for each of the latents' rows.

    Raises:
        JobError: image or mask have another size.
    """
    shape = (height, width, 3)
    if init.pixels.shape != shape or (init.mask is not None and init.mask.shape != shape[:2]):
        raise errors.JobError(
            f"the image to begin with, or its mask, does not have {width}x{height} pixels"
        )
    if init.mask is None:
        return PreparedImage(init.pixels, None, init.masked_content)
    mask = Image.fromarray(init.mask)
    pixels = init.pixels if init.masked_content == "original" else _fill(init.pixels, mask)
    small = np.asarray(mask.resize((width // factor, height // factor), Image.Resampling.BICUBIC))
    kept = torch.from_numpy(1 - np.around(small.astype(np.float32) / 255))
    hidden = torch.from_numpy(np.around(init.mask.astype(np.float32) / 255))
    return PreparedImage(pixels, kept[None], init.masked_content, hidden[None])


def _fill(pixels: contract.Pixels, mask: Image.Image) -> contract.Pixels:
    """The image with the colours around the mask below it: ever finer blurs of what is outside."""
    outside = Image.new("RGBa", mask.size)
    opaque = Image.fromarray(pixels).convert("RGBA").convert("RGBa")
    outside.paste(opaque, mask=ImageOps.invert(mask))
    filled = Image.new("RGBA", mask.size)
    for radius, times in _BLURS:
        layer = outside.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            filled.alpha_composite(layer)
    return np.asarray(filled.convert("RGB"))
