"""The list of what is cancelled or paused, `cancelled.json` among the files.

Workers obey it, and running loads.

A job is cancelled if its message was sent before its campaign was, by the clock of the storage; or
if it is in the list itself. The jobs of a paused campaign wait, whenever they were sent.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import NoReturn

from pydantic import AwareDatetime, BaseModel, Field

from imagefleet import concurrency, validation
from imagefleet.errors import FleetError, SetupError
from imagefleet.job.message import DEFAULT_CAMPAIGN, SafeId, job_key
from imagefleet.job.names import split_job_key
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart, BlobStore
from imagefleet.telemetry.logs import Occasion, log

BLOB = "cancelled.json"

#: Seconds between two readings of the list by a process that has work.
PERIOD_SECONDS = 5.0

#: The longest that a job waits for the list: a storage that is down must not hold it up for long.
READ_SECONDS = 5.0

#: A running `load` reads the list within this time. What it sends until then is cancelled, too.
LOAD_SECONDS = 10.0

#: How far a message's stamp may be from the clock's: whole seconds, of servers that differ.
BLUR_SECONDS = 3.0

#: An entry is dropped after this time, which is longer than any lease, once the queue is empty.
KEPT = timedelta(days=8)

#: An entry of a single job, whose message is taken back where nobody has it yet.
KEPT_JOBS = timedelta(days=1)

#: The longest list, some 100 KB, which each worker reads once after each change.
MAX_CAMPAIGNS = 1_000
MAX_BYTES = 1_000_000


class Cancellation(BaseModel, extra="allow", frozen=True):
    """One campaign of one queue, or one job of it, and until when its messages were sent.

    Of a campaign that *is_paused*, since when it is.
    """

    queue: str = Field(max_length=200)
    campaign: SafeId
    id: SafeId | None = None
    at: AwareDatetime
    is_paused: bool = False

    @property
    def name(self) -> str:
        return job_key(self.campaign, self.id) if self.id else self.campaign


class CancelledList(BaseModel, extra="allow", frozen=True):
    """The whole list; several fleets, each with a queue of its own, may share it."""

    campaigns: tuple[Cancellation, ...] = ()


class CancelledCampaigns:
    """The cancelled campaigns of one queue, as read last."""

    def __init__(self, files: BlobStore, queue: str) -> None:
        self._files = files
        self._queue = queue
        #: The time at which each campaign was cancelled, or each single job, by `campaign/id`.
        self.times: Mapping[str, datetime] = {}
        #: The campaigns whose jobs wait until they are resumed.
        self.paused: frozenset[str] = frozenset()
        self._version: str | None = None
        self._read_at = -math.inf
        self._reading = asyncio.Lock()
        self._warning = Occasion()

    def includes(
        self, campaign: str | None, sent_at: datetime, job_id: str | None = None
    ) -> bool:
        """True if a campaign is cancelled, or a job of it, whose message was sent then."""
        for name in (campaign or DEFAULT_CAMPAIGN, job_key(campaign, job_id)):
            if (at := self.times.get(name)) and sent_at <= at:
                return True
        return False

    async def refresh(self, older_than_seconds: float | None = None) -> None:
        """Reads the list, if it was last read longer ago (by default five seconds)."""
        longest = PERIOD_SECONDS if older_than_seconds is None else older_than_seconds
        async with self._reading:
            now = time.monotonic()
            if now - self._read_at < longest:
                return
            self._read_at = now
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self._read()
            except TimeoutError:
                self._log(f"no answer within {READ_SECONDS:g} seconds")
            except FleetError as error:
                self._log(error.message)

    async def watch(self, in_flight: Collection[object] | None = None) -> NoReturn:
        """Side task: reads the list every five seconds, if given while jobs are *in_flight*."""
        while True:
            await asyncio.sleep(concurrency.jitter(PERIOD_SECONDS / 5))
            if in_flight is None or in_flight:
                await self.refresh()

    async def _read(self) -> None:
        start = await self._files.read_part(
            BLOB, 0, 1
        )  # a byte tells whether it has changed
        if start is None:
            self.times = {}
            self.paused = frozenset()
            self._version = None
        elif start.version != self._version:
            part = await self._files.read_part(BLOB, 0, MAX_BYTES)
            self._version = None if part is None else part.version
            own = [
                entry
                for entry in _parse(self._files, part).campaigns
                if entry.queue == self._queue
            ]
            self.times = {entry.name: entry.at for entry in own if not entry.is_paused}
            self.paused = frozenset(entry.name for entry in own if entry.is_paused)

    def _log(self, why: str) -> None:
        if self._warning.is_due():
            log.warning(
                f"{BLOB} in the container {self._files.name!r} cannot be read: {why}",
                action="cancelled_unread",
            )


async def cancel(storage: Storage, campaign: str) -> datetime:
    """Cancels what was sent of a campaign, and ends its running loads; returns until when.

    Takes some twelve seconds: a load that begins then runs. Raises TransientError or SetupError.
    """
    # Messages in flight count: without any, no message is older than this call.
    is_empty = (await storage.queue.depth()).messages == 0
    await allow(storage, campaign)
    at = await _change(storage, LOAD_SECONDS, [(campaign, None)], forget=is_empty)
    await _wait((at - storage.blobs.clock.now()).total_seconds() + BLUR_SECONDS)
    return at


async def cancel_jobs(
    storage: Storage, new: Collection[str], ended: Collection[str]
) -> None:
    """Cancels single jobs, by `campaign/id`, and forgets cancelled ones that have *ended*.

    Their campaigns need an `allow` before.
    """
    await _change(storage, BLUR_SECONDS, list(map(split_job_key, new)), ended)


async def pause(storage: Storage, campaign: str, *, is_paused: bool) -> bool:
    """Pauses a campaign, or resumes it; False if it was so before. A cancellation resumes it."""
    entry = Cancellation(
        queue=storage.queue.name,
        campaign=campaign,
        at=storage.blobs.clock.now(),
        is_paused=True,
    )
    was_paused = await _edit(
        storage,
        [entry] * is_paused,
        lambda each: each.name == campaign and each.is_paused,
    )
    return was_paused != is_paused


async def allow(storage: Storage, campaign: str) -> None:
    """Lets records count by which jobs of the campaign were cancelled, for good.

    The list forgets; by this a worker's record that a job was cancelled is believed.
    """
    await RecordLog(storage.files, "operator").open(campaign, "cancelled")


async def _change(
    storage: Storage,
    seconds: float,
    new: Collection[tuple[str, str | None]],
    ended: Collection[str] = (),
    *,
    forget: bool = False,
) -> datetime:
    """Cancels campaigns, or their jobs, until so many *seconds* from now; returns until when.

    *ended* are forgotten, and with *forget* what is too old to matter.
    """
    at = storage.blobs.clock.now() + timedelta(
        seconds=seconds
    )  # which has had an answer
    added = [
        Cancellation(queue=storage.queue.name, campaign=name, id=job_id, at=at)
        for name, job_id in new
    ]
    gone = {*ended, *(each.name for each in added)}

    def is_gone(each: Cancellation) -> bool:
        age = at - each.at
        is_old = (forget and age > KEPT) or (each.id and age > KEPT_JOBS)
        return each.name in gone or bool(is_old and not each.is_paused)

    await _edit(storage, added, is_gone)
    return at


async def _edit(
    storage: Storage,
    added: Collection[Cancellation],
    is_gone: Callable[[Cancellation], bool],
) -> bool:
    """Adds to the list, without those of this queue that are gone; False if there are none."""
    was_there = False

    def changed(part: BlobPart | None) -> bytes:
        nonlocal was_there
        known = _parse(storage.files, part)
        kept = [
            each
            for each in known.campaigns
            if each.queue != storage.queue.name or not is_gone(each)
        ]
        was_there = len(kept) < len(known.campaigns)
        if len(kept) + len(added) > MAX_CAMPAIGNS:
            raise SetupError(
                f"{BLOB} in {storage.files.name} has {MAX_CAMPAIGNS:,} campaigns: they are dropped"
                f" {KEPT.days} days later by a cancellation while the queue is empty; `imagefleet"
                " cancel --all` empties it"
            )
        update = {"campaigns": (*kept, *added)}
        return known.model_copy(update=update).model_dump_json(indent=1).encode()

    await storage.files.edit(BLOB, changed, MAX_BYTES)
    return was_there


async def _wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _parse(files: BlobStore, part: BlobPart | None) -> CancelledList:
    """The list, empty if there is none; raises SetupError for anything else."""
    if part is None:
        return CancelledList()
    before = (
        f"correct or delete {BLOB} in {files.name}, which is not a list of campaigns: "
    )
    with validation.as_error(SetupError, before):
        return CancelledList.model_validate_json(part.data)
