"""The figures of a comparison, and which of them are within their bounds."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from evaluation.gate.compare import Comparison, Measures, PairFigures
from evaluation.score.metrics import frechet_distance, psnr
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict

#: Pairs that are listed and shown, unless --limit says otherwise.
WORST = 8


@dataclass(frozen=True)
class Bounds:
    """Limits of the gate's figures: percentages but for PSNR, SSIM and levels of brightness.

    A pair is alike within `min_ssim`, `max_detail`, `max_colour` and `max_light`. The last two are
    of MLPerf's SDXL benchmark.
    """

    min_psnr: float = 30.0
    min_alike: float = 100.0
    min_ssim: float = 0.5
    max_detail: float = 25.0
    max_colour: float = 20.0
    max_light: float = 3.0
    max_brightness: float = 1.0
    max_contrast: float = 2.0
    max_sharpness: float = 5.0
    max_displacement: float = 0.1
    max_features: float = 2.0
    max_fid: float = 2.0
    max_clip: float = 0.2

    @classmethod
    def read(cls, texts: Iterable[str]) -> Self:
        """The bounds with changes such as `psnr=26`; raises SetupError for what is no bound."""
        fields = {
            field.name.partition("_")[2]: field.name
            for field in dataclasses.fields(cls)
        }
        changes = {}
        for text in texts:
            name, _, number = text.partition("=")
            if name not in fields:
                hint = (
                    validation.suggestion(name, fields) or f": use {', '.join(fields)}"
                )
                raise SetupError(
                    f"--set {text[:80]}: there is no bound {name[:40]!r}{hint}"
                )
            try:
                changes[fields[name]] = value = float(number)
            except ValueError:
                value = math.nan
            if not 0 <= value <= (100 if name == "alike" else math.inf):
                raise SetupError(f"--set {text[:80]}: give a number, such as {name}=1")
        return cls(**changes)

    def are_alike(self, pair: PairFigures) -> bool:
        """True if two drawings differ no more, anywhere, than those of one job on two GPUs."""
        return (
            pair.ssim_worst_region >= self.min_ssim
            and abs(pair.sharpness_percent) <= self.max_detail
            and pair.colour_percent <= self.max_colour
            and pair.light_levels <= self.max_light
        )


@dataclass(frozen=True)
class Check:
    """One figure against its bound."""

    #: Key of the check in `--json`.
    name: str
    title: str
    #: None: the images are the same to the last bit.
    figure: float | None
    bound: float
    unit: str
    #: The figure must not be below the bound, rather than above.
    is_least: bool = False

    @property
    def bound_text(self) -> str:
        """The bound in words."""
        return f"{'at least' if self.is_least else 'at most'} {self.bound:g} {self.unit}".rstrip()

    @property
    def figure_text(self) -> str:
        """The figure with its unit."""
        return "identical" if self.figure is None else f"{self.figure:,.3f} {self.unit}"

    @property
    def passed(self) -> bool:
        if self.figure is None:
            return True
        return self.figure >= self.bound if self.is_least else self.figure <= self.bound


@dataclass(frozen=True)
class Verdict:
    """All figures of both sides, and the checks."""

    pairs: int
    identical: int
    psnr: float | None
    psnr_lowest: float | None
    alike: int
    #: SSIM, the mean over pairs.
    ssim: float
    #: SSIM of the worst region of all pairs.
    ssim_worst_region: float
    #: The mean, as a share of that of A's images of different jobs.
    feature_distance: float | None
    fid_a: float | None
    fid_b: float | None
    #: FID of B's images against A's.
    fid_between: float | None
    clip_a: float | None
    clip_b: float | None
    checks: tuple[Check, ...]
    worst: tuple[PairFigures, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_json(self) -> JSONDict:
        """Figures by name; PSNR is null where the images are the same."""
        facts = asdict(self)
        facts["checks"] = [
            {**asdict(each), "passed": each.passed} for each in self.checks
        ]
        facts["worst"] = [{**asdict(each), "psnr": each.psnr} for each in self.worst]
        return {"passed": self.passed, **facts}


def judge(
    found: Comparison, measures: Measures, bounds: Bounds, worst: int = WORST
) -> Verdict:
    """The verdict on at least one pair."""
    pairs = found.pairs
    total = psnr(float(np.mean([pair.squares for pair in pairs])))
    alike = sum(map(bounds.are_alike, pairs))
    share = 100 * alike / len(pairs)
    checks = [
        Check(
            "psnr", "PSNR over all pairs", total, bounds.min_psnr, "dB", is_least=True
        ),
        Check("alike", "pairs alike", share, bounds.min_alike, "%", is_least=True),
        *_shift_checks(found, bounds),
    ]
    apart = _feature_distance(found)
    if apart is not None:
        title = "feature distance, of that between different jobs"
        checks.append(
            Check("feature_distance", title, 100 * apart, bounds.max_features, "%")
        )
    fid_a, fid_b, between = _fids(found, measures)
    clip_a, clip_b = (
        float(np.mean(each)) if each else None for each in found.clip_scores
    )
    for name, title, a, b, bound in (
        ("fid", "change of FID", fid_a, fid_b, bounds.max_fid),
        ("clip", "change of CLIP score", clip_a, clip_b, bounds.max_clip),
    ):
        if a is not None and b is not None:
            checks.append(Check(name, title, _percent_apart(a, b), bound, "%"))
    order = sorted(
        pairs, key=lambda pair: (bounds.are_alike(pair), _rank(pair), pair.key)
    )
    return Verdict(
        pairs=len(pairs),
        identical=sum(pair.squares == 0 for pair in pairs),
        psnr=total,
        psnr_lowest=psnr(max(pair.squares for pair in pairs)),
        alike=alike,
        ssim=float(np.mean([pair.ssim for pair in pairs])),
        ssim_worst_region=min(pair.ssim_worst_region for pair in pairs),
        feature_distance=apart,
        fid_a=fid_a,
        fid_b=fid_b,
        fid_between=between,
        clip_a=clip_a,
        clip_b=clip_b,
        checks=tuple(checks),
        worst=tuple(order[:worst]),
    )


def _shift_checks(found: Comparison, bounds: Bounds) -> list[Check]:
    """Checks of the shift that all pairs share.

    Chance differences cancel out in it, those of a wrong setting do not.
    """
    shift = found.shift
    assert shift is not None  # noqa: S101 - there is a pair
    brighter = shift.brightness_levels
    sharper = abs(shift.sharpness_percent)
    moved = shift.displacement_pixels
    return [
        Check(
            "brightness",
            "shift of brightness",
            brighter,
            bounds.max_brightness,
            "of 255",
        ),
        Check(
            "contrast",
            "change of contrast",
            shift.contrast_percent,
            bounds.max_contrast,
            "%",
        ),
        Check("sharpness", "change of sharpness", sharper, bounds.max_sharpness, "%"),
        Check("displacement", "displacement", moved, bounds.max_displacement, "pixels"),
    ]


def _rank(pair: PairFigures) -> float:
    """Orders pairs, worst first: by their worst region, or what has changed most."""
    change = max(abs(pair.sharpness_percent), pair.colour_percent, pair.light_levels)
    return min(pair.ssim_worst_region, 1 - change / 100)


def _feature_distance(found: Comparison) -> float | None:
    """The mean of 1 - cosine over pairs, over that of A's images of different jobs."""
    count = len(found.pairs)
    if found.directions is None or count < 2:  # noqa: PLR2004 - no images of different jobs
        return None
    apart = float(np.mean([pair.feature_distance for pair in found.pairs]))
    # The cosines of all pairs of different images: the square of the sum has each twice.
    square = float(found.directions @ found.directions)
    between = 1 - (square - count) / (count * (count - 1))
    return apart / between if between > 0 else None


def _fids(found: Comparison, measures: Measures) -> tuple[float | None, ...]:
    """FID of A and of B, each against the reference or the other half of A, and of B against A.

    Halves make the change of FID a percentage of what it is, without other images than A's.
    """
    if not found.halves_a or min(each.count for each in found.halves_a) < 2:  # noqa: PLR2004
        return None, None, None
    (even_a, odd_a) = found.halves_a
    (even_b, odd_b) = found.halves_b
    a = even_a + odd_a
    b = even_b + odd_b
    between = max(0.0, frechet_distance(b, a))
    if measures.reference is not None:
        fid_a = frechet_distance(a, measures.reference)
        fid_b = frechet_distance(b, measures.reference)
    else:
        fid_a = frechet_distance(even_a, odd_a)
        fid_b = (frechet_distance(even_b, odd_a) + frechet_distance(odd_b, even_a)) / 2
    return fid_a, fid_b, between


def _percent_apart(a: float, b: float) -> float:
    """Difference of *b* from *a*, in percent of *a*."""
    if a == b:
        return 0.0
    return 100 * abs(b - a) / abs(a) if a else 100.0
