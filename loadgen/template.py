"""The template file: patterns of prompts, lists of words, fields of the job.

A placeholder `{noun}` is one entry of the list `noun`, the same everywhere in a job; `{noun:2}` is
a second draw. Entries may contain placeholders. `{{` and `}}` are braces. Draws use SHAKE-256 (FIPS
202): job n is a function of the seed and n, on every version of Python.
"""

import bisect
import hashlib
import itertools
import json
import string
import struct
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from imagefleet import redaction, validation, yaml_file
from imagefleet.errors import SetupError
from imagefleet.job import prompt
from imagefleet.job.message import Job, SafeFileName
from imagefleet.validation import JSONDict

SUFFIXES = {".yaml", ".yml", ".toml"}

#: Generated for each job; values under `job:` would be overwritten silently.
_GENERATED_FIELDS = ("prompt", "negative_prompt", "id")

ListName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Strength = Annotated[float, Field(ge=-prompt.WEIGHT_LIMIT, le=prompt.WEIGHT_LIMIT)]


class Choice(
    BaseModel,
    extra="forbid",
    frozen=True,
    allow_inf_nan=False,
    hide_input_in_errors=True,
):
    """An entry of a list: words, or a LoRA and its trigger words."""

    text: str = ""
    lora: SafeFileName | None = None
    strength: Annotated[
        tuple[Strength, Strength],
        BeforeValidator(
            lambda value: (value, value) if isinstance(value, int | float) else value
        ),
    ] = (1.0, 1.0)
    weight: float = Field(default=1.0, gt=0, le=1e9)

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: object) -> object:
        if isinstance(value, bool):
            # pydantic reports a ValueError, not a TypeError
            raise ValueError(  # noqa: TRY004
                "YAML reads yes, no, on and off as booleans: quote the word"
            )
        return {"text": str(value)} if isinstance(value, str | int | float) else value

    @field_validator("text")
    @classmethod
    def _tags_are_valid(cls, text: str) -> str:
        if "{" not in text:  # a tag with a placeholder is checked with the whole prompt
            with validation.as_error(ValueError):
                prompt.read_prompt(text)
        return text

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.model_fields_set & {"text", "lora"}:
            raise ValueError("needs `text` or `lora`")
        if "strength" in self.model_fields_set and self.lora is None:
            raise ValueError(
                "`strength` is for LoRAs; `weight` is how often an entry is drawn"
            )
        if self.strength[0] > self.strength[1]:
            raise ValueError("`strength` is one number or [lowest, highest]")
        return self


Choices = Annotated[
    tuple[Choice, ...],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str | Mapping) else value
    ),
    Field(min_length=1),
]


Fields = dict[str, JsonValue]


