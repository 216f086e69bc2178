"""Feature extractors: their interface, their facts, and the preparation of images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image

from evaluation.score.preparation import Preparation
from evaluation.score.statistics import Features
from imagefleet.errors import SetupError
from imagefleet.files import safetensors
from imagefleet.validation import JSONDict

#: The extractor that needs no file.
DEMO = "demo"

#: For people, by the name of the resize.
DESCRIPTIONS = {
    "clean-fid": "PIL bicubic with antialiasing in float32, as clean-fid",
    "clip": "PIL bicubic with antialiasing of the shorter side, then the centre, as CLIP",
}


@dataclass(frozen=True)
class ExtractorFacts:
    """Identity of an extractor; only figures of equal ones can be compared."""

    name: str
    kind: str
    sha256: str
    dimensions: int
    preparation: Preparation

    def as_json(self) -> JSONDict:
        """The facts as the JSON of a command has them."""
        facts = asdict(self) | asdict(self.preparation)
        del facts["preparation"]
        return facts | {"resize": DESCRIPTIONS[self.preparation.resize]}


class Extractor(Protocol):
    """Images in, features out."""

    @property
    def facts(self) -> ExtractorFacts: ...

    def features(self, images: Sequence[Image.Image]) -> Features:
        """[images, dimensions]; the same images in the same batch give the same bits."""


@runtime_checkable
class TextExtractor(Extractor, Protocol):
    """One whose features of texts compare with those of images, as CLIP's."""

    def text_features(self, texts: Sequence[str]) -> Features:
        """[texts, dimensions]."""


def finite(extractor: Extractor, images: Sequence[Image.Image]) -> Features:
    """The features, of which one that is not finite would make all figures unknown."""
    features = extractor.features(images)
    if not np.isfinite(features).all():
        raise SetupError(
            f"{extractor.facts.name} gives features that are not finite: its input may be scaled"
            f" otherwise, which {extractor.facts.name}.json beside it can say"
        )
    return features


def sha256_of(path: Path) -> str:
    """Raises SetupError if the file cannot be read."""
    try:
        return safetensors.sha256_of(path)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
