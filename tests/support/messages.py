"""Messages of jobs, what runs a worker's pipeline on them, and what has become of them."""

import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.stand_in import StandInEngine, draw_noise
from browsing import visible
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from worker.engine import contract


def message(**fields: object) -> str:
    """A job's message with any fields changed."""
    return json.dumps({"prompt": "a house", **fields})


def read(**fields: object) -> Job:
    """The job of a message with any fields changed."""
    return read_job(message(**fields), "message-1")


def chained(*stages: JSONDict, **fields: Any) -> str:
    """The message of a job of three stages of 11, 12 and 13 steps."""
    then = stages or ({"steps": 12}, {"steps": 13})
    return message(**{"id": "a", "steps": 11, "then": then, **fields})


def failing(call: Callable[..., Awaitable[Any]], error: Exception, times: int) -> Any:
    """A call to the storage that fails so many times before it succeeds."""
    failures = iter([error] * times)

    async def fails(*given: Any, **named: Any) -> Any:
        if failure := next(failures, None):
            raise failure
        return await call(*given, **named)

    return fails


async def redelivered(storage: Storage, *bodies: str) -> None:
    """Sends messages whose first worker loses its leases."""
    await storage.queue.send(bodies)
    for leased in await storage.queue.receive(len(bodies), 60):
        await storage.queue.release(leased)


async def blobs(storage: Storage, prefix: str = "default/") -> list[str]:
    return sorted([name async for name in storage.blobs.names(prefix)])


async def images(storage: Storage) -> set[str]:
    """The names of all images but those that are kept aside."""
    return {name async for name in storage.blobs.names() if not name.startswith("-")}


async def records(storage: Storage, campaign: str = "default") -> list[Record]:
    return [record async for record in reader.images(storage, campaign)]


async def counts(storage: Storage, campaign: str = "default") -> tuple[int, int, int]:
    """Images, completed jobs and failed jobs by the records."""
    found = await reader.counts(storage, campaign)
    return found.images, found.completed, found.failed


async def image(storage: Storage, name: str) -> Image.Image:
    """A stored image."""
    data = await storage.blobs.read(name)
    assert data is not None, name
    return Image.open(io.BytesIO(data))


def file_of(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image, or of its pixels."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(buffer, kind, **options)
    return buffer.getvalue()


async def failures(storage: Storage) -> dict[str, FailedJob]:
    """The jobs in the poison queue by their ids."""
    return {str(job.id): job for job in await failed_jobs(storage)}


async def failed_jobs(storage: Storage) -> list[FailedJob]:
    """The jobs in the poison queue, in which there is nothing else."""
    found = [FailedJob.parse(each.body) async for each in visible(storage.poison)]
    jobs = [job for job in found if job is not None]
    assert len(jobs) == len(found)
    return jobs


def draw_unless_broken(request: contract.ImageRequest) -> contract.Pixels:
    if "broken" in str(request.prompt):
        raise errors.JobError("the prompt is broken")
    return draw_noise(request)


class Drawing(StandInEngine):
    """Notes what it draws; *fails* returns the errors of what cannot be drawn."""

    def __init__(
        self,
        fails: Callable[[contract.ImageRequest], errors.FleetError | None]
        | None = None,
        model: str = "stand-in",
        **options: Any,
    ) -> None:
        super().__init__(draw=self._draw_and_note, **options)
        self.model_name = model
        self.drawn: list[contract.ImageRequest] = []
        self._fails = fails

    def _draw_and_note(self, request: contract.ImageRequest) -> contract.Pixels:
        self.drawn.append(request)
        if self._fails and (error := self._fails(request)):
            raise error
        return draw_noise(request)

    @property
    def steps(self) -> list[int]:
        return [request.steps for request in self.drawn]

    @property
    def seeds(self) -> list[int]:
        return [request.seed for request in self.drawn]
