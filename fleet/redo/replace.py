"""Replaces images so that none is lost, wherever this is killed.

A copy of each image, then a mark that it is being replaced, then the deletion, a note of it in the
records, then the job, and the mark's deletion last. Who finds a mark does from its copy what is
not done yet. Marks are among the files, which workers only read: a forged copy has none.
"""

import contextlib
import hashlib
import itertools
import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from cli.console import Move
from imagefleet import concurrency
from imagefleet.errors import JobError, SetupError, UnusableFileError
from imagefleet.files import picture
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.message import MAX_IMAGE_BYTES, Job, job_key, read_job
from imagefleet.job.names import DUPLICATES, REPLACED
from imagefleet.records import dedupe, pictures
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Spot
from imagefleet.storage.dead_letter import Check
from imagefleet.storage.dead_letter_queue import NO_CHECK
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore, Metadata


@dataclass(frozen=True)
class JobFinder:
    """The messages that draw images again; *given* by their job's key.

    A job that *check* would not send again counts as none: no worker takes it.
    """

    blobs: BlobStore
    given: Mapping[str, str]
    check: Check = NO_CHECK
    _duplicates: dict[str, list[str]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )

    async def list_duplicates(self, prefix: str) -> None:
        """Lists the duplicates of images whose names begin so, before their jobs are asked for."""
        async for name in self.blobs.names(DUPLICATES + prefix):
            self._duplicates[name.removeprefix(DUPLICATES).rpartition("/")[0]].append(
                name
            )

    async def message(self, name: str, data: bytes) -> str:
        """The message of the job that draws image *name*; raises JobError unless it is one."""
        given = self.given.get(_key_of(name))
        if given is not None and draws(read_job(given, "none"), name):
            return given
        files = [data]
        for duplicate in self._duplicates.get(name, ()):
            with contextlib.suppress(UnusableFileError):
                files.append(await self.blobs.read(duplicate, MAX_IMAGE_BYTES) or b"")
        jobs = filter(
            None, (picture.job_in(file, self.check.sendable) for file in files)
        )
        found = {job.to_message(): message for message, job in jobs if draws(job, name)}
        if len(found) > 1:
            raise JobError(
                "the image and its duplicates have different jobs: give the right one with --jobs"
            )
        if not found:
            signed = (
                ""
                if self.check.trusted is None
                else " whose signature with a trusted key still holds"
            )
            raise JobError(f"it has no job in it{signed}: give its job with --jobs")
        return self.check.dated(found.popitem()[1])


def _key_of(image: str) -> str:
    """The key of the job that draws an image."""
    return image.rpartition(".")[0].partition(SEPARATOR)[0]


def draws(job: Job, name: str) -> bool:
    return any(job.blob_name(index) == name for index in range(job.images_to_draw))


def by_key(bodies: Iterable[str | None]) -> dict[str, str]:
    jobs = ((read_job(body, "none"), body) for body in bodies if body is not None)
    return {job_key(job.campaign, job.id): body for job, body in jobs}


#: The folder of marks, empty files named as the copies are below `REPLACED`.
MARKS = "redo/"

#: Images whose files are in memory at the same time, beside the others of the last one's job.
BATCH = 32

