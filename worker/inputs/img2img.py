"""The image and the mask of img2img, prepared and put back as AUTOMATIC1111 does.

The order of the work is that of `StableDiffusionProcessingImg2Img.init` and of `apply_overlay`
(`modules/processing.py`, version 1.10); masks are worked on as in `modules/masking.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from imagefleet.errors import JobError
from imagefleet.job.message import MAX_IMAGE_PIXELS, Job
from imagefleet.job.sizes import Size
from imagefleet.pricing import families
from worker.engine.contract import InitImage, Pixels
from worker.inputs import pictures

#: [height, width].
Mask = npt.NDArray[np.uint8]

#: Left, upper, right and lower, as Pillow has them.
Box = tuple[int, int, int, int]

#: How far its blur reaches, in units of its sigma.
_REACH = 2.5

#: OpenCV's kernels for 8 bits are multiples of 1/256.
_ONE = 256

_MIDDLE = 128

#: The masked content by a job's `inpainting_fill`. The engine fills what is below the mask.
_CONTENT: Mapping[
    int, Literal["fill", "original", "latent noise", "latent nothing"]
] = {
    0: "fill",
    1: "original",
    2: "latent noise",
    3: "latent nothing",
}


#: The sides of what is drawn are this many times those of a sample.
_SAMPLE_SHARE = 4

#: The level of the noise on it that DeepFloyd IF's third stage has.
_SAMPLE_NOISE = 0.1


@dataclass(frozen=True, eq=False)
class Overlay:
    """The kept part of the image that a job was given, to be laid over what is drawn."""

    #: RGBA, transparent where the drawing shows.
    image: Image.Image
    #: The box that the drawing belongs in; None: it has the image's size.
    box: Box | None = None

    def put_over(self, pixels: Pixels) -> Pixels:
        """The finished image [height, width, 3]."""
        drawn = Image.fromarray(pixels)
        if self.box is not None:
            left, upper, right, lower = self.box
            whole = Image.new("RGBA", self.image.size)
            whole.paste(
                pictures.resize(1, drawn, (right - left, lower - upper)), (left, upper)
            )
            drawn = whole
        drawn = drawn.convert("RGBA")
        drawn.alpha_composite(self.image)
        return np.asarray(drawn.convert("RGB"))


def begin(
    job: Job, image: Image.Image, mask: Image.Image | None, size: Size | None
) -> tuple[InitImage, Overlay | None]:
    """Prepares a job's image and mask, as they were read, for a drawing of *size*.

    Returns what the engine begins with, and what is laid over its image; both for all of a job's.

    None: for an engine that enlarges the image, so in the size that it has. Raises JobError if the
    result, which has the image's size, would be too large, or one far longer than wide is cut.
    """
    image = pictures.flatten(image)
    whole = None if mask is None else _whole_mask(job, mask)
    if size is None:
        return _init(job, image, whole), None
    box = None
    if whole is not None and job.inpaint_full_res:
        box = crop_box(whole, job.inpaint_full_res_padding, size)
        if box is None:  # an empty mask: there it goes on with img2img
            whole = None
    if box is None:
        image = pictures.resize(job.resize_mode, image, size)
    if whole is None:
        return _init(job, image, None), None
    if box is not None:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise JobError(
                f"inpaint_full_res: the result would have the {image.width:,} x {image.height:,}"
                f" pixels of init_images; {MAX_IMAGE_PIXELS:,} at most are allowed"
            )
        left, upper, right, lower = box
        pictures.inner_size(
            1, size, (right - left, lower - upper)
        )  # `put_over` is too late
        covered = Image.fromarray(whole)
        drawn_mask = pictures.resize(2, covered.crop(box), size)
    else:
        drawn_mask = pictures.resize(job.resize_mode, Image.fromarray(whole), size)
        covered = drawn_mask.point([min(2 * level, 255) for level in range(256)])
    overlay = Overlay(_uncovered(job, image, covered), box)
    if box is not None:
        image = pictures.resize(2, image.crop(box), size)
    return _init(job, image, np.asarray(drawn_mask)), overlay


def _whole_mask(job: Job, mask: Image.Image) -> Mask:
    read = read_mask(mask)
    if job.inpainting_mask_invert:
        read = np.subtract(255, read, dtype=np.uint8)
    return blur_mask(read, *job.blur)


def _uncovered(job: Job, image: Image.Image, mask: Image.Image) -> Image.Image:
    """The image without what is below the mask."""
    if mask.size != image.size:
        mask = pictures.resize(job.resize_mode, mask, image.size)
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    return kept.convert("RGBA")


def _init(job: Job, image: Image.Image, mask: Mask | None) -> InitImage:
    return InitImage(
        np.asarray(image),
        job.denoising_strength,
        mask,
        "original" if mask is None else _CONTENT[job.inpainting_fill],
    )


def sample(family: str, width: int, height: int) -> InitImage | None:
    """A start image of this size, without a job; None for families that need only text."""
    if not families.find(family).enlarges:
        return None
    # Red grows to the right, green downwards, and blue is in squares.
    sides = (width // _SAMPLE_SHARE, height // _SAMPLE_SHARE)
    red, green = np.meshgrid(
        *(np.linspace(0, 255, side, dtype=np.uint8) for side in sides)
    )
    blue = (red // 64 + green // 64) % 2 * 255
    return InitImage(np.stack([red, green, blue], axis=2), _SAMPLE_NOISE)


def read_mask(image: Image.Image) -> Mask:
    """The mask of an image of any mode; one with transparency is a mask where it is opaque."""
    if image.mode == "RGBA":
        alpha = np.asarray(image.getchannel("A"))
        if (alpha != _ONE - 1).any():
            return np.where(alpha > _MIDDLE, np.uint8(_ONE - 1), np.uint8(0))
    return np.array(image.convert("L"))


def blur_mask(mask: Mask, sigma_x: int, sigma_y: int) -> Mask:
    """Blurs rows, then columns, each rounded to 8 bits, as OpenCV; sigmas in pixels, 0 for none."""
    if sigma_x:
        mask = _blur_rows(mask, sigma_x)
    if sigma_y:
        mask = _blur_rows(mask.T, sigma_y).T
    return np.ascontiguousarray(mask)


def crop_box(mask: Mask, padding: int, size: Size) -> Box | None:
    """The part to draw, with *size*'s ratio where it can be; None: the mask is empty."""
    box = Image.fromarray(mask).getbbox()
    if box is None:
        return None
    height, width = mask.shape
    left, upper = (max(near - padding, 0) for near in box[:2])
    right = min(box[2] + padding, width)
    lower = min(box[3] + padding, height)
    ratio = size[0] / size[1]
    if (right - left) / (lower - upper) > ratio:
        upper, lower = _widened(upper, lower, (right - left) / ratio, height)
    else:
        left, right = _widened(left, right, (lower - upper) * ratio, width)
    return left, upper, right, lower


