"""Images that are stored, but of which a worker that died may have written no record."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from imagefleet import errors
from imagefleet.records.record import Record, hashed

if TYPE_CHECKING:
    import numpy as np  # slow to import, and needed only where names were taken

#: How the line of an image's record begins.
_BEFORE_NAME = b'{"outcome":"completed","blob":"'


class MissingRecords:
    """Names of images that may have no record of their own, by hash: 9 bytes each."""

    def __init__(self) -> None:
        self._added = array("Q")
        self._hashes: np.ndarray | None = None
        self._is_found: np.ndarray | None = None

    @property
    def any(self) -> bool:
        return bool(self._added) and not (self._is_found is not None and self._is_found.all())

    def add(self, names: Iterable[str]) -> None:
        """Adds names, only before the first one is looked up."""
        self._added.extend(map(hashed, names))

    def found(self, names: Iterable[str]) -> None:
        """Notes that these names have records."""
        if self._added:
            self._look_up(list(map(hashed, names)))

    def found_in(self, lines: Sequence[bytes]) -> list[int]:
        """Notes the records in these lines of shards; returns the hash of each one's name.

        The rest of a line is not read, which takes a tenth of the time.
        """
        hashes = [hashed(_name(line)) for line in lines]
        if self._added:
            self._look_up(hashes)
        return hashes

    def take(self, name: str) -> bool:
        """True for the first who asks for a name that is missing."""
        return bool(self._look_up([hashed(name)]))

    def _look_up(self, wanted: list[int]) -> int:
        """Marks names as found; returns how many were missing until now."""
        import numpy as np

        hashes = np.array(wanted, np.uint64)
        if self._hashes is None or self._is_found is None:
            self._hashes = np.unique(np.frombuffer(self._added, np.uint64))
            self._is_found = np.zeros(len(self._hashes), bool)
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        places = np.unique(places[self._hashes[places] == hashes])
        new = int((~self._is_found[places]).sum())
        self._is_found[places] = True
        return new


def _name(line: bytes) -> str:
    """The image that a line is of; empty if it is none."""
    if line.startswith(_BEFORE_NAME):
        end = line.find(b'"', len(_BEFORE_NAME))
        return line[len(_BEFORE_NAME) : end].decode(errors="replace")
    try:
        return Record.read(line).blob or ""
    except errors.JobError:
        return ""
