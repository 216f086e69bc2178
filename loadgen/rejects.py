"""Rows of a file that are no jobs: what is wrong with each, and how many there are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from imagefleet import redaction
from imagefleet.job import message
from imagefleet.job.message import FAILURE_FIELD
from imagefleet.validation import JSONDict, JSONObject
from loadgen.formats.lines import Entry

#: Rows that are shown; the others are counted.
MOST_SHOWN = 10

_SHOWN_CHARACTERS = 80

#: A reason of several fields, or of the job as a whole, begins with the first of them.
_FIELD = re.compile(r"([a-z_][\w.\[\]]*): ")


class Rejected(NamedTuple):
    """A row that is refused; of several fields that are wrong, the first."""

    place: str
    reason: str
    #: The fields of the job, as far as it could be read.
    job: JSONObject
    #: Facts about the row as `--rejects` writes them; its text, if its job could not be read.
    facts: JSONObject

    @classmethod
    def of(cls, entry: Entry, reason: str) -> Rejected:
        job = message.fields_if_any(entry.text)
        match = _FIELD.match(reason)
        named = match[1] if match else None
        text = "" if job else entry.source or entry.text
        value = job.get(named) if named else text or None
        facts = {
            "place": entry.place,
            "line": entry.line,
            "field": named,
            "value": None if value is None else _shown(value),
            "reason": reason,
            "row": text or None,
        }
        return cls(
            entry.place,
            reason,
            job,
            {name: each for name, each in facts.items() if each is not None},
        )

    @property
    def why(self) -> str:
        """The reason, with the job's id and the value that is wrong."""
        named = {"id": self.job.get("id"), "value": self.facts.get("value")}
        facts = ", ".join(
            f"{name} {_shown(each)}" for name, each in named.items() if each
        )
        return f"{self.reason} ({facts})" if facts else self.reason

    def as_job(self) -> JSONDict:
        """The job to be mended and loaded again, with what is wrong in a key that is left out."""
        return {**self.job, FAILURE_FIELD: self.facts}


def is_rejected(failure: object) -> bool:
    """True if a job's key `failure` says that it was refused, so that it was never sent."""
    return isinstance(failure, dict) and "place" in failure


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = redaction.printable(redaction.message(" ".join(text[:10_000].split())))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


@dataclass(eq=False)
class Report:
    """Counts the rows that are refused, each once however often the file is read."""

    #: True if they are left out, so that the others are sent.
    skips: bool = False
    on_rejected: Callable[[Rejected], object] = lambda _: None
    #: Called with a warning about a row that is a valid job, but may not be meant as it is.
    on_notice: Callable[[str], object] = lambda _: None
    rejects: str = ""

    def __post_init__(self) -> None:
        self.shown: list[Rejected] = []
        self._places: set[str] = set()
        self._odd: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._places)

    def reject(self, rejected: Rejected) -> None:
        if rejected.place in self._places:
            return
        self._places.add(rejected.place)
        if len(self.shown) < MOST_SHOWN:
            self.shown.append(rejected)
        self.on_rejected(rejected)

    def notice(self, place: str, notice: str) -> None:
        if place not in self._odd:
            self._odd.add(place)
            self.on_notice(f"{place}: {notice}")

    @property
    def summary(self) -> str:
        """The number of refused rows, and the place where all of them are."""
        where = (
            f"all are in {self.rejects}"
            if self.rejects
            else "--rejects FILE holds them all"
        )
        return f"showing {len(self.shown)} of {self.count:,}; {where}"

    def sentence(self, name: str) -> str:
        """A refusal of the file *name*: nothing of it is sent; lists the first invalid rows."""
        first = (
            f"{name} has invalid jobs; nothing was sent. Correct them or skip them with"
            f" --skip-invalid; {self.summary}:"
        )
        return "\n".join([first, *(f"{each.place}: {each.why}" for each in self.shown)])
