"""`imagefleet job`: what became of one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from fleet import console, options
from fleet.campaigns import target
from imagefleet import errors
from imagefleet.job.message import job_key, read_job
from imagefleet.records import outcomes
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

_WHY = {
    "unknown": "some of its images are missing, and it has no record and no message",
    "queued or in flight": "it has no image and no record: Azure does not show which jobs wait",
}


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job, and *since* when; None for what is not known.

    It is its record's outcome, `queued`, `in flight`, either of both, or `unknown`.
    """

    id: str
    campaign: str
    state: str
    since: datetime | None = None
    stage: int | None = None
    """The stage of a job with several: the last stored, or the one that waits or has failed."""
    attempts: int | None = None
    worker: str | None = None
    error: str | None = None
    reason: str | None = None
    images: list[dict[str, Any]] = field(default_factory=list)
    """Blob, address and size of each."""


@options.from_settings(StorageSettings)
async def command(
    settings: StorageSettings,
    job: target.OneJob,
    as_json: options.AsJson = False,
) -> None:
    """Shows what became of one job.

    That is where it is, since when, its attempts, and its images or why it failed.

    imagefleet job spring/0001 --json
    """
    named = target.job(job)
    async with console.connected(settings) as fleet:
        found = await look_up(fleet.storage, *named)
        if found.state == "unknown" and not found.images:
            raise await target.unknown_job(fleet.storage, target.Target(*named))
    if as_json:
        console.print_json(asdict(found))
    else:
        _print(found)


async def look_up(storage: Storage, campaign: str, job_id: str) -> JobState:
    """Searches its images' names, then the queue's messages, then the campaign's records."""
    job = outcomes.JobFacts(job_id, campaign)
    # Before the images: a job that completes in between must not be taken for an unknown one.
    messages = (await storage.queue.depth()).messages
    stored = await outcomes.stored_images(storage, job)
    images = [
        {"blob": blob, "address": storage.blobs.address(blob), "size_bytes": each.size_bytes or 0}
        for each in stored
        if (blob := each.blob)
    ]
    message, record = None, None
    if outcomes.are_all(stored):
        record = stored[-1] if stored[0].stages > 1 else stored[0]
    elif not (message := await target.find_message(storage, target.Target(campaign, job_id))):
        record = await outcomes.last_end(storage, job)
    if message is not None:
        return JobState(
            *(job_id, campaign, "in flight" if message.is_leased else "queued"),
            since=message.message.enqueued_at,
            stage=_stage(message.message.body),
            attempts=message.message.delivery_count,
            images=images,
        )
    if record is None:
        # Azure shows no more than the first of the messages that wait, and none in flight.
        is_hidden = messages > 0 and not storage.queue.finds_all
        state = "queued or in flight" if is_hidden else "unknown"
        return JobState(job_id, campaign, state, images=images)
    is_image = record.outcome == "completed"
    by_worker = not is_image or record.seconds is not None  # else somebody changed its metadata
    return JobState(
        *(job_id, campaign, record.outcome),
        since=max(each.at for each in stored) if is_image else record.at,
        stage=record.stage if record.stages > 1 else None,
        attempts=record.attempts if by_worker else None,
        worker=record.worker if by_worker else None,
        error=record.error,
        reason=record.reason,
        images=images,
    )


def _stage(body: str) -> int | None:
    """The stage that a message asks for, if its job has several."""
    try:
        job = read_job(body, "none")
    except errors.JobError:
        return None
    return job.stage if job.stages > 1 else None


def _print(found: JobState) -> None:
    since = f"{found.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if found.since else "-"
    facts = {"job": job_key(found.campaign, found.id), "state": found.state, "since": since}
    if found.stage:
        facts["stage"] = console.number(found.stage)
    facts |= {"attempts": console.number(found.attempts), "worker": found.worker or "-"}
    reason = _WHY.get(found.state, found.reason)
    if reason:
        facts["reason"] = f"{found.error}: {reason}" if found.error else reason
    console.print_facts(facts)
    for image in found.images:
        console.print_facts({"image": image["address"]})
