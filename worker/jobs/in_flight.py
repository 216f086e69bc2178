"""A leased job and its images on their way through the worker, and what of them is stored."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from imagefleet import concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import FleetError, JobError
from imagefleet.files.marks import Mark
from imagefleet.files.pack import Member
from imagefleet.job.message import DEFAULT_CAMPAIGN, DELIVERIES_FIELD, Job
from imagefleet.job.sizes import Size
from imagefleet.records.record import Record
from imagefleet.storage.deliveries import (
    SUSPECT_AFTER,
    Deliveries,
    shown_images,
)
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.telemetry.logs import log
from imagefleet.telemetry.metrics import MAX_MODELS, OTHER_MODELS
from imagefleet.validation import JSONDict
from worker.engine.contract import Embedding, ImageRequest, Pixels, PreparedRequest
from worker.files.manifest import FutureHash
from worker.inputs.img2img import Overlay
from worker.leases import Lease
from worker.metrics import Outcome, WorkerMetrics

#: A delivery begins no more images once more than these have failed, and more than a tenth of those
#: stored: what the job, or the node, gets wrong each time is not tried a thousand times.
FAILED_IMAGES = 2
STORED_PER_FAILED = 10


@dataclass(eq=False)
class InFlightJob:
    """One leased message, or one job of a bundle.

    It is settled once: acknowledged, dead-lettered, retried or released; what becomes of a bundle's
    message follows from all of its jobs.

    Its images are drawn and stored one by one, between those of other jobs. Two stages may want to
    settle it at the same time; the first to call `settle` does it. Its images share what was
    prepared for the first: their prompts and their LoRAs in memory.
    """

    lease: Lease
    #: The bundle that it came in; None for a message of its own.
    bundle: "Bundle | None" = None
    #: The job's own message in a bundle.
    body: str = ""
    pulled_at: float = field(default_factory=time.monotonic)
    job: Job | None = None
    #: The job as it is drawn: with the worker's accelerator, if it has one.
    drawn: Job | None = None
    #: The requests that the engine has not been given yet, each with its image's index.
    requests: deque[tuple[int, ImageRequest]] = field(default_factory=deque)
    #: The first of the requests, prepared.
    prepared: PreparedRequest | None = None
    #: Number of the job's images that the engine has not finished.
    ahead: int = 1
    #: Rank of its priority; 0 is the highest.
    level: int = 0
    #: True if it goes before all others here: they are of lower priority.
    is_urgent: bool = False
    images_to_submit: int = 0
    images_to_store: int = 0
    images_written: int = 0
    settled: bool = False
    is_stopping: bool = False  # no more of its images are begun, since some have failed
    is_cancelled: bool = False  # some of its images are left out
    #: Images with scores that wait for those of the job's others.
    judged: "list[Generated]" = field(default_factory=list)
    #: How many of its images are stored; None of a job that is not judged yet, or never.
    kept: int | None = None
    has_ended: bool = False  # none of its images is in the making
    is_first_awaited: bool = False  # its first image is in the making, of several
    #: Uploads of the images that wait for the first one to be stored.
    waiting: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    #: Errors of the images that failed in this delivery, by index.
    failures: dict[int, FleetError] = field(default_factory=dict)
    #: The indices of the job's images that are stored, by whomever.
    stored: set[int] = field(default_factory=set)
    #: Records of images that this worker has stored; written as the job ends.
    records: list[Record] = field(default_factory=list)
    #: Records of the job's images that found their names taken.
    again: list[Record] = field(default_factory=list)
    #: Hashes of its LoRAs, by their names in its prompt; computed while it is drawn.
    lora_hashes: dict[str, FutureHash] = field(default_factory=dict)
    #: SHA-256 of the VAE and extra checkpoints the job names, keyed by job field.
    model_hashes: dict[str, FutureHash] = field(default_factory=dict)
    #: The picture that its images are pasted into, for inpainting of a masked part.
    overlay: Overlay | None = None
    #: AUTOMATIC1111's text in the file of the image that the job enlarges.
    source_parameters: str = ""
    _uploads: int = 0
    _upload_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_since_pulled(self) -> float:
        """To a millisecond, as records have it."""
        return round(time.monotonic() - self.pulled_at, 3)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """One of its images is being stored, and its record added, during the block."""
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1
            self._upload_ended.set()

    def take_image(self) -> tuple["InFlightImage", PreparedRequest]:
        """Removes and returns the next image for the engine."""
        assert self.drawn is not None  # noqa: S101 - it was prepared
        index, request = self.requests.popleft()
        prepared: Any = self.prepared  # a dataclass of the engine's
        if request is not prepared.request:
            prepared = replace(prepared, request=request)
        size = request.width, request.height
        image = InFlightImage(self, self.drawn, index, size, request, drawn_index=index)
        return image, prepared

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
        """Releases the job's other images once the first is stored or has failed."""
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
    def message(self) -> LeasedMessage:
        """The job's message; in a bundle as it would have been sent by itself."""
        message = self.lease.message
        return replace(message, body=self.body) if self.bundle else message

    @property
    def deliveries(self) -> Deliveries:
        """The record of how earlier deliveries of its message ended."""
        return Deliveries.of(self.lease.message)

    @property
    def is_redelivered(self) -> bool:
        """True if it may have been drawn before, also as a failed job that was sent again."""
        message = self.lease.message
        # A prompt with that word costs a look at the storage.
        return message.delivery_count > 1 or DELIVERIES_FIELD in message.body

    @property
    def is_suspect(self) -> bool:
        """True if the job may be what its workers died of."""
        return (
            self.lease.message.delivery_count > SUSPECT_AFTER
            and self.deliveries.is_suspect
        )

    @property
    def has_next_stage(self) -> bool:
        """True if its image is the input of a further stage."""
        return self.job is not None and self.job.stage < self.job.stages

    def is_of(self, cancelled: CancelledCampaigns) -> bool:
        """True if it or its campaign has been cancelled since it was sent."""
        return self.job is not None and cancelled.includes(
            self.job.campaign, self.lease.message.enqueued_at, self.job.id
        )

    @property
    def is_second_drawing(self) -> bool:
        return self.job is not None and self.job.verify

    @property
    def is_all_stored(self) -> bool:
        if self.job is None:
            return False
        return len(self.stored) >= (self.kept or self.job.images_to_draw)

    @property
    def id(self) -> str:
        """The job's id; its message's where it has none, or could not be read."""
        if self.bundle:
            return self.bundle.members[self]
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

    def image_failed(self, index: int, error: FleetError) -> None:
        """The others go on, unless they would fail as well, or may not be stored without it."""
        self.failures[index] = error
        most = max(FAILED_IMAGES, len(self.stored) // STORED_PER_FAILED)
        ends_others = isinstance(error, JobError) or (
            not index and self.is_first_awaited
        )
        if ends_others or len(self.failures) > most:
            self.is_stopping = True

    def log(self, level: int, text: str, action: str, **fields: Any) -> None:
        log.log(level, f"job {self.id} {text}", action=action, job_id=self.id, **fields)

    def reason(self, error: FleetError) -> str:
        """A failed job's reason; of several images also which one failed, and which are stored."""
        job = self.job
        if job is None or job.images_to_draw == job.stages == 1:
            return error.message
        if job.images_to_draw == 1:
            return f"stage {job.stage} of {job.stages}: {error.message}"
        failed = [index for index, each in self.failures.items() if each is error]
        which = f"image {failed[0]}: " if failed else ""
        stored = shown_images(self.stored) or "none"
        return (
            f"{which}{error.message}; of its {job.images} images are stored: {stored}"
        )

    def mark_completed(self) -> None:
        """Every image is stored and has a record here: that of the last says so."""
        if self.job is None or self.job.images_to_draw == 1:
            return
        for kept in (self.records, self.again):
            for place, record in enumerate(kept):
                if record.index == record.images - 1:
                    kept[place] = record.model_copy(update={"completes": True})


#: A job's id and digest; None as the digest of one that could not be read.
Key = tuple[str, str | None]


@dataclass(eq=False)
class Bundle:
    """The jobs of a leased bundle, and what this worker and others have stored of it."""

    lease: Lease
    name: str
    campaign: str
    #: The reason why none of its jobs may be drawn; None for a good bundle.
    problem: str | None
    #: Its jobs with their ids, in order.
    members: dict[InFlightJob, str] = field(default_factory=dict)
    #: How jobs have ended in this delivery.
    ends: dict[InFlightJob, Outcome] = field(default_factory=dict)
    #: Images that are in no part yet.
    images: dict[InFlightJob, Member] = field(default_factory=dict)
    #: Records of jobs that have ended without an image and are in no part yet.
    without: dict[InFlightJob, Record] = field(default_factory=dict)
    #: Number of parts that are known to be stored.
    parts: int = 0
    #: The records in these parts.
    found: dict[Key, Record] = field(default_factory=dict)
    #: Jobs whose records are in parts of this worker's.
    own: set[Key] = field(default_factory=set)
    #: Records of failed jobs that no part may hold, since they are not valid or not trusted.
    refused: dict[InFlightJob, Record] = field(default_factory=dict)
    #: Pause before what is left is delivered again.
    delay_seconds: float = 0.0
    #: True once the parts of earlier deliveries were read.
    is_read: bool = False
    #: True once no more of its jobs can end in this delivery.
    is_closed: bool = False
    #: Held while its parts are read or written.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Set when a part was stored, or a job has ended.
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    def stored(self, entry: InFlightJob) -> Record | None:
        """The record of a job's end that is in a part, whoever has written it."""
        digest = entry.job.stage_digest if entry.job else None
        return self.found.get((entry.id, digest))


@dataclass(eq=False)
class InFlightImage:
    """One image of a job in flight; *size* is (width, height) of its first pass or its source."""

    owner: InFlightJob
    job: Job
    index: int
    size: Size
    #: What the engine draws it by; None for an image that was drawn by others.
    request: ImageRequest | None = None
    #: Time at which the image was ready for the engine (monotonic seconds).
    ready_at: float = field(default_factory=time.monotonic)
    #: Its position among the images that are drawn; `index` is that among those stored.
    drawn_index: int = 0
    #: True once its estimate has dropped it, in time or too late.
    is_dropped: bool = False
    #: Facts of its record by its judges: scores, the job's dropped images, and its hash.
    facts: JSONDict = field(default_factory=dict)

    @property
    def embeddings(self) -> tuple[Embedding, ...]:
        """The embeddings that the job's prompts name."""
        return () if self.request is None else self.request.embeddings


#: An image with its pixels.
Generated = tuple[InFlightImage, Pixels]


@dataclass(frozen=True)
class EncodedImage:
    """A file's bytes, media type and SHA-256 (hex), and the size (width, height) of its image."""

    data: bytes
    content_type: str
    sha256: str
    size: Size
    mark: Mark | None = None
