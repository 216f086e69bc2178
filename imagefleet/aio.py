"""The asynchronous client: submit jobs, wait for their images, look after those that failed."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
import math
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Container, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypedDict, TypeVar, Unpack

from pydantic import JsonValue, TypeAdapter, ValidationError

from imagefleet import errors, retry, validation
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, SafeId, job_key
from imagefleet.storage import dead_letter_queue, protocol
from imagefleet.storage.dead_letter_queue import Entry, OnProgress, Selection, Swept
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.submit import RETRIES, BulkSender

if TYPE_CHECKING:
    from PIL import Image

#: Pauses between two polls: they double while nothing new arrives.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0

#: A pause is at least this many times as long as the poll before it: listing 100,000 images takes
#: many requests.
PAUSE_PER_POLL = 5

#: Polls after which the failed jobs are browsed although their number has not changed.
POLLS_PER_BROWSE = 10

Status = Literal["pending", "completed", "failed", "unknown"]

_Result = TypeVar("_Result")


class ConnectOptions(TypedDict, total=False):
    """Settings of the storage; each defaults to its `IMAGEFLEET_` variable."""

    queue: str
    container: str
    queue_sas: str
    poison_sas: str
    blob_sas: str
    sas_file: str | Path


class Which(TypedDict, total=False):
    """Which failed jobs: *error* is part of the error's class or reason; all conditions hold."""

    error: str | None
    campaign: str | None
    id: str | None


class Depth(NamedTuple):
    """Messages in the job queue and in the queue of failed jobs."""

    queue: protocol.QueueDepth
    failed: protocol.QueueDepth


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known about a job; `reason` says why it failed, `blobs` names its images."""

    id: str
    campaign: str
    status: Status
    seed: int | None = None
    reason: str | None = None
    blobs: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result(JobFacts):
    """A job's outcome; *index* counts the images of one job."""

    fleet: Fleet = dataclasses.field(kw_only=True, repr=False, compare=False)

    async def data(self, index: int = 0) -> bytes:
        """The image's file: PNG, JPEG or WebP.

        Raises:
            JobError: there is none, because the job failed, say.
        """
        if not self.blobs:
            raise errors.JobError(f"job {self.id} has no image: {self.reason or self.status}")
        name, storage = self.blobs[index], self.fleet.storage
        if (data := await self.fleet.run(storage.blobs.read(name))) is None:
            raise errors.JobError(f"there is no image {name} in {storage.url}")
        return data

    async def image(self, index: int = 0) -> Image.Image:
        """The image, decoded by Pillow."""
        return decode(await self.data(index))


@dataclass(frozen=True, slots=True)
class _Expected:
    """A job that was sent, and the names of the images to wait for."""

    id: str
    campaign: str
    seed: int
    blobs: tuple[str, ...]
    metadata: Mapping[str, JsonValue]

    @property
    def key(self) -> str:
        return job_key(self.campaign, self.id)


def connect(storage: str | None = None, **settings: Unpack[ConnectOptions]) -> Fleet:
    """The fleet behind a storage address, to be entered with `async with`.

    *storage* is `local:FOLDER`, an Azure connection string or `https://ACCOUNT.blob...`; it and
    the settings default to the `IMAGEFLEET_` variables.

    Raises:
        SetupError: the address or a setting is not valid.
    """
    given: dict[str, Any] = {**settings} if storage is None else {"storage": storage, **settings}
    try:
        return Fleet(open_storage(StorageSettings(**given)))
    except ValidationError as error:
        reason = validation.sentence(error, StorageSettings.model_fields)
        raise errors.SetupError(reason) from None


