"""Failed jobs by their records beside the images: to read those hides none from other readers.

And notes there of what became of them, so that lists and counts leave them out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from imagefleet import concurrency
from imagefleet.job.message import DEFAULT_CAMPAIGN, SafeId
from imagefleet.records.record import Record
from imagefleet.records.writer import RecordLog
from imagefleet.storage import protocol
from imagefleet.storage.dead_letter import Entry, FailedJob
from imagefleet.storage.open import Storage

_Outcome = Literal["replayed", "discarded"]

_CAMPAIGN: TypeAdapter[str] = TypeAdapter(SafeId)


async def failed(
    storage: Storage,
    campaign: str | None = None,
    matches: Callable[[Entry], bool] = lambda _: True,
) -> AsyncIterator[Entry]:
    """The jobs that have failed and were neither replayed nor discarded; None: of all campaigns."""
    from imagefleet.records import reader  # numpy is slow to import

    try:
        known = None if campaign is None else _CAMPAIGN.validate_python(campaign)
    except ValidationError:  # no job has such a campaign
        return
    async for record in reader.ended(storage, known):
        if record.outcome == "failed":
            found = entry(record)
            if matches(found):
                yield found


async def are_completed(storage: Storage, entries: Sequence[Entry]) -> list[bool]:
    """Whether all images of each job are stored: it was sent again since, and completed.

    A read for each of its images, or six for a job that has none.
    """
    return list(await concurrency.gather(*(_is_completed(storage, each) for each in entries)))


async def _is_completed(storage: Storage, failed: Entry) -> bool:
    from imagefleet.records import outcomes

    if (note := _note(failed, "discarded", datetime.now(UTC))) is None:
        return False
    job = outcomes.JobFacts(note.id, note.campaign)
    return outcomes.are_all(await outcomes.stored_images(storage, job))


def entry(record: Record) -> Entry:
    """A failed job as the poison queue would have it."""
    message = protocol.Message(record.source or record.id, record.body or "", 0, record.at)
    return Entry(message, FailedJob.of(record))


class Notes:
    """Writes what became of failed jobs."""

    def __init__(self, storage: Storage) -> None:
        self._log = RecordLog(storage.blobs, "operator")
        self._is_checked = False

    async def check(self, entries: Iterable[Entry]) -> None:
        """Raises SetupError if the credentials do not allow notes on these, before a change."""
        noted = (_note(each, "replayed", datetime.now(UTC)) for each in entries)
        if not self._is_checked and (first := next(filter(None, noted), None)):
            await self._log.check(first.campaign)
            self._is_checked = True

    async def add(
        self, entries: Iterable[Entry], outcome: Literal["replayed", "discarded"]
    ) -> None:
        """Notes it of each failure; a failure of the same job that comes later is another."""
        now = datetime.now(UTC)
        noted = (_note(each, outcome, now) for each in entries)
        await self._log.add([each for each in noted if each is not None])


def _note(each: Entry, outcome: _Outcome, now: datetime) -> Record | None:
    failure = each.record
    if failure is None or failure.source is None:  # of a version without records
        return None
    try:
        return Record(
            outcome=outcome,
            id=failure.id,
            campaign=failure.campaign or DEFAULT_CAMPAIGN,
            at=now,
            source=failure.source,
        )
    except ValidationError:  # made up: no failed job has such an id
        return None
