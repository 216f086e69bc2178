"""The asynchronous client: submit jobs, wait for their images, look after those that failed."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, TypeVar, Unpack

from pydantic import TypeAdapter, ValidationError

from imagefleet import errors, outcomes, retry, signing, validation
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, SafeId
from imagefleet.outcomes import JobFacts, Status
from imagefleet.storage import dead_letter_queue, protocol
from imagefleet.storage.dead_letter import Entry
from imagefleet.storage.dead_letter_check import Check
from imagefleet.storage.dead_letter_queue import OnProgress, Preview, Selection, Swept
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import Priority, SignerSettings, checked_priority
from imagefleet.submit import RETRIES, BulkSender

if TYPE_CHECKING:
    from PIL import Image

#: Pauses between two polls: they double while nothing new arrives.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0

#: A pause is at least this many times as long as the poll before it: listing 100,000 images takes
#: many requests.
PAUSE_PER_POLL = 5

_Result = TypeVar("_Result")


class ConnectOptions(TypedDict, total=False):
    """Settings of the storage; each defaults to its `IMAGEFLEET_` variable."""

    queue: str
    container: str
    files_container: str
    sas: str
    sas_file: str | Path
    signing_key: str | Path
    trusted_key: str


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
class Result(JobFacts):
    """A job's outcome; *index* counts the images of one job."""

    fleet: Fleet = field(kw_only=True, repr=False, compare=False)

    async def data(self, index: int = 0) -> bytes:
        """As `imagefleet.Result.data`."""
        if not self.blobs:
            raise errors.JobError(f"job {self.id} has no image: {self.reason or self.status}")
        name, storage = self.blobs[index], self.fleet.storage
        if (data := await self.fleet.run(storage.blobs.read(name))) is None:
            raise errors.JobError(f"there is no image {name} in {storage.url}")
        return data

    async def image(self, index: int = 0) -> Image.Image:
        return decode(await self.data(index))


def connect(storage: str | None = None, **settings: Unpack[ConnectOptions]) -> Fleet:
    """As `imagefleet.connect`, to be entered with `async with`."""
    given: dict[str, Any] = {**settings} if storage is None else {"storage": storage, **settings}
    try:
        all_settings = SignerSettings(**given)
        return Fleet(open_storage(all_settings), signing.Keys.of(all_settings))
    except ValidationError as error:
        reason = validation.sentence(error, SignerSettings.model_fields)
        raise errors.SetupError(reason) from None


