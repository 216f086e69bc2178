"""The figures of a campaign by group: what the table, the JSON and the curve show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.score import chunks, metrics
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.plan import Chunk, Plan
from evaluation.score.reference import Reference
from evaluation.score.statistics import Statistics
from imagefleet import errors, validation

#: FID and KID of fewer images are not defined.
_LEAST = 2

#: Named of the images that are missing, or no images.
_NAMED = 10


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


def compute(
    plan: Plan,
    campaign: str,
    reference: Reference | None,
    facts: tuple[ExtractorFacts | None, ExtractorFacts | None],
    on_group: Callable[[], None],
) -> Scores:
    """The figures of what is computed already; the same files give the same digits."""
    extractor, clip = facts
    within = None
    if reference is not None and reference.clip is not None and clip:
        within = metrics.mean_kernel(reference.clip, reference.clip)
    groups, named = [], list[str]()
    for name, group in plan.groups.items():
        notes = [note for note in map(chunks.read_note, plan.chunks[name]) if note]
        left_out = [each for note in notes for each in note.left_out]
        named += left_out[: _NAMED - len(named)]
        told = group.model_dump(exclude={"name", "guidance"}) if group else {}
        figures = _figures(plan.chunks[name], reference, extractor, clip, within)
        scores = [score for note in notes for score in note.scores]
        groups.append(
            GroupScores(
                group=name,
                cfg_scale=plan.guidance[name],
                images=sum(note.images for note in notes),
                left_out=len(left_out),
                # Exact, whatever their order.
                clip=math.fsum(scores) / len(scores) if scores else None,
                **told,
                **figures,
            )
        )
        on_group()
    return Scores(
        campaign=campaign,
        reference=reference.name if reference else None,
        reference_images=reference.images if reference else None,
        extractor=extractor.as_json() if extractor else None,
        clip_extractor=clip.as_json() if clip else None,
        kid_subsets=metrics.KID_SUBSETS,
        groups=tuple(groups),
        left_out=tuple(named),
        of_no_group=plan.of_no_group,
    )


def _figures(
    done: Sequence[Chunk],
    reference: Reference | None,
    extractor: ExtractorFacts | None,
    clip: ExtractorFacts | None,
    within: float | None,
) -> dict[str, float]:
    found: dict[str, float] = {}
    if reference is None:
        return found
    if extractor and reference.statistics:
        rows = chunks.StoredRows(done, "features", extractor.dimensions)
        if rows.shape[0] >= _LEAST:
            found["fid"] = metrics.frechet_distance(Statistics.of(rows), reference.statistics)
            if reference.features is not None:
                kid = metrics.kid(rows, reference.features, subsets=metrics.KID_SUBSETS)
                found |= {"kid": kid.mean, "kid_std": kid.std, "kid_subset_size": kid.subset_size}
    if clip and reference.clip is not None:
        seen = chunks.StoredRows(done, "clip", clip.dimensions)
        if seen.shape[0]:
            found["cmmd"] = metrics.cmmd(seen, reference.clip, within_b=within)
    return found


def read(path: Path) -> Scores:
    """The JSON of `imagefleet score`.

    Raises:
        SetupError: the file is none.
    """
    try:
        return Scores.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reason = validation.sentence(error)
        raise errors.SetupError(f"{path} is no JSON of `imagefleet score`: {reason}") from None
    except OSError as error:
        raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
