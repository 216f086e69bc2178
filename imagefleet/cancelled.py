"""The list of cancelled campaigns, `cancelled.json` among the files, which workers and `load` obey.

A job is cancelled if its message was sent before its campaign was, by the clock of the storage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import NoReturn, Self

from pydantic import AwareDatetime, BaseModel, Field

from imagefleet import concurrency, errors, validation
from imagefleet.job.message import DEFAULT_CAMPAIGN, SafeId
from imagefleet.records.record import RecordLog
from imagefleet.storage.edit import edit
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart, BlobStore
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import Occasion

log = logs.EventLog(__name__)

BLOB = "cancelled.json"

#: Seconds between two readings of the list by a process that has work.
PERIOD_SECONDS = 5.0

#: The longest that a job waits for the list: a storage that is down must not hold it up for long.
READ_SECONDS = 5.0

#: A running `load` reads the list within this time. What it sends until then is cancelled, too.
LOAD_SECONDS = 10.0

#: An entry is dropped after this time, which is longer than any lease, once the queue is empty.
KEPT = timedelta(days=8)

#: The longest list, some 100 KB, which each worker reads once after each change.
MAX_CAMPAIGNS = 1_000
MAX_BYTES = 1_000_000

_CLOCK_SECONDS = 0.5


class Cancellation(BaseModel, extra="allow", frozen=True):
    """One campaign of one queue, and until when its messages were sent."""

    queue: str = Field(max_length=200)
    campaign: SafeId
    at: AwareDatetime


class CancelledList(BaseModel, extra="allow", frozen=True):
    """The whole list; several fleets, each with a queue of its own, may share it."""

    campaigns: tuple[Cancellation, ...] = ()

    def with_entry(self, new: Cancellation, *, forget: bool) -> Self:
        """With *new* in place of an older entry; *forget*: without what is too old to matter."""
        kept = [
            campaign
            for campaign in self.campaigns
            if campaign.queue != new.queue
            or (campaign.campaign != new.campaign and not (forget and new.at - campaign.at > KEPT))
        ]
        return self.model_copy(update={"campaigns": (*kept, new)})


class CancelledCampaigns:
    """The cancelled campaigns of one queue, as read last."""

    def __init__(
        self, files: BlobStore, queue: str, on_unreadable: Callable[[str], None] | None = None
    ) -> None:
        """*on_unreadable* is told why the list cannot be read; by default, a line in the log."""
        self._files = files
        self._queue = queue
        self._on_unreadable = on_unreadable or self._log
        self.times: Mapping[str, datetime] = {}
        """The time at which each campaign was cancelled."""
        self._version: str | None = None
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._warning = Occasion()

    def includes(self, campaign: str | None, sent_at: datetime) -> bool:
        """Whether a job is cancelled whose message was sent then."""
        cancelled_at = self.times.get(campaign or DEFAULT_CAMPAIGN)
        return cancelled_at is not None and sent_at <= cancelled_at

    async def refresh(self, older_than_seconds: float | None = None) -> None:
        """Reads the list, if it was last read longer ago (by default five seconds)."""
        longest = PERIOD_SECONDS if older_than_seconds is None else older_than_seconds
        async with self._reading:
            now = time.monotonic()
            if self._read_at is not None and now - self._read_at < longest:
                return
            self._read_at = now
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self._read()
            except TimeoutError:
                self._on_unreadable(f"no answer within {READ_SECONDS:g} seconds")
            except errors.FleetError as error:
                self._on_unreadable(error.message)

    async def watch(self, has_work: Callable[[], bool]) -> NoReturn:
        """Side task: reads the list every five seconds while there is work."""
        while True:
            await asyncio.sleep(concurrency.jitter(PERIOD_SECONDS / 5))
            if has_work():
                await self.refresh()

    async def _read(self) -> None:
        start = await self._files.read_part(BLOB, 0, 1)  # a byte tells whether it has changed
        if start is None:
            self.times, self._version = {}, None
        elif start.version != self._version:
            part = await self._files.read_part(BLOB, 0, MAX_BYTES)
            self._version = None if part is None else part.version
            found = _parse(self._files, part)
            own = (entry for entry in found.campaigns if entry.queue == self._queue)
            self.times = {entry.campaign: entry.at for entry in own}

    def _log(self, why: str) -> None:
        if self._warning.is_due():
            where = f"{BLOB} in the container {self._files.name!r}"
            log.warning(f"{where} cannot be read: {why}", action="cancelled_unread")


async def cancel(storage: Storage, campaign: str) -> datetime:
    """Cancels what was sent of a campaign, and ends its running loads; returns until when.

    Takes some twelve seconds: a load that begins then runs. Raises TransientError or SetupError.
    """
    at = (await storage.queue.stamps()).latest + timedelta(seconds=LOAD_SECONDS)
    # The list forgets it; by this a worker's record that a job was cancelled is believed for good.
    await RecordLog(storage.files, "operator").open(campaign, "cancelled")
    new = Cancellation(queue=storage.queue.name, campaign=campaign, at=at)
    # Messages in flight count: without any, no message is older than this call.
    is_empty = (await storage.queue.depth()).messages == 0

    def with_new(part: BlobPart | None) -> bytes:
        changed = _parse(storage.files, part).with_entry(new, forget=is_empty)
        if len(changed.campaigns) > MAX_CAMPAIGNS:
            raise errors.SetupError(
                f"{BLOB} in {storage.files.name} has {MAX_CAMPAIGNS:,} campaigns: they are dropped"
                f" {KEPT.days} days later by a cancellation while the queue is empty; `imagefleet"
                " cancel --all` empties it"
            )
        return changed.model_dump_json(indent=1).encode()

    await edit(storage.files, BLOB, with_new, MAX_BYTES)
    await _wait_until_later(storage, at)
    return at


async def _wait_until_later(storage: Storage, at: datetime) -> None:
    while (await storage.queue.stamps()).earliest <= at:  # noqa: ASYNC110 - no event of this process
        await asyncio.sleep(_CLOCK_SECONDS)


def _parse(files: BlobStore, part: BlobPart | None) -> CancelledList:
    """The list, empty if there is none; raises SetupError for anything else."""
    if part is None:
        return CancelledList()
    before = f"correct or delete {BLOB} in {files.name}, which is not a list of campaigns: "
    with validation.as_error(errors.SetupError, before):
        return CancelledList.model_validate_json(part.data)
