"""Sums up a campaign's records: of its images, and of its failed and cancelled jobs.

Memory depends on the hours and the workers, not on the images.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from imagefleet.records import reader
from imagefleet.records.record import Record, hashed
from imagefleet.records.stored import Damaged
from imagefleet.redaction import printable
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage

#: The resolution, in seconds, of an image's time in the worker: few distinct values.
_TIME_STEP = 0.05

#: Records are untrusted: no number of forged names may fill the memory.
_MAX_WORKERS = 50_000
_MAX_FAILURE_KINDS = 5_000
_MAX_MODELS = 1_000
_MAX_MODEL_TIMES = 200_000

#: The most seconds of a record, some two months; a record's time is what a worker's clock says.
_MAX_SECONDS = 5_000_000


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


@dataclass(slots=True)
class Records:
    """Totals of a campaign."""

    campaign: str
    jobs: int = 0
    images: int = 0
    image_bytes: int = 0
    workers: dict[tuple[str, str], WorkerRecord] = field(default_factory=dict)
    stored_in_second: Counter[int] = field(default_factory=Counter)
    seconds_in_worker: Counter[int] = field(default_factory=Counter)
    deliveries: Counter[int] = field(default_factory=Counter)
    images_by_model: Counter[str] = field(default_factory=Counter)
    seconds_by_model: dict[tuple[tuple[str, str], str], float] = field(default_factory=dict)
    """Seconds by a worker's key and the model: start-up and changes of models included."""
    failed_by_error: Counter[tuple[str, str]] = field(default_factory=Counter)
    cancelled: int = 0
    samples: list[tuple[str, str]] = field(default_factory=list)
    """Images drawn as samples: blobs and their jobs."""
    damaged: Damaged = field(default_factory=Damaged)
    damaged_samples: int = 0

    @property
    def failed(self) -> int:
        return self.failed_by_error.total()

    @property
    def began_at(self) -> datetime | None:
        """The start of the first worker."""
        return min((worker.began_at for worker in self.workers.values()), default=None)

    @property
    def ended_at(self) -> datetime | None:
        """The last image."""
        return max((worker.last_image_at for worker in self.workers.values()), default=None)

    def time_in_worker(self, share: float) -> float | None:
        """The quantile *share* of the seconds from pull to upload."""
        left = math.ceil(share * self.seconds_in_worker.total())
        for steps, count in sorted(self.seconds_in_worker.items()):
            left -= count
            if left <= 0:
                return steps * _TIME_STEP
        return None


async def read_records(storage: Storage, campaign: str, samples: int) -> Records:
    """Reads a campaign's records and draws *samples* random images.

    The sample is the same each time, as long as the records are: the names with the least hashes.
    """
    records = Records(campaign)
    drawn: list[tuple[int, str, str]] = []
    async for record in reader.images(storage, campaign, records.damaged):
        blob = record.blob or ""
        heapq.heappush(drawn, (-hashed(blob), blob, record.id))
        if len(drawn) > samples:
            heapq.heappop(drawn)
        _count_image(records, record)
    async for ended in reader.ended(storage, campaign, records.damaged):
        if ended.outcome == "failed":
            _count_failure(records, ended.error or "", ended.reason or "")
        else:
            records.cancelled += 1
    records.samples = sorted((blob, job) for _, blob, job in drawn)
    return records


def _count_failure(records: Records, error: str, reason: str) -> None:
    kind = (printable(error), printable(reason[: dead_letter.MAX_REASON_CHARACTERS]))
    is_known = kind in records.failed_by_error
    if not is_known and len(records.failed_by_error) >= _MAX_FAILURE_KINDS:
        kind = ("other errors", "")
    records.failed_by_error[kind] += 1


def _count_image(records: Records, record: Record) -> None:
    records.images += 1
    records.image_bytes += record.size_bytes or 0
    model = printable(record.model) if record.model else None
    if model not in records.images_by_model and len(records.images_by_model) >= _MAX_MODELS:
        model = None
    if model:
        records.images_by_model[model] += 1
    second = int(record.at.timestamp())
    if second in records.stored_in_second or len(records.stored_in_second) < _MAX_SECONDS:
        records.stored_in_second[second] += 1
    # A container that restarts on the same machine keeps its name, but not its start time.
    started_at = record.started_at.isoformat() if record.started_at else ""
    key = (printable(record.worker), started_at)
    if key not in records.workers and len(records.workers) >= _MAX_WORKERS:
        records.damaged.add(record.blob or "", f"there are more than {_MAX_WORKERS:,} workers")
        return
    seconds = record.seconds or 0
    records.jobs += record.completes_job
    records.seconds_in_worker[math.ceil(seconds / _TIME_STEP)] += 1
    records.deliveries[record.attempts] += 1
    pulled_at = record.at - timedelta(seconds=seconds)
    if key not in records.workers:
        records.workers[key] = WorkerRecord(
            name=key[0],
            gpu=printable(record.gpu) if record.gpu else None,
            dollars_per_hour=record.price_per_hour,
            start_up_seconds=record.start_up_seconds,
            first_pull_at=pulled_at,
            last_image_at=record.at,
        )
    worker = records.workers[key]
    counted = worker.seconds if worker.images else 0.0
    worker.images += 1
    worker.first_pull_at = min(worker.first_pull_at, pulled_at)
    worker.last_image_at = max(worker.last_image_at, record.at)
    times = records.seconds_by_model
    if model and ((key, model) in times or len(times) < _MAX_MODEL_TIMES):
        # One model is drawn at a time, so what was added since the last image is this one's.
        times[key, model] = times.get((key, model), 0.0) + worker.seconds - counted
