"""What became of jobs, from listings of their images and of the failed jobs."""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from imagefleet import errors
from imagefleet.job import image_record
from imagefleet.job.image_record import ImageRecord
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, job_key
from imagefleet.storage import dead_letter_queue, protocol
from imagefleet.storage.dead_letter_queue import Selection

if TYPE_CHECKING:
    from imagefleet.signing import SigningKey

#: Polls after which failed jobs are browsed even if their number has not changed.
_POLLS_PER_BROWSE = 10

Status = Literal["pending", "completed", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known about a job; `reason` says why it failed, `blobs` names its images."""

    id: str
    campaign: str
    status: Status = "pending"
    seed: int | None = None
    reason: str | None = None
    blobs: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return job_key(self.campaign, self.id)

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(JobFacts)}


def messages(
    jobs: Iterable[Job],
    campaign: str | None,
    expected: dict[str, JobFacts],
    key: SigningKey | None = None,
) -> Iterator[str]:
    """The jobs' messages; adds to *expected*, by `JobFacts.key`, each job and its images.

    Raises:
        JobError: two jobs have one id, or a job is too large for a message.
    """
    token = uuid.uuid4().hex[:12]
    for number, given in enumerate(jobs, start=1):
        job = given.identified(f"{token}-{number:06}", campaign)
        if job.verify:
            raise errors.JobError(
                f"job {job_key(job.campaign, job.id)} is a second drawing (verify), which has no"
                " result to wait for"
            )
        facts = JobFacts(
            str(job.id),
            job.campaign or DEFAULT_CAMPAIGN,
            seed=job.seed,
            blobs=tuple(job.blob_name(index) for index in range(job.images)),
            metadata=job.metadata,
        )
        if facts.key in expected:
            raise errors.JobError(f"two jobs have the id {facts.key}")
        try:
            (body,) = protocol.checked_messages([job.to_message(key)])
        except errors.JobError as error:
            raise errors.JobError(f"job {facts.key}: {error.message}") from None
        expected[facts.key] = facts
        yield body


class Poll:
    """Finds the outcomes of many jobs by listings, without a request for each job."""

    def __init__(
        self, storage: protocol.Storage, expected: Iterable[JobFacts], old_failures: Container[str]
    ) -> None:
        self.found: list[JobFacts] = []
        self.waiting = {job.key: job for job in expected}
        self._storage = storage
        self._missing = {name: job for job in self.waiting.values() for name in job.blobs}
        self._images = Counter(job.key for job in self._missing.values())
        self._old_failures = old_failures
        self._failures = 0
        self._polls = 0

    async def run(self) -> None:
        """Moves jobs from `waiting` to `found`; after an error, it can run again."""
        for prefix in _common_prefixes(self._missing):
            async for name in self._storage.blobs.names(prefix):
                if (job := self._missing.pop(name, None)) is not None:
                    self._images[job.key] -= 1
                    if not self._images[job.key]:
                        self._add(job, "completed")
        # Browsing hides messages from other readers, so mostly when their number has changed.
        before, self._failures = self._failures, (await self._storage.poison.depth()).messages
        self._polls += 1
        if self._failures and (self._failures != before or self._polls % _POLLS_PER_BROWSE == 0):
            async for entry in dead_letter_queue.browse(self._storage, Selection()):
                record = entry.record
                if record is not None and entry.message.id not in self._old_failures:
                    job = self.waiting.get(job_key(record.campaign, record.id))
                    if job is not None:
                        self._add(job, "failed", record.reason)

    def _add(self, job: JobFacts, status: Status, reason: str | None = None) -> None:
        del self.waiting[job.key]
        blobs = tuple(name for name in job.blobs if self._missing.pop(name, None) is None)
        self.found.append(dataclasses.replace(job, status=status, reason=reason, blobs=blobs))


async def look_up(storage: protocol.Storage, job: JobFacts) -> JobFacts:
    """A job of which only id and campaign are known, as it is now."""
    # Before the images: a job that completes in between must not be taken for an unknown one.
    elsewhere = (await storage.queue.depth()).messages + (await storage.poison.depth()).messages
    if images := await _images(storage, job):
        first = min(images)
        facts = _facts(images[first])
        if len(images) >= facts.images:
            return dataclasses.replace(
                job,
                status="completed",
                seed=None if facts.seed is None else (facts.seed - first) % 2**32,
                blobs=tuple(images[index].name for index in sorted(images)),
                metadata=facts.metadata,
            )
    async for entry in dead_letter_queue.browse(storage, Selection()):
        elsewhere -= 1
        if entry.record and job_key(entry.record.campaign, entry.record.id) == job.key:
            job = dataclasses.replace(job, status="failed", reason=entry.record.reason)
    is_unknown = job.status == "pending" and elsewhere <= 0
    return dataclasses.replace(job, status="unknown") if is_unknown else job


async def _images(storage: protocol.Storage, job: JobFacts) -> dict[int, protocol.BlobRecord]:
    """By index; `a-1.png` is image 1 of job `a` or the only one of job `a-1`."""
    name = re.compile(rf"{re.escape(job.key)}(?:-(\d{{1,4}}))?\.\w+")
    images = {}
    for separator in ".-":
        async for record in storage.blobs.records(job.key + separator):
            match = name.fullmatch(record.name)
            if match and record.metadata.get("job", job.id) == job.id:
                images[int(match[1] or 0)] = record
    return images


def _facts(record: protocol.BlobRecord) -> ImageRecord:
    """The image's record; that of an image without one where it is damaged."""
    try:
        found = image_record.read(record.metadata)
    except errors.JobError:
        found = None
    return found or ImageRecord(job="unknown")


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """What the names in each folder start with."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name.partition("/")[0], []).append(name)
    return [os.path.commonprefix(each) for each in folders.values()]  # noqa: RUF071 - of characters
