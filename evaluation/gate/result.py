"""What the gate found: the verdict, what it is of and the pictures for its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evaluation.gate.compare import Comparison, Measures, PairFigures
from evaluation.gate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Picture:
    """A pair for the page, each image as a PNG or WebP in base64."""

    pair: PairFigures
    a: str
    b: str
    difference: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict, and what it is of."""

    labels: tuple[str, str]
    measures: Measures
    comparison: Comparison
    verdict: Verdict
    pictures: tuple[Picture, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        facts = {
            name: None if each is None else each.facts.as_json()
            for name, each in (
                ("extractor", self.measures.extractor),
                ("clip", self.measures.text_extractor),
            )
        }
        return {
            "a": self.labels[0],
            "b": self.labels[1],
            **self.verdict.as_json(),
            **facts,
            "fid_against": self.fid_against,
            "other_fields": {
                name: list(values) for name, values in self.comparison.other_fields.items()
            },
            "unknown_jobs": self.comparison.unknown_jobs,
        }

    @property
    def left_out(self) -> list[str]:
        """Figures that need an extractor which was not given."""
        figures = {
            "FID and the feature distance (--extractor)": self.measures.extractor,
            "the CLIP score (--clip)": self.measures.text_extractor,
        }
        return [name for name, extractor in figures.items() if extractor is None]

    @property
    def fid_against(self) -> str:
        """What FID is of."""
        return "the reference" if self.measures.reference else "the other half of A's images"
