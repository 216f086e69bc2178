"""The job in a picture's text, whichever program wrote it."""

import contextlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from imagefleet.errors import JobError
from imagefleet.job import samplers
from imagefleet.validation import JSONDict, JSONObject

#: The words of other programs, and what they are in a job.
WORDS: JSONObject = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)


@contextlib.contextmanager
def damaged(sentence: str) -> Iterator[None]:
    """Raises JobError with this *sentence* for what damaged settings raise in the block."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
        OverflowError,
    ):
        raise JobError(sentence) from None


class Named(NamedTuple):
    """A file that a picture was drawn with: its kind's word, its name and its hash in hex."""

    kind: str
    name: str | None
    digits: str | None = None


@dataclass
class Reading:
    """A payload of AUTOMATIC1111's API as read from a picture's text, with what it lacks."""

    job: JSONDict
    models: list[Named] = field(default_factory=list)
    #: Sentences about parts of the picture that are not drawn again, or only alike.
    cannot: list[str] = field(default_factory=list)
    #: Fields that must be given besides: their pictures are in no text.
    needs: list[str] = field(default_factory=list)
    #: True if its program cuts a prompt of more than 75 tokens at other words.
    cuts_prompts_elsewhere: bool = False

    def give(self, fields: JSONObject) -> None:
        """Sets fields of the job, among them what it needs."""
        self.job |= fields
        given = {name for name, value in fields.items() if value}
        if "alwayson_scripts" in given:
            given |= {each for each in self.needs if each.startswith("controlnet")}
        self.needs = [each for each in self.needs if each not in given]


def sampler_fields(
    name: str, schedule: str | None = None, *, is_old: bool = False
) -> dict[str, str]:
    """`sampler_name` and `scheduler` of a sampler whose name may tell its schedule.

    *is_old*: as up to A1111's 1.8, where a name alone has none but that of the model.
    """
    found = samplers.NAMES.get(name.lower())
    if found is None:  # which the job refuses
        return {"sampler_name": name, "scheduler": schedule or "Automatic"}
    is_told = is_old or found.key != found.method
    told = samplers.SCHEDULES.get(found.schedule or "") if is_told else None
    return {"sampler_name": found.title, "scheduler": schedule or told or "Automatic"}
