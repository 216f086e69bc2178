"""The asynchronous client: submit jobs, wait for their images, look after those that failed."""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, TypeVar, Unpack

from pydantic import TypeAdapter

from imagefleet import cancelled, concurrency, signing, validation
from imagefleet.concurrency import Operation, Work
from imagefleet.errors import FleetError, JobError, MisfitError, SetupError
from imagefleet.job.change import Change
from imagefleet.job.message import Job, SafeId
from imagefleet.job.names import split_job_key
from imagefleet.records import columns, outcomes, reader
from imagefleet.records.batch import Submission, Watch
from imagefleet.records.catalog import Damaged
from imagefleet.records.counts import Counts
from imagefleet.records.ledger import Ledgers
from imagefleet.records.outcomes import JobFacts, Status
from imagefleet.storage import dead_letter_queue, enqueue
from imagefleet.storage.bundle import jobs_per_bundle
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.dead_letter_queue import Swept
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import OnProgress, QueueDepth
from imagefleet.storage.routing.models import models_of
from imagefleet.storage.settings import Priority, SignerSettings, checked_priority
from imagefleet.submit import RETRIES, BulkSender, keep_noting
from imagefleet.validation import JSONDict, JSONObject

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

#: Pauses between two polls: they double while nothing new arrives.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0

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


class FailedJobFilter(TypedDict, total=False):
    """Selection of failed jobs: *error* is part of the error's class or reason; all must hold."""

    error: str | None
    campaign: str | None
    id: str | None


class Depth(NamedTuple):
    """Messages in the job queue and in the queue of failed jobs."""

    queue: QueueDepth
    failed: QueueDepth


@dataclass(frozen=True, slots=True)
class Result(JobFacts):
    """A job's outcome; *index* counts the images of one job."""

    fleet: Fleet = field(kw_only=True, repr=False, compare=False)

    async def data(self, index: int = 0) -> bytes:
        """The image's file: PNG, JPEG or WebP; raises JobError if there is none.

        MisfitError: what is stored under its name is another picture than the one recorded.
        """
        from imagefleet.records import pictures  # which needs Pillow

        if not self.blobs:
            raise JobError(f"job {self.id} has no image: {self.reason or self.status}")
        name = self.blobs[index]
        storage = self.fleet.storage
        unsaid = {
            "prompt": None,
            "negative_prompt": None,
        }  # whoever wrote the record chose them
        records = [
            each.model_copy(update=unsaid) for each in self.records if each.blob == name
        ]
        found = await self.fleet.run(pictures.find(storage, records))
        if found == "missing":
            raise JobError(f"there is no image {name} in {storage.url}")
        if found == "misfit":
            raise MisfitError(
                f"{name} in {storage.url} is not the picture that was recorded: another"
                " one has been stored under its name"
            )
        return found.data

    async def image(self, index: int = 0) -> Image.Image:
        return decode(await self.data(index))


def connect(storage: str | None = None, **settings: Unpack[ConnectOptions]) -> Fleet:
    """Connects as `imagefleet.connect` does, to be entered with `async with`."""
    given: JSONDict = (
        {**settings} if storage is None else {"storage": storage, **settings}
    )
    with validation.as_error(SetupError, known=SignerSettings.model_fields):
        all_settings = SignerSettings(**given)
        return Fleet(open_storage(all_settings), all_settings.keys())


