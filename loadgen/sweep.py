"""Lists and ranges in a template's job fields: a sweep over all combinations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, model_validator

from imagefleet import validation
from imagefleet.job import samplers
from imagefleet.job.message import Job

#: Two sides in one field, so that a list of sizes is no list of all their combinations.
SIZE = "size"

#: Fields that take lists and ranges, and how an id says each. The last changes first: jobs of the
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

MAX_COMBINATIONS = 10**12

#: The most values of a range with fractions, which are stored.
MAX_FRACTIONS = 100_000

#: The largest value of a range; exact as a float.
_LARGEST = 10**15

_SIZE = re.compile(r"(\d{1,5})\s*[xX]\s*(\d{1,5})")

#: Digits of a range's values after the point, so that 5 + 3 * 0.1 is 5.3.
_DIGITS = 9

Fields = dict[str, Any]


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and abs(value) <= _LARGEST):  # also refuses NaN
        raise ValueError("should be a number")
    return value


Number = Annotated[int | float, PlainValidator(_number)]


class Range(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Numbers from the first to the last, both included."""

    first: Number = Field(alias="from")
    last: Number = Field(alias="to")
    step: Number = 1

    @model_validator(mode="after")
    def _is_finite(self) -> Range:
        if self.step <= 0:
            raise ValueError("`step` should be greater than 0")
        if self.first > self.last:
            raise ValueError("`from` is greater than `to`")
        is_whole = isinstance(self.first, int) and isinstance(self.step, int)
        most = MAX_COMBINATIONS if is_whole else MAX_FRACTIONS
        if (self.last - self.first) / self.step > most:
            raise ValueError(f"it has more than {most:,} values")
        if "step" not in self.model_fields_set and isinstance(self.first, float):
            raise ValueError("a range with fractions needs `step`")
        return self

    def values(self) -> Sequence[int | float]:
        """All its numbers; whole ones are not stored."""
        if isinstance(self.first, int) and isinstance(self.step, int):
            return range(self.first, math.floor(self.last) + 1, self.step)
        count = math.floor((self.last - self.first) / self.step + 1e-9) + 1
        return tuple(round(self.first + self.step * at, _DIGITS) for at in range(count))


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
        values = _values(name, value)
        if values is None:
            fixed[name] = value
        else:
            swept[name] = values
    if SIZE in fields and {"width", "height"} & fields.keys():
        raise ValueError("size: is both sides; remove `width` and `height`")
    _check(fixed)
    for name, values in swept.items():
        # Of a range, its bounds and the second tell: they have all that its multiples have.
        for value in values if isinstance(values, list) else {*values[:2], values[-1]}:
            _check(fixed | as_job_fields({name: value}))
    sweep = Sweep({name: swept[name] for name in SWEPT if name in swept})
    if sweep.combinations > MAX_COMBINATIONS:
        raise ValueError(
            f"{sweep.describe()} are {sweep.combinations:,} combinations;"
            f" {MAX_COMBINATIONS:,} at most"
        )
    return fixed, sweep


def _values(name: str, value: Any) -> Sequence[Any] | None:
    """The values of a field that takes several; None for one that is the same for all jobs."""
    if name in SWEPT and isinstance(value, dict):
        before = f"{name}: a range is {{from: 20, to: 40, step: 5}}: "
        with validation.as_error(ValueError, before, ("from", "to", "step")):
            return Range.model_validate(value).values()
    if name in SWEPT and isinstance(value, list):
        if not value:
            raise ValueError(f"{name}: the list is empty")
        if len({repr(each) for each in value}) < len(value):
            raise ValueError(f"{name}: a value is there twice")
        return value
    return [value] if name == SIZE else None


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
