"""Sums up a campaign's records: of its images, and of its jobs that ended without one.

Memory depends on the hours and the workers, not on the images.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from fleet.report import processes
from fleet.report.processes import OwnTime, WorkerKey, worker_key
from imagefleet.records import catalog, dedupe, ledger, reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.record import UNKNOWN_WORKER, Record, hashed
from imagefleet.redaction import printable
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage
from imagefleet.storage.proofs import Proofs

#: The resolution, in seconds, of an image's time in the worker: few distinct values.
_TIME_STEP = 0.05

#: Records are untrusted: no number of forged names may fill the memory.
_MAX_WORKERS = 50_000
_MAX_FAILURE_KINDS = 5_000
_MAX_MODELS = 1_000

#: The most seconds of a record, some two months; a record's time is what a worker says.
_MAX_SECONDS = 5_000_000


@dataclass(slots=True)
class Worker:
    """One run of a worker by the storage's times; dollars are None if its price is unknown.

    Its speed, cost and slowness are computed once all records are read.
    """

    name: str
    gpu: str | None
    dollars_per_hour: float | None
    start_up_seconds: float
    first_pull_at: datetime
    first_image_at: datetime
    last_image_at: datetime
    images: int = 0
    #: Images that it drew, and `imagefleet redo` has replaced.
    replaced: int = 0
    #: Images that it drew, and another worker had stored.
    doubled: int = 0
    #: Duration of its start-up and of its work, from its first pull to its last drawing.
    seconds: float = 0.0
    #: While it worked; None after a single image.
    images_per_second: float | None = None
    gpu_dollars: float | None = None
    is_slow: bool = False

    @property
    def drawn(self) -> int:
        return self.images + self.replaced + self.doubled

    @property
    def began_at(self) -> datetime:
        return self.first_pull_at - timedelta(seconds=self.start_up_seconds)


@dataclass
class Model:
    """The images of one model, and its part of the workers' times and costs.

    Loading it is included. Dollars are None if the price of one of its workers is unknown.
    """

    name: str
    images: int = 0
    gpu_seconds: float = 0.0
    gpu_dollars: float | None = 0.0
    images_per_dollar_gpu_only: float | None = None


@dataclass
class Records:
    """Totals of a campaign; *given_price* ($/h) overrides what its workers recorded."""

    campaign: str
    given_price: float | None = None
    jobs: int = 0
    images: int = 0
    image_bytes: int = 0
    #: Images in packs.
    packed: int = 0
    packs: set[str] = field(default_factory=set)
    images_redelivered: int = 0
    workers: dict[WorkerKey, Worker] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    stored_in_second: Counter[int] = field(default_factory=Counter)
    seconds_in_worker: Counter[int] = field(default_factory=Counter)
    failed_by_error: Counter[tuple[str, str]] = field(default_factory=Counter)
    cancelled: int = 0
    #: Images that were judged and do not count, and jobs that kept none.
    images_dropped: int = 0
    dropped: int = 0
    #: Images that `imagefleet redo` has replaced, of workers without a record.
    replaced_unrecorded: int = 0
    #: Records of the images that were chosen as samples.
    samples: list[Record] = field(default_factory=list)
    damaged: Damaged = field(default_factory=Damaged)
    #: Seconds of each worker by the model that it drew with.
    seconds_of_models: dict[WorkerKey, dict[str, float]] = field(default_factory=dict)
    #: Checks proofs of machines; where they are used, unproven records add no time or cost.
    proofs: Proofs | None = None
    _unproven: set[int] = field(default_factory=set)

    @property
    def failed(self) -> int:
        return self.failed_by_error.total()

    def time_in_worker(self, share: float) -> float | None:
        """The quantile *share* of the seconds from pull to upload."""
        left = math.ceil(share * self.seconds_in_worker.total())
        for steps, count in sorted(self.seconds_in_worker.items()):
            left -= count
            if left <= 0:
                return steps * _TIME_STEP
        return None

    def model(self, record: Record) -> Model | None:
        """The model that drew an image, if it is known."""
        name = printable(record.model or "")
        if not name or not _has_room(self.models, name, _MAX_MODELS):
            return None
        return self.models.setdefault(name, Model(name))

    def is_credited(self, record: Record) -> bool:
        """True if it says which worker drew its image, proven where the fleet uses proofs."""
        if record.worker == UNKNOWN_WORKER:
            return False
        if self.is_proven(record):
            return True
        if self.proofs is not None and self.proofs.are_hidden:
            return False  # of all of them, which is said once
        if (drawing := _drawing(record)) not in self._unproven:
            self._unproven.add(drawing)
            self.damaged.add(
                record.blob or "",
                f"no proof that {record.worker} has drawn it: its time and cost are left out",
            )
        return False

    def is_proven(self, record: Record) -> bool:
        return self.proofs is None or self.proofs.accept(
            record.worker, record.claims, record.proof
        )

    def add_time(self, record: Record) -> WorkerKey:
        """Adds the time in which an image was drawn to its worker's and its model's."""
        key = worker_key(record)
        if not _has_room(self.workers, key, _MAX_WORKERS):
            self.damaged.add(
                record.blob or "", f"there are more than {_MAX_WORKERS:,} workers"
            )
            return key
        pulled_at = record.at - timedelta(seconds=record.seconds or 0)
        if key not in self.workers:
            self.workers[key] = Worker(
                name=key[0],
                gpu=printable(record.gpu) if record.gpu else None,
                dollars_per_hour=self.given_price or record.price_per_hour or None,
                start_up_seconds=record.start_up_seconds,
                first_pull_at=pulled_at,
                first_image_at=record.at,
                last_image_at=record.at,
            )
        worker = self.workers[key]
        worker.first_pull_at = min(worker.first_pull_at, pulled_at)
        worker.first_image_at = min(worker.first_image_at, record.at)
        worker.last_image_at = max(worker.last_image_at, record.at)
        before = worker.seconds
        worker.seconds = (worker.last_image_at - worker.began_at).total_seconds()
        if (model := self.model(record)) is not None:
            # One model is drawn at a time, so what was added since the last image is this one's.
            seconds_of = self.seconds_of_models.setdefault(key, {})
            seconds = worker.seconds - before
            seconds_of[model.name] = seconds_of.get(model.name, 0.0) + seconds
        return key

    def share(self, own: Mapping[WorkerKey, OwnTime]) -> None:
        """Leaves workers that drew for other campaigns, too, their *own* time for this one.

        Gives the models their parts of the workers' times and costs.
        """
        for key, worker in self.workers.items():
            in_full = worker.seconds
            if (part := own.get(key)) is not None:
                worker.seconds, worker.start_up_seconds = part
            price = worker.dollars_per_hour
            for name, of_model in self.seconds_of_models.get(key, {}).items():
                model = self.models[name]
                seconds = of_model * worker.seconds / in_full if in_full else 0.0
                model.gpu_seconds += seconds
                if price is None or model.gpu_dollars is None:
                    model.gpu_dollars = None
                else:
                    model.gpu_dollars += seconds / 3600 * price


async def read_records(
    storage: Storage, campaign: str, samples: int, given_price: float | None = None
) -> Records:
    """Reads a campaign's records and draws *samples* random images.

    The sample is the same each time, as long as the records are: the names with the least hashes.
    """
    records = Records(campaign, given_price, proofs=await storage.proofs())
    known = await ledger.known(storage, campaign)
    drawn: list[tuple[int, int, Record]] = []
    async for record in reader.images(storage, campaign, records.damaged, known=known):
        _count_image(records, record)
        heapq.heappush(drawn, (-hashed(record.blob or ""), records.images, record))
        if len(drawn) > samples:
            heapq.heappop(drawn)
    await _count_unused(storage, records)
    async for ended in reader.ended(storage, campaign, records.damaged, known=known):
        if ended.outcome == "failed":
            reason = (ended.reason or "")[: dead_letter.MAX_REASON_CHARACTERS]
            kind = (printable(ended.error or ""), printable(reason))
            if not _has_room(records.failed_by_error, kind, _MAX_FAILURE_KINDS):
                kind = ("other errors", "")
            records.failed_by_error[kind] += 1
        elif ended.outcome == "dropped":
            records.dropped += 1
            # A near-duplicate is stored, and counts beside those of its job that are not.
            records.images_dropped += len(ended.dropped) + bool(ended.phash)
            # Workers prove images alone: where they do, an end has no proof, and is not damaged.
            if ended.worker != UNKNOWN_WORKER and records.is_proven(ended):
                records.add_time(ended)
        else:
            records.cancelled += 1
    began_at = {key: worker.began_at for key, worker in records.workers.items()}
    records.share(
        await processes.own_times(storage, campaign, began_at, records.is_proven)
    )
    records.samples = sorted(
        (record for *_, record in drawn), key=lambda each: each.blob or ""
    )
    return records


def _has_room(found: Counter[Any] | dict[Any, Any], key: object, most: int) -> bool:
    return key in found or len(found) < most


def _count_image(records: Records, record: Record) -> None:
    records.images += 1
    records.image_bytes += record.size_bytes or 0
    if record.pack is not None:
        records.packed += 1
        records.packs.add(record.pack)
    if (model := records.model(record)) is not None:
        model.images += 1
    second = int(record.at.timestamp())
    if _has_room(records.stored_in_second, second, _MAX_SECONDS):
        records.stored_in_second[second] += 1
    records.images_dropped += len(record.dropped)
    records.jobs += record.completes_job
    records.images_redelivered += record.attempts > 1
    if not records.is_credited(record):
        return
    records.seconds_in_worker[math.ceil((record.seconds or 0) / _TIME_STEP)] += 1
    if (worker := records.workers.get(records.add_time(record))) is not None:
        worker.images += 1


async def _count_unused(storage: Storage, records: Records) -> None:
    """Counts what was drawn, and paid, besides the images: replaced since, or stored by another."""
    shards = await catalog.shards_of(storage, records.campaign)
    # With proofs all are read: another record of an image may stand in the place of the proven one.
    if records.proofs is None and not {each.kind for each in shards} & {
        "again",
        "replaced",
    }:
        return
    noted: dict[int, WorkerKey] = {}
    async for part in catalog.records_of(shards, "replaced", Damaged()):
        noted.update((_drawing(note), worker_key(note)) for note in part)
    replaced = Counter(noted.values())
    # Who finds an image stored writes its record again; it has not drawn it.
    copies = set[int]()
    drawn = Counter[WorkerKey]()
    doubled = Counter[WorkerKey]()
    async for part in catalog.records_of(shards, "again", Damaged()):
        copies.update(map(_drawing, filter(records.is_credited, part)))
    async for part in catalog.records_of(shards, "images", Damaged()):
        for record in filter(records.is_credited, part):
            copies.discard(_drawing(record))
            noted.pop(_drawing(record), None)
            drawn[records.add_time(record)] += 1
    async for part in catalog.records_of(shards, "again", Damaged()):
        for record in filter(records.is_credited, part):
            if (name := _drawing(record)) in copies:
                copies.remove(name)
                noted.pop(name, None)
                doubled[records.add_time(record)] += 1
    # A worker that was killed has stored these, and written no record.
    drawn.update(key for key in noted.values() if key in records.workers)
    records.replaced_unrecorded = sum(
        key not in records.workers for key in noted.values()
    )
    for key, worker in records.workers.items():
        unused = max(0, drawn[key] + doubled[key] - worker.images)
        # What others found of a worker that was killed is no copy, but what it stored.
        worker.replaced = min(unused, max(replaced[key], unused - doubled[key]))
        worker.doubled = unused - worker.replaced


def _drawing(record: Record) -> int:
    return hashed(dedupe.drawing(record))
