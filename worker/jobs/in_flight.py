"""Leased messages and their images from the pull to the end, and what of them is stored.

Records are written in batches; a job ends only after its records are stored. So every image has a
record, whenever a worker dies: one that was stored without is drawn again by the worker that gets
the message next, which finds its name taken and writes the record.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

from imagefleet import concurrency, errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.deliveries import SUSPECT_AFTER, Deliveries, shown_images
from imagefleet.storage.proofs import Prover
from imagefleet.telemetry import logs
from imagefleet.telemetry.metrics import MAX_MODELS, OTHER_MODELS
from worker import tasks
from worker.engine import contract
from worker.inputs.img2img import Overlay
from worker.jobs.stored import proven, stored_record
from worker.leases import Lease
from worker.metrics import WorkerMetrics

log = logs.EventLog(__name__)

#: A delivery begins no more images once more than these have failed, and more than a tenth of those
#: stored: what the job, or the node, gets wrong each time is not tried a thousand times.
FAILED_IMAGES = 2
STORED_PER_FAILED = 10

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

Finish = Callable[[errors.TransientError | None], Awaitable[object]]
"""Ends a job after its records are stored, or after the error that kept them from being."""


@dataclass(frozen=True, slots=True)
class FailedImage:
    index: int
    error: errors.FleetError


@dataclass(slots=True, eq=False)
class InFlightJob:
    """One leased message. It is settled once: acknowledged, dead-lettered, retried or released.

    Its images are drawn and stored one by one, between those of other jobs. Two stages may want to
    settle it at the same time; the first to call `settle` does it.
    """

    lease: Lease
    pulled_at: float = field(default_factory=time.monotonic)
    job: Job | None = None
    ahead: int = 1
    """How many of the job's images the engine has not finished."""
    images_to_submit: int = 0
    images_to_store: int = 0
    images_written: int = 0
    settled: bool = False
    is_stopping: bool = False  # no more of its images are begun, since some have failed
    is_cancelled: bool = False  # some of its images are left out
    is_put_off: bool = False  # some of its images are left to its next delivery
    has_ended: bool = False  # none of its images is in the making
    is_looked_up: bool = False  # which of its images are stored was asked for
    is_first_awaited: bool = False  # its first image is in the making, of several
    waiting: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """What stores the images that wait for the first one to be stored."""
    failures: list[FailedImage] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    """The indices of the job's images that are stored, by whomever."""
    recorded: set[int] = field(default_factory=set)
    """The indices of stored images whose records are stored as well."""
    records: list[Record] = field(default_factory=list)
    """Records of images that this worker has stored, as far as they are not written yet."""
    again: list[Record] = field(default_factory=list)
    """Records of the job's images that found their names taken."""
    lora_hashes: dict[str, Future[str | None]] = field(default_factory=dict)
    """Hashes of its LoRAs, by their names in its prompt; computed while it is drawn."""
    model_hashes: dict[str, Future[str | None]] = field(default_factory=dict)
    """Those of its VAE and of other checkpoints, by the fields that name them."""
    overlay: Overlay | None = None
    """What is laid over its images."""
    source_parameters: str = ""
    """AUTOMATIC1111's text of the image that it enlarges."""
    _uploads: int = field(default=0, init=False)
    _upload_ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """One of its images is being stored, and its record added, during the block."""
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1
            self._upload_ended.set()

    def image_written(self, metrics: WorkerMetrics, model: str) -> None:
        """An image of this job is stored, by this worker: notes and counts it."""
        assert self.job is not None  # noqa: S101 - it was drawn
        self.images_written += 1
        metrics.images_stored += 1
        metrics.images.inc()
        metrics.model_images.labels(model).inc()
        name = self.job.campaign or DEFAULT_CAMPAIGN
        if len(metrics.campaigns) < MAX_MODELS:
            metrics.campaigns.add(name)
        label = name if name in metrics.campaigns else OTHER_MODELS
        metrics.campaign_images.labels(label).inc()
        if self.job.stages > 1:
            metrics.chain_images.labels(str(self.job.stage)).inc()

    async def first_ended(self) -> None:
        """The first image is stored, or will not be: so goes what waits for it."""
        if not self.is_first_awaited:
            return
        self.is_first_awaited = False
        waiting, self.waiting = self.waiting, []
        await concurrency.for_each(waiting, lambda store: store(), len(waiting))

    async def uploads_end(self) -> None:
        """Returns once no image is being stored."""
        while self._uploads:
            self._upload_ended.clear()
            await self._upload_ended.wait()

    @property
    def deliveries(self) -> Deliveries:
        """How the earlier deliveries of its message ended."""
        return Deliveries.of(self.lease.message)

    @property
    def is_suspect(self) -> bool:
        """True if the job may be what its workers died of."""
        return (
            self.lease.message.delivery_count > SUSPECT_AFTER
            and self.deliveries.is_suspect
        )

    @property
    def has_next_stage(self) -> bool:
        """Whether its image is the input of a further stage."""
        return self.job is not None and self.job.stage < self.job.stages

    def is_of(self, cancelled: CancelledCampaigns) -> bool:
        """Whether it or its campaign has been cancelled since it was sent."""
        return self.job is not None and cancelled.includes(
            self.job.campaign, self.lease.message.enqueued_at, self.job.id
        )

    @property
    def is_second_drawing(self) -> bool:
        return self.job is not None and self.job.verify

    @property
    def is_all_stored(self) -> bool:
        return self.job is not None and len(self.stored) >= self.job.images_to_draw

    @property
    def id(self) -> str:
        """The job's id; its message's where it has none, or could not be read."""
        return (self.job.id if self.job else None) or self.lease.message.id

    @property
    def source(self) -> str:
        """Names its delivery in records: its message, or that of its chain."""
        message_id = self.lease.message.id
        return self.job.source(message_id) if self.job is not None else message_id

    def settle(self) -> bool:
        """True for the first caller, which settles the job."""
        first = not self.settled
        self.settled = True
        return first

    def ended(self, *, failed: bool) -> Deliveries:
        """The deliveries of its message when this one ends by handing it back."""
        earlier = self.deliveries
        record = earlier.ended(failed=failed)
        is_unsure = earlier.is_unsure and not self.is_looked_up
        if self.job is None or self.job.images_to_draw == 1:
            is_unsure |= self._may_be_stored or bool(self.stored)
            return record.model_copy(update={"is_unsure": is_unsure})
        recorded = self.recorded.union(earlier.images)
        is_unsure |= self._may_be_stored or self.stored != self.recorded
        return record.with_images(recorded, is_unsure=is_unsure)

    @property
    def _may_be_stored(self) -> bool:
        """Whether one of its images may be stored that is not in `stored`."""
        in_doubt = (
            getattr(each.error, "outcome_is_unknown", False) for each in self.failures
        )
        return self._uploads > 0 or any(in_doubt)

    def image_failed(self, index: int, error: errors.FleetError) -> None:
        """The others go on, unless they would fail as well, or may not be stored without it."""
        self.failures.append(FailedImage(index, error))
        self.images_to_store -= 1
        most = max(FAILED_IMAGES, len(self.stored) // STORED_PER_FAILED)
        ends_others = isinstance(error, errors.JobError) or (
            not index and self.is_first_awaited
        )
        if ends_others or len(self.failures) > most:
            self.is_stopping = True

    def fault_of(self, error: Exception) -> errors.FleetError:
        """*error*; for a bug of ours one that is retried, as that could end all workers."""
        if isinstance(error, errors.FleetError):
            return error
        self.log(logging.ERROR, "hit a bug", "job_defect", exc_info=error)
        return errors.TransientError(f"{type(error).__name__}: {error}")

    def log(self, level: int, text: str, action: str, **fields: Any) -> None:
        log.log(level, f"job {self.id} {text}", action=action, job_id=self.id, **fields)

    def reason(self, error: errors.FleetError) -> str:
        """Why it failed; of a job of several images also which one failed, and what is stored."""
        if self.job is None or self.job.images_to_draw == 1:
            if self.job is None or self.job.stages == 1:
                return error.message
            return f"stage {self.job.stage} of {self.job.stages}: {error.message}"
        failed = next((each for each in self.failures if each.error is error), None)
        which = f"image {failed.index}: " if failed else ""
        stored = shown_images(self.stored) or "none"
        return f"{which}{error.message}; of its {self.job.images} images are stored: {stored}"

    def take_records(self) -> tuple[list[Record], list[Record]]:
        """Takes `records` and `again`, but for the record that says that the job is complete.

        That is its last image's, and is stored with the job's end.
        """
        taken: tuple[list[Record], list[Record]] = ([], [])
        for kept, some in zip((self.records, self.again), taken, strict=True):
            some += [each for each in kept if not self._is_last(each)]
            kept[:] = [each for each in kept if self._is_last(each)]
        return taken

    def mark_completed(self, at: datetime) -> None:
        """Every image is stored, which is known *at* that time: the record of the last says so."""
        if self.job is None or self.job.images_to_draw == 1:
            return
        last = self.job.images - 1
        if not any(map(self._is_last, (*self.records, *self.again))):
            # An earlier delivery has recorded it, while others were missing.
            self.again.append(stored_record(self.job, self.source, last, at))
        for kept in (self.records, self.again):
            for place, record in enumerate(kept):
                if self._is_last(record):
                    kept[place] = record.model_copy(update={"completes": True})

    def _is_last(self, record: Record) -> bool:
        return record.index == record.images - 1


@dataclass(slots=True, eq=False)
class InFlightImage:
    """One image of a job in flight; *ready_at* is when it was ready for the engine.

    *generated_at* is when the engine had finished it; both in monotonic seconds. *size* is that of
    its first pass, or of what it enlarges, *final_size* that of its file: both (width, height).
    """

    owner: InFlightJob
    job: Job
    index: int
    size: tuple[int, int]
    final_size: tuple[int, int]
    embeddings: tuple[contract.Embedding, ...] = ()
    """The embeddings that the job's prompts name."""
    ready_at: float = field(default_factory=time.monotonic)
    generated_at: float = 0.0


def flush_seconds(lease_seconds: float, *, is_local: bool) -> float:
    """The longest that a record waits for others."""
    usual = LOCAL_FLUSH_SECONDS if is_local else FLUSH_SECONDS
    return min(usual, lease_seconds * FLUSH_PER_LEASE)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Records of a job to store within some *seconds*; *finish* ends it, else it goes on."""

    job: InFlightJob
    seconds: float
    records: list[Record]
    again: list[Record]
    finish: Finish | None = None
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def due_at(self) -> float:
        return self.begun_at + self.seconds

    @property
    def count(self) -> int:
        return len(self.records) + len(self.again)


_Stored = tuple[_Waiting, "errors.TransientError | None"]


@dataclass(slots=True, eq=False)
class PendingRecords:
    """Jobs that wait for their records to be stored."""

    log: RecordLog
    metrics: WorkerMetrics
    flush_seconds: float
    in_flight: Callable[[], int]
    """Jobs in flight; those that wait here are among them."""
    prover: Callable[[], Prover | None] = lambda: None
    _waiting: list[_Waiting] = field(default_factory=list, init=False)
    _records: int = field(default=0, init=False)  # of those that wait
    _due_at: float = field(default=math.inf, init=False)  # of the first of them
    jobs: int = field(default=0, init=False)
    """Jobs that are done but for their records and the end of their messages."""
    _early: int = field(default=0, init=False)  # records of jobs that go on
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _room: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stored: asyncio.Queue[_Stored] = field(default_factory=asyncio.Queue, init=False)
    _stored_at: deque[float] = field(
        default_factory=deque, init=False
    )  # of those in `_stored`

    @property
    def behind_seconds(self) -> float:
        """How long a job with stored records has waited for the end of its message to begin."""
        return time.monotonic() - self._stored_at[0] if self._stored_at else 0.0

    async def put(self, job: InFlightJob, finish: Finish, *more: Record) -> None:
        """Stores a job's records soon, with *more* of its end, then calls *finish*."""
        await self._wait_for_room()
        self.jobs += 1
        entry = _Waiting(
            job, self._seconds(job), [*job.records, *more], job.again, finish
        )
        if entry.count or self._early:
            self._wait(entry)
        else:
            self._end_soon(entry, None)

    def _end_soon(self, entry: _Waiting, error: errors.TransientError | None) -> None:
        self._stored_at.append(time.monotonic())
        self._stored.put_nowait((entry, error))

    async def add(self, job: InFlightJob) -> None:
        """Stores the records of a job so far soon; it goes on."""
        await self._wait_for_room()
        entry = _Waiting(job, self._seconds(job), *job.take_records())
        if entry.count:
            self._early += entry.count
            self._wait(entry)

    def _seconds(self, job: InFlightJob) -> float:
        is_awaited = job.job is not None and job.job.whole.awaited  # by a client
        return min(
            self.flush_seconds, AWAITED_FLUSH_SECONDS if is_awaited else math.inf
        )

    async def _wait_for_room(self) -> None:
        while self.jobs + self._early >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()

    def _wait(self, entry: _Waiting) -> None:
        self._waiting.append(entry)
        self._records += entry.count
        if entry.due_at < self._due_at or self._is_all:
            self._due_at = min(self._due_at, entry.due_at)
            self._changed.set()

    def job_ended(self) -> None:
        """A job has ended elsewhere: what waits here may be all that is in flight."""
        if self._is_all:
            self._changed.set()

    @property
    def _is_all(self) -> bool:
        """Whether what waits is much, or no more can come."""
        return self._records >= MAX_RECORDS or self.jobs >= self.in_flight()

    async def run(self) -> NoReturn:
        """Side task: writes what waits; raises SetupError if the storage refuses it."""
        while True:
            while not (batch := self._take()):
                self._changed.clear()
                seconds = self._due_at - time.monotonic()
                await tasks.first_of(self._changed.wait(), timeout_seconds=seconds)
            error = await self._write(batch)
            for entry in batch:
                if entry.finish is not None:
                    self._end_soon(entry, error)
            self._go_on([entry for entry in batch if entry.finish is None], error)

    def _take(self) -> list[_Waiting]:
        """What is due, and what may wait no longer than that."""
        now = time.monotonic()
        due = (each.seconds for each in self._waiting if each.due_at <= now)
        longest = math.inf if self._is_all else max(due, default=-1.0)
        taken = [each for each in self._waiting if each.seconds <= longest]
        self._waiting = [each for each in self._waiting if each.seconds > longest]
        self._records = sum(each.count for each in self._waiting)
        self._due_at = min((each.due_at for each in self._waiting), default=math.inf)
        return taken

    def _go_on(
        self, early: list[_Waiting], error: errors.TransientError | None
    ) -> None:
        """Keeps what could not be stored of jobs that go on for their next records."""
        if error is not None:
            for entry in early:
                entry.begun_at = time.monotonic()
            self._waiting[:0] = early
            return
        for entry in early:
            self._early -= entry.count
            entry.job.recorded.update(
                each.index for each in (*entry.records, *entry.again)
            )
        self._room.set()

    async def finish(self) -> NoReturn:
        """Side task: ends the jobs whose records are stored."""
        while True:
            entry, error = await self._stored.get()
            self._stored_at.popleft()
            try:
                with self.metrics.stage_seconds["acknowledge"].time():
                    if entry.finish is not None:
                        await entry.finish(error)
            finally:
                self.jobs -= 1
                self._room.set()

    def _proven(self, records: Iterable[list[Record]]) -> list[Record]:
        some = list(chain.from_iterable(records))
        prover = self.prover()
        return some if prover is None else [proven(each, prover) for each in some]

    async def _write(self, batch: list[_Waiting]) -> errors.TransientError | None:
        try:
            with self.metrics.stage_seconds["record"].time():
                await self.log.add(self._proven(each.records for each in batch))
                await self.log.add(
                    self._proven(each.again for each in batch), again=True
                )
        except errors.TransientError as error:
            return error
        return None
