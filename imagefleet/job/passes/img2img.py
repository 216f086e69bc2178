"""AUTOMATIC1111's fields of img2img and inpainting, with the defaults of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from imagefleet.job.passes.first import FirstPass
from imagefleet.job.passes.sources import ImageSource

#: The largest blur of a mask, in pixels; the page of AUTOMATIC1111 allows as much.
MAX_BLUR = 64

#: The most padding around a mask's box, in pixels.
MAX_PADDING = 2048

_RESIZE_MODES = "should be 0 (just resize), 1 (crop and resize) or 2 (resize and fill)"


def _resize_mode(value: object) -> object:
    if value == 3:  # noqa: PLR2004 - its number in the payload
        raise ValueError(f"3 (latent upscale) is not supported; {_RESIZE_MODES}")
    return value


def _one_is_a_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Img2Img(FirstPass):
    """The fields that matter with `init_images`; blurs in pixels."""

    init_images: Annotated[
        tuple[ImageSource, ...], BeforeValidator(_one_is_a_list), Field(max_length=1)
    ] = ()
    denoising_strength: float = Field(default=0.75, ge=0, le=1)
    """Strength of the noise on the image, from 0 to 1; it is the second pass' strength as well."""
    resize_mode: Annotated[Literal[0, 1, 2], BeforeValidator(_resize_mode)] = 0
    mask: ImageSource | None = None
    mask_blur: int | None = Field(default=None, ge=0, le=MAX_BLUR)
    """The blur in both directions, in place of the next two."""
    mask_blur_x: int = Field(default=4, ge=0, le=MAX_BLUR)
    mask_blur_y: int = Field(default=4, ge=0, le=MAX_BLUR)
    inpainting_fill: int = Field(default=0, ge=0, le=3)
    inpaint_full_res: bool = True
    inpaint_full_res_padding: int = Field(default=0, ge=0, le=MAX_PADDING)
    inpainting_mask_invert: int = Field(default=0, ge=0, le=1)

    @property
    def blur(self) -> tuple[int, int]:
        """Blur of the mask in pixels, horizontally and vertically."""
        if self.mask_blur is not None:
            return self.mask_blur, self.mask_blur
        return self.mask_blur_x, self.mask_blur_y


FIELDS = frozenset(Img2Img.model_fields) - set(FirstPass.model_fields)

#: The fields of img2img that no other job has.
OWN_FIELDS = FIELDS - {"init_images", "denoising_strength"}

#: No effect in img2img, whatever the value: the second concerns checkpoints that edit pictures.
WITHOUT_EFFECT = frozenset({"include_init_images", "image_cfg_scale"})

#: Fields that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "initial_noise_multiplier": (None, 1),
    "latent_mask": (None, ""),
    "mask_round": (None, True),
}

#: Settings that change the images of img2img -> their neutral values.
NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "img2img_background_color": (None, "#ffffff"),
    "img2img_color_correction": (None, False),
    "img2img_extra_noise": (None, 0),
    "img2img_fix_steps": (None, False),
    "initial_noise_multiplier": (None, 1),
    "inpainting_mask_weight": (None, 1),
    "overlay_inpaint": (None, True),
    "upscaler_for_img2img": (None, "", "None"),
}


def calls(steps: int, denoising_strength: float) -> int:
    """The UNet's calls, as AUTOMATIC1111 counts them: the last of the schedule's *steps*."""
    return int(min(denoising_strength, 0.999) * steps) + 1
