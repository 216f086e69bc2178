"""A campaign's records in storage, of its images and of its failed jobs.

Millions of images are summed up while they are listed: the memory needed depends on the hours and
the workers, not on the images.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from fleet.results.files import image_name
from imagefleet import errors
from imagefleet.job import image_record
from imagefleet.job.image_record import ImageRecord
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage import dead_letter, dead_letter_queue, protocol

#: The resolution, in seconds, of an image's time in the worker: few distinct values.
_TIME_STEP = 0.05

#: Records are untrusted: no number of forged names may fill the memory.
_MAX_WORKERS = 50_000
_MAX_FAILURE_KINDS = 5_000
_MAX_MODELS = 1_000
_MAX_MODEL_TIMES = 200_000

#: $/h, above that of any worker.
_MAX_PRICE = 1_000

#: The most seconds of a record, some two months; a record's time is what a worker's clock says.
_MAX_SECONDS = 5_000_000

#: The most reasons for damage that are kept.
_SHOWN_REASONS = 10


@dataclass(slots=True)
class WorkerRecord:
    """One run of a worker; times are those of the storage."""

    name: str
    gpu: str | None
    dollars_per_hour: float | None
    start_up_seconds: float
    first_pull_at: datetime
    last_image_at: datetime
    images: int = 0

    @property
    def began_at(self) -> datetime:
        return self.first_pull_at - timedelta(seconds=self.start_up_seconds)

    @property
    def seconds(self) -> float:
        """Seconds of its start-up, plus from its first pull of the campaign to its last image."""
        return (self.last_image_at - self.began_at).total_seconds()

    @property
    def images_per_second(self) -> float | None:
        """Images per second while it worked; None after a single image."""
        working = (self.last_image_at - self.first_pull_at).total_seconds()
        return self.images / working if working > 0 and self.images > 1 else None


@dataclass(frozen=True, slots=True)
class SampleName:
    """An image drawn as a sample."""

    blob: str
    job: str


@dataclass(slots=True)
class Skipped:
    """What is left out because it is damaged: numbers, and the first reasons."""

    records: int = 0
    samples: int = 0
    reasons: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.records or self.samples)

    def add_record(self, blob: str, reason: str) -> None:
        self.records += 1
        self._note(blob, reason)

    def add_sample(self, blob: str, reason: str) -> None:
        self.samples += 1
        self._note(blob, reason)

    def _note(self, blob: str, reason: str) -> None:
        if len(self.reasons) < _SHOWN_REASONS:
            self.reasons.append(printable(f"{blob[:200]}: {reason[:300]}"))


@dataclass(slots=True)
class Records:
    """Totals of a campaign."""

    campaign: str
    jobs: int = 0
    images: int = 0
    image_bytes: int = 0
    without_record: int = 0
    workers: dict[tuple[str, str], WorkerRecord] = field(default_factory=dict)
    stored_in_second: Counter[int] = field(default_factory=Counter)
    seconds_in_worker: Counter[int] = field(default_factory=Counter)
    deliveries: Counter[int] = field(default_factory=Counter)
    images_by_model: Counter[str] = field(default_factory=Counter)
    seconds_by_model: dict[tuple[tuple[str, str], str], float] = field(default_factory=dict)
    """Seconds by a worker's key and the model: start-up and changes of models included."""
    failed_by_error: Counter[tuple[str, str]] = field(default_factory=Counter)
    cancelled: int = 0
    are_listed: bool = False
    """Whether the images themselves were listed: earlier workers wrote no records."""
    failed_are_of_queue: bool = False
    samples: list[SampleName] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def failed(self) -> int:
        return self.failed_by_error.total()

    @property
    def began_at(self) -> datetime | None:
        """The start of the first worker; without any records, the first image."""
        starts = [worker.began_at for worker in self.workers.values()]
        if not starts and self.stored_in_second:
            return datetime.fromtimestamp(min(self.stored_in_second), UTC)
        return min(starts, default=None)

    @property
    def ended_at(self) -> datetime | None:
        """The last image."""
        ends = [worker.last_image_at for worker in self.workers.values()]
        if self.stored_in_second:
            ends.append(datetime.fromtimestamp(max(self.stored_in_second), UTC))
        return max(ends, default=None)

    def time_in_worker(self, share: float) -> float | None:
        """The quantile *share* of the seconds from pull to upload."""
        left = math.ceil(share * self.seconds_in_worker.total())
        for steps, count in sorted(self.seconds_in_worker.items()):
            left -= count
            if left <= 0:
                return steps * _TIME_STEP
        return None


