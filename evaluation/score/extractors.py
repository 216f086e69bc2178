"""What a feature extractor is, and what it does to an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.score.resize import DESCRIPTIONS, Preparation
from evaluation.score.statistics import Features
from imagefleet import errors, validation

#: The extractor that needs no file.
DEMO = "demo"

#: Inception's, where no JSON beside the file says otherwise.
_INCEPTION_SIZE = 299
_INCEPTION_CENTRE = 128.0


@dataclass(frozen=True, slots=True)
class ExtractorFacts:
    """What an extractor is and what it does to an image; figures of others do not compare."""

    name: str
    kind: str
    sha256: str
    dimensions: int
    preparation: Preparation

    def as_json(self) -> dict[str, Any]:
        """For the output."""
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


class _Input(BaseModel):
    """The JSON beside a file: `inception.pt.json`."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    size: Annotated[int, Field(ge=8, le=4096)] = _INCEPTION_SIZE
    mean: tuple[float, float, float] = (_INCEPTION_CENTRE,) * 3
    std: tuple[
        Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]
    ] = (_INCEPTION_CENTRE,) * 3


def read_preparation(path: Path) -> Preparation | None:
    """What the JSON beside a file says of its input; None if there is none.

    Raises:
        SetupError: it is not valid.
    """
    beside = path.with_name(f"{path.name}.json")
    if not beside.exists():
        return None
    try:
        found = _Input.model_validate(json.loads(beside.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise errors.SetupError(f"{beside}: {validation.sentence(error)}") from None
    except (OSError, ValueError) as error:
        raise errors.SetupError(f"cannot read {beside}: {error}") from None
    return Preparation(found.size, found.mean, found.std)


def inception_preparation() -> Preparation:
    """That of Inception as clean-fid uses it: 299 pixels, -1 to 1."""
    return Preparation(_INCEPTION_SIZE, (_INCEPTION_CENTRE,) * 3, (_INCEPTION_CENTRE,) * 3)


def sha256_of(path: Path) -> str:
    """Raises SetupError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