class Fleet:
    """A connection to a fleet's storage, for one event loop; signs and checks with *keys*."""

    def __init__(self, storage: Storage, keys: signing.Keys = signing.NO_KEYS) -> None:
        self.storage = storage
        self.keys = keys
        self.signer = keys.signer(storage.scope)
        self._ledgers = Ledgers(storage)
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

    async def run(self, operation: Work[_Result]) -> _Result:
        """Awaits *operation*, which `close` ends; raises FleetError if the fleet is closed."""
        if self._closed:
            operation.close()
            raise FleetError("this fleet is closed")
        task = asyncio.create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise FleetError("this fleet was closed") from None
            raise

    async def submit(
        self,
        jobs: Iterable[Job],
        *,
        campaign: str | None = None,
        priority: Priority = "normal",
        models: Collection[str] = (),
        before_send: Callable[[Mapping[str, JobFacts]], object] = lambda _: None,
    ) -> Batch:
        """Sends jobs; creates the queues and the containers if there are none.

        A job without an id gets one, one without a campaign *campaign*. All are checked before the
        first is sent; then *before_send* gets them, by campaign and id. *models* are what workers
        have from elsewhere than `models/` in the storage.
        Raises JobError for an id that is there twice, a large job, or a model that no worker can
        have, and NameTakenError for an id that was sent before with another content.
        """
        campaign = campaign and _checked("campaign", campaign)
        to = enqueue.JobSender(
            self.storage, checked_priority(priority), elsewhere=models
        )

        async def send() -> Batch:
            if not self._created:
                await self.storage.create()
                self._created = True
            submission = Submission(self.storage, self._ledgers)
            bodies = list(submission.messages(jobs, campaign, self.signer))
            await to.check(model for body in bodies for model in models_of(body))
            await submission.check()
            before_send(submission.jobs)
            await RETRIES.call(submission.before_send)
            sender = BulkSender(
                to.send, bodies, bundle_jobs=jobs_per_bundle(len(bodies))
            )

            async def note() -> None:
                await submission.note_sent(sender.progress.sent)

            try:
                async with concurrency.beside(keep_noting(note)):
                    await sender.run()
            finally:
                await note()
            return Batch(self, submission)

        return await self.run(send())

    def results(self, campaign: str) -> Results:
        """Results of a campaign's ended jobs, each once; not of those queued or running."""
        found = outcomes.of_campaign(self.storage, _checked("campaign", campaign))
        return Results(self, self._each(found))

    async def _each(self, found: AsyncIterator[JobFacts]) -> AsyncIterator[Result]:
        async def step() -> JobFacts | None:
            return await anext(found, None)

        while (facts := await self.run(step())) is not None:
            yield Result(**facts.fields(), fleet=self)

    async def campaigns(self) -> dict[str, Counts]:
        """The campaigns that have records, by name, and how many jobs of each are where."""
        return await self.run(reader.all_counts(self.storage, Damaged(), {}))

    async def cancel(self, campaign: str) -> datetime:
        """Cancels what was sent of a campaign, and ends its running loads; returns until when.

        It takes some twelve seconds; what is sent later runs, and what workers have begun ends.
        """
        return await self.run(
            cancelled.cancel(self.storage, _checked("campaign", campaign))
        )

    def job(self, id: str, campaign: str | None = None) -> JobHandle:  # noqa: A002 - a job's field
        """One job, by its id and campaign, or by both in one: `spring/0001`."""
        campaign, job_id = split_job_key(id, campaign)
        return JobHandle(
            self, JobFacts(_checked("id", job_id), _checked("campaign", campaign))
        )

    async def depth(self) -> Depth:
        """Sizes of the job queue and of the queue of failed jobs."""
        return Depth(
            await self.run(self.storage.queue.depth()),
            await self.run(self.storage.poison.depth()),
        )

    def failed(self, **which: Unpack[FailedJobFilter]) -> Results:
        """The jobs that have failed and were neither replayed nor discarded since."""
        records = dead_letter_queue.recorded(self.storage, Selection(**which))
        return Results(
            self, self._each(outcomes.known(each).ended(each) async for each in records)
        )

    async def replay(
        self,
        on_progress: OnProgress | None = None,
        *,
        set: JSONObject | None = None,  # noqa: A002 - as `--set`
        priority: Priority = "normal",
        **which: Unpack[FailedJobFilter],
    ) -> Swept:
        """Puts failed jobs back into the job queue of *priority*; without a condition, all of them.

        *set* has new values of fields: `{"steps": 20}`; raises SetupError for a field that no job
        has. With a key only signed jobs; what is changed is signed again.
        """
        check = self.check(Change(set, self.signer) if set else None)
        return await self.run(
            dead_letter_queue.replay(
                self.storage,
                Selection(**which),
                on_progress,
                check,
                checked_priority(priority),
            )
        )

    def check(self, change: Change | None = None) -> Check:
        """Conditions for failed jobs to be sent again: signed, where there is a key."""
        keys = self.keys.trusted
        trusted = (
            None
            if keys is None
            else signing.TrustedJobs(keys, self.storage.scope, at_any_time=True)
        )
        return Check(trusted, change, self.signer)

    async def discard(
        self, on_progress: OnProgress | None = None, **which: Unpack[FailedJobFilter]
    ) -> Swept:
        """Deletes failed jobs for good; without a condition, all of them."""
        return await self.run(
            dead_letter_queue.discard(self.storage, Selection(**which), on_progress)
        )