@dataclass(frozen=True, slots=True)
class _Image:
    """What is counted of an image; *worker* is None where it is not known."""

    blob: str
    job: str
    size_bytes: int
    stored_at: datetime
    is_first_of_job: bool = False
    worker: str | None = None
    started_at: str = ""
    gpu: str | None = None
    model: str | None = None
    price_per_hour: float | None = None
    start_up_seconds: float = 0
    seconds: float = 0
    attempts: int = 1
    is_damaged: bool = False


async def read_records(storage: protocol.Storage, campaign: str, samples: int) -> Records:
    """Reads a campaign's records and draws *samples* random images.

    The sample is the same each time, as long as the records are.
    """
    records = Records(campaign)
    sampler = _Sampler(campaign, samples)
    async for record in reader.images(storage, campaign, records.skipped.add_record):
        if (image := _of_record(record, records)) is not None:
            sampler.add(image)
            _count_image(records, image)
    async for ended in reader.ended(storage, campaign, records.skipped.add_record):
        if ended.outcome == "failed":
            _count_failure(records, ended.error or "", ended.reason or "")
        else:
            records.cancelled += 1
    has_records = bool(records.images or records.failed or records.cancelled)
    if not records.images:
        await _list_images(storage, records, sampler)
    if not has_records:
        await _read_poison_queue(storage, records)
    records.samples = sorted(sampler.drawn, key=lambda sample: sample.blob)
    return records


async def _list_images(storage: protocol.Storage, records: Records, sampler: _Sampler) -> None:
    """Counts the images of workers of an earlier version, one by one."""
    async for blob in storage.blobs.records(f"{records.campaign}/"):
        records.are_listed = True
        image = _of_blob(blob, records)
        sampler.add(image)
        _count_image(records, image)


async def _read_poison_queue(storage: protocol.Storage, records: Records) -> None:
    """Counts the messages of failed jobs of workers of an earlier version."""
    records.failed_are_of_queue = True
    async for entry in dead_letter_queue.browse(storage, dead_letter_queue.Selection()):
        failed = entry.record
        if failed and (failed.campaign or DEFAULT_CAMPAIGN) == records.campaign:
            _count_failure(records, failed.error, failed.reason)


class _Sampler:
    """Reservoir sampling: each image is equally likely, and one reading is enough."""

    def __init__(self, campaign: str, samples: int) -> None:
        self.drawn: list[SampleName] = []
        self._samples = samples
        self._seen = 0
        self._generator = random.Random(campaign)  # noqa: S311 - no secret

    def add(self, image: _Image) -> None:
        self._seen += 1
        if len(self.drawn) < self._samples:
            self.drawn.append(_sample(image))
        elif (place := self._generator.randrange(self._seen)) < self._samples:
            self.drawn[place] = _sample(image)


def _sample(image: _Image) -> SampleName:
    return SampleName(image.blob, printable(image.job[:200]))


