"""`imagefleet job`: what became of one job."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fleet import console, options
from fleet.campaigns.cancel import checked
from imagefleet import errors
from imagefleet.job import image_record
from imagefleet.job.message import DEFAULT_CAMPAIGN, job_key, message_fields
from imagefleet.storage.protocol import BlobRecord, FoundMessage, Storage
from imagefleet.storage.settings import StorageSettings

if TYPE_CHECKING:
    from imagefleet.records.record import Record

State = Literal[
    "queued", "in flight", "queued or in flight", "completed", "failed", "cancelled", "unknown"
]


@dataclass(frozen=True, slots=True)
class _Image:
    blob: str
    address: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class JobState:
    """Where a job is, and *since* when; None for what is not known."""

    id: str
    campaign: str
    state: State
    since: datetime | None = None
    attempts: int | None = None
    worker: str | None = None
    error: str | None = None
    reason: str | None = None
    images: list[_Image] = field(default_factory=list)


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id, or CAMPAIGN/ID.")],
    campaign: Annotated[
        str | None, typer.Option(metavar="NAME", help="The job's campaign; default: `default`.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Shows what became of one job.

    That is where it is, since when, its attempts, and its images or why it failed.

    imagefleet job 0001 --campaign spring

    imagefleet job spring/0001 --json
    """
    if campaign is None and "/" in job_id:
        campaign, _, job_id = job_id.partition("/")
    campaign = checked("--campaign", campaign or DEFAULT_CAMPAIGN)
    found = console.run(_look_up(settings, campaign, checked("ID", job_id)))
    if as_json:
        console.print_json(asdict(found))
    else:
        _print(found)


async def _look_up(settings: StorageSettings, campaign: str, job_id: str) -> JobState:
    async with console.connected(settings) as fleet:
        return await look_up(fleet.storage, campaign, job_id)


async def look_up(storage: Storage, campaign: str, job_id: str) -> JobState:
    """By its images' names, then by the queue's messages, then by the campaign's records."""
    # Before the images: a job that completes in between must not be taken for an unknown one.
    messages = (await storage.queue.depth()).messages
    blobs = await _images(storage, campaign, job_id)
    images = [
        _Image(each.name, storage.blobs.address(each.name), each.size_bytes) for each in blobs
    ]
    drawn = [facts for each in blobs if (facts := _facts(each))]
    if images and len(images) >= max((facts.images for facts in drawn), default=1):
        first = drawn[0] if drawn else None
        return JobState(
            *(job_id, campaign, "completed", max(each.created_at for each in blobs)),
            attempts=first.attempt if first else None,
            worker=first.worker if first else None,
            images=images,
        )
    if (message := await _message(storage, campaign, job_id)) is not None:
        return JobState(
            *(job_id, campaign, "in flight" if message.is_leased else "queued"),
            since=message.message.enqueued_at,
            attempts=message.message.delivery_count,
            images=images,
        )
    if (record := await _ended(storage, campaign, job_id)) is not None:
        return JobState(
            *(job_id, campaign, "failed" if record.outcome == "failed" else "cancelled", record.at),
            attempts=record.attempts,
            worker=record.worker,
            error=record.error,
            reason=record.reason,
            images=images,
        )
    # Azure shows no more than the first of the messages that wait, and none in flight.
    is_hidden = messages > 0 and not storage.queue.finds_all
    return JobState(
        job_id, campaign, "queued or in flight" if is_hidden else "unknown", images=images
    )


async def _images(storage: Storage, campaign: str, job_id: str) -> list[BlobRecord]:
    """`a-1.png` is image 1 of job `a`, or the only one of job `a-1`."""
    key = job_key(campaign, job_id)
    name = re.compile(rf"{re.escape(key)}(?:-(\d{{1,4}}))?\.\w+")
    found: dict[int, BlobRecord] = {}
    for separator in ".-":
        async for blob in storage.blobs.records(key + separator):
            match = name.fullmatch(blob.name)
            if match and blob.metadata.get("job", job_id) == job_id:
                found[int(match[1] or 0)] = blob
    return [found[index] for index in sorted(found)]


def _facts(blob: BlobRecord) -> image_record.ImageRecord | None:
    try:
        return image_record.read(blob.metadata)
    except errors.JobError:
        return None  # somebody has changed it: the image is there all the same


async def _message(storage: Storage, campaign: str, job_id: str) -> FoundMessage | None:
    async for found in storage.queue.find(job_id):
        try:
            fields = message_fields(found.message.body)
        except (ValueError, RecursionError):
            continue
        if not isinstance(fields, dict):
            continue
        of = fields.get("campaign") or DEFAULT_CAMPAIGN, fields.get("id") or found.message.id
        if of == (campaign, job_id) and not fields.get("verify"):
            return found
    return None


async def _ended(storage: Storage, campaign: str, job_id: str) -> Record | None:
    """The last record of a failed or cancelled job."""
    from imagefleet.records import reader

    records = [each async for each in reader.ended(storage, campaign) if each.id == job_id]
    return max(records, key=lambda each: each.at, default=None)


def _print(found: JobState) -> None:
    since = f"{found.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if found.since else "-"
    facts: dict[str, Any] = {
        "job": job_key(found.campaign, found.id),
        "state": found.state,
        "since": since,
        "attempts": console.number(found.attempts),
        "worker": found.worker or "-",
    }
    if found.reason:
        facts["reason"] = f"{found.error}: {found.reason}" if found.error else found.reason
    if found.state == "unknown":
        facts["reason"] = "it has no image, no record and no message: was it sent?"
    if found.state == "queued or in flight":
        facts["reason"] = "it has no image and no record: Azure does not show which jobs wait"
    console.print_facts(facts)
    for image in found.images:
        console.print_facts({"image": image.address})
