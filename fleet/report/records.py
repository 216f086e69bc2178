"""A campaign's records in storage: the metadata of its images, and its failed jobs.

Millions of images are summed up while they are listed: the memory needed depends on the hours and
the workers, not on the images.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from imagefleet import errors
from imagefleet.job import image_record
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.redaction import printable
from imagefleet.storage import dead_letter, dead_letter_queue, protocol

#: The resolution, in seconds, of an image's time in the worker: few distinct values.
_TIME_STEP = 0.05

#: Records are untrusted: no number of forged names may fill the memory.
_MAX_WORKERS = 50_000
_MAX_FAILURE_KINDS = 5_000

#: Of what is damaged, each with its reason.
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
        """Its start-up, plus the time from its first pull of the campaign to its last image."""
        return (self.last_image_at - self.began_at).total_seconds()

    @property
    def images_per_second(self) -> float | None:
        """While it worked; None after a single image."""
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
    failed_by_error: Counter[tuple[str, str]] = field(default_factory=Counter)
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


async def read_records(storage: protocol.Storage, campaign: str, samples: int) -> Records:
    """Reads a campaign's records and draws *samples* random images.

    The sample is the same each time, as long as the images are.
    """
    records = Records(campaign)
    generator = random.Random(campaign)  # noqa: S311 - no secret
    async for blob in storage.blobs.records(f"{campaign}/"):
        _count_image(records, blob)
        # Reservoir sampling: each image is equally likely, and one listing is enough.
        if len(records.samples) < samples:
            records.samples.append(_sample(blob))
        elif (place := generator.randrange(records.images)) < samples:
            records.samples[place] = _sample(blob)
    records.samples.sort(key=lambda sample: sample.blob)
    async for entry in dead_letter_queue.browse(storage, dead_letter_queue.Selection()):
        if entry.record is not None and (entry.record.campaign or DEFAULT_CAMPAIGN) == campaign:
            _count_failure(records, entry.record)
    return records


def _sample(blob: protocol.BlobRecord) -> SampleName:
    return SampleName(blob.name, printable(blob.metadata.get("job", _stem(blob))[:200]))


def _stem(blob: protocol.BlobRecord) -> str:
    return blob.name.rpartition("/")[2].rpartition(".")[0]


def _count_failure(records: Records, failed: dead_letter.FailedJob) -> None:
    kind = (
        printable(failed.error[:200]),
        printable(failed.reason[: dead_letter.MAX_REASON_CHARACTERS]),
    )
    is_known = kind in records.failed_by_error
    if not is_known and len(records.failed_by_error) >= _MAX_FAILURE_KINDS:
        kind = ("other errors", "")
    records.failed_by_error[kind] += 1


def _count_image(records: Records, blob: protocol.BlobRecord) -> None:
    records.images += 1
    records.image_bytes += blob.size_bytes
    records.stored_in_second[int(blob.created_at.timestamp())] += 1
    try:
        facts = image_record.read(blob.metadata)
    except errors.JobError as error:
        records.skipped.add_record(blob.name, error.message)
        return
    if facts is None or facts.seconds is None:
        records.without_record += 1
        return
    # A container that restarts on the same machine keeps its name, but not its start time.
    key = (facts.worker, facts.started_at)
    if key not in records.workers and len(records.workers) >= _MAX_WORKERS:
        records.skipped.add_record(blob.name, f"there are more than {_MAX_WORKERS:,} workers")
        return
    # A job is counted at its first image, whose name has no number or the number 0.
    records.jobs += _stem(blob) in {facts.job, f"{facts.job}-0"}
    records.seconds_in_worker[math.ceil(facts.seconds / _TIME_STEP)] += 1
    records.deliveries[facts.attempt] += 1
    pulled_at = blob.created_at - timedelta(seconds=facts.seconds)
    if key not in records.workers:
        records.workers[key] = WorkerRecord(
            name=facts.worker,
            gpu=facts.gpu,
            dollars_per_hour=facts.price_per_hour,
            start_up_seconds=facts.start_up_seconds,
            first_pull_at=pulled_at,
            last_image_at=blob.created_at,
        )
    worker = records.workers[key]
    worker.images += 1
    worker.first_pull_at = min(worker.first_pull_at, pulled_at)
    worker.last_image_at = max(worker.last_image_at, blob.created_at)