def _of_record(record: Record, records: Records) -> _Image | None:
    blob = record.blob or ""
    if image_name(blob, records.campaign) is None:
        records.skipped.add_record(blob, "is not the name of an image of this campaign")
        return None
    price = record.price_per_hour
    if price is not None and price > _MAX_PRICE:
        records.skipped.add_record(blob, f"its price is above {_MAX_PRICE:,} $/h")
        return None
    return _Image(
        blob,
        record.id,
        record.size_bytes or 0,
        record.at,
        is_first_of_job=record.completes_job,
        worker=None if record.seconds is None else printable(record.worker),
        started_at=record.started_at.isoformat() if record.started_at else "",
        gpu=printable(record.gpu) if record.gpu else None,
        model=printable(record.model) if record.model else None,
        price_per_hour=price,
        start_up_seconds=record.start_up_seconds,
        seconds=record.seconds or 0,
        attempts=record.attempts,
    )


def _of_blob(blob: protocol.BlobRecord, records: Records) -> _Image:
    job = blob.metadata.get("job", _stem(blob))
    unknown = _Image(blob.name, job, blob.size_bytes, blob.created_at)
    try:
        facts = image_record.read(blob.metadata)
    except errors.JobError as error:
        records.skipped.add_record(blob.name, error.message)
        return replace(unknown, is_damaged=True)
    if facts is None or facts.seconds is None:
        return unknown
    return replace(
        unknown,
        is_first_of_job=_counts_job(blob, facts),
        started_at=facts.started_at,
        **facts.facts(),
    )


def _counts_job(blob: protocol.BlobRecord, facts: ImageRecord) -> bool:
    """Whether it is the image by which its job is counted, of several stages the last.

    Else the first, whose name has no number or the number 0.
    """
    if facts.stages > 1:
        return facts.stage == facts.stages
    return _stem(blob) in {facts.job, f"{facts.job}-0"}


def _stem(blob: protocol.BlobRecord) -> str:
    return blob.name.rpartition("/")[2].rpartition(".")[0]


def _count_failure(records: Records, error: str, reason: str) -> None:
    kind = (printable(error[:200]), printable(reason[: dead_letter.MAX_REASON_CHARACTERS]))
    is_known = kind in records.failed_by_error
    if not is_known and len(records.failed_by_error) >= _MAX_FAILURE_KINDS:
        kind = ("other errors", "")
    records.failed_by_error[kind] += 1


def _count_image(records: Records, image: _Image) -> None:
    records.images += 1
    records.image_bytes += image.size_bytes
    model = image.model
    if model not in records.images_by_model and len(records.images_by_model) >= _MAX_MODELS:
        model = None
    if model:
        records.images_by_model[model] += 1
    second = int(image.stored_at.timestamp())
    if second in records.stored_in_second or len(records.stored_in_second) < _MAX_SECONDS:
        records.stored_in_second[second] += 1
    if image.is_damaged:
        return
    if image.worker is None:
        records.without_record += 1
        return
    # A container that restarts on the same machine keeps its name, but not its start time.
    key = (image.worker, image.started_at)
    if key not in records.workers and len(records.workers) >= _MAX_WORKERS:
        records.skipped.add_record(image.blob, f"there are more than {_MAX_WORKERS:,} workers")
        return
    records.jobs += image.is_first_of_job
    records.seconds_in_worker[math.ceil(image.seconds / _TIME_STEP)] += 1
    records.deliveries[image.attempts] += 1
    pulled_at = image.stored_at - timedelta(seconds=image.seconds)
    if key not in records.workers:
        records.workers[key] = WorkerRecord(
            name=image.worker,
            gpu=image.gpu,
            dollars_per_hour=image.price_per_hour,
            start_up_seconds=image.start_up_seconds,
            first_pull_at=pulled_at,
            last_image_at=image.stored_at,
        )
    worker = records.workers[key]
    counted = worker.seconds if worker.images else 0.0
    worker.images += 1
    worker.first_pull_at = min(worker.first_pull_at, pulled_at)
    worker.last_image_at = max(worker.last_image_at, image.stored_at)
    times = records.seconds_by_model
    if model and ((key, model) in times or len(times) < _MAX_MODEL_TIMES):
        # One model is drawn at a time, so what was added since the last image is this one's.
        times[key, model] = times.get((key, model), 0.0) + worker.seconds - counted
