"""Finds out whether a stored image belongs to this job (an earlier delivery) or to another one."""

import re
from collections.abc import Iterable

from imagefleet import concurrency
from imagefleet.errors import NameTakenError, SetupError
from imagefleet.job.message import Job
from imagefleet.records.record import Record, of_job
from imagefleet.storage.protocol import BlobRecord, BlobStore, Metadata

#: Images of one job that are looked for at the same time.
_LOOKS_AT_ONCE = 16

#: Characters that a reason shows of a digest, and of what it quotes.
_DIGEST_CHARACTERS = 12
_QUOTED_CHARACTERS = 80

#: The metadata of an image that the credentials do not let anybody read.
NOT_READ: Metadata = {}

_HOW_TO_MEND = "send this one again with another id (`imagefleet failed --export`)"


async def look_up(blobs: BlobStore, job: Job, index: int) -> BlobRecord | None:
    """A job's image as it is stored; None if it is not.

    Its metadata are NOT_READ if its name is taken, and the credentials do not tell by whom. Raises
    NameTakenError if another job's image has its name.
    """
    name = job.blob_name(index)
    try:
        found = await blobs.record(name)
    except SetupError:  # a worker's token allows to create images, not to read them
        if not await blobs.exists(name):
            return None
        return BlobRecord(name, 0, blobs.clock.now(), NOT_READ)
    if found is None:
        return None
    # A job of fewer stages draws the same images as another does on its way.
    digest = found.metadata.get("digest", "none")
    stages = found.metadata.get("stages", "1")
    if (digest, stages) == (job.stage_digest, str(job.stages)):
        return found
    of_stages = f" and {stages[:1]} stages" if stages != str(job.stages) else ""
    worker = found.metadata.get("worker", "an unknown worker")[:_QUOTED_CHARACTERS]
    raise NameTakenError(
        f"the name {found.name} is taken by the image of another job, of digest"
        f" {digest[:_DIGEST_CHARACTERS]}{of_stages}, that {worker} stored at"
        f" {found.created_at:%Y-%m-%dT%H:%M:%SZ}; this job is {_shown(job)}: {_HOW_TO_MEND}"
    )


def taken_unseen(job: Job, index: int) -> NameTakenError:
    """The error of a job that is new, where nobody may see whose image has its name."""
    return NameTakenError(
        f"the name {job.blob_name(index)} is taken, and this worker's token cannot read by which"
        f" job; this job is {_shown(job)}. If it is the same, `imagefleet replay` settles it; else"
        f" {_HOW_TO_MEND}"
    )


def _shown(job: Job) -> str:
    return f"{job.prompt[:_QUOTED_CHARACTERS]!r}, of digest {job.stage_digest[:_DIGEST_CHARACTERS]}"


def sha256_in(metadata: Metadata) -> str | None:
    """The SHA-256 that an image's metadata tell; None if they do not, or anything else."""
    told = metadata.get("sha256", "")
    return told if re.fullmatch("[0-9a-f]{64}", told) else None


async def find_stored(
    blobs: BlobStore, job: Job, source: str, images: Iterable[int]
) -> tuple[list[Record], NameTakenError | None]:
    """Records of those *images* that are stored, and the error of a name that another job's has.

    *source* is the job's message. A name that is taken by nobody may see whom counts as stored: by
    an earlier delivery of that message.
    """
    found: dict[int, Record] = {}
    taken: list[NameTakenError] = []

    async def look(index: int) -> None:
        try:
            if (image := await look_up(blobs, job, index)) is not None:
                found[index] = stored_record(job, source, index, image)
        except NameTakenError as error:
            taken.append(error)

    await concurrency.for_each(images, look, _LOOKS_AT_ONCE)
    return [found[index] for index in sorted(found)], next(iter(taken), None)


def stored_record(job: Job, source: str, index: int, image: BlobRecord) -> Record:
    """The record of a stored *image*; by whom and at what cost, its metadata may tell."""
    width, height = job.final_size
    known = {
        **of_job(job),
        "outcome": "completed",
        "at": image.created_at,
        "source": source,
        "blob": job.blob_name(index),
        "size_bytes": image.size_bytes or None,
        "index": index,
        "completes": False if job.images > 1 else None,
        "seed": job.image_seed(index),
        "model": job.model,
        "width": width,
        "height": height,
    }
    if job.keep is not None:  # its metadata tell which it is, and of how many
        del known["images"], known["seed"]
    return Record.of_blob(known, image.metadata)