class Fleet:
    """A connection to a fleet's storage, for one event loop."""

    def __init__(self, storage: protocol.Storage, keys: signing.Keys = signing.NO_KEYS) -> None:
        """Signs what it submits, and replays only what is signed, if *keys* say so."""
        self.storage = storage
        self.keys = keys
        self._created = False
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self.storage.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnects; calls that still wait raise FleetError. The jobs go on."""
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

    async def submit(
        self,
        jobs: Iterable[Job],
        *,
        campaign: str | None = None,
        priority: Priority = "normal",
    ) -> Batch:
        """As `imagefleet.Fleet.submit`."""
        campaign = campaign and _checked("campaign", campaign)
        return await self.run(self._submit(jobs, campaign, checked_priority(priority)))

    async def _submit(self, jobs: Iterable[Job], campaign: str | None, priority: Priority) -> Batch:
        if not self._created:
            await self.storage.create()
            self._created = True
        rest = iter(jobs)
        first = list(itertools.islice(rest, 1))
        old_failures: set[str] = set()
        # Only an id that was used before can have failed before.
        if first and first[0].id and (await self.storage.poison.depth()).messages:
            failed = dead_letter_queue.browse(self.storage, Selection())
            old_failures = {entry.message.id async for entry in failed}
        expected: dict[str, JobFacts] = {}
        messages = outcomes.messages(
            itertools.chain(first, rest), campaign, expected, self.keys.signing
        )
        await BulkSender(self.storage.queues[priority], messages).run()
        return Batch(self, expected.values(), old_failures)

    def job(self, id: str, campaign: str | None = None) -> JobHandle:  # noqa: A002 - a job's field
        """One job, by its id and campaign, or by both in one: `spring/0001`."""
        if campaign is None and "/" in id:
            campaign, _, id = id.partition("/")  # noqa: A001 - likewise
        campaign = _checked("campaign", campaign or DEFAULT_CAMPAIGN)
        return JobHandle(self, JobFacts(_checked("id", id), campaign))

    async def depth(self) -> Depth:
        """What waits in the job queue, and how many jobs have failed."""
        queue, failed = self.storage.queue, self.storage.poison
        return Depth(await self.run(queue.depth()), await self.run(failed.depth()))

    async def failed(self, **which: Unpack[Which]) -> AsyncIterator[Entry]:
        """The failed jobs: `entry.record` has the error, the reason and the job."""
        entries = dead_letter_queue.browse(self.storage, Selection(**which))

        async def step() -> Entry | None:
            return await anext(entries, None)

        while (entry := await self.run(step())) is not None:
            yield entry

    async def preview_replay(self, *, invalid: bool = False, **which: Unpack[Which]) -> Preview:
        """What `replay` with the same arguments would send, and what would stay."""
        check = Check(self.keys.trusted, takes_invalid=invalid)
        selection = Selection(**which)
        return await self.run(dead_letter_queue.preview(self.storage, selection, check))

    async def replay(
        self,
        on_progress: OnProgress | None = None,
        *,
        invalid: bool = False,
        priority: Priority = "normal",
        **which: Unpack[Which],
    ) -> Swept:
        """As `imagefleet.Fleet.replay`."""
        check = Check(self.keys.trusted, takes_invalid=invalid)
        selection = Selection(**which)
        priority = checked_priority(priority)
        return await self.run(
            dead_letter_queue.replay(self.storage, selection, on_progress, check, priority)
        )

    async def discard(
        self,
        on_progress: OnProgress | None = None,
        *,
        unsigned: bool = False,
        **which: Unpack[Which],
    ) -> Swept:
        """As `imagefleet.Fleet.discard`."""
        keep_signed = self.checks_signatures() if unsigned else None
        selection = Selection(**which)
        return await self.run(
            dead_letter_queue.discard(self.storage, selection, on_progress, keep_signed)
        )

    def checks_signatures(self) -> Check:
        """Raises SetupError without a key to check with."""
        if self.keys.trusted is None:
            raise errors.SetupError(
                "which jobs are signed is not known without a key: set IMAGEFLEET_SIGNING_KEY or"
                " IMAGEFLEET_TRUSTED_KEY"
            )
        return Check(self.keys.trusted)


class Batch:
    """Jobs that were submitted together; `ids` are in their order."""

    def __init__(
        self, fleet: Fleet, jobs: Iterable[JobFacts], old_failures: Container[str]
    ) -> None:
        self._fleet = fleet
        self._jobs = tuple(jobs)
        self._old_failures = old_failures
        self.ids = [job.id for job in self._jobs]

    def __len__(self) -> int:
        return len(self._jobs)

    async def results(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - asyncio.timeout() must not span a yield
    ) -> AsyncIterator[Result]:
        """As `imagefleet.Batch.results`."""
        poll = outcomes.Poll(self._fleet.storage, self._jobs, self._old_failures)
        pace = _Pace(self._fleet, timeout)
        while poll.waiting:
            await pace.poll(poll.run)
            found, poll.found = poll.found, []
            for facts in found:
                yield Result(**facts.fields(), fleet=self._fleet)
            if poll.waiting:
                left = f"{len(poll.waiting):,} of {len(self):,} jobs are"
                await pace.pause(left, progress=bool(found))


class JobHandle:
    """A job by its id, whoever submitted it."""

    def __init__(self, fleet: Fleet, job: JobFacts) -> None:
        self.id = job.id
        self.campaign = job.campaign
        self._fleet = fleet
        self._job = job

    async def status(self) -> Status:
        """As `imagefleet.JobHandle.status`."""
        return (await self._fleet.run(self._look_up())).status

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as above
        """As `imagefleet.JobHandle.result`."""
        pace = _Pace(self._fleet, timeout)
        while (job := await pace.poll(self._look_up)).status == "pending":
            await pace.pause("the job is")
        if job.status == "unknown":
            raise errors.FleetError(f"there is no job {job.key} in {self._fleet.storage.url}")
        return Result(**job.fields(), fleet=self._fleet)

    async def _look_up(self) -> JobFacts:
        return await outcomes.look_up(self._fleet.storage, self._job)


class _Pace:
    """Polls, the pauses between them, and their end."""

    def __init__(self, fleet: Fleet, timeout: float | None) -> None:
        self._fleet = fleet
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._quiet_polls = 0
        self._poll_seconds = 0.0

    async def poll(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        began_at = time.monotonic()
        result = await self._fleet.run(RETRIES.call(operation))
        self._poll_seconds = time.monotonic() - began_at
        return result

    async def pause(self, left: str, *, progress: bool = False) -> None:
        """Raises TimeoutError, which says what is *left*, if there is no time for another poll."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{left} not done after {self._timeout:g} seconds")
        self._quiet_polls = 0 if progress else self._quiet_polls + 1
        backoff = retry.backoff(self._quiet_polls, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        seconds = max(backoff, PAUSE_PER_POLL * self._poll_seconds)
        await self._fleet.run(asyncio.sleep(min(seconds, remaining)))


def decode(data: bytes) -> Image.Image:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _checked(what: str, name: str) -> str:
    try:
        return TypeAdapter(SafeId).validate_python(name)
    except ValidationError as error:
        raise errors.JobError(f"{what} {name[:80]!r}: {validation.sentence(error)}") from None