def _widened(start: int, end: int, wanted: float, limit: int) -> tuple[int, int]:
    """Start and end with *wanted* pixels between them, as far as there are that many."""
    more = int(wanted - (end - start))
    start -= more // 2
    end += more - more // 2
    if end >= limit:
        start -= end - limit
        end = limit
    if start < 0:
        start, end = 0, end - start
    return start, min(end, limit)


def _blur_rows(mask: Mask, sigma: int) -> Mask:
    kernel = _kernel(sigma)
    reach = len(kernel) - 1
    width = mask.shape[1]
    # Mirrored at the pixels of the borders, more than once where the mask is narrow.
    wide = np.pad(mask, ((0, 0), (reach, reach)), "reflect").astype(np.uint16)
    # [height, offset, width]: the mask moved by each offset.
    moved = np.lib.stride_tricks.sliding_window_view(wide, width, axis=1)
    # Weights are multiples of 1/256 that add up to one, so 16 bits hold every sum.
    total = moved[:, reach] * kernel[0]
    for distance, weight in enumerate(kernel[1:], 1):
        if weight:
            total += (moved[:, reach - distance] + moved[:, reach + distance]) * weight
    return ((total.astype(np.uint32) + _ONE // 2) // _ONE).astype(np.uint8)


def _kernel(sigma: int) -> list[np.uint16]:
    """The weights by distance, in units of 1/256; the rounding error goes to the next weight."""
    reach = int(_REACH * sigma + 0.5)
    weights = [
        math.exp(-(distance**2) / (2 * sigma**2)) for distance in range(reach + 1)
    ]
    total = 2 * sum(weights[1:]) + weights[0]
    rounded = []
    error = 0.0
    for weight in reversed(weights[1:]):
        exact = weight / total * _ONE + error
        rounded.append(round(exact))
        error = exact - rounded[-1]
    rounded.append(_ONE - 2 * sum(rounded))
    return [np.uint16(weight) for weight in reversed(rounded)]
