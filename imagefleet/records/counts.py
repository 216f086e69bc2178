"""A campaign in numbers, and a hash that tells whether it has changed since it was counted."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from imagefleet.storage.protocol import BlobRecord


@dataclass(frozen=True, slots=True)
class Counts:
    """A campaign in numbers. *sent* is None where nobody has noted it."""

    sent: int | None
    images: int
    completed: int
    """Jobs of which every image is stored."""
    failed: int
    cancelled: int
    first_at: datetime | None
    """The time at which the first process began to write records."""
    last_at: datetime | None
    discarded: int = 0
    unknown: int = 0
    """Jobs with records that nobody has noted as sent, where others were; in no other number."""

    @property
    def pending(self) -> int | None:
        """Jobs without an end: queued, in flight, or lost with their messages."""
        return None if self.sent is None else self.sent - self.ended

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled + self.discarded


class CachedCounts(NamedTuple):
    """A campaign's numbers, the records that do not fit, and a hash of what was listed of it."""

    listed: str
    counts: Counts
    unfit: int


def hashed(listed: Iterable[BlobRecord]) -> str:
    """A hash of a campaign's ledger and shards, as they were listed."""
    found = hashlib.blake2b(digest_size=16)
    for blob in listed:
        facts = blob.name, blob.size_bytes, blob.created_at, blob.modified_at
        found.update(repr(facts).encode())
    return found.hexdigest()
