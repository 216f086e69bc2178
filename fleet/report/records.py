"""What the store itself tells of a campaign: the records beside its images, and its failed jobs.

Millions of images are read as one listing and kept as sums, so the memory that it takes follows
from the hours and the workers, not from the images.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from imagefleet.storage import dead_letter_queue, protocol

#: The folder of jobs that name no campaign, as `Job.blob_name` has it.
NO_CAMPAIGN = "default"

#: Of a time in a worker, in seconds: fine beside any image's, and few different values.
_TIME_STEP = 0.05


@dataclass(slots=True)
class WorkerRecord:
    """What one run of a worker left in the store; times are the store's."""

    name: str
    gpu: str | None
    dollars_per_hour: float | None
    start_up_seconds: float | None
    first_pull_at: datetime
    last_image_at: datetime
    images: int = 0

    @property
    def began_at(self) -> datetime:
        return self.first_pull_at - timedelta(seconds=self.start_up_seconds or 0)

    @property
    def seconds(self) -> float:
        """Its start-up, and from its first pull of the campaign to its last image."""
        return (self.last_image_at - self.began_at).total_seconds()

    @property
    def images_per_second(self) -> float | None:
        """While it worked; of a single image, no rate is known."""
        working = (self.last_image_at - self.first_pull_at).total_seconds()
        return self.images / working if working > 0 and self.images > 1 else None


@dataclass(slots=True)
class Records:
    """A campaign, summed up."""

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
    failed_in_second: Counter[int] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return self.failed_by_error.total()

    @property
    def began_at(self) -> datetime | None:
        """The first worker's start; without any record, the first image."""
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
        """From pull to stored, in seconds: of *share* of the images it was no more than this."""
        left = math.ceil(share * self.seconds_in_worker.total())
        for steps, count in sorted(self.seconds_in_worker.items()):
            left -= count
            if left <= 0:
                return steps * _TIME_STEP
        return None


async def read_records(storage: protocol.Storage, campaign: str, samples: int) -> Records:
    """Reads a campaign's records; *samples* of its images' names are chosen evenly, by chance.

    The choice is the same each time, as long as the images are.
    """
    records = Records(campaign)
    chance = random.Random(campaign)  # noqa: S311 - a sample, no secret
    async for blob in storage.blobs.records(f"{campaign}/"):
        _count_image(records, blob)
        # Reservoir sampling: every image has the same chance, and none is listed twice.
        if len(records.samples) < samples:
            records.samples.append(blob.name)
        elif (place := chance.randrange(records.images)) < samples:
            records.samples[place] = blob.name
    records.samples.sort()
    async for entry in dead_letter_queue.browse(storage, dead_letter_queue.Selection()):
        if entry.record is not None and (entry.record.campaign or NO_CAMPAIGN) == campaign:
            records.failed_by_error[entry.record.error, entry.record.reason] += 1
            records.failed_in_second[int(entry.record.failed_at.timestamp())] += 1
    return records


def _count_image(records: Records, blob: protocol.BlobRecord) -> None:
    records.images += 1
    records.image_bytes += blob.size_bytes
    records.stored_in_second[int(blob.created_at.timestamp())] += 1
    facts = blob.metadata
    seconds, job = _number(facts, "seconds"), facts.get("job")
    if seconds is None or job is None:
        records.without_record += 1
        return
    # The first image of a job stands for it: its name has no number, or the number 0.
    stem = blob.name.rpartition("/")[2].rpartition(".")[0]
    records.jobs += stem in {job, f"{job}-0"}
    records.seconds_in_worker[math.ceil(seconds / _TIME_STEP)] += 1
    records.deliveries[int(_number(facts, "attempt") or 1)] += 1
    _count_for_worker(records, blob, seconds)


def _count_for_worker(records: Records, blob: protocol.BlobRecord, seconds: float) -> None:
    facts = blob.metadata
    # A container that starts again on the same machine has the same name, not the same start.
    key = (facts.get("worker", "?"), facts.get("started_at", ""))
    pulled_at = blob.created_at - timedelta(seconds=seconds)
    worker = records.workers.get(key)
    if worker is None:
        worker = records.workers[key] = WorkerRecord(
            name=key[0],
            gpu=facts.get("gpu"),
            dollars_per_hour=_number(facts, "price_per_hour"),
            start_up_seconds=_number(facts, "start_up_seconds"),
            first_pull_at=pulled_at,
            last_image_at=blob.created_at,
        )
    worker.images += 1
    worker.first_pull_at = min(worker.first_pull_at, pulled_at)
    worker.last_image_at = max(worker.last_image_at, blob.created_at)


def _number(facts: Mapping[str, str], name: str) -> float | None:
    try:
        number = float(facts[name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None
