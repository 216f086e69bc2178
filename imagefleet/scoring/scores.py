"""The figures of a campaign by group, and what they depend on: the JSON of `imagefleet score`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from imagefleet import errors, validation


class GroupScores(BaseModel):
    """One group of a sweep: one point of a curve. What cannot be computed is None."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    group: str
    cfg_scale: float | None = None
    sampler: str | None = None
    steps: int | None = None
    model: str | None = None
    lora: str | None = None
    lora_strength: float | None = None
    images: int
    left_out: int = 0
    fid: float | None = None
    kid: float | None = None
    kid_std: float | None = None
    """Over its subsets."""
    kid_subset_size: int | None = None
    clip: float | None = None
    cmmd: float | None = None


class Scores(BaseModel):
    """All groups, and all that the figures depend on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    campaign: str
    reference: str | None
    reference_images: int | None
    extractor: dict[str, Any] | None
    clip_extractor: dict[str, Any] | None
    kid_subsets: int
    groups: tuple[GroupScores, ...]
    left_out: tuple[str, ...] = ()
    """The first images that are missing, not as recorded, or no images."""
    of_no_group: int = 0


def read(path: Path) -> Scores:
    """The JSON of `imagefleet score`; raises SetupError if the file is none."""
    try:
        return Scores.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reason = validation.sentence(error)
        raise errors.SetupError(f"{path} is no JSON of `imagefleet score`: {reason}") from None
    except OSError as error:
        raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None


def facts(scores: Scores) -> dict[str, str]:
    """What the figures depend on."""
    found = {}
    if scores.reference is not None:
        count = scores.reference_images
        images = "" if count is None else f", {count:,} images"
        found["reference"] = f"{scores.reference}{images}"
    if scores.extractor:
        found["FID, KID"] = _extractor(scores.extractor)
    if scores.clip_extractor:
        found["CLIP, CMMD"] = _extractor(scores.clip_extractor)
    return found


def _extractor(facts: dict[str, Any]) -> str:
    return (
        f"{facts['name']} ({facts['kind']}, {facts['dimensions']:,} features), {facts['size']}"
        f" pixels, {facts['resize']}; SHA-256 {facts['sha256']}"
    )
