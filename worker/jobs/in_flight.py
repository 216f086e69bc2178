"""Leased messages and their images, from the pull to the end, and the order in which they begin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from imagefleet import errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import Job
from imagefleet.records.record import Record
from imagefleet.storage.deliveries import SUSPECT_AFTER, Deliveries, shown_images
from worker.engine import contract
from worker.inputs.img2img import Overlay
from worker.jobs import stored
from worker.leases import Lease

log = logging.getLogger(__name__)

#: A delivery begins no more images once more than these have failed, and more than a tenth of those
#: stored: what the job, or the node, gets wrong each time is not tried a thousand times.
FAILED_IMAGES = 2
STORED_PER_FAILED = 10


@dataclass(frozen=True, slots=True)
class FailedImage:
    """An image that could not be drawn or stored, and why."""

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
        message = self.lease.message
        return message.delivery_count > SUSPECT_AFTER and self.deliveries.is_suspect

    @property
    def has_next_stage(self) -> bool:
        """Whether its image is the input of a further stage."""
        return self.job is not None and self.job.stage < self.job.stages

    def is_of(self, cancelled: CancelledCampaigns) -> bool:
        """Whether its campaign has been cancelled since it was sent."""
        return self.job is not None and cancelled.includes(
            self.job.campaign, self.lease.message.enqueued_at
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
        recorded = earlier.images | self.recorded
        is_unsure |= self._may_be_stored or self.stored != self.recorded
        return record.with_images(recorded, is_unsure=is_unsure)

    @property
    def _may_be_stored(self) -> bool:
        """Whether one of its images may be stored that is not in `stored`."""
        in_doubt = (getattr(each.error, "outcome_is_unknown", False) for each in self.failures)
        return self._uploads > 0 or any(in_doubt)

    def image_failed(self, index: int, error: errors.FleetError) -> None:
        """The others go on, unless they would fail as well."""
        self.failures.append(FailedImage(index, error))
        self.images_to_store -= 1
        most = max(FAILED_IMAGES, len(self.stored) // STORED_PER_FAILED)
        if isinstance(error, errors.JobError) or len(self.failures) > most:
            self.is_stopping = True

    def fault_of(self, error: Exception) -> errors.FleetError:
        """*error*; for a bug of ours one that is retried, as that could end all workers."""
        if isinstance(error, errors.FleetError):
            return error
        log.error(
            "job %s hit a bug",
            self.id,
            exc_info=error,
            extra={"action": "job_defect", "job_id": self.id},
        )
        return errors.TransientError(f"{type(error).__name__}: {error}")

    def reason(self, error: errors.FleetError) -> str:
        """Why it failed; of a job of several images also which one failed, and what is stored."""
        if self.job is None or self.job.images_to_draw == 1:
            is_of_chain = self.job is not None and self.job.stages > 1
            return f"{self._stage}: {error.message}" if is_of_chain else error.message
        failed = next((each for each in self.failures if each.error is error), None)
        which = f"image {failed.index}: " if failed else ""
        stored = shown_images(self.stored) or "none"
        return f"{which}{error.message}; of its {self.job.images} images are stored: {stored}"

    @property
    def _stage(self) -> str:
        return f"stage {self.job.stage} of {self.job.stages}" if self.job else ""

    def take_records(self) -> tuple[list[Record], list[Record]]:
        """Takes `records` and `again`, but for the record that says that the job is complete.

        That is its last image's, and is stored with the job's end.
        """
        taken: tuple[list[Record], list[Record]] = ([], [])
        for kept, some in zip((self.records, self.again), taken, strict=True):
            some += [each for each in kept if not self._is_last(each)]
            kept[:] = [each for each in kept if self._is_last(each)]
        return taken

    def mark_completed(self) -> None:
        """Every image is stored: the record of the last says so."""
        if self.job is None or self.job.images_to_draw == 1:
            return
        last = self.job.images - 1
        if not any(map(self._is_last, (*self.records, *self.again))):
            # An earlier delivery has recorded it, while others were missing.
            self.again.append(stored.record(self.job, self.source, last))
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


@dataclass(slots=True, eq=False)
class BegunJob:
    """A job and its images that the engine has not been given yet.

    They share what was prepared for the first: their prompts and their LoRAs in memory.
    """

    entry: InFlightJob
    requests: deque[tuple[int, contract.ImageRequest]]
    """The requests left, each with its image's index."""
    first: contract.PreparedRequest

    def take(self) -> tuple[InFlightImage, contract.PreparedRequest]:
        """The next image."""
        entry = self.entry
        if entry.job is None:
            raise RuntimeError("read the job first")
        index, request = self.requests.popleft()
        prepared = self.first
        if request is not prepared.request:
            dataclass_of_engine: Any = prepared
            prepared = dataclasses.replace(dataclass_of_engine, request=request)
        size = final = request.width, request.height
        if (last := request.upscale or request.hires) is not None:
            final = last.width, last.height
        elif entry.overlay is not None:
            final = entry.overlay.size
        image = InFlightImage(entry, entry.job, index, size, final, request.embeddings)
        return image, prepared


class Turns:
    """Lets every other image be one of a job that is not begun, while there are both.

    So neither does a job of a thousand images hold up the others, nor they it.
    """

    def __init__(self, most_new: int) -> None:
        """*most_new*: jobs that may wait here to be begun; then `put` waits."""
        self._new: asyncio.Queue[InFlightJob] = asyncio.Queue(most_new)
        self._begun: deque[BegunJob] = deque()
        self._waiting = asyncio.Semaphore(0)
        self._was_new = False

    async def put(self, entry: InFlightJob) -> None:
        """A job that is not begun."""
        await self._new.put(entry)
        self._waiting.release()

    def go_on(self, job: BegunJob) -> None:
        """A job with images left; others that are begun come first."""
        self._begun.append(job)
        self._waiting.release()

    async def next(self) -> InFlightJob | BegunJob:
        await self._waiting.acquire()
        self._was_new = not self._new.empty() and not (self._was_new and self._begun)
        return self._new.get_nowait() if self._was_new else self._begun.popleft()