class Fleet:
    """Jobs go in, results come out. Use it on one event loop."""

    def __init__(self, storage: protocol.Storage) -> None:
        self.storage = storage
        self._created = False
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self.storage.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnects; whatever still waits raises FleetError. The jobs go on."""
        if self._closed:
            return
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.storage.__aexit__(None, None, None)

    async def run(self, operation: Coroutine[Any, Any, _Result]) -> _Result:
        """Awaits *operation*, which `close` ends.

        Raises:
            FleetError: the fleet is closed.
        """
        if self._closed:
            operation.close()
            raise errors.FleetError("this fleet is closed")
        task = asyncio.create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise errors.FleetError("this fleet was closed") from None
            raise

    async def submit(self, jobs: Iterable[Job], *, campaign: str | None = None) -> Batch:
        """Sends jobs; creates the queue and the container if there are none.

        A job without an id gets one. *campaign* is for jobs without one. Jobs before an invalid
        one are sent.

        Raises:
            JobError: two jobs have one id, or a job is too large for a message.
            FleetError: the storage cannot be used.
        """
        return await self.run(self._submit(jobs, campaign and _checked("campaign", campaign)))

    async def _submit(self, jobs: Iterable[Job], campaign: str | None) -> Batch:
        if not self._created:
            await self.storage.create()
            self._created = True
        waiting = iter(jobs)
        beginning = list(itertools.islice(waiting, 1))
        old_failures: set[str] = set()
        # Only an id that was used before can have failed before.
        if beginning and beginning[0].id and (await self.storage.poison.depth()).messages:
            failed = dead_letter_queue.browse(self.storage, Selection())
            old_failures = {entry.message.id async for entry in failed}
        expected: dict[str, _Expected] = {}
        bodies = _messages(itertools.chain(beginning, waiting), campaign, expected)
        await BulkSender(self.storage.queue, bodies).run()
        return Batch(self, expected.values(), old_failures)

    def job(self, id: str, campaign: str | None = None) -> JobHandle:  # noqa: A002 - a job's field
        """One job, by its id and campaign, or by both in one: `spring/0001`."""
        if campaign is None and "/" in id:
            campaign, _, id = id.partition("/")  # noqa: A001 - likewise
        campaign = _checked("campaign", campaign or DEFAULT_CAMPAIGN)
        return JobHandle(self, _checked("id", id), campaign)

    async def depth(self) -> Depth:
        """What waits in the job queue, and how many jobs have failed."""
        queue, failed = self.storage.queue, self.storage.poison
        return Depth(await self.run(queue.depth()), await self.run(failed.depth()))

    async def failed(self, **which: Unpack[Which]) -> AsyncIterator[Entry]:
        """The failed jobs: `entry.record` has the error, the reason and the job."""
        entries = dead_letter_queue.browse(self.storage, Selection(**which))
        while (entry := await self.run(_next(entries))) is not None:
            yield entry

    async def replay(self, on_progress: OnProgress | None = None, **which: Unpack[Which]) -> Swept:
        """Puts failed jobs back into the job queue; without a condition, all of them."""
        return await self.run(
            dead_letter_queue.replay(self.storage, Selection(**which), on_progress)
        )

    async def discard(self, on_progress: OnProgress | None = None, **which: Unpack[Which]) -> Swept:
        """Deletes failed jobs for good; without a condition, all of them."""
        return await self.run(
            dead_letter_queue.discard(self.storage, Selection(**which), on_progress)
        )


class JobHandle:
    """A job by its id, whoever submitted it."""

    def __init__(self, fleet: Fleet, id: str, campaign: str) -> None:  # noqa: A002 - a job's field
        self.id = id
        self.campaign = campaign
        self._fleet = fleet

    async def status(self) -> Status:
        """Pending (queued or running), completed, failed, or unknown to this storage."""
        return (await self._fleet.run(RETRIES.call(self._look_up))).status

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as below
        """Waits until the job has completed or failed.

        Raises:
            TimeoutError: that takes longer than *timeout* seconds.
            FleetError: the job is not in this storage.
        """
        pace = _Pace(self._fleet, timeout)
        look_up = partial(RETRIES.call, self._look_up)
        while (result := await self._fleet.run(look_up())).status == "pending":
            await pace.pause("the job is")
        if result.status == "unknown":
            key = job_key(self.campaign, self.id)
            raise errors.FleetError(f"there is no job {key} in {self._fleet.storage.url}")
        return result

    async def _look_up(self) -> Result:
        storage = self._fleet.storage
        job = Result(self.id, self.campaign, "pending", fleet=self._fleet)
        # Before the images: a job that completes in between must not be taken for an unknown one.
        queued = (await storage.queue.depth()).messages
        if images := await self._images():
            first = min(images)
            facts = images[first].metadata
            if len(images) >= int(facts.get("images", 1)):
                return dataclasses.replace(
                    job,
                    status="completed",
                    seed=(int(facts["seed"]) - first) % 2**32 if "seed" in facts else None,
                    blobs=tuple(images[index].name for index in sorted(images)),
                    metadata=json.loads(facts.get("metadata", "{}")),
                )
        key = job_key(self.campaign, self.id)
        async for entry in dead_letter_queue.browse(storage, Selection(id=self.id)):
            if entry.record and job_key(entry.record.campaign, entry.record.id) == key:
                job = dataclasses.replace(job, status="failed", reason=entry.record.reason)
        is_unknown = job.status == "pending" and not queued
        return dataclasses.replace(job, status="unknown") if is_unknown else job

    async def _images(self) -> dict[int, protocol.BlobRecord]:
        """By index; `a-1.png` is image 1 of job `a` or the only one of job `a-1`."""
        key = job_key(self.campaign, self.id)
        name = re.compile(rf"{re.escape(key)}(?:-(\d+))?\.\w+")
        images = {}
        for separator in ".-":
            async for record in self._fleet.storage.blobs.records(key + separator):
                match = name.fullmatch(record.name)
                if match and record.metadata.get("job", self.id) == self.id:
                    images[int(match[1] or 0)] = record
        return images


class Batch:
    """Jobs that were submitted together."""

    def __init__(
        self, fleet: Fleet, jobs: Iterable[_Expected], old_failures: Iterable[str] = ()
    ) -> None:
        self._fleet = fleet
        self._jobs = tuple(jobs)
        self._old_failures = frozenset(old_failures)

    @property
    def ids(self) -> list[str]:
        """The jobs' ids, in their order."""
        return [job.id for job in self._jobs]

    def __len__(self) -> int:
        return len(self._jobs)

    async def results(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - asyncio.timeout() must not span a yield
    ) -> AsyncIterator[Result]:
        """Each job's result once, as they complete or fail; called again, all of them again.

        Raises:
            TimeoutError: not all are done after *timeout* seconds.
        """
        poll = _Poll(self._fleet, self._jobs, self._old_failures)
        pace = _Pace(self._fleet, timeout)
        while poll.waiting:
            began_at = time.monotonic()
            await self._fleet.run(RETRIES.call(poll.run))
            seconds = time.monotonic() - began_at
            results, poll.results = poll.results, []
            for result in results:
                yield result
            if poll.waiting:
                left = f"{len(poll.waiting):,} of {len(self):,} jobs are"
                await pace.pause(left, poll_seconds=seconds, progress=bool(results))


