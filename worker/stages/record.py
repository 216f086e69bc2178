"""The record stage: writes the records of images and jobs in batches, then ends the jobs.

A job ends only after its records are stored. So every image has a record, whenever a worker dies:
one that was stored without is drawn again by the worker that gets the message next, which finds its
name taken and writes the record.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import NoReturn

from imagefleet.errors import TransientError
from imagefleet.records.log import RecordLog
from imagefleet.records.record import UNKNOWN_WORKER, Record
from imagefleet.storage.open import Storage
from imagefleet.storage.proofs import Prover, machine_of
from imagefleet.storage.protocol import Metadata
from worker import tasks
from worker.jobs.in_flight import InFlightJob
from worker.metrics import WorkerMetrics

#: Records are written at least so often while others are in the making. On Azure each time is a
#: billed write: some for a hundred images, where every image is one itself.
FLUSH_SECONDS = 15.0
LOCAL_FLUSH_SECONDS = 1.0

#: Records of jobs that a client awaits go sooner, with those that have come meanwhile: at 20
#: images/s five for each write.
AWAITED_FLUSH_SECONDS = 0.25

#: Records wait for this share of the lease, lest a short one is renewed for their sake.
FLUSH_PER_LEASE = 1 / 8

#: Written without waiting for more.
MAX_RECORDS = 256

#: Jobs that may wait here in an outage before uploads wait, too.
MAX_WAITING = 2048

#: Ends a job after its records are stored, or after the error that kept them from being.
Finish = Callable[[TransientError | None], Awaitable[object]]


def flush_seconds(lease_seconds: float, *, is_local: bool) -> float:
    """The longest that a record waits for others."""
    usual = LOCAL_FLUSH_SECONDS if is_local else FLUSH_SECONDS
    return min(usual, lease_seconds * FLUSH_PER_LEASE)


@dataclass(eq=False)
class PendingRecords:
    """Records of a job that has ended but for them; *finish* ends it once they are stored."""

    records: list[Record]
    again: list[Record]
    finish: Finish
    #: Jobs that end so; several of a bundle.
    jobs: int = 1
    #: Error of the last attempt to store the records; None before one failed.
    error: TransientError | None = None


@dataclass(eq=False)
class RecordStage:
    """Jobs that wait for their records to be stored."""

    log: RecordLog
    metrics: WorkerMetrics
    flush_seconds: float
    #: The jobs in flight; those that wait here are among them.
    in_flight: Collection[InFlightJob]
    storage: Storage
    #: Jobs that are done but for their records and the end of their messages.
    jobs: int = 0
    _waiting: list[PendingRecords] = field(default_factory=list)
    _records: int = 0  # of those that wait
    _due_at: float = math.inf  # of the first of them
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _stored: asyncio.Queue[PendingRecords] = field(default_factory=asyncio.Queue)
    _stored_at: deque[float] = field(default_factory=deque)  # of those in `_stored`

    @property
    def behind_seconds(self) -> float:
        """Seconds that a job with stored records has waited for its message to be ended."""
        return time.monotonic() - self._stored_at[0] if self._stored_at else 0.0

    async def put(self, job: InFlightJob, finish: Finish, *more: Record) -> None:
        """Stores a job's records soon, with *more* of its end, then calls *finish*."""
        is_awaited = job.job is not None and job.job.whole.awaited
        pending = PendingRecords([*job.records, *more], job.again, finish)
        await self.add(pending, is_awaited=is_awaited)

    async def add(self, pending: PendingRecords, *, is_awaited: bool = False) -> None:
        """Stores records soon, sooner for a client that awaits them, then finishes their jobs."""
        while self.jobs >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        self.jobs += pending.jobs
        count = len(pending.records) + len(pending.again)
        if not count:
            self._end(pending)
            return
        self._waiting.append(pending)
        self._records += count
        seconds = self.flush_seconds
        if is_awaited:
            seconds = min(seconds, AWAITED_FLUSH_SECONDS)
        due_at = time.monotonic() + seconds
        if due_at < self._due_at or self._is_all:
            self._due_at = min(self._due_at, due_at)
            self._changed.set()

    def job_ended(self) -> None:
        """A job has ended elsewhere: what waits here may be all that is in flight."""
        if self._is_all:
            self._changed.set()

    async def run(self) -> NoReturn:
        """Side task: writes what waits; raises SetupError if the storage refuses it."""
        while True:
            while not (batch := self._take()):
                self._changed.clear()
                seconds = self._due_at - time.monotonic()
                await tasks.first_of(self._changed.wait(), timeout_seconds=seconds)
            error = await self._write(batch)
            for pending in batch:
                pending.error = error
                self._end(pending)

    async def finish(self) -> NoReturn:
        """Side task: ends the jobs whose records are stored."""
        while True:
            pending = await self._stored.get()
            self._stored_at.popleft()
            try:
                with self.metrics.stage_seconds["acknowledge"].time():
                    await pending.finish(pending.error)
            finally:
                self.jobs -= pending.jobs
                self._room.set()

    @property
    def _is_all(self) -> bool:
        """True if what waits is much, or no more can come."""
        return self._records >= MAX_RECORDS or self.jobs >= len(self.in_flight)

    def _take(self) -> list[PendingRecords]:
        """Removes and returns what waits, once some of it is due; else nothing."""
        if not self._is_all and time.monotonic() < self._due_at:
            return []
        taken = self._waiting
        self._waiting = []
        self._records = 0
        self._due_at = math.inf
        return taken

    async def _write(self, batch: list[PendingRecords]) -> TransientError | None:
        prover = self.storage.prover
        records = [proven(each, prover) for ended in batch for each in ended.records]
        again = [proven(each, prover) for ended in batch for each in ended.again]
        try:
            with self.metrics.stage_seconds["record"].time():
                await self.log.add(records)
                await self.log.add(again, again=True)
        except TransientError as error:
            return error
        return None

    def _end(self, pending: PendingRecords) -> None:
        self._stored_at.append(time.monotonic())
        self._stored.put_nowait(pending)


def with_proof(prover: Prover | None, blob: str, metadata: Metadata) -> Metadata:
    """The metadata of a blob with the proof of who stores it, if this machine has a key."""
    return metadata if prover is None else prover.proven(blob, metadata)


def proven(record: Record, prover: Prover | None) -> Record:
    """A record with the proof of who has drawn its image; of another machine's, it names nobody."""
    if (
        prover is None
        or record.blob is None
        or record.proof
        or not (machine := machine_of(record.worker))
    ):
        return record
    if machine != prover.machine:
        return record.model_copy(update={"worker": UNKNOWN_WORKER})
    return record.model_copy(
        update={"proof": prover.proof(record.worker, record.claims)}
    )
