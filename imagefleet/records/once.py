"""Which records of images count: each image once, and none of a drawing that was replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from pydantic import ValidationError

from imagefleet import errors
from imagefleet.job.message import ASIDE
from imagefleet.records.record import Record, hashed

#: How the line of an image's record begins.
_BEFORE_NAME = b'{"outcome":"completed","blob":"'


def note(name: str, metadata: Mapping[str, str], journal: str, at: datetime) -> Record | None:
    """The note, once for each *journal*, that a drawing with this *metadata* was replaced."""
    if name.startswith(ASIDE):
        return None
    campaign = name.rpartition("/")[0]
    try:
        return Record.model_validate(
            {
                "outcome": "replaced",
                "blob": name,
                "id": metadata.get("job"),
                "campaign": campaign,
                "at": at,
                "source": journal,
                "worker": metadata.get("worker", "?"),
                "started_at": metadata.get("started_at"),
            }
        )
    except ValidationError:  # somebody has changed it
        return None


class Replaced:
    """A campaign's notes of images that `imagefleet redo` has replaced; some 150 bytes each."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._left: Counter[int] = Counter()
        """How often each drawing was replaced, less its records that were left out."""

    def add(self, notes: Iterable[Record]) -> None:
        for note in notes:
            drawing = _drawing(note)
            if (noted := hashed(f"{note.source} {drawing}")) not in self._noted:
                self._noted.add(noted)
                self._left[hashed(drawing)] += 1

    def without(self, records: list[Record], *, once: bool) -> list[Record]:
        """Leaves out drawings that were replaced; *once*: for each note the first of its worker."""
        if not self._left:
            return records
        kept = []
        for record in records:
            drawing = hashed(_drawing(record))
            if drawing not in self._left or (once and not self._left[drawing]):
                kept.append(record)
            else:
                self._left[drawing] -= once
        return kept


def _drawing(record: Record) -> str:
    """Names a drawing of an image by who has drawn it; metadata of images are in ASCII."""
    worker = record.worker.encode("ascii", "replace").decode()
    started = "" if record.started_at is None else f"{record.started_at.timestamp():.3f}"
    return f"{record.blob} {worker} {started}"


class MissingRecords:
    """Images without a record, should their worker have died before: 60 bytes for each name."""

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
        """Notes the records in these lines; returns the hash of each one's name."""
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
