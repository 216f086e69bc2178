"""AUTOMATIC1111's 'extras': a job that only enlarges its image, with the defaults of its API."""

from collections.abc import Collection
from typing import Annotated

from pydantic import BeforeValidator, Field

from imagefleet.errors import JobError
from imagefleet.job.passes import hires, img2img
from imagefleet.job.passes.first import Share
from imagefleet.job.passes.img2img import Img2Img
from imagefleet.job.sizes import MAX_SIDE, MIN_SIDE, PartialSize, Size

#: The most pixels of the result and of what it is cut out of, and the longest side to ask for.
MAX_PIXELS = MAX_SIDE**2
_MAX_TARGET = 8192

#: AUTOMATIC1111's upscalers make sides that are multiples of this.
_ALIGNMENT = 8

#: What most networks enlarge a side by, and how often one is applied at most.
_USUAL_SCALE = 4
_MOST_TIMES = 3

#: `resize_mode`: by a factor, or to a size.
_BY_FACTOR = 0
_TO_SIZE = 1

#: The field of its payload that is `init_images` here.
IMAGE = "image"

#: Fields of a drawing: with an upscaler they would not do what they say.
_OF_DRAWINGS = (img2img.OWN_FIELDS - {"resize_mode"}) | {"denoising_strength"}


def _upscaler(value: object) -> object:
    if value in ("", "None"):
        return None
    if value in hires.LATENT:
        raise ValueError(
            "enlarges latents, which only the second pass (hr_upscaler) has"
        )
    return hires.check_upscaler(value) if isinstance(value, str) else value


_Upscaler = Annotated[str | None, BeforeValidator(_upscaler)]
_Target = Annotated[int, Field(ge=MIN_SIDE, le=_MAX_TARGET)]


class Extras(Img2Img):
    """The fields that matter with `upscaler_1`, beside `init_images` and `resize_mode`."""

    #: The first upscaler; None: the job draws.
    upscaler_1: _Upscaler = None
    upscaler_2: _Upscaler = None
    extras_upscaler_2_visibility: Share = 0.0
    upscaling_resize: float = Field(default=2.0, gt=0, le=8)
    upscaling_resize_w: _Target = 512
    #: Height of the result in pixels, as the width above it; both matter with `resize_mode` 1.
    upscaling_resize_h: _Target = 512
    upscaling_crop: bool = True


FIELDS = frozenset(Extras.model_fields) - set(Img2Img.model_fields)


def check(job: Extras, of_drawings: Collection[str]) -> None:
    """Raises ValueError if a job that only enlarges has other fields, as those *of_drawings*."""
    if job.upscaler_1 is None:
        if unused := job.model_fields_set & (FIELDS - {"upscaler_1"}):
            raise ValueError(
                f"{min(unused)}: is for jobs that only enlarge an image; upscaler_1 is missing"
            )
        return
    if not job.init_images:
        raise ValueError("upscaler_1: enlarges an image; init_images is missing")
    if job.resize_mode not in {_BY_FACTOR, _TO_SIZE}:
        raise ValueError(
            "resize_mode: with upscaler_1 it should be 0 (by upscaling_resize) or 1 (to"
            " upscaling_resize_w x upscaling_resize_h)"
        )
    if drawn := {*(job.model_fields_set & _OF_DRAWINGS), *of_drawings}:
        raise ValueError(
            f"{min(drawn)}: a job with upscaler_1 only enlarges its image: remove one of the two,"
            " or make them two stages (then)"
        )
    if job.images > 1:
        raise ValueError(
            f"upscaler_1: batch_size x n_iter is {job.images}; a job enlarges one image"
        )


def scale(job: Extras, size: Size) -> float:
    """Factor by which an image of *size*, (width, height) in pixels, is enlarged."""
    if job.resize_mode == _BY_FACTOR:
        return job.upscaling_resize
    return max(job.upscaling_resize_w / size[0], job.upscaling_resize_h / size[1])


def sizes_after(job: Extras, size: Size) -> tuple[Size, Size]:
    """Sizes that an image of *size* is enlarged to and cut to; JobError beyond the limits."""
    times = scale(job, size)
    width, height = (int(side * times // _ALIGNMENT * _ALIGNMENT) for side in size)
    whole = final = (width, height)
    field = "upscaling_resize"
    if job.resize_mode == _TO_SIZE:
        field = "upscaling_resize_w"
        if job.upscaling_crop:
            final = job.upscaling_resize_w, job.upscaling_resize_h
    if min(final) < MIN_SIDE or whole[0] * whole[1] > MAX_PIXELS:
        cut = f", cut out of {whole[0]}x{whole[1]}" if whole != final else ""
        raise JobError(
            f"{field}: the image would have {final[0]}x{final[1]} pixels{cut}; at least {MIN_SIDE}"
            f" a side and {MAX_PIXELS:,} altogether are allowed"
        )
    return whole, final


def final_size(job: Extras, width: int | None, height: int | None) -> PartialSize:
    """The enlarged image's width and height, as far as known; JobError beyond the limits."""
    if width is not None and height is not None:
        return sizes_after(job, (width, height))[1]
    if job.resize_mode == _TO_SIZE and job.upscaling_crop:
        return job.upscaling_resize_w, job.upscaling_resize_h
    return None, None


def network_pixels(size: Size, times: float) -> int:
    """Pixels that a usual network takes in until an image of *size* is so many *times* larger."""
    pixels = 0
    reached = 1
    for _ in range(_MOST_TIMES if times >= 1 else 0):
        pixels += size[0] * size[1] * reached**2
        reached *= _USUAL_SCALE
        if reached >= times:
            break
    return pixels
