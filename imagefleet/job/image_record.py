"""The record that a worker stores with each image, as its blob's metadata.

It is untrusted: whoever may store an image writes what he likes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from imagefleet import errors, validation
from imagefleet.job.chain import MAX_STAGES
from imagefleet.job.message import SafeId
from imagefleet.job.passes.first import MAX_IMAGES_PER_JOB
from imagefleet.job.sizes import MAX_METADATA_BYTES

#: No job waits longer in a worker, and no worker starts for longer.
_LONGEST_SECONDS = 7 * 24 * 3600

#: Text that the metadata of a blob can hold: printable ASCII, 200 characters at most.
_Text = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]*$", max_length=200)]
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]


def _from_json(text: object) -> object:
    if not isinstance(text, str):
        return text
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"has more than {MAX_METADATA_BYTES:,} characters")
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


class ImageRecord(BaseModel):
    """Facts of one image and of the worker that made it."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    job: SafeId
    seconds: _Seconds | None = None
    """Seconds from the pull of the image's job to the image's upload."""
    attempt: int = Field(default=1, ge=1, le=1_000_000)
    worker: _Text = "?"
    started_at: _Text = ""
    start_up_seconds: _Seconds = 0
    gpu: _Text | None = None
    price_per_hour: float | None = Field(default=None, ge=0, le=1000)
    images: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    stage: int = Field(default=1, ge=1, le=MAX_STAGES)
    stages: int = Field(default=1, ge=1, le=MAX_STAGES)
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    metadata: Annotated[dict[str, JsonValue], BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )

    def facts(self) -> dict[str, Any]:
        """What the image's record in a shard tells as well, by its names there."""
        return {
            "worker": self.worker,
            "gpu": self.gpu,
            "price_per_hour": self.price_per_hour,
            "start_up_seconds": self.start_up_seconds,
            "seconds": self.seconds,
            "attempts": self.attempt,
        }


def read(facts: Mapping[str, str]) -> ImageRecord | None:
    """The record in a blob's metadata; None for an image that no worker stored.

    Raises:
        JobError: it is damaged; says why in one sentence.
    """
    if "job" not in facts and "seconds" not in facts:
        return None
    try:
        return ImageRecord.model_validate(facts)
    except ValidationError as error:
        raise errors.JobError(validation.sentence(error)) from None
