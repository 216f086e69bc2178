"""Images that are stored, but of which a worker that died may have written no record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from imagefleet import errors
from imagefleet.records.record import Record, hashed

#: How the line of an image's record begins.
_BEFORE_NAME = b'{"outcome":"completed","blob":"'


class MissingRecords:
    """Names of images that may have no record of their own, by hash: some 60 bytes each."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    @property
    def any(self) -> bool:
        return bool(self._hashes)

    def add(self, names: Iterable[str]) -> None:
        self._hashes.update(map(hashed, names))

    def found(self, names: Iterable[str]) -> None:
        """Notes that these names have records."""
        if self._hashes:
            self._hashes.difference_update(map(hashed, names))

    def found_in(self, lines: Sequence[bytes]) -> list[int]:
        """Notes the records in these lines of shards; returns the hash of each one's name.

        The rest of a line is not read, which takes a tenth of the time.
        """
        hashes = [hashed(_name(line)) for line in lines]
        self._hashes.difference_update(hashes)
        return hashes

    def take(self, name: str) -> bool:
        """True for the first who asks for a name that is missing."""
        is_missing = hashed(name) in self._hashes
        self._hashes.discard(hashed(name))
        return is_missing


def _name(line: bytes) -> str:
    """The image that a line is of; empty if it is none."""
    if line.startswith(_BEFORE_NAME):
        end = line.find(b'"', len(_BEFORE_NAME))
        return line[len(_BEFORE_NAME) : end].decode(errors="replace")
    try:
        return Record.read(line).blob or ""
    except errors.JobError:
        return ""
