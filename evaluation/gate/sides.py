"""The sides of a comparison: a campaign, a folder of images, or an engine's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli import target
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict, JSONObject

#: The words for an engine's settings, and what each sets of `worker.engine.load.load_engine`.
WORDS: Mapping[str, JSONObject] = {
    "float32": {"precision": "float32"},
    "float16": {"precision": "float16"},
    "bfloat16": {"precision": "bfloat16"},
    "int8": {"precision": "int8"},
    "compiled": {"compile": "auto"},
    "uncompiled": {"compile": "off"},
    "fp16-accumulate": {"fp16_accumulate": True},
    "merged": {"slot_weights": "merged"},
    "reloaded": {"slot_weights": "reloaded"},
}

#: Of these words, those that a CPU ignores: the gate would compare an engine with itself.
GPU_ONLY = frozenset({"compiled", "fp16-accumulate"})

#: With a number.
SLOTS = "slots="

_MOST_SLOTS = 64

#: So that a campaign may be called like a setting.
_CAMPAIGN = "campaign:"


@dataclass(frozen=True)
class Campaign:
    """The images of a campaign."""

    name: str

    def __str__(self) -> str:
        return f"campaign {self.name}"


@dataclass(frozen=True)
class Folder:
    """Images in a folder and the folders in it."""

    path: Path

    def __str__(self) -> str:
        return f"folder {self.path}"


@dataclass(frozen=True)
class Engine:
    """Settings of the engine, with which the images are drawn here and now."""

    text: str
    settings: JSONObject

    def __str__(self) -> str:
        return self.text


Side = Campaign | Folder | Engine


def read(text: str) -> Side:
    """The side that an argument names; raises SetupError if it is none."""
    if not text.startswith(_CAMPAIGN):
        if text in {".", ".."} or "/" in text:
            return Folder(Path(text).expanduser())
        words = text.split(",")
        if any(word in WORDS or word.startswith(SLOTS) for word in words):
            return Engine(text, _settings(words))
    return Campaign(target.campaign(text.removeprefix(_CAMPAIGN)))


def _settings(words: list[str]) -> JSONDict:
    settings = {}
    for word in words:
        for name, value in _setting(word).items():
            if name in settings:
                raise SetupError(
                    f"{','.join(words)}: {word} sets what another word has set"
                )
            settings[name] = value
    return settings


def _setting(word: str) -> JSONObject:
    if word.startswith(SLOTS):
        number = word.removeprefix(SLOTS)
        if not (number.isdecimal() and 1 <= int(number) <= _MOST_SLOTS):
            raise SetupError(f"{word}: give a number from 1 to {_MOST_SLOTS}")
        return {"slots": int(number)}
    if word not in WORDS:
        known = [*WORDS, SLOTS + "4"]
        hint = validation.suggestion(word, known) or f"; known are {', '.join(known)}"
        raise SetupError(f"{word[:40]!r} is no setting of the engine{hint}")
    return WORDS[word]
