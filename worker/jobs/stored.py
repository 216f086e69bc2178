"""The images of a job that earlier deliveries have stored: a worker that died cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from imagefleet import concurrency
from imagefleet.job.message import Job
from imagefleet.records.record import Record, of_job
from imagefleet.storage.protocol import BlobStore

#: Images of one job that are looked for at the same time.
_LOOKS_AT_ONCE = 16


async def find(blobs: BlobStore, job: Job, source: str, images: Iterable[int]) -> list[Record]:
    """Records of those *images* whose names are taken; *source* is the job's message."""
    found: dict[int, Record] = {}

    async def look(index: int) -> None:
        if await blobs.exists(job.blob_name(index)):
            found[index] = record(job, source, index)

    await concurrency.for_each(images, look, _LOOKS_AT_ONCE)
    return [found[index] for index in sorted(found)]


def record(job: Job, source: str, index: int) -> Record:
    """The record of an image that is stored; who has drawn it, and when, is not known."""
    width, height = job.final_size
    return Record.model_validate(
        {
            **of_job(job),
            "outcome": "completed",
            "at": datetime.now(UTC),
            "source": source,
            "blob": job.blob_name(index),
            "index": index,
            "completes": False if job.images > 1 else None,
            "seed": job.image_seed(index),
            "model": job.model,
            "width": width,
            "height": height,
        }
    )
