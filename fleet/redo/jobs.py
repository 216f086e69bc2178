"""Finds the job of an image: in a file of jobs, in the image itself, or in a duplicate of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from imagefleet import errors
from imagefleet.files import picture
from imagefleet.job.message import DUPLICATES, MAX_IMAGE_BYTES, Job, job_key, read_job
from imagefleet.signing import TrustedKeys
from imagefleet.storage.protocol import BlobStore

#: The number of an image of a job that has several.
_NUMBER = re.compile(r"-\d+$")


class JobFinder:
    """The messages that draw images again; *given* by their job's key.

    With *trusted* keys, a job that is not signed with one of them counts as none: no worker takes
    it.
    """

    def __init__(
        self, blobs: BlobStore, given: Mapping[str, str], trusted: TrustedKeys | None = None
    ) -> None:
        self._blobs = blobs
        self._given = given
        self._trusted = trusted
        self._duplicates: dict[str, list[str]] = defaultdict(list)

    async def list_duplicates(self, prefix: str) -> None:
        """Lists the duplicates of images whose names begin so, before their jobs are asked for."""
        async for name in self._blobs.names(DUPLICATES + prefix):
            self._duplicates[name.removeprefix(DUPLICATES).rpartition("/")[0]].append(name)

    async def message(self, name: str, data: bytes) -> str:
        """The message of the job that draws image *name*, whose file is *data*.

        Raises:
            JobError: there is none, or more than one; says why.
        """
        key = name.rpartition(".")[0]
        for given in map(self._given.get, (key, _NUMBER.sub("", key))):
            if given is not None and draws(read_job(given, "none"), name):
                return given
        found = {
            job.to_message(): message
            for message, job in await self._jobs(name, data)
            if draws(job, name)
        }
        if len(found) > 1:
            raise errors.JobError(
                "the image and its duplicates have different jobs: give the right one with --jobs"
            )
        if not found:
            signed = "" if self._trusted is None else " that is signed with a trusted key"
            raise errors.JobError(f"it has no job in it{signed}: give its job with --jobs")
        return found.popitem()[1]

    async def _jobs(self, name: str, data: bytes) -> list[tuple[str, Job]]:
        files = [data]
        for duplicate in self._duplicates.get(name, ()):
            try:
                files.append(await self._blobs.read(duplicate, MAX_IMAGE_BYTES) or b"")
            except errors.UnusableFileError:
                continue
        return [
            found for file in files if (found := picture.job_in(file, self._trusted)) is not None
        ]


def draws(job: Job, name: str) -> bool:
    """Whether the job has an image of that name."""
    return any(job.blob_name(index) == name for index in range(job.images_to_draw))


def by_key(bodies: Iterable[str | None]) -> dict[str, str]:
    """Messages by their jobs' keys."""
    found = {}
    for body in bodies:
        if body is not None:
            job = read_job(body, "none")
            found[job_key(job.campaign, job.id)] = body
    return found
