"""Writes records in batches; a job ends only after its records are stored.

So every image has a record, whenever a worker dies: one that was stored without is drawn again by
the worker that gets the message next, which finds its name taken and writes the record.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn

from imagefleet import errors
from imagefleet.records.record import Record
from imagefleet.records.shard import RecordLog
from imagefleet.storage.open import LOCAL_SCHEME
from worker import tasks
from worker.jobs.in_flight import InFlightJob
from worker.metrics import WorkerMetrics

#: Records are written at least so often while others are in the making. On Azure each time is a
#: billed write: some for a hundred images, where every image is one itself.
FLUSH_SECONDS = 15.0
LOCAL_FLUSH_SECONDS = 1.0

#: Records wait for this share of the lease, lest a short one is renewed for their sake.
FLUSH_PER_LEASE = 1 / 8

#: Written without waiting for more.
MAX_RECORDS = 256

#: Jobs that may wait here in an outage before uploads wait, too.
MAX_WAITING = 2048

Finish = Callable[[errors.TransientError | None], Awaitable[None]]
"""Ends a job after its records are stored, or after the error that kept them from being."""


def flush_seconds(storage_url: str, lease_seconds: float) -> float:
    """The longest that a record waits for others."""
    usual = LOCAL_FLUSH_SECONDS if storage_url.startswith(LOCAL_SCHEME) else FLUSH_SECONDS
    return min(usual, lease_seconds * FLUSH_PER_LEASE)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What to store; *begun* is a job that goes on meanwhile, *finish* ends one."""

    records: list[Record]
    again: list[Record]
    finish: Finish | None = None
    begun: InFlightJob | None = None


@dataclass(slots=True, eq=False)
class PendingRecords:
    """Jobs that wait for their records to be stored."""

    log: RecordLog
    metrics: WorkerMetrics
    flush_seconds: float
    in_flight: Callable[[], int]
    """Jobs in flight; those that wait here are among them."""
    _waiting: list[_Waiting] = field(default_factory=list, init=False)
    _records: int = field(default=0, init=False)  # of those that wait
    _first_at: float = field(default=0.0, init=False)
    _jobs: int = field(default=0, init=False)  # here, until they have ended
    _early: int = field(default=0, init=False)  # records of jobs that go on
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _room: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stored: asyncio.Queue[tuple[_Waiting, errors.TransientError | None]] = field(
        default_factory=asyncio.Queue, init=False
    )
    _stored_at: deque[float] = field(default_factory=deque, init=False)  # of those in `_stored`

    @property
    def jobs(self) -> int:
        """Jobs that are done but for their records and the end of their messages."""
        return self._jobs

    @property
    def behind_seconds(self) -> float:
        """How long a job with stored records has waited for the end of its message to begin."""
        return time.monotonic() - self._stored_at[0] if self._stored_at else 0.0

    async def put(
        self, finish: Finish, records: list[Record], again: list[Record] | None = None
    ) -> None:
        """Stores a job's records soon, then calls *finish*."""
        await self._wait_for_room()
        self._jobs += 1
        job = _Waiting(records, again or [], finish)
        if job.records or job.again or self._early:
            self._wait(job)
        else:
            self._end_soon(job, None)

    def _end_soon(self, job: _Waiting, error: errors.TransientError | None) -> None:
        self._stored_at.append(time.monotonic())
        self._stored.put_nowait((job, error))

    async def add(self, entry: InFlightJob) -> None:
        """Stores the records of a job so far soon; it goes on."""
        await self._wait_for_room()
        records, again = entry.take_records()
        if records or again:
            self._early += len(records) + len(again)
            self._wait(_Waiting(records, again, begun=entry))

    async def _wait_for_room(self) -> None:
        while self._jobs + self._early >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()

    def _wait(self, job: _Waiting) -> None:
        self._first_at = self._first_at if self._waiting else time.monotonic()
        self._waiting.append(job)
        self._records += len(job.records) + len(job.again)
        if len(self._waiting) == 1 or self._seconds_left() <= 0:
            self._changed.set()

    def job_ended(self) -> None:
        """A job has ended elsewhere: what waits here may be all that is in flight."""
        if self._waiting and self._seconds_left() <= 0:
            self._changed.set()

    async def run(self) -> NoReturn:
        """Side task: writes what waits.

        Raises:
            SetupError: the storage refuses it.
        """
        while True:
            await self._changed.wait()
            while (seconds := self._seconds_left()) > 0:
                self._changed.clear()
                await tasks.first_of(self._changed.wait(), timeout_seconds=seconds)
            self._changed.clear()
            batch, self._waiting, self._records = self._waiting, [], 0
            error = await self._write(batch)
            for job in batch:
                if job.begun is None:
                    self._end_soon(job, error)
            self._go_on([job for job in batch if job.begun is not None], error)

    def _go_on(self, early: list[_Waiting], error: errors.TransientError | None) -> None:
        """Keeps what could not be stored of jobs that go on for their next records."""
        if error is not None:
            self._waiting[:0] = early
            self._records += sum(len(each.records) + len(each.again) for each in early)
            self._first_at = time.monotonic()
            self._changed.set()
            return
        for each in early:
            written = [*each.records, *each.again]
            self._early -= len(written)
            if each.begun is not None:
                each.begun.recorded.update(record.index for record in written)
        self._room.set()

    async def finish(self) -> NoReturn:
        """Side task: ends the jobs whose records are stored."""
        while True:
            job, error = await self._stored.get()
            self._stored_at.popleft()
            try:
                with self.metrics.stage_seconds["acknowledge"].time():
                    if job.finish is not None:
                        await job.finish(error)
            finally:
                self._jobs -= 1
                self._room.set()

    def _seconds_left(self) -> float:
        """Seconds until what waits is written; 0 if nothing else can come soon."""
        if self._records >= MAX_RECORDS or self._jobs >= self.in_flight():
            return 0.0
        return self._first_at + self.flush_seconds - time.monotonic()

    async def _write(self, batch: list[_Waiting]) -> errors.TransientError | None:
        try:
            with self.metrics.stage_seconds["record"].time():
                await self.log.add([record for each in batch for record in each.records])
                await self.log.add([record for each in batch for record in each.again], again=True)
        except errors.TransientError as error:
            return error
        return None
