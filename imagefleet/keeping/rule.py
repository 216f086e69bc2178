"""What a campaign keeps of the images that it draws: the rule that workers and readers share.

An image's fate follows from scores alone, so it does not depend on which worker draws what, when,
or how often:

1. A job is judged once all of its images are drawn, by the scores of its own images. An image below
   a minimum is dropped; the first minimum that it misses is the reason.
2. Of the others the `best` are kept: those of the highest score `by`, of equal scores the one that
   is drawn first. Kept images are numbered in the order in which they are drawn.
3. A job that keeps nothing has the outcome `dropped`.
4. A minimum of `early.NAME` is for the score NAME of an image's estimate at half of its steps. An
   image below it is dropped, and drawn no further; it counts as below even if it was drawn to its
   end before that was known. An image without an estimate passes. No choice is made early.
5. With `distinct`, whoever reads the whole campaign drops near-duplicates: of two kept images whose
   perceptual hashes differ in at most so many bits, the one with the lower score `by`, of equal
   scores the one of the job whose id comes later. It is dropped even if the other one is dropped
   for a third, so the order of drawing is of no effect. Until both are drawn, either one counts.

Scores are rounded before they are compared, and recorded as they were compared.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from imagefleet.job.prompt import SAFE_NAME

#: A job's images wait in memory until all of them are judged.
MAX_JUDGED = 64

#: Near-duplicates are looked for by parts of their hashes, one more than this.
MAX_DISTINCT = 7

#: Digits of a score that count: GPUs differ in the others.
DIGITS = 3

#: Scores that need no network.
OF_PIXELS = ("contrast", "coherence")

#: Begins the name of a score of an image's estimate at half of its steps.
EARLY = "early."

#: Names that a rule's text has for what is no score.
_OTHERS = ("best", "by", "distinct")

Scores = Mapping[str, float]


_Minimum = Annotated[float, Field(ge=-1e9, le=1e9)]


class Keep(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A rule of what is kept; as text `clip=25,aesthetic=5,best=2,by=clip,distinct=3`."""

    #: The least score that an image needs, by the score's name.
    minimum: dict[str, _Minimum] = Field(default_factory=dict, max_length=16)
    #: The most images of a job that are kept; None: all that pass.
    best: int | None = Field(default=None, ge=1, le=MAX_JUDGED)
    #: The score that ranks images; None: the first of `minimum`.
    by: str | None = None
    #: Bits of 64 in which the hashes of near-duplicates differ at most; None: they are kept.
    distinct: int | None = Field(default=None, ge=0, le=MAX_DISTINCT)

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        minimum: dict[str, str] = {}
        for part in filter(None, given.split(",")):
            name, sign, value = map(str.strip, part.partition("="))
            if not sign:
                raise ValueError(f"{part!r} should be NAME=VALUE, as in clip=25,best=2")
            minimum[name] = value
        others = {name: minimum.pop(name) for name in _OTHERS if name in minimum}
        return {"minimum": minimum, **others}

    @model_validator(mode="after")
    def _has_scores(self) -> Self:
        if not self.ranking:
            raise ValueError("it names no score: clip=25 keeps images of at least 25")
        for name in self.networks:
            if not SAFE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a score")
        return self

    @property
    def ranking(self) -> str:
        """The score that ranks images."""
        return (self.by or next(iter(self.minimum), "")).removeprefix(EARLY)

    @property
    def scores(self) -> list[str]:
        """The names of the scores that it needs of whole images."""
        names = dict.fromkeys((*self.minimum, self.ranking))
        return [name for name in names if not name.startswith(EARLY)]

    @property
    def early(self) -> list[str]:
        """The names of its minima for images' estimates."""
        return [name for name in self.minimum if name.startswith(EARLY)]

    @property
    def networks(self) -> list[str]:
        """The scores that need a network."""
        names = {name.removeprefix(EARLY) for name in (*self.scores, *self.early)}
        return sorted(names.difference(OF_PIXELS))

    def reason(self, scores: Scores) -> str | None:
        """Why an image is dropped for its own scores; None if it passes."""
        unknown = dict.fromkeys(self.early, math.inf)
        # Estimates first: an image that one of them drops has no other scores.
        for name, least in (unknown | self.minimum).items():
            score = scores.get(name, unknown.get(name, -math.inf))
            if score < least:
                return f"{name} {score:g} is below {least:g}"
        return None

    def rank(self, scores: Scores) -> float:
        """Sorts images, the best first."""
        return -scores.get(self.ranking, -math.inf)

    def choose(
        self, images: Sequence[Scores], stored: int | None = None
    ) -> list[str | None]:
        """The reason why each image of a job is dropped; None for those that are kept.

        *stored*: an earlier delivery has kept so many; scores may differ from GPU to GPU.
        """
        reasons = [self.reason(scores) for scores in images]
        count = stored or min(self.best or MAX_JUDGED, reasons.count(None))
        ranked = sorted(
            range(len(images)),
            key=lambda at: (reasons[at] is not None, self.rank(images[at])),
        )
        for at in ranked[count:]:
            reasons[at] = (
                reasons[at] or f"{count} of its job have a better {self.ranking}"
            )
        for at in ranked[:count]:
            reasons[at] = None
        return reasons

    def wrongly_dropped(self, jobs: Iterable[Sequence[Scores]]) -> float:
        """Share that it drops for estimates, of the images that it would keep without these."""
        unknown = dict.fromkeys(self.early, math.inf)
        reasons = [
            self.reason(scores)
            for job in jobs
            for scores, other in zip(
                job, self.choose([{**each, **unknown} for each in job]), strict=True
            )
            if other is None
        ]
        return sum(map(bool, reasons)) / max(1, len(reasons))

    def may_keep(self, images: Sequence[Scores]) -> bool:
        """True if it keeps one of a job's images, as far as their scores are known."""
        unknown = dict.fromkeys(self.minimum, math.inf)
        return any(self.reason({**unknown, **scores}) is None for scores in images)
