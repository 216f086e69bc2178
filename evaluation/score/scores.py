"""Computes the figures of a campaign by group from the features of its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evaluation.score import chunks, metrics
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.figures import GroupScores, Scores
from evaluation.score.plan import Chunk, ScorePlan
from evaluation.score.reference import Reference
from evaluation.score.statistics import Doubles
from imagefleet.validation import JSONDict

#: FID and KID of fewer images are not defined.
_LEAST = 2

#: Named of the images that are missing, or no images.
_NAMED = 10


def compute(
    plan: ScorePlan,
    campaign: str,
    reference: Reference | None,
    facts: tuple[ExtractorFacts | None, ExtractorFacts | None],
    on_group: Callable[[], None],
) -> Scores:
    """The figures of what is computed already; the same files give the same digits."""
    extractor, clip = facts
    compared = _Compared(reference, extractor, clip) if reference else None
    groups = []
    named = list[str]()
    for name, group in plan.groups.items():
        notes = [note for note in map(chunks.read_note, plan.chunks[name]) if note]
        left_out = [each for note in notes for each in note.left_out]
        named += left_out[: _NAMED - len(named)]
        told = group.model_dump(exclude={"name", "guidance"}) if group else {}
        figures = compared.figures(plan.chunks[name]) if compared else {}
        if scores := [score for note in notes for score in note.scores]:
            figures |= _with_interval("clip", metrics.mean(np.array(scores)))
        groups.append(
            GroupScores(
                group=name,
                cfg_scale=plan.guidance[name],
                images=sum(note.images for note in notes),
                left_out=len(left_out),
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
        small=_small(groups, reference),
        left_out=tuple(named),
        of_no_group=plan.of_no_group,
    )


@dataclass(frozen=True)
class _Compared:
    """A reference, with what all groups need of it."""

    reference: Reference
    extractor: ExtractorFacts | None
    clip: ExtractorFacts | None

    @cached_property
    def root(self) -> Doubles:
        assert self.reference.statistics is not None  # noqa: S101 - asked for FID alone
        return metrics.square_root(self.reference.statistics)

    @cached_property
    def within(self) -> float:
        assert self.reference.clip is not None  # noqa: S101 - asked for CMMD alone
        return float(
            metrics.mean_kernels(self.reference.clip, self.reference.clip).mean()
        )

    def figures(self, done: Sequence[Chunk]) -> JSONDict:
        found: JSONDict = {}
        reference = self.reference
        if self.extractor and reference.statistics:
            rows = chunks.StoredRows(done, "features", self.extractor.dimensions)
            if rows.shape[0] >= _LEAST:
                fid = metrics.fid(rows, reference.statistics, self.root)
                found |= _with_interval("fid", fid)
                if reference.features is not None:
                    kid = metrics.kid(
                        rows, reference.features, subsets=metrics.KID_SUBSETS
                    )
                    found |= _with_interval("kid", kid.estimate)
                    found |= {"kid_std": kid.std, "kid_subset_size": kid.subset_size}
        if self.clip and reference.clip is not None:
            seen = chunks.StoredRows(done, "clip", self.clip.dimensions)
            if seen.shape[0]:
                cmmd = metrics.cmmd(seen, reference.clip, within_b=self.within)
                found |= _with_interval("cmmd", cmmd)
        return found


def _with_interval(name: str, found: metrics.Estimate) -> JSONDict:
    return {name: found.value, f"{name}_interval": found.interval}


def _small(
    groups: Sequence[GroupScores], reference: Reference | None
) -> tuple[str, ...]:
    """Groups, and the reference, of fewer images than a subset of KID."""
    few = [each.group for each in groups if each.images < metrics.KID_SUBSET_SIZE]
    if reference and reference.images and reference.images < metrics.KID_SUBSET_SIZE:
        few.append("the reference")
    return tuple(few)