class _Poll:
    """Looks for the outcomes of many jobs: by listings, never by a request for each."""

    def __init__(
        self, fleet: Fleet, jobs: Iterable[_Expected], old_failures: Container[str]
    ) -> None:
        self.results: list[Result] = []
        self.waiting = {job.key: job for job in jobs}
        self._fleet = fleet
        self._missing = {name: job for job in self.waiting.values() for name in job.blobs}
        self._images = Counter(job.key for job in self._missing.values())
        self._old_failures = old_failures
        self._failures = 0
        self._polls = 0

    async def run(self) -> None:
        """One poll; adds to `results`, also if it is interrupted by an error."""
        storage = self._fleet.storage
        for prefix in _prefixes(self._missing):
            async for name in storage.blobs.names(prefix):
                job = self._missing.pop(name, None)
                if job is not None:
                    self._images[job.key] -= 1
                    if not self._images[job.key]:
                        self._add(job, "completed")
        # Browsing hides messages from other readers, so mostly when their number has changed.
        before, self._failures = self._failures, (await storage.poison.depth()).messages
        self._polls += 1
        if self._failures and (self._failures != before or self._polls % POLLS_PER_BROWSE == 0):
            async for entry in dead_letter_queue.browse(storage, Selection()):
                record = entry.record
                if record is not None and entry.message.id not in self._old_failures:
                    job = self.waiting.get(job_key(record.campaign, record.id))
                    if job is not None:
                        self._add(job, "failed", record.reason)

    def _add(self, job: _Expected, status: Status, reason: str | None = None) -> None:
        del self.waiting[job.key]
        blobs = tuple(name for name in job.blobs if self._missing.pop(name, None) is None)
        facts = job.id, job.campaign, status, job.seed, reason, blobs, job.metadata
        self.results.append(Result(*facts, fleet=self._fleet))


class _Pace:
    """The pauses between polls, and their end."""

    def __init__(self, fleet: Fleet, timeout: float | None) -> None:
        self._fleet = fleet
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._quiet_polls = 0

    async def pause(self, left: str, poll_seconds: float = 0, *, progress: bool = False) -> None:
        """Raises TimeoutError, which says what is *left*, if there is no time for another poll."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{left} not done after {self._timeout:g} seconds")
        self._quiet_polls = 0 if progress else self._quiet_polls + 1
        backoff = retry.backoff(self._quiet_polls, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        seconds = max(backoff, PAUSE_PER_POLL * poll_seconds)
        await self._fleet.run(asyncio.sleep(min(seconds, remaining)))


def decode(data: bytes) -> Image.Image:
    """Raises SetupError if Pillow is not installed."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise errors.SetupError("image() needs Pillow: pip install pillow") from None
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _messages(
    jobs: Iterable[Job], campaign: str | None, expected: dict[str, _Expected]
) -> Iterator[str]:
    """The jobs' messages; each job is added to *expected* before its message is sent."""
    token = uuid.uuid4().hex[:12]
    for number, given in enumerate(jobs, start=1):
        job = given.identified(f"{token}-{number:06}", campaign)
        blobs = tuple(job.blob_name(index) for index in range(job.images))
        entry = _Expected(
            str(job.id), job.campaign or DEFAULT_CAMPAIGN, job.seed, blobs, job.metadata
        )
        if entry.key in expected:
            raise errors.JobError(f"two jobs have the id {entry.key}")
        body = job.to_message()
        try:
            protocol.checked_messages([body])
        except errors.JobError as error:
            raise errors.JobError(f"job {entry.key}: {error.message}") from None
        expected[entry.key] = entry
        yield body


def _checked(what: str, name: str) -> str:
    try:
        return TypeAdapter(SafeId).validate_python(name)
    except ValidationError as error:
        raise errors.JobError(f"{what} {name[:80]!r}: {validation.sentence(error)}") from None


def _prefixes(names: Iterable[str]) -> list[str]:
    """What the names in each folder have in common."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name.partition("/")[0], []).append(name)
    return [os.path.commonprefix(each) for each in folders.values()]  # noqa: RUF071 - of letters


async def _next(results: AsyncIterator[_Result]) -> _Result | None:
    return await anext(results, None)
