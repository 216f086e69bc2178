"""What all formats have in common: a file of jobs is a sequence of entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol

#: The longest job in bytes or characters: none comes near it, since a message holds 64 KiB.
MAX_JOB_LENGTH = 2**20


class Entry(NamedTuple):
    """A position of a file: a job as JSON, or nothing (an empty line), or why it is no job."""

    place: str
    text: str = ""
    problem: str = ""


class FormatError(Exception):
    """The file as a whole is not of its format; says what is wrong."""


class Format(Protocol):
    """How to read one kind of file. Every method may raise FormatError."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What an entry is called."""

    @property
    def is_stream(self) -> bool:
        """Whether it is read from its first byte to its last, so that it can come from a pipe."""

    def count(self, stream: BinaryIO) -> int:
        """The number of entries."""

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        """The entries from position *start* on."""


def lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; FormatError for one that is longer than any job, which is not read."""
    for number in itertools.count(1):
        line = stream.readline(MAX_JOB_LENGTH)
        if len(line) == MAX_JOB_LENGTH:
            raise FormatError(
                f"line {number} has more than {MAX_JOB_LENGTH:,} bytes, and no job has so many: is"
                " it another --format, an array in JSON say?"
            )
        if not line:
            return
        yield line
