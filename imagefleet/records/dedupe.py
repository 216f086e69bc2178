"""Deduplicates image records and drops those of replaced images."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime

from pydantic import ValidationError

from imagefleet.errors import JobError
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.names import ASIDE
from imagefleet.records.record import Record, hashed
from imagefleet.storage.protocol import Metadata

#: How the line of an image's record begins.
_BEFORE_NAME = b'{"outcome":"completed","blob":"'

#: The pack that an image is in.
_IN_PACK = re.compile(rb'"pack":"([^"]+)"')

#: How many images and stages its job has, if that is not one.
_COUNTS = re.compile(rb'"(?:images|stages)":\d+')


def note(name: str, metadata: Metadata, source: str, at: datetime) -> Record | None:
    """The note, once for each *source*, that a drawing with this *metadata* was replaced."""
    if name.startswith(ASIDE):
        return None
    try:
        return Record.model_validate(
            {
                "outcome": "replaced",
                "blob": name,
                "id": metadata.get("job"),
                "campaign": name.rpartition("/")[0],
                "at": at,
                "source": source,
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
        #: Count of replacements of each drawing, less its records that were left out.
        self._left: Counter[int] = Counter()

    def add(self, notes: Iterable[Record]) -> None:
        for note in notes:
            name = drawing(note)
            if (noted := hashed(f"{note.source} {name}")) not in self._noted:
                self._noted.add(noted)
                self._left[hashed(name)] += 1

    def without(self, records: list[Record], *, once: bool) -> list[Record]:
        """Leaves out drawings that were replaced; *once*: for each note the first of its worker."""
        if not self._left:
            return records
        kept = []
        for record in records:
            name = hashed(drawing(record))
            if name not in self._left or (once and not self._left[name]):
                kept.append(record)
            else:
                self._left[name] -= once
        return kept


def drawing(record: Record) -> str:
    """Names a drawing of an image by who has drawn it; metadata of images are in ASCII."""
    worker = record.worker.encode("ascii", "replace").decode()
    started = (
        "" if record.started_at is None else f"{record.started_at.timestamp():.3f}"
    )
    return f"{record.blob} {worker} {started}"


def packs_in(lines: Iterable[bytes]) -> set[str]:
    """The packs that records of images name."""
    found = map(_IN_PACK.search, lines)
    return {match[1].decode(errors="replace") for match in found if match}


def packed(is_wanted: Callable[[str], bool], lines: Iterable[bytes]) -> list[bytes]:
    """The lines of records of images in packs whose names, without suffixes, are wanted."""
    return [
        line
        for line in lines
        if _IN_PACK.search(line) and is_wanted(_name(line).rpartition(".")[0])
    ]


class Again:
    """Images whose names were taken; some 100 bytes for each.

    Most are copies of what is stored. The others are images whose worker died before it wrote their
    records, and jobs of another digest than the stored image's, which have failed.
    """

    def __init__(self) -> None:
        self._names: set[int] = set()
        self._missing: set[int] = set()
        self._drawings: set[int] = set()
        self._completed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._drawings)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._names.add(name := hashed(record.blob or ""))
            self._missing.add(name)
            self._drawings.add(drawing := _of_digest(record))
            if record.completes:
                self._completed.add(drawing)

    def completes(self, record: Record) -> bool:
        """True if its worker, or one that found it, says that this image completes its job."""
        return record.completes_job or _of_digest(record) in self._completed

    def found(self, records: Iterable[Record]) -> None:
        """Notes that these images have records."""
        if self._drawings:
            for record in records:
                self._missing.discard(hashed(record.blob or ""))
                self._drawings.discard(_of_digest(record))

    def find(self, lines: Iterable[bytes]) -> list[bytes]:
        """The lines of records of images whose names were taken, perhaps."""
        return [line for line in lines if hashed(_name(line)) in self._names]

    def is_left(self, record: Record) -> bool:
        """True if no image of its name, or none of its digest, has a record."""
        return _of_digest(record) in self._drawings or self.is_missing(record)

    def is_missing(self, record: Record) -> bool:
        """True if no image of that name has a record."""
        return hashed(record.blob or "") in self._missing

    def take(self, record: Record) -> bool:
        """True for the first record of a job whose digest no image of that name has."""
        drawing = _of_digest(record)
        is_left = drawing in self._drawings
        self._drawings.discard(drawing)
        return is_left


class Rivals:
    """Finds names that several records have, in 64 MiB; of ten million less than 1 % are none.

    A name is one whatever its suffix: an image has one format. And jobs of which records say
    unlike numbers of images or stages: one that has more than were drawn.
    """

    _MOST_BITS = 29

    def __init__(self, lines: int | None) -> None:
        """*lines*: how many there are, if that is known; it takes 128 bytes for each at most."""
        known_bits = self._MOST_BITS if lines is None else (lines << 9).bit_length()
        self._bits = 2 ** min(self._MOST_BITS, known_bits)
        self._seen = bytearray(max(1, self._bits // 8))
        self._names: set[int] = set()
        self._jobs: set[int] = set()
        self._taken: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def note(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            stem = _name(line).rpartition(".")[0]
            if self._is_seen(name := hashed(stem)):
                self._names.add(name)
            job = stem.partition(SEPARATOR)[0]
            is_known = self._is_seen(hashed(f"{job} of"))
            if (
                not self._is_seen(hashed(f"{job} of {_COUNTS.findall(line)}"))
                and is_known
            ):
                self._jobs.add(hashed(job))

    def _is_seen(self, name: int) -> bool:
        is_seen = True
        for part in (name, name >> 32):
            place, bit = divmod(part % self._bits, 8)
            is_seen = is_seen and bool(self._seen[place] & 1 << bit)
            self._seen[place] |= 1 << bit
        return is_seen

    def have(self, stem: str) -> bool:
        """True if several records have this name."""
        return hashed(stem) in self._names

    def include(self, record: Record) -> bool:
        """True if another record has its name, too, or denies how many images its job has."""
        return self.have(record.stem) or self.deny(record)

    def deny(self, record: Record) -> bool:
        """True if another record says that its job has other images or stages."""
        return hashed(record.key) in self._jobs

    def take(self, name: str) -> bool:
        """True for the first who asks for a name."""
        is_first = name not in self._taken
        self._taken.add(name)
        return is_first


def _of_digest(record: Record) -> int:
    return hashed(f"{record.blob} {record.digest}")


def _name(line: bytes) -> str:
    """The image that a line is of; empty if it is none."""
    if line.startswith(_BEFORE_NAME):
        end = line.find(b'"', len(_BEFORE_NAME))
        return line[len(_BEFORE_NAME) : end].decode(errors="replace")
    try:
        return Record.read(line).blob or ""
    except JobError:
        return ""
