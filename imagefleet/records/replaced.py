"""Images that `imagefleet redo` has replaced: readers leave the records of the old drawings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from pydantic import ValidationError

from imagefleet.job.message import ASIDE
from imagefleet.records.record import Record, hashed


def note(name: str, metadata: Mapping[str, str], journal: str) -> Record | None:
    """The note that a drawing of image *name* was replaced; None if it can have no record.

    *metadata* is the drawing's own. *journal* names the replacement: noted twice, it counts once.
    """
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
                "at": datetime.now(UTC),
                "source": journal,
                "worker": metadata.get("worker", "?"),
                "started_at": metadata.get("started_at"),
            }
        )
    except ValidationError:  # somebody has changed it
        return None


class Replaced:
    """The notes of a campaign; some 150 bytes each."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._left: Counter[int] = Counter()
        """How often each drawing was replaced, less its records that were left out."""

    def add(self, notes: Iterable[Record]) -> None:
        for each in notes:
            drawing = _drawing(each)
            if (noted := hashed(f"{each.source} {drawing}")) not in self._noted:
                self._noted.add(noted)
                self._left[hashed(drawing)] += 1

    def without(self, records: list[Record], *, once: bool) -> list[Record]:
        """*records* without those of drawings that were replaced.

        *once*: for each note only the first of them, since the same worker may draw an image again.
        """
        if not self._left:
            return records
        return [each for each in records if not self._is_replaced(each, once=once)]

    def _is_replaced(self, record: Record, *, once: bool) -> bool:
        drawing = hashed(_drawing(record))
        left = self._left.get(drawing)
        if left is None or (once and not left):
            return False
        self._left[drawing] = left - once
        return True


def _drawing(record: Record) -> str:
    """Names a drawing of an image by who has drawn it; metadata of images are in ASCII."""
    worker = record.worker.encode("ascii", "replace").decode()
    started = "" if record.started_at is None else f"{record.started_at.timestamp():.3f}"
    return f"{record.blob} {worker} {started}"
