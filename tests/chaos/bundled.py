"""Bundles of jobs for tests, and what is in the packs that workers made of them."""

import asyncio
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from imagefleet import errors
from imagefleet.files import pack
from imagefleet.job.message import Job, fields_if_any
from imagefleet.records.log import GZIP, RECORDS
from imagefleet.records.record import Record
from imagefleet.storage import bundle
from imagefleet.storage.open import Storage, open_storage
from messages import Drawing
from storm_worker import BAD_STEPS
from worker.engine import contract
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

NAME = "0123456789abcdef" * 2


def job(number: int, **fields: object) -> str:
    """The message of job `jN`, whose seed is its number."""
    known = {"prompt": "a house", "id": f"j{number}", "seed": number}
    return Job.model_validate({**known, **fields}).to_message()


def bundle_of(jobs: Iterable[str], name: str = NAME) -> str:
    group = [bundle._Job(text, True, fields_if_any(text)) for text in jobs]
    (text,) = bundle._fitting(group, lambda _: name)
    return text


def bundle_of_jobs(count: int, **fields: object) -> str:
    return bundle_of((job(number, **fields) for number in range(count)), NAME)


@dataclass(slots=True)
class Packed:
    """The ends of jobs in the parts of a campaign's bundles, by their ids."""

    #: The parts that have an image of the job.
    images: dict[str, list[str]] = field(default_factory=dict)
    #: The outcomes of the job without an image.
    ends: dict[str, list[str]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)


class StoredImage(NamedTuple):
    """An image by itself or in a pack, as if it were by itself."""

    name: str
    data: bytes
    attempts: int
    pack: str | None = None


async def stored_images(storage: Storage, campaign: str) -> AsyncIterator[StoredImage]:
    async for record in storage.blobs.records(f"{campaign}/"):
        data = await storage.blobs.read(record.name) or b""
        yield StoredImage(record.name, data, int(record.metadata.get("attempt", 1)))
    async for name in storage.packs.names(f"{campaign}/"):
        whole = await storage.packs.read(name) or b""
        for each in pack.read(name, whole).records:
            start = each.offset or 0
            data = whole[start : start + (each.size_bytes or 0)]
            yield StoredImage(str(each.blob), data, each.attempts, name)


async def packed(storage: Storage, campaign: str = "default") -> Packed:
    found = Packed()
    for name in sorted([name async for name in storage.packs.names(f"{campaign}/")]):
        data = await storage.packs.read(name)
        assert data is not None
        contents = pack.read(name, data)
        found.parts.append(name)
        for record in contents.records:
            found.images.setdefault(record.id, []).append(name)
        for record in contents.ends:
            found.ends.setdefault(record.id, []).append(record.outcome)
    return found


async def logged(storage: Storage, campaign: str = "default") -> list[Record]:
    """All records of a campaign as they are stored, `again` and twice as well."""
    found = []
    async for name in storage.blobs.names(f"{RECORDS}{campaign}/"):
        data = await storage.blobs.read(name) or b""
        while data:
            member = zlib.decompressobj(GZIP)
            lines = member.decompress(data)
            data = member.unused_data
            found += [Record.read(line) for line in lines.splitlines()]
    return found


async def faults(storage: Storage, jobs: Iterable[str]) -> set[str]:
    """What is wrong with the ends of *jobs* once the queue is empty; none if each ended once."""
    found = await packed(storage, "default")
    records = await logged(storage, "default")
    recorded = {(each.id, each.outcome) for each in records}
    wrong = set()
    for name in jobs:
        images = found.images.get(name, [])
        ends = set(found.ends.get(name, []))
        ends |= {outcome for each, outcome in recorded if each == name} - {"completed"}
        if not images and not ends:
            wrong.add(f"{name} lost")
        if len(images) > 1:
            wrong.add(f"{name} doubled")
        if images and ends:
            wrong.add(f"{name} has two ends")
        if images and (name, "completed") not in recorded:
            wrong.add(f"{name} has no record")
    return wrong


#: Calls of a worker to the storage at which it can be killed, before or after their effect.
DEADLY_CALLS = (
    ("packs", "create"),
    ("blobs", "append"),
    ("poison", "send"),
    ("queue", "delete"),
)


def worker_that_is_killed() -> None:
    """A worker that kills itself (SIGKILL) at a call: its arguments are `PART.CALL before|after`.

    Run in a fork (`forks`), on the storage of the environment's settings, until the queue is empty.
    """
    call, when = sys.argv[1:]
    part, name = call.split(".")

    def deadly(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call_and_die(*given: Any, **named: Any) -> Any:
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            await inner(*given, **named)
            os.kill(os.getpid(), signal.SIGKILL)

        return call_and_die

    def fails(request: contract.ImageRequest) -> errors.FleetError | None:
        is_bad = request.steps == BAD_STEPS
        return errors.JobError("cannot be drawn") if is_bad else None

    run_wrapped(partial(Drawing, fails), {part: (name,)}, deadly)


def run_wrapped(
    engine: Callable[[], contract.Engine],
    calls: Mapping[str, Iterable[str]],
    wrap: Callable[[Any], Any],
) -> None:
    """Runs a worker until the queue is empty, with these calls of parts of its storage wrapped."""

    def wrap_all(part: str, of: Any) -> Any:
        for name in calls.get(part, ()):
            setattr(of, name, wrap(getattr(of, name)))
        return of

    async def run() -> None:
        usual = WorkerSettings(model=Path("stand-in"), until_empty=True)
        settings = usual.model_copy(update={"lease_seconds": 1})
        async with open_storage(settings) as storage:
            served = storage.models.served
            storage.models.served = lambda models: wrap_all("queue", served(models))  # type: ignore[method-assign]
            for part in calls.keys() - {"queue"}:
                wrap_all(part, getattr(storage, part))
            pipeline = Pipeline(storage, engine, settings)
            await pipeline.run(asyncio.Event(), asyncio.Event())

    asyncio.run(run())