_CONTENT_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One image to be replaced: the drawing that is meant, by its metadata, and its job."""

    name: str
    copy: str
    metadata: Metadata
    #: The job's message; None for a duplicate, which is only put aside.
    message: str | None

    @property
    def mark(self) -> str:
        return MARKS + self.copy.removeprefix(REPLACED)


@dataclass
class Replaced:
    """Counts of images put aside and of jobs sent, and why other images stay as they are."""

    images: int = 0
    jobs: int = 0
    refused: dict[str, str] = field(default_factory=dict)


#: The writer in the names of the shards with the notes.
_WRITER = "redo"


async def check_access(storage: Storage) -> None:
    """Raises SetupError if the credentials may not delete images."""
    if not await storage.blobs.delete(f"{REPLACED}{uuid.uuid4().hex}"):
        raise SetupError(
            "the credentials may not delete images, which to replace one needs: use the account's"
            " key, an identity with the role Storage Blob Data Contributor, or the tokens of"
            " `imagefleet keys mint operator`"
        )


async def interrupted(storage: Storage) -> dict[str, Metadata]:
    """The copies, with their metadata, of images that a killed run has not replaced."""
    copies = [
        REPLACED + mark.removeprefix(MARKS) async for mark in storage.files.names(MARKS)
    ]
    return {copy: await storage.blobs.metadata(copy) or {} for copy in copies}


def original(name: str) -> str:
    """The image that *name* is a copy of, or *name* itself."""
    if not name.startswith(REPLACED):
        return name
    return name.removeprefix(REPLACED).rpartition("/")[0]


async def replace(
    storage: Storage,
    images: Mapping[str, Metadata],
    packed: Mapping[str, Spot],
    finder: JobFinder,
    on_image: Move,
) -> Replaced:
    """Replaces *images*, by name; those of an interrupted run by the names of their copies.

    Those that are *packed* stay in their packs: a note says that they are replaced.
    """
    replaced = Replaced()
    log = RecordLog(storage.files, _WRITER)
    now = storage.blobs.clock.now()
    notes = (
        dedupe.note(original(name), metadata, "", now)
        for name, metadata in images.items()
    )
    if first := next(filter(None, notes), None):
        await log.open(first.campaign, "replaced")
    for batch in _batches(images):
        prepared = await concurrency.gather(
            *(
                _prepare(storage, packed.get(name, Spot(name)), images[name], finder)
                for name in batch
            )
        )
        for name, entry in zip(batch, prepared, strict=True):
            if isinstance(entry, str):
                replaced.refused[name] = entry
        entries = [entry for entry in prepared if isinstance(entry, Entry)]
        await _replace(storage, entries, log, replaced)
        for _ in batch:
            on_image()
    return replaced


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    """Groups images; those of one job stay together.

    It is sent once all of them are put aside: else it would find its own names taken.
    """

    def key(name: str) -> str:
        return _key_of(original(name))

    batch: list[str] = []
    for _, of_job in itertools.groupby(sorted(names, key=key), key):
        batch += of_job
        if len(batch) >= BATCH:
            yield batch
            batch = []
    yield batch


async def _replace(
    storage: Storage, entries: list[Entry], log: RecordLog, replaced: Replaced
) -> None:
    gone = await concurrency.gather(*(_delete(storage, entry) for entry in entries))
    missing = [entry for entry, is_gone in zip(entries, gone, strict=True) if is_gone]
    now = storage.blobs.clock.now()
    notes = (
        dedupe.note(entry.name, entry.metadata, PurePosixPath(entry.copy).stem, now)
        for entry in missing
    )
    await log.add([note for note in notes if note is not None])
    messages = list(dict.fromkeys(entry.message for entry in missing if entry.message))
    await storage.models.send(messages)
    for entry in entries:
        if not await storage.files.delete(entry.mark):
            raise SetupError(
                f"the credentials may not delete {entry.mark} in {storage.files.name}"
            )
    replaced.images += len(missing)
    replaced.jobs += len(messages)


async def _prepare(
    storage: Storage, spot: Spot, metadata: Metadata, finder: JobFinder
) -> Entry | str:
    """Keeps a marked copy of the image once its job is known; or says why the image stays."""
    name = spot.blob
    image = original(name)
    is_duplicate = image.startswith(DUPLICATES)
    try:
        data = await pictures.read(storage, spot)
        if data is None:
            return "it is gone"
        message = None if is_duplicate else await finder.message(image, data)
    except (UnusableFileError, JobError) as error:
        return error.message
    if name != image:
        return Entry(image, name, metadata, message)
    suffix = name.rpartition(".")[2]
    content_type = _CONTENT_TYPES.get(suffix, "application/octet-stream")
    facts = json.dumps(dict(metadata), sort_keys=True).encode()
    digest = hashlib.blake2b(facts + data, digest_size=8).hexdigest()
    # The same drawing has the same name, so one that is there is this one, of a run before.
    entry = Entry(name, f"{REPLACED}{name}/{digest}.{suffix}", metadata, message)
    await storage.blobs.create(entry.copy, data, content_type, metadata)
    await storage.files.create(entry.mark, b"", "text/plain", {})
    return entry


async def _delete(storage: Storage, entry: Entry) -> bool:
    """Deletes the drawing that is meant; False if another is in its place."""
    found = await storage.blobs.metadata(entry.name)
    if found is None:
        return True
    if dict(found) != dict(entry.metadata):
        return False
    if not await storage.blobs.delete(entry.name):
        raise SetupError(f"the credentials may not delete {entry.name}")
    return True
