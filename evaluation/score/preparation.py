"""Prepares images for the networks that features are of: size and normalisation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from evaluation.score.statistics import Features
from imagefleet import validation
from imagefleet.errors import SetupError
from worker.judges.preparation import clip_crop, normalised

_WHITE = 255.0

_Positive = Annotated[float, Field(gt=0)]


@validated(frozen=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Preparation:
    """Resize and normalisation of an image for a network; *mean* and *std* are out of 255.

    The defaults are clean-fid's for Inception: 299 pixels, -1 to 1.
    """

    size: Annotated[int, Field(ge=8, le=4096)] = 299
    mean: tuple[float, float, float] = (128.0,) * 3
    std: tuple[_Positive, _Positive, _Positive] = (128.0,) * 3
    resize: Literal["clean-fid", "clip"] = "clean-fid"

    def array(self, images: Sequence[Image.Image]) -> Features:
        """[images, 3, size, size], normalised."""
        resized = clean_fid if self.resize == "clean-fid" else clip_crop
        sized = [resized(image, self.size) for image in images]
        return normalised(sized, self.mean, self.std)


def read_preparation(path: Path) -> Preparation | None:
    """Reads the JSON beside a network's file, if there is one; raises SetupError if not valid."""
    beside = path.with_name(f"{path.name}.json")
    if not beside.exists():
        return None
    try:
        return TypeAdapter(Preparation).validate_json(beside.read_bytes())
    except ValidationError as error:
        raise SetupError(f"{beside}: {validation.sentence(error)}") from None
    except OSError as error:
        raise SetupError(f"cannot read {beside}: {error}") from None


def clean_fid(image: Image.Image, size: int) -> Features:
    """[size, size, 3] in 0..255: each channel resized in float32, without rounding to 8 bits.

    https://github.com/GaParmar/clean-fid, `make_resizer("PIL", False, "bicubic", ...)`
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    channels = [
        np.asarray(
            Image.fromarray(pixels[..., channel]).resize(
                (size, size), Image.Resampling.BICUBIC
            )
        )
        for channel in range(3)
    ]
    return np.stack(channels, axis=2).clip(0, _WHITE)
