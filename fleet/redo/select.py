"""Images that are to be drawn again: a worker's, those of suspect records, or a job's."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleet import options
from fleet.campaigns.target import Target, check_campaign, images, unknown_job
from fleet.options import Since, argument, option
from imagefleet import concurrency, errors
from imagefleet.job.message import ASIDE, CHECKS, DUPLICATES, SUSPECT, job_key
from imagefleet.records import outcomes
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobRecord, BlobStore
from worker.node.quarantine import node_of

#: The longest record: above one of 50,000 images, the most of a worker.
_MAX_RECORD_BYTES = 2**24

#: Images looked up at once.
_CONCURRENCY = 16

_SECONDS_PER_HOUR = 3600

Metadata = Mapping[str, str]


class SuspectRecord(BaseModel):
    """The images of a node since its last good check. Untrusted: a worker stores it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    worker: str = Field(min_length=1, max_length=200)
    images: list[str] = Field(default_factory=list, max_length=100_000)


@dataclass(slots=True)
class Selection:
    """Images by name, each with its metadata, and what drawing them cost where it is known."""

    images: dict[str, Metadata] = field(default_factory=dict)
    dollars: float | None = None
    damaged_records: int = 0

    @property
    def by_worker(self) -> Counter[str]:
        return Counter(each.get("worker", "") for each in self.images.values())


@dataclass(frozen=True, slots=True)
class Which:
    """The images that are drawn again."""

    job: str | None = argument(
        "The images of this job, or this image of it, as in spring/a-2.png; for --worker"
        " and --suspect, only images of this campaign.",
        None,
        metavar="CAMPAIGN[/ID]",
    )
    worker: str | None = option("Images of this worker, or machine on SaladCloud.", metavar="ID")
    suspect: bool = option(
        "Images that nodes which failed their checks have marked as suspect.", default=False
    )
    since: Since = None
    until: str | None = option("Only what was stored until then.", metavar="TIME")

    def __post_init__(self) -> None:
        if sum((self.worker is not None, self.suspect, self.named.id is not None)) != 1:
            raise errors.SetupError("choose the images: CAMPAIGN/ID, --worker or --suspect")
        if self.worker is None and (self.since or self.until):
            raise errors.SetupError("--since and --until go with --worker")

    @property
    def named(self) -> Target:
        return images(self.job)


async def select(storage: Storage, which: Which, on_listed: Callable[[], None]) -> Selection:
    """Reads which images are wanted; *on_listed* is called for each that is looked at."""
    named = which.named
    if named.campaign is not None and named.id is not None:
        return await _of_job(storage, named.campaign, named.id)
    await check_campaign(storage, named.campaign)
    if which.suspect:
        return await _by_records(storage.blobs, named.campaign, on_listed)
    return await _by_worker(storage.blobs, which, on_listed)


def is_image(name: str) -> bool:
    """Whether a job draws it: an image, or a second drawing."""
    return name.startswith(CHECKS) or not name.startswith(ASIDE)


async def _of_job(storage: Storage, campaign: str, job_id: str) -> Selection:
    """The images of a job, or the one image of that name."""
    name = job_key(campaign, job_id)
    if (metadata := await storage.blobs.metadata(name)) is not None:
        return Selection({name: metadata})
    job = outcomes.JobFacts(job_id, campaign)
    stored = [each.blob for each in await outcomes.stored_images(storage, job) if each.blob]
    known = {blob: await storage.blobs.metadata(blob) for blob in stored}
    found = {blob: metadata for blob, metadata in known.items() if metadata is not None}
    if not found:
        raise await unknown_job(storage, Target(campaign, job_id))
    return Selection(found)


async def _by_worker(blobs: BlobStore, which: Which, on_listed: Callable[[], None]) -> Selection:
    found = Selection()
    since = options.read_moment("--since", which.since) or datetime.min.replace(tzinfo=UTC)
    until = options.read_moment("--until", which.until) or datetime.max.replace(tzinfo=UTC)
    runs: dict[tuple[float, str], list[datetime]] = {}
    async for record in _records(blobs, which.named.campaign):
        on_listed()
        worker = record.metadata.get("worker", "")
        is_in_time = since <= record.created_at <= until
        if which.worker not in {worker, node_of(worker)} or not is_in_time:
            continue
        found.images[record.name] = record.metadata
        if price := _price(record.metadata):
            run = price, record.metadata.get("started_at", "")
            runs.setdefault(run, []).append(record.created_at)
    costs = [_dollars(price, stored) for (price, _), stored in runs.items() if len(stored) > 1]
    found.dollars = sum(costs) if costs else None
    return found


async def _records(blobs: BlobStore, campaign: str | None) -> AsyncIterator[BlobRecord]:
    prefixes = (
        [""] if campaign is None else [f"{each}{campaign}/" for each in ("", CHECKS, DUPLICATES)]
    )
    for prefix in prefixes:
        async for record in blobs.records(prefix):
            if is_image(record.name) or record.name.startswith(DUPLICATES):
                yield record


async def _by_records(
    blobs: BlobStore, campaign: str | None, on_listed: Callable[[], None]
) -> Selection:
    found = Selection()
    suspects: dict[str, str] = {}
    async for name in blobs.names(SUSPECT):
        if not name.endswith(".json"):
            continue
        try:
            data = await blobs.read(name, _MAX_RECORD_BYTES)
            record = SuspectRecord.model_validate_json(data or b"")
        except (ValidationError, errors.UnusableFileError):
            found.damaged_records += 1
            continue
        start = "" if campaign is None else f"{campaign}/"
        for image in record.images:
            if is_image(image) and image.removeprefix(CHECKS).startswith(start):
                suspects[image] = record.worker

    async def look_up(name: str) -> None:
        on_listed()
        try:
            metadata = await blobs.metadata(name)
        except errors.JobError:  # no name of a blob
            return
        # Another worker's: it was replaced already.
        if metadata is not None and metadata.get("worker") == suspects[name]:
            found.images[name] = metadata

    await concurrency.for_each(suspects, look_up, _CONCURRENCY)
    return found


def _price(metadata: Metadata) -> float | None:
    try:
        dollars_per_hour = float(metadata["price_per_hour"])
    except (KeyError, ValueError):
        return None
    return dollars_per_hour if 0 < dollars_per_hour < 1000 else None  # noqa: PLR2004 - $/h, or noise


def _dollars(price_per_hour: float, stored: Iterable[datetime]) -> float:
    moments = sorted(stored)
    hours = (moments[-1] - moments[0]).total_seconds() / _SECONDS_PER_HOUR
    return price_per_hour * hours * len(moments) / (len(moments) - 1)
