"""Cache of campaigns' counts: only campaigns that changed are read again.

Beside a campaign's numbers is a hash of what was listed of it before: the names, sizes and times of
its ledger and its shards, to which is only ever appended. So they are right or of no use, whoever
stored them, and when. They are among the files, where no worker writes.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from imagefleet import errors
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobRecord
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

#: The folder of the overviews, in the container of files, which several fleets may share.
_FOLDER = "-counts/"

#: Of a million campaigns, some 250 bytes each.
_MAX_BYTES = 256 * 2**20

#: Part of the hash: another one for other rules of counting.
_RULES = b"1"


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


_CAMPAIGNS = TypeAdapter(dict[str, CachedCounts])


class Overview:
    """The overview of one storage: read once, and stored after each change, if that is allowed."""

    def __init__(self, storage: Storage) -> None:
        self._files = storage.files
        self._name = f"{_FOLDER}{storage.blobs.name}.json"
        self._kept: Mapping[str, CachedCounts] | None = None
        self._is_stored = True

    async def read(self) -> Mapping[str, CachedCounts]:
        if self._kept is None:
            self._kept = {}
            try:
                if part := await self._files.read_part(self._name, 0, _MAX_BYTES):
                    self._kept = _CAMPAIGNS.validate_json(part.data)
            except (errors.SetupError, ValidationError) as error:
                log.debug(
                    f"all campaigns are counted anew: {error}",
                    action="overview_unknown",
                )
        return self._kept

    async def keep(self, kept: Mapping[str, CachedCounts]) -> None:
        if kept == self._kept:
            return
        self._kept = kept
        if not self._is_stored:
            return
        data = _CAMPAIGNS.dump_json(dict(kept))
        try:
            await self._files.edit(self._name, lambda _: data, 1)
        except errors.FleetError as error:
            self._is_stored = not isinstance(error, errors.SetupError)
            log.debug(
                f"what was counted is not stored: {error}", action="overview_not_stored"
            )


def hashed(listed: Iterable[BlobRecord]) -> str:
    """A hash of a campaign's ledger and shards, as they were listed."""
    found = hashlib.blake2b(_RULES, digest_size=16)
    for blob in listed:
        facts = blob.name, blob.size_bytes, blob.created_at, blob.modified_at
        found.update(repr(facts).encode())
    return found.hexdigest()
