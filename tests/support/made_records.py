"""Records of jobs of the campaign `spring`, and the images that they are of."""

import asyncio
import itertools
from datetime import UTC, datetime
from typing import Any

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.dead_letter import FailedJob, failed_job
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.validation import JSONDict

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)

MISSING = errors.MissingFileError("there is no LoRA 'forest'")

#: The digest of jobs that `sent_jobs` notes.
DIGEST = "0" * 64


def image(job: int | str, campaign: str = "spring", **fields: Any) -> Record:
    """The record of a job's image; a number stands for the job with that number in its id."""
    name = f"job-{job}" if isinstance(job, int) else job
    blob = f"{campaign}/{name}.png"
    return _record(name, campaign, {"outcome": "completed", "blob": blob, **fields})


def ended(
    job: int | str, outcome: str = "failed", campaign: str = "spring", **fields: Any
) -> Record:
    """The record of a job's end without all of its images."""
    name = f"job-{job}" if isinstance(job, int) else job
    source = f"message-{job}"
    return _record(name, campaign, {"outcome": outcome, "source": source, **fields})


def _record(name: str, campaign: str, fields: JSONDict) -> Record:
    known = {"id": name, "campaign": campaign, "at": NOON}
    return Record.model_validate(known | fields)


async def store(storage: Storage, *blobs: str | None, **told: str) -> None:
    """Stores images under these names, with a digest and what is *told* beside it."""
    metadata = {"digest": DIGEST, **told}
    for blob in blobs:
        await storage.blobs.create(str(blob), b"pixels", "image/png", metadata)


async def dead_letter(
    storage: Storage,
    message: LeasedMessage,
    job: Job | None,
    error: errors.FleetError,
    worker: str,
    **more: Any,
) -> FailedJob:
    """Adds a job's record to the poison queue; its message stays."""
    at = storage.blobs.clock.now()
    record = failed_job(message, job, error, worker, at, **more)
    await storage.poison.send([record.encode()])
    return record


async def fail(
    storage: Storage,
    *job_ids: str,
    error: errors.FleetError = MISSING,
    campaign: str = "spring",
) -> None:
    """Sends jobs that fail as a worker's do: the poison queue, the record, the message."""
    jobs = [Job(prompt="a cat", id=each, seed=1, campaign=campaign) for each in job_ids]
    await storage.queue.send([job.to_message() for job in jobs])
    records = []
    for _ in job_ids:
        (message,) = await storage.queue.receive(1, 60)
        job = read_job(message.body, message.id)
        records.append(await dead_letter(storage, message, job, error, "worker-1"))
        await storage.queue.delete(message)
    await RecordLog(storage.blobs, "worker-1").add(records)


async def later(storage: Storage) -> None:
    """Waits until the storage's clock, whose times of blobs are seconds on Azure, is further."""
    for number in itertools.count():
        name = f"-clock/{number}"
        await storage.blobs.create(name, b"", "text/plain", {})
        made = await storage.blobs.record(name)
        if number == 0:
            first = made
        elif made and first and made.created_at > first.created_at:
            return
        await asyncio.sleep(0.05)
