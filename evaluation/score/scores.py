"""Computes the figures of a campaign by group from the features of its images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from evaluation.score import chunks, metrics
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.plan import Chunk, Plan
from evaluation.score.reference import Reference
from evaluation.score.statistics import Statistics
from imagefleet.scores import GroupScores, Scores

#: FID and KID of fewer images are not defined.
_LEAST = 2

#: Named of the images that are missing, or no images.
_NAMED = 10


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
        reference_sha256=reference.sha256 if reference else None,
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