class Template(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """A validated template file; `Patterns` reads its patterns."""

    prompt: Choices
    negative_prompt: Choices = (Choice(text=""),)
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    lists: dict[ListName, Choices] = Field(default_factory=dict)
    job: Fields = Field(default_factory=dict)

    @field_validator("job")
    @classmethod
    def _fields_belong_to_a_job(cls, fields: Fields) -> Fields:
        for name in _GENERATED_FIELDS:
            if name in fields:
                raise ValueError(f"{name} is filled in for each job; remove it here")
        with validation.as_error(ValueError, known=Job.model_fields):
            Job.model_validate({"prompt": "", **fields})
        return fields


#: The fields of all levels of the file, for suggestions.
_FIELDS = {*Template.model_fields, *Choice.model_fields}


def read_template(path: Path) -> tuple[Template, str]:
    """Reads a template file and returns it with a canonical text of its content; or SetupError.

    `count`, `seed` and layout do not change that text: a longer run begins with the same jobs.
    """
    document = _load(path)
    with validation.as_error(SetupError, f"{path}: ", _FIELDS):
        template = Template.model_validate(document)
    content = {
        key: value for key, value in document.items() if key not in {"count", "seed"}
    }
    return template, json.dumps(
        content, sort_keys=True, separators=(",", ":"), default=str
    )


def _load(path: Path) -> JSONDict:
    try:
        data = path.read_bytes()
        if path.suffix == ".toml":
            return tomllib.loads(data.decode())
        document = yaml_file.parse(data)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SetupError(
            f"{path} is not valid {path.suffix[1:]}: {redaction.reason(error)}"
        ) from None
    if not isinstance(document, dict):
        raise SetupError(f"{path}: a template is a mapping with at least `prompt`")
    return document


#: For one slot: which choice, and where in its range a LoRA's strength is, in [0, 1).
Draw = tuple[int, float]

_MAX_DEPTH = 50


class _Word(NamedTuple):
    """A choice, ready to render: literal text and, as numbers, slots."""

    parts: tuple[str | int, ...]
    choice: Choice


class _Slot(NamedTuple):
    """One draw of a job; *cumulative* are the running sums of the weights."""

    cumulative: tuple[float, ...]
    words: tuple[_Word, ...]

    def pick(self, fraction: float) -> int:
        # Rounding may lift the product up to the last sum, so that is not searched.
        return bisect.bisect_right(
            self.cumulative, fraction * self.cumulative[-1], 0, len(self.words) - 1
        )


class Patterns:
    """All slots of a template: `slot` adds one, `draw` draws for all, `render` gives the text."""

    def __init__(self, lists: Mapping[str, Sequence[Choice]]) -> None:
        self._lists = lists
        self._slots: list[_Slot] = []
        self._by_placeholder: dict[str, int] = {}
        self._open: list[str] = []

    def slot(self, choices: Sequence[Choice], place: str) -> int:
        """Adds a slot with these choices, or raises SetupError; returns its number."""
        words = tuple(
            _Word(self._parts(choice.text, place), choice) for choice in choices
        )
        cumulative = tuple(itertools.accumulate(choice.weight for choice in choices))
        self._slots.append(_Slot(cumulative, words))
        return len(self._slots) - 1

    @property
    def longest(self) -> int:
        return max(len(slot.words) for slot in self._slots)

    def draw(self, seed: int, index: int) -> list[Draw]:
        """Every slot by chance."""
        size = len(self._slots)
        stream = hashlib.shake_256(struct.pack(">QQ", seed, index)).digest(16 * size)
        # A float has 53 bits.
        numbers = [
            (number >> 11) / 2**53 for number in struct.unpack(f">{2 * size}Q", stream)
        ]
        picked = zip(self._slots, numbers[::2], numbers[1::2], strict=True)
        return [(slot.pick(fraction), within) for slot, fraction, within in picked]

    def draw_in_turn(self, turn: int) -> list[Draw]:
        """Every slot at its choice *turn*: `longest` turns cover each word of each list."""
        return [(turn % len(slot.words), 0.5) for slot in self._slots]

    def render(self, slot: int, draws: Sequence[Draw]) -> str:
        number, within = draws[slot]
        word = self._slots[slot].words[number]
        text = "".join(
            [
                part if isinstance(part, str) else self.render(part, draws)
                for part in word.parts
            ]
        )
        if word.choice.lora is None:
            return text
        lowest, highest = word.choice.strength
        tag = f"<lora:{word.choice.lora}:{lowest + (highest - lowest) * within:.2f}>"
        return f"{tag}, {text}" if text else tag

    def _parts(self, text: str, place: str) -> tuple[str | int, ...]:
        parts: list[str | int] = []
        try:
            for literal, name, number, _ in string.Formatter().parse(text):
                parts.append(literal)
                if name is not None:
                    parts.append(self._placeholder(name, f"{name}:{number}", place))
        except ValueError as error:
            raise SetupError(
                f"{place}: {error} near {text[:60]!r};"
                " a placeholder is {name}, a literal brace is {{ or }}"
            ) from None
        return tuple(parts)

    def _placeholder(self, name: str, placeholder: str, place: str) -> int:
        """The slot of a *placeholder*: a list's *name*, and which draw of it."""
        if placeholder in self._by_placeholder:
            return self._by_placeholder[placeholder]
        if name not in self._lists:
            known = ", ".join(sorted(self._lists)) or "none"
            raise SetupError(
                f"{place}: there is no list for {{{name[:60]}}}; lists: {known}; a literal brace is"
                " {{ or }}"
            )
        if name in self._open:
            raise SetupError(
                f"{place}: circular lists: {' -> '.join([*self._open, name])}"
            )
        if len(self._open) == _MAX_DEPTH:
            raise SetupError(f"{place}: lists are nested more than {_MAX_DEPTH} deep")
        self._open.append(name)
        number = self.slot(self._lists[name], f"lists.{name}")
        self._open.pop()
        self._by_placeholder[placeholder] = number
        return number
