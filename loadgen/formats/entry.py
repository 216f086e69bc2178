"""What all formats have in common: a file of jobs is a sequence of entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol


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