class Results:
    """Results as they come, or together as a data frame."""

    def __init__(self, fleet: Fleet, results: AsyncIterator[Result]) -> None:
        self._fleet = fleet
        self._results = results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        return await anext(self._results)

    async def frame(self) -> pd.DataFrame:
        """A row for each image, and for each job without; the columns of `imagefleet results`."""
        records = (record async for result in self for record in result.records)
        return await columns.frame(records, columns.addresses(self._fleet.storage))


class Batch:
    """Jobs that were submitted together; `ids` are in their order."""

    def __init__(self, fleet: Fleet, submission: Submission) -> None:
        self._fleet = fleet
        self._jobs = submission.jobs
        self._positions = submission.positions
        self.ids = [job.id for job in self._jobs.values()]

    def __len__(self) -> int:
        return len(self._jobs)

    def results(self, timeout: float | None = None) -> Results:
        """Each job's result once, as they end; raises TimeoutError after *timeout* seconds."""
        return Results(self._fleet, self._results(timeout))

    async def _results(
        self,
        timeout: float | None,  # noqa: ASYNC109 - asyncio.timeout() must not span a yield
    ) -> AsyncIterator[Result]:
        watch = Watch(self._fleet.storage, self._jobs.values(), self._positions)
        pace = _Pace(self._fleet, timeout)
        progress = False
        while watch.waiting:
            await pace.poll(watch.poll)
            found = watch.found
            watch.found = []
            progress = progress or bool(found)
            for facts in found:
                yield Result(**facts.fields(), fleet=self._fleet)
            if watch.waiting and not watch.is_behind:
                await pace.pause(
                    f"{len(watch.waiting):,} of {len(self):,} jobs are",
                    progress=progress,
                )
                progress = False


class JobHandle:
    """A job by its id, whoever submitted it."""

    def __init__(self, fleet: Fleet, job: JobFacts) -> None:
        self.id = job.id
        self.campaign = job.campaign
        self._fleet = fleet
        self._job = job

    async def status(self) -> Status:
        """Pending (queued or running), completed, failed, cancelled, or unknown to this storage."""
        return (await self._fleet.run(self._look_up())).status

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as above
        """Waits until the job has completed or failed, or was cancelled.

        Raises TimeoutError after *timeout* seconds, and FleetError if it is not in this storage.
        """
        pace = _Pace(self._fleet, timeout)
        while (job := await pace.poll(self._look_up)).status == "pending":
            await pace.pause("the job is")
        if job.status == "unknown":
            raise FleetError(f"there is no job {job.key} in {self._fleet.storage.url}")
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

    async def poll(self, operation: Operation[_Result]) -> _Result:
        return await self._fleet.run(RETRIES.call(operation))

    async def pause(self, left: str, *, progress: bool = False) -> None:
        """Raises TimeoutError, which says what is *left*, if there is no time for another poll."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{left} not done after {self._timeout:g} seconds")
        self._quiet_polls = 0 if progress else self._quiet_polls + 1
        seconds = concurrency.backoff(
            self._quiet_polls, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
        )
        await self._fleet.run(asyncio.sleep(min(seconds, remaining)))


def decode(data: bytes) -> Image.Image:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _checked(what: str, name: str) -> str:
    with validation.as_error(JobError, f"{what} {name[:80]!r}: "):
        return TypeAdapter(SafeId).validate_python(name)
