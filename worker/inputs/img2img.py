"""The image and the mask of img2img, prepared and put back as AUTOMATIC1111 does.

The order of the work is that of `StableDiffusionProcessingImg2Img.init` and of `apply_overlay`
(`modules/processing.py`, version 1.10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from imagefleet import errors
from imagefleet.job.message import MAX_IMAGE_PIXELS, Job
from imagefleet.pricing import families
from worker.engine.contract import InitImage, Pixels
from worker.inputs import masks, pictures
from worker.inputs.pictures import Size

#: The masked content by a job's `inpainting_fill`. The engine fills what is below the mask.
_CONTENT: Mapping[int, Literal["fill", "original", "latent noise", "latent nothing"]] = {
    0: "fill",
    1: "original",
    2: "latent noise",
    3: "latent nothing",
}


#: The sides of what is drawn are this many times those of a sample.
_SAMPLE_SHARE = 4

#: The level of the noise on it that DeepFloyd IF's third stage has.
_SAMPLE_NOISE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """What stays of the image that a job was given, to be laid over what is drawn."""

    image: Image.Image
    """RGBA, transparent where the drawing shows."""
    box: masks.Box | None = None
    """The box that the drawing belongs in; None: it has the image's size."""

    @property
    def size(self) -> Size:
        return self.image.size

    def put_over(self, pixels: Pixels) -> Pixels:
        """The finished image [height, width, 3]."""
        drawn = Image.fromarray(pixels)
        if self.box is not None:
            left, upper, right, lower = self.box
            whole = Image.new("RGBA", self.image.size)
            whole.paste(pictures.resize(1, drawn, (right - left, lower - upper)), (left, upper))
            drawn = whole
        drawn = drawn.convert("RGBA")
        drawn.alpha_composite(self.image)
        return np.asarray(drawn.convert("RGB"))


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """What the engine begins with, and what is laid over its image; both for all of a job's."""

    init: InitImage
    overlay: Overlay | None = None


def begin(job: Job, image: Image.Image, mask: Image.Image | None, size: Size | None) -> Begin:
    """Prepares a job's image and mask, as they were read, for a drawing of *size*.

    None: for an engine that enlarges the image, so in the size that it has. Raises JobError if the
    result, which has the image's size, would be too large, or an image far longer than wide is to
    be cut.
    """
    image = pictures.flatten(image)
    whole = None if mask is None else _whole_mask(job, mask)
    if size is None:
        return Begin(_init(job, image, None if whole is None else Image.fromarray(whole)))
    box = None
    if whole is not None and job.inpaint_full_res:
        box = masks.crop_box(whole, job.inpaint_full_res_padding, size)
        if box is None:  # an empty mask: there it goes on with img2img
            whole = None
    if box is None:
        image = pictures.resize(job.resize_mode, image, size)
    if whole is None:
        return Begin(_init(job, image, None))
    if box is not None:
        _refuse_large(image.size)
        left, upper, right, lower = box
        pictures.inner_size(1, size, (right - left, lower - upper))  # `put_over` is too late
        covered = Image.fromarray(whole)
        drawn_mask = pictures.resize(2, covered.crop(box), size)
    else:
        drawn_mask = pictures.resize(job.resize_mode, Image.fromarray(whole), size)
        covered = drawn_mask.point([min(2 * level, 255) for level in range(256)])
    overlay = Overlay(_uncovered(job, image, covered), box)
    if box is not None:
        image = pictures.resize(2, image.crop(box), size)
    return Begin(_init(job, image, drawn_mask), overlay)


def _whole_mask(job: Job, mask: Image.Image) -> masks.Mask:
    read = masks.read(mask)
    if job.inpainting_mask_invert:
        read = np.subtract(255, read, dtype=np.uint8)
    return masks.blur(read, *job.blur)


def _uncovered(job: Job, image: Image.Image, mask: Image.Image) -> Image.Image:
    """The image without what is below the mask."""
    if mask.size != image.size:
        mask = pictures.resize(job.resize_mode, mask, image.size)
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    return kept.convert("RGBA")


def _init(job: Job, image: Image.Image, mask: Image.Image | None) -> InitImage:
    return InitImage(
        np.asarray(image),
        job.denoising_strength,
        None if mask is None else np.asarray(mask),
        _CONTENT[job.inpainting_fill] if mask is not None else "original",
    )


def _refuse_large(size: Size) -> None:
    if size[0] * size[1] > MAX_IMAGE_PIXELS:
        raise errors.JobError(
            f"inpaint_full_res: the result would have the {size[0]:,} x {size[1]:,} pixels of"
            f" init_images; {MAX_IMAGE_PIXELS:,} at most are allowed"
        )


def sample(family: str, width: int, height: int) -> InitImage | None:
    """What an image of this size begins with where a program draws without a job.

    None for families that draw from text alone.
    """
    if not families.find(family).enlarges:
        return None
    return InitImage(_colours(width // _SAMPLE_SHARE, height // _SAMPLE_SHARE), _SAMPLE_NOISE)


def _colours(width: int, height: int) -> Pixels:
    """Red grows to the right, green downwards, and blue is in squares."""
    across = np.linspace(0, 255, width, dtype=np.uint8)
    down = np.linspace(0, 255, height, dtype=np.uint8)
    red, green = np.broadcast_arrays(across[None], down[:, None])
    squares = (across[None] // 64 + down[:, None] // 64) % 2 * 255
    return np.stack([red, green, squares.astype(np.uint8)], axis=2)
