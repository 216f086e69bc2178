"""Outcomes of jobs: of a whole campaign from its records, of one job from its images."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import JsonValue

from imagefleet.job.message import job_key
from imagefleet.records import reader
from imagefleet.records.decisions import are_all, job_images
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict

Status = Literal["pending", "completed", "failed", "cancelled", "dropped", "unknown"]

_STATUSES: Mapping[str, Status] = {"cancelled": "cancelled", "dropped": "dropped"}


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Status and facts of a job; `reason` says why it has no image, `blobs` names its images."""

    id: str
    campaign: str
    status: Status = "pending"
    seed: int | None = None
    #: `Job.digest`, where the whole job is known.
    digest: str | None = field(default=None, kw_only=True, compare=False)
    reason: str | None = None
    blobs: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    #: True if it keeps some of its images at most; its records tell how many.
    is_judged: bool = field(default=False, kw_only=True, repr=False, compare=False)
    #: Records that its workers wrote: one of each image, and one of its end without.
    records: tuple[Record, ...] = field(default=(), repr=False, compare=False)

    @property
    def key(self) -> str:
        return job_key(self.campaign, self.id)

    def fields(self) -> JSONDict:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(JobFacts)
        }

    def completed(self, images: Iterable[Record]) -> JobFacts:
        """The job with all of its images; of several stages, those of the last."""
        last = [each for each in images if each.stage == each.stages]
        records = tuple(sorted(last, key=lambda each: each.index))
        return replace(self, status="completed", blobs=_blobs(records), records=records)

    def ended(self, record: Record, images: Iterable[Record] = ()) -> JobFacts:
        """The job as *record* says that it ended, with those of its images that are stored."""
        stored = tuple(sorted(images, key=lambda each: each.index))
        return replace(
            self,
            status=_STATUSES.get(record.outcome, "failed"),
            reason=record.reason,
            blobs=_blobs(stored),
            records=(*stored, record),
        )


async def of_campaign(storage: Storage, campaign: str) -> AsyncIterator[JobFacts]:
    """The jobs of a campaign that have ended, each once; 60 bytes of memory for each failed one."""
    ended = set[int]()
    sent_again = {}
    partial: dict[int, dict[int, Record]] = {}
    async for record in reader.images(storage, campaign, ended=ended):
        if record.stage < record.stages:
            continue
        images = {record.index: record}
        if record.images > 1:
            images = partial.setdefault(record.job, {})
            images[record.index] = record
            if len(images) < record.images:
                continue
            del partial[record.job]
        facts = known(images[min(images)]).completed(images.values())
        if record.job in ended:  # these are stored only if it was sent again meanwhile
            sent_again[record.job] = facts
        else:
            yield facts
    async for record in reader.ended(storage, campaign):
        if record.job in ended:
            sent_again.pop(record.job, None)
            yield known(record).ended(record, partial.get(record.job, {}).values())
    for facts in sent_again.values():
        yield facts


async def look_up(storage: Storage, job: JobFacts) -> JobFacts:
    """A job by its id and campaign: its images by their names, or its end in the records."""
    # Before the images: a job that completes in between must not be taken for an unknown one.
    waiting = (await storage.queue.depth()).messages
    images = await job_images(storage, job.campaign, job.id, job.digest or "")
    if are_all(images):
        last = images[-1]
        return replace(job, seed=last.first_seed, metadata=last.metadata).completed(
            images
        )
    if (latest := await last_end(storage, job)) is not None:
        return replace(job, metadata=latest.metadata).ended(latest, images)
    return job if waiting else replace(job, status="unknown")


async def last_end(storage: Storage, job: JobFacts) -> Record | None:
    """The last record of a job that ended without an image."""
    latest = None
    async for record in reader.ended(storage, job.campaign, job_id=job.id):
        if latest is None or record.at >= latest.at:
            latest = record
    return latest


def known(record: Record) -> JobFacts:
    return JobFacts(
        record.id, record.campaign, seed=record.first_seed, metadata=record.metadata
    )


def _blobs(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(record.blob for record in records if record.blob)
