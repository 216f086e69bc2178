"""Entries of a file of jobs, what all its formats share, and the formats of one job per line."""

import abc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

#: The longest job in bytes or characters: none comes near it, since a message holds 64 KiB.
MAX_JOB_LENGTH = 2**20


#: Byte order marks.
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class Entry(NamedTuple):
    """A position of a file: a job as JSON, or nothing (an empty line), or why it is no job."""

    place: str
    text: str = ""
    problem: str = ""
    #: The number of its first line, if it has one.
    line: int | None = None
    #: The text that it was read from, where that is not the job.
    source: str = ""
    #: Warning about a valid job that may not be meant as it stands.
    notice: str = ""
    is_comment: bool = False
    #: True for a prompt that an earlier entry has, where each is wanted once.
    is_repeat: bool = False


class FormatError(Exception):
    """The file as a whole is not of its format; says what is wrong."""


class Format(abc.ABC):
    """A format of files of jobs. Every method may raise FormatError."""

    name: str
    suffixes: tuple[str, ...]
    #: The noun for an entry in messages, such as "row".
    unit: str
    #: True if it is read from its first byte to its last, so that it can come from a pipe.
    is_stream = True

    @abc.abstractmethod
    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        """The entries, a job or none for each position."""

    def count(self, stream: BinaryIO) -> int:
        return sum(1 for _ in self.entries(stream))


@dataclass
class ChangedFormat(Format):
    """Another format, whose entries are changed, left out or in another order."""

    form: Format

    def __post_init__(self) -> None:
        self.name = self.form.name
        self.suffixes = self.form.suffixes
        self.unit = self.form.unit
        self.is_stream = self.form.is_stream

    def count(self, stream: BinaryIO) -> int:
        return self.form.count(stream)


def lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; FormatError for one that is longer than any job, which is not read."""
    for number in itertools.count(1):
        line = stream.readline(MAX_JOB_LENGTH)
        if len(line) == MAX_JOB_LENGTH:
            raise FormatError(
                f"line {number} has more than {MAX_JOB_LENGTH:,} bytes, and no job has so many: is"
                " it another --format, an array in JSON say?"
            )
        if number == 1 and line.startswith(_UTF_16):
            raise FormatError(
                "it is UTF-16: save it as UTF-8, `iconv -f UTF-16 -t UTF-8` say"
            )
        if not line:
            return
        yield line


class JsonLines(Format):
    """One JSON object per line; empty lines are skipped."""

    name = "jsonl"
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson")
    unit = "line"

    def count(self, stream: BinaryIO) -> int:
        return sum(1 for _ in lines(stream))

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        for number, line in enumerate(lines(stream), 1):
            place = f"line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                shown = line.decode(errors="replace")
                yield Entry(place, problem="not UTF-8", line=number, source=shown)
            else:
                yield self._entry(place, number, text)

    def _entry(self, place: str, line: int, text: str) -> Entry:
        """The entry of a line without white space at its ends."""
        return Entry(place, text, line=line)
