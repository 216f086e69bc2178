"""Lists in a template's job fields: a sweep over all combinations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefleet import validation
from imagefleet.job import samplers
from imagefleet.job.message import Job

#: Two sides in one field, so that a list of sizes is no list of all their combinations.
SIZE = "size"

#: Fields that take lists, and how an id says each. The last changes first: jobs of the
#: same model, size and sampler are neighbours.
SWEPT: Mapping[str, str] = {
    "model": "",
    SIZE: "",
    "width": "width",
    "height": "height",
    "sampler_name": "",
    "scheduler": "",
    "clip_skip": "clip",
    "cfg_scale": "cfg",
    "steps": "steps",
    "seed": "seed",
}

_SIZE = re.compile(r"(\d{1,5})\s*[xX]\s*(\d{1,5})")

#: Significant digits of a value in an id.
_DIGITS = 9

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The fields that have several values, in the order of `SWEPT`."""

    values: Mapping[str, Sequence[Any]]

    @property
    def combinations(self) -> int:
        return math.prod(map(len, self.values.values()))

    def combination(self, number: int) -> Fields:
        """Combination *number*, from 0; the last field changes first."""
        chosen: Fields = {}
        for name in reversed(list(self.values)):
            number, index = divmod(number, len(self.values[name]))
            chosen[name] = self.values[name][index]
        return {name: chosen[name] for name in self.values}

    def describe(self) -> str:
        """`3 steps x 2 size`."""
        sizes = {name: len(values) for name, values in self.values.items()}
        return " x ".join(
            f"{size:,} {name}" for name, size in sizes.items() if size > 1
        )


def read(fields: Mapping[str, Any]) -> tuple[Fields, Sweep]:
    """The fields of `job:` that all jobs share, and those with several values; or ValueError."""
    fixed: Fields = {}
    swept: dict[str, Sequence[Any]] = {}
    for name, value in fields.items():
        if name in SWEPT and isinstance(value, list):
            swept[name] = _several(name, value)
        elif name == SIZE:
            swept[name] = [value]
        else:
            fixed[name] = value
    if SIZE in fields and {"width", "height"} & fields.keys():
        raise ValueError("size: is both sides; remove `width` and `height`")
    _check(fixed)
    for name, values in swept.items():
        for value in values:
            _check(fixed | as_job_fields({name: value}))
    return fixed, Sweep({name: swept[name] for name in SWEPT if name in swept})


def _several(name: str, values: list[Any]) -> list[Any]:
    """The values of a field; raises ValueError for none, or one that is there twice."""
    if not values:
        raise ValueError(f"{name}: the list is empty")
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{name}: a value is there twice")
    return values


def as_job_fields(fields: Mapping[str, Any]) -> Fields:
    """*fields* with a size as the two fields of a job; raises ValueError if it is no size."""
    if SIZE not in fields:
        return dict(fields)
    others = {name: value for name, value in fields.items() if name != SIZE}
    found = _SIZE.fullmatch(str(fields[SIZE]))
    if not found:
        raise ValueError("size: should be WIDTHxHEIGHT, such as 512x768")
    return others | {"width": int(found[1]), "height": int(found[2])}


def label(name: str, value: Any) -> str:
    """A field's value as an id has it: `512x768`, `ddim`, `cfg7.5` or `steps20`."""
    text = f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
    return SWEPT[name] + slug(
        samplers.find(value).key if name == "sampler_name" else text
    )


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_.")


def _check(fields: Fields) -> None:
    with validation.as_error(ValueError, known={*Job.model_fields, SIZE}):
        Job.model_validate({"prompt": "", **fields})
