"""The template file: prompt patterns with placeholders, the lists they draw from, fixed fields."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, cast

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from imagefleet import errors
from imagefleet.job import prompt
from imagefleet.job.message import Job, SafeFileName

SUFFIXES = frozenset({".yaml", ".yml", ".toml"})

#: What the generator itself fills in; under `job:` they would be overwritten in silence.
_GENERATED_FIELDS = ("prompt", "negative_prompt", "id")

ListName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Strength = Annotated[float, Field(ge=-prompt.WEIGHT_LIMIT, le=prompt.WEIGHT_LIMIT)]


class Choice(BaseModel):
    """One thing a list may give: words, or a LoRA and the words that trigger it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    text: str = ""
    lora: SafeFileName | None = None
    strength: tuple[Strength, Strength] = (1.0, 1.0)
    weight: float = Field(default=1.0, gt=0, le=1e9)

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("YAML reads yes, no, on and off as booleans: put the word in quotes")  # noqa: TRY004 - pydantic reports a ValueError, not a TypeError
        return {"text": str(value)} if isinstance(value, str | int | float) else value

    @field_validator("strength", mode="before")
    @classmethod
    def _read_range(cls, value: object) -> object:
        return (value, value) if isinstance(value, int | float) else value

    @field_validator("text")
    @classmethod
    def _tags_are_understood(cls, text: str) -> str:
        if "{" not in text:  # a tag that a placeholder completes is checked with the whole prompt
            try:
                prompt.read_prompt(text)
            except errors.JobError as error:
                raise ValueError(error.message) from None
        return text

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set & {"text", "lora"}:
            raise ValueError("needs `text` or `lora`")
        if "strength" in self.model_fields_set and self.lora is None:
            raise ValueError("`strength` is a LoRA's; how often a choice is drawn is `weight`")
        if self.strength[0] > self.strength[1]:
            raise ValueError("`strength` is one number or [lowest, highest]")
        return self


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value


Choices = Annotated[tuple[Choice, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Template(BaseModel):
    """A template file, read and checked; what its patterns mean is `pattern.py`'s business."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    prompt: Choices
    negative_prompt: Choices = (Choice(text=""),)
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    lists: dict[ListName, Choices] = Field(default_factory=dict)
    job: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("job")
    @classmethod
    def _fields_are_a_jobs(cls, fields: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in _GENERATED_FIELDS:
            if name in fields:
                raise ValueError(f"{name} is filled in for each job and has no place here")
        try:
            Job.model_validate({"prompt": "", **fields})
        except ValidationError as error:
            raise ValueError(sentence(error, Job.model_fields)) from None
        return fields


def read_template(path: Path) -> tuple[Template, str]:
    """Reads a template file and returns it with the text that stands for its content.

    That text is the same for a file that says the same: comments, layout, `count` and `seed` do
    not count, so that a longer run of a template begins with the jobs of the shorter one.

    Raises:
        SetupError: the file cannot be read, or says something that is no template.
    """
    document = _load(path)
    try:
        template = Template.model_validate(document)
    except ValidationError as error:
        raise errors.SetupError(f"{path}: {sentence(error, Template.model_fields)}") from None
    content = {key: value for key, value in document.items() if key not in {"count", "seed"}}
    return template, json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if path.suffix == ".toml":
            return tomllib.loads(data.decode())
        document = yaml.safe_load(data)
    except OSError as error:
        raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # tomllib's and the decoder's are ValueErrors
        reason = " ".join(str(error).split())
        raise errors.SetupError(f"{path} is not valid {path.suffix[1:]}: {reason}") from None
    if not isinstance(document, dict):
        raise errors.SetupError(f"{path}: a template is a mapping with at least `prompt`")
    return document


def sentence(error: ValidationError, known: Mapping[str, object]) -> str:
    """What is wrong and where; *known* are the keys that a slip of the fingers may have meant."""
    return "; ".join(
        _reason(cast("Mapping[str, Any]", detail), known)
        for detail in error.errors(include_url=False)
    )


def _reason(detail: Mapping[str, Any], known: Mapping[str, object]) -> str:
    where = _place(detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_hint(str(detail['loc'][-1]), detail['loc'], known)}"
        case "too_short":
            return f"{where}: the list is empty"
        case "missing":
            return f"{where}: is missing"
    what = str(detail["msg"]).removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def _place(location: Sequence[object]) -> str:
    """`lists.noun[2]`: the way a person would say where."""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place[:120]


def _hint(name: str, location: Sequence[object], known: Mapping[str, object]) -> str:
    at_the_top = len(location) == 1
    if at_the_top and known is Template.model_fields and name in Job.model_fields:
        return "; fields of the job belong under `job:`"
    candidates = known if at_the_top else Choice.model_fields
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
