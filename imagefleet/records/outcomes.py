"""What became of jobs: of a whole campaign from its records, of one job from its images."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from imagefleet import concurrency
from imagefleet.job.message import SUFFIXES, image_stem, job_key
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage

#: Names of one job's images.
_LOOKED_UP_AT_ONCE = 64

_SUFFIXES = tuple(SUFFIXES.values())

Status = Literal["pending", "completed", "failed", "cancelled", "unknown"]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known about a job; `reason` says why it failed, `blobs` names its images."""

    id: str
    campaign: str
    status: Status = "pending"
    seed: int | None = None
    digest: str | None = dataclasses.field(default=None, kw_only=True)
    """`Job.digest`, where the whole job is known."""
    reason: str | None = None
    blobs: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    records: tuple[Record, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """What its workers recorded: of each image, and of its end without one."""

    @property
    def key(self) -> str:
        return job_key(self.campaign, self.id)

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(JobFacts)}

    def completed(self, images: Iterable[Record]) -> JobFacts:
        """The job with all of its images; of several stages, those of the last."""
        last = [each for each in images if each.stage == each.stages]
        records = tuple(sorted(last, key=lambda each: each.index))
        return dataclasses.replace(self, status="completed", blobs=_blobs(records), records=records)

    def ended(self, record: Record, images: Iterable[Record] = ()) -> JobFacts:
        """The job as *record* says that it ended, with those of its images that are stored."""
        stored = tuple(sorted(images, key=lambda each: each.index))
        return dataclasses.replace(
            self,
            status="cancelled" if record.outcome == "cancelled" else "failed",
            reason=record.reason,
            blobs=_blobs(stored),
            records=(*stored, record),
        )


async def of_campaign(storage: Storage, campaign: str) -> AsyncIterator[JobFacts]:
    """The jobs of a campaign that have ended, each once; 60 bytes of memory for each failed one."""
    ended = {record.job async for record in reader.ended(storage, campaign)}
    partial: dict[int, dict[int, Record]] = {}
    async for record in reader.images(storage, campaign):
        if not is_of_its_job(record) or record.stage < record.stages:
            continue
        images = {record.index: record}
        if record.images > 1:
            images = partial.setdefault(record.job, {})
            images[record.index] = record
            if len(images) < record.images:
                continue
            del partial[record.job]
        ended.discard(record.job)  # it failed once, and was sent again
        yield known(images[min(images)]).completed(images.values())
    async for record in reader.ended(storage, campaign):
        if record.job in ended:
            ended.remove(record.job)
            images = partial.get(record.job, {})
            yield known(record).ended(record, images.values())


async def look_up(storage: Storage, job: JobFacts) -> JobFacts:
    """A job by its id and campaign: its images by their names, or its end in the records."""
    # Before the images: a job that completes in between must not be taken for an unknown one.
    waiting = (await storage.queue.depth()).messages
    images = await stored_images(storage, job)
    if are_all(images):
        last = images[-1]
        return dataclasses.replace(job, seed=_seed(last), metadata=last.metadata).completed(images)
    if (latest := await last_end(storage, job)) is not None:
        return dataclasses.replace(job, metadata=latest.metadata).ended(latest, images)
    return job if waiting else dataclasses.replace(job, status="unknown")


async def stored_images(storage: Storage, job: JobFacts) -> list[Record]:
    """A job's images, as their metadata tells; none as long as the first one is missing.

    Nothing is listed: it may be much.
    """
    if (first := await _image(storage, job)) is None:
        return []
    found = [first]

    async def look(place: tuple[int, int]) -> None:
        # Images of one stage have one format.
        suffixes = [(first.blob or "").rpartition(".")[2]] if place[0] else _SUFFIXES
        if (record := await _image(storage, job, *place, suffixes)) is not None:
            found.append(record)

    images = [(index, 1) for index in range(1, first.images)]
    stages = [(0, stage) for stage in range(2, first.stages + 1)]
    await concurrency.for_each([*images, *stages], look, _LOOKED_UP_AT_ONCE)
    if first.stages == 1:  # another job of that id may have begun to draw as many
        found = [record for record in found if record.digest == first.digest]
    return sorted(found, key=lambda record: (record.stage, record.index))


def are_all(images: Sequence[Record]) -> bool:
    if not images or images[-1].stage < images[-1].stages:
        return False
    return len(images) >= images[0].images


async def last_end(storage: Storage, job: JobFacts) -> Record | None:
    """The last record of a job that has failed or was cancelled."""
    latest: Record | None = None
    async for record in reader.ended(storage, job.campaign):
        if record.key == job.key and (latest is None or record.at >= latest.at):
            latest = record
    return latest


def known(record: Record) -> JobFacts:
    """What a record tells of its job."""
    return JobFacts(record.id, record.campaign, seed=_seed(record), metadata=record.metadata)


def _seed(record: Record) -> int | None:
    """The seed of the job's first image."""
    return None if record.seed is None else (record.seed - record.index) % 2**32


def _blobs(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(record.blob for record in records if record.blob)


def is_of_its_job(record: Record) -> bool:
    """Records are untrusted: one may name another job's image."""
    name = (record.blob or "").rpartition(".")[0]
    return name == image_stem(record.key, record.index, record.stage)


async def _image(
    storage: Storage,
    job: JobFacts,
    index: int = 0,
    stage: int = 1,
    suffixes: Iterable[str] = _SUFFIXES,
) -> Record | None:
    """The record of a job's image, in any format; a read for each."""
    stem = image_stem(job.key, index, stage)
    for suffix in suffixes:
        blob = await storage.blobs.record(f"{stem}.{suffix}")
        if blob is None or blob.metadata.get("job", job.id) != job.id:
            continue
        known = {
            "outcome": "completed",
            "id": job.id,
            "campaign": job.campaign,
            "at": blob.created_at,
            "blob": blob.name,
            "size_bytes": blob.size_bytes,
            "index": index,
        }
        found = Record.of_blob(known, blob.metadata)
        counts = {
            "images": 1 if stage > 1 else max(found.images, index + 1),
            "stage": stage,
            "stages": max(stage, found.stages),
        }
        return found.model_copy(update=counts)
    return None
