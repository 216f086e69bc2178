"""The template file: prompt patterns with placeholders, lists of words, fields of the job."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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

from imagefleet import errors, redaction, validation, yaml_file
from imagefleet.job import prompt
from imagefleet.job.message import Job, SafeFileName
from loadgen import sweep as sweeping

SUFFIXES = frozenset({".yaml", ".yml", ".toml"})

#: Generated for each job; values under `job:` would be overwritten silently.
_GENERATED_FIELDS = ("prompt", "negative_prompt", "id")

ListName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Strength = Annotated[float, Field(ge=-prompt.WEIGHT_LIMIT, le=prompt.WEIGHT_LIMIT)]


class Choice(BaseModel):
    """An entry of a list: words, or a LoRA and its trigger words."""

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
            raise ValueError("YAML reads yes, no, on and off as booleans: quote the word")  # noqa: TRY004 - pydantic reports a ValueError, not a TypeError
        return {"text": str(value)} if isinstance(value, str | int | float) else value

    @field_validator("strength", mode="before")
    @classmethod
    def _read_range(cls, value: object) -> object:
        return (value, value) if isinstance(value, int | float) else value

    @field_validator("text")
    @classmethod
    def _tags_are_valid(cls, text: str) -> str:
        if "{" not in text:  # a tag with a placeholder is checked with the whole prompt
            try:
                prompt.read_prompt(text)
            except errors.JobError as error:
                raise ValueError(error.message) from None
        return text

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.model_fields_set & {"text", "lora"}:
            raise ValueError("needs `text` or `lora`")
        if "strength" in self.model_fields_set and self.lora is None:
            raise ValueError("`strength` is for LoRAs; `weight` is how often an entry is drawn")
        if self.strength[0] > self.strength[1]:
            raise ValueError("`strength` is one number or [lowest, highest]")
        return self


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value


Choices = Annotated[tuple[Choice, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Template(BaseModel):
    """A validated template file; `pattern.py` reads its patterns."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    prompt: Choices
    negative_prompt: Choices = (Choice(text=""),)
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    lists: dict[ListName, Choices] = Field(default_factory=dict)
    job: dict[str, JsonValue] = Field(default_factory=dict)
    sweep: Literal["all", "random"] = "all"
    every: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _job_fields_are_not_at_the_top(cls, document: Mapping[str, object]) -> object:
        for name in document:
            if name in Job.model_fields and name not in cls.model_fields:
                raise ValueError(f"{name}: unknown key; fields of the job belong under `job:`")
        return document

    @field_validator("job")
    @classmethod
    def _fields_belong_to_a_job(cls, fields: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in _GENERATED_FIELDS:
            if name in fields:
                raise ValueError(f"{name} is filled in for each job; remove it here")
        sweeping.read(fields)
        return fields

    @model_validator(mode="after")
    def _every_is_known(self) -> Self:
        for name in self.every:
            if name not in self.choices:
                known = ", ".join(self.choices)
                raise ValueError(f"every: there is no list {name[:80]!r}; there are {known}")
            if self.every.count(name) > 1:
                raise ValueError(f"every: {name!r} is there twice")
        if self.every and self.sweep == "random":
            raise ValueError("every: is for `sweep: all`; remove one of the two")
        return self

    @property
    def choices(self) -> dict[str, Choices]:
        """All that can be drawn from, by name."""
        return {"prompt": self.prompt, "negative_prompt": self.negative_prompt, **self.lists}


#: The fields of all levels of the file, for suggestions.
_FIELDS = {*Template.model_fields, *Choice.model_fields}


def read_template(path: Path) -> tuple[Template, str]:
    """Reads a template file and returns it with a canonical text of its content.

    Comments, layout, `count` and `seed` do not change that text, so a longer run of a template
    begins with the jobs of a shorter one.

    Raises:
        SetupError: the file cannot be read or is not a valid template.
    """
    document = _load(path)
    try:
        template = Template.model_validate(document)
    except ValidationError as error:
        raise errors.SetupError(f"{path}: {validation.sentence(error, _FIELDS)}") from None
    content = {key: value for key, value in document.items() if key not in {"count", "seed"}}
    return template, json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if path.suffix == ".toml":
            return tomllib.loads(data.decode())
        document = yaml_file.parse(data)
    except OSError as error:
        raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = redaction.reason(error)
        raise errors.SetupError(f"{path} is not valid {path.suffix[1:]}: {reason}") from None
    if not isinstance(document, dict):
        raise errors.SetupError(f"{path}: a template is a mapping with at least `prompt`")
    return document
