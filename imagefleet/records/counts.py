"""A campaign in numbers, and what was listed of it, which tells whether it has changed since."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from imagefleet.storage.protocol import BlobRecord


@dataclass(frozen=True, slots=True)
class Counts:
    """A campaign in numbers. *sent* is None where nobody has noted it."""

    sent: int | None
    images: int
    #: Jobs of which every image is stored.
    completed: int
    failed: int
    cancelled: int
    #: The time at which the first process began to write records.
    first_at: datetime | None
    last_at: datetime | None
    discarded: int = 0
    #: Jobs that kept none of their images.
    dropped: int = 0
    #: Jobs with records that nobody has noted as sent, where others were; in no other number.
    unknown: int = 0

    @property
    def pending(self) -> int | None:
        """Jobs without an end: queued, in flight, or lost with their messages."""
        return None if self.sent is None else self.sent - self.ended

    @property
    def ended(self) -> int:
        without_image = self.failed + self.cancelled + self.discarded + self.dropped
        return self.completed + without_image

    def of(self, outcome: str) -> int:
        """Number of results of an outcome: images, or jobs that ended without one."""
        return int(getattr(self, "images" if outcome == "completed" else outcome))


class CachedCounts(NamedTuple):
    """A campaign's numbers, the records that do not fit, and its ledger and shards as listed."""

    listed: list[BlobRecord]
    counts: Counts
    unfit: int
