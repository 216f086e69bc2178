"""The client: `imagefleet.aio` for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from imagefleet import aio, errors
from imagefleet.aio import ConnectOptions, Depth, Which
from imagefleet.job.message import Job
from imagefleet.records.outcomes import JobFacts, Status
from imagefleet.records.reader import Counts
from imagefleet.storage.dead_letter_queue import Swept
from imagefleet.storage.settings import Priority

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

_Result = TypeVar("_Result")


def connect(storage: str | None = None, **settings: Unpack[ConnectOptions]) -> Fleet:
    """The fleet behind a storage address; a context manager, or `close` it.

    *storage* is `local:FOLDER`, an Azure connection string or `https://ACCOUNT.blob...`; it and
    the settings default to the `IMAGEFLEET_` variables.

    Raises:
        SetupError: the address or a setting is not valid.
    """
    return Fleet(aio.connect(storage, **settings))


class Fleet:
    """A connection to a fleet's storage, for any thread."""

    def __init__(self, fleet: aio.Fleet) -> None:
        self._loop = _LoopThread()
        self._fleet = fleet
        self._loop.run(fleet.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects; calls that still wait raise FleetError. The jobs go on."""
        self._loop.close(self._fleet.close())

    def submit(
        self,
        jobs: Iterable[Job],
        *,
        campaign: str | None = None,
        priority: Priority = "normal",
        models: Collection[str] = (),
    ) -> Batch:
        """Sends jobs; creates the queues and the containers if there are none.

        A job without an id gets one. *campaign* is for jobs without one. Workers take jobs of high
        *priority* first and of low priority last. Jobs before an invalid one are sent. *models*
        are what workers have from elsewhere than `models/` in the storage.

        Raises:
            JobError: two jobs have one id, a job is too large for a message, or no worker can have
            the model that it names.
            FleetError: the storage cannot be used.
        """
        submitted = self._fleet.submit(jobs, campaign=campaign, priority=priority, models=models)
        return Batch(self._loop, self._loop.run(submitted))

    def job(self, id: str, campaign: str | None = None) -> JobHandle:  # noqa: A002 - a job's field
        """One job, by its id and campaign, or by both in one: `spring/0001`."""
        return JobHandle(self._loop, self._fleet.job(id, campaign))

    def results(self, campaign: str) -> Results:
        """What has become of a campaign's jobs so far, whoever submitted them; each job once.

        Jobs that are queued or running are left out.
        """
        return Results(self._loop, self._fleet.results(campaign))

    def campaigns(self) -> dict[str, Counts]:
        """The campaigns that have records, by name, and how many jobs of each are where."""
        return self._loop.run(self._fleet.campaigns())

    def cancel(self, campaign: str) -> datetime:
        """Cancels what was sent of a campaign, and ends its running loads; returns until when.

        Workers obey within seconds: what they have begun ends, the rest becomes `cancelled`. This
        call takes some twelve seconds; what is sent after it runs.
        """
        return self._loop.run(self._fleet.cancel(campaign))

    def depth(self) -> Depth:
        """Messages in the job queue and in the queue of failed jobs."""
        return self._loop.run(self._fleet.depth())

    def failed(self, **which: Unpack[Which]) -> Results:
        """The jobs that have failed and were neither replayed nor discarded since.

        Nothing is moved or hidden meanwhile, unlike the messages in the poison queue.
        """
        return Results(self._loop, self._fleet.failed(**which))

    def replay(
        self,
        *,
        set: Mapping[str, Any] | None = None,  # noqa: A002 - as `--set`
        invalid: bool = False,
        priority: Priority = "normal",
        **which: Unpack[Which],
    ) -> Swept:
        """Puts failed jobs back into the job queue of *priority*; without a condition, all of them.

        *set* has new values of some fields of each job: `{"steps": 20}`. With a key only jobs that
        are signed; those that are changed are signed again. *invalid*: also jobs that this version
        takes for invalid, for newer workers.

        Raises:
            SetupError: no job can have these values.
        """
        return self._loop.run(
            self._fleet.replay(set=set, invalid=invalid, priority=priority, **which)
        )

    def discard(
        self, *, unsigned: bool = False, completed: bool = False, **which: Unpack[Which]
    ) -> Swept:
        """Deletes failed jobs for good; without a condition, all of them.

        *unsigned*: only what is not signed with a key of this fleet. *completed*: only jobs that
        were sent again since, and whose images are all stored.
        """
        return self._loop.run(self._fleet.discard(unsigned=unsigned, completed=completed, **which))


class Batch:
    """Jobs that were submitted together."""

    def __init__(self, loop: _LoopThread, batch: aio.Batch) -> None:
        self._loop = loop
        self._batch = batch
        self.ids = batch.ids

    def __len__(self) -> int:
        return len(self._batch)

    def results(self, timeout: float | None = None) -> Results:
        """Each job's result once, as they end; called again, all of them again.

        Raises:
            TimeoutError: not all have ended after *timeout* seconds.
        """
        return Results(self._loop, self._batch.results(timeout))


class Results(Iterator["Result"]):
    """Results as they come, or together as a data frame."""

    def __init__(self, loop: _LoopThread, results: aio.Results) -> None:
        self._loop = loop
        self._results = results
        self._iterator = loop.iterate(results)

    def __next__(self) -> Result:
        return Result.of(self._loop, next(self._iterator))

    def frame(self) -> pd.DataFrame:
        """The results as a data frame: a row for each image, and for each job without.

        Its columns are those of `imagefleet results`.

        Raises:
            SetupError: pandas is not installed.
        """
        return self._loop.run(self._results.frame())


class JobHandle:
    """A job by its id, whoever submitted it."""

    def __init__(self, loop: _LoopThread, job: aio.JobHandle) -> None:
        self.id = job.id
        self.campaign = job.campaign
        self._loop = loop
        self._job = job

    @property
    def status(self) -> Status:
        """Pending (queued or running), completed, failed, cancelled, or unknown to this storage.

        A failed job stays failed until it is replayed, discarded or completed.
        """
        return self._loop.run(self._job.status())

    def result(self, timeout: float | None = None) -> Result:
        """Waits until the job has completed or failed, or was cancelled.

        Raises:
            TimeoutError: it is not done after *timeout* seconds.
            FleetError: the job is not in this storage.
        """
        return Result.of(self._loop, self._loop.run(self._job.result(timeout)))


@dataclass(frozen=True, slots=True)
class Result(JobFacts):
    """A job's outcome; *index* counts the images of one job."""

    _loop: _LoopThread = field(kw_only=True, repr=False, compare=False)
    _result: aio.Result = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(cls, loop: _LoopThread, result: aio.Result) -> Self:
        return cls(**result.fields(), _loop=loop, _result=result)

    def data(self, index: int = 0) -> bytes:
        """The image's file: PNG, JPEG or WebP.

        Raises:
            JobError: there is none, because the job failed, say.
        """
        return self._loop.run(self._result.data(index))

    def image(self, index: int = 0) -> Image.Image:
        """The image, decoded by Pillow."""
        return aio.decode(self.data(index))


class _LoopThread:
    """An event loop in a thread, for callers in other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="imagefleet-client", daemon=True
        )
        self._thread.start()

    def run(self, operation: Coroutine[Any, Any, _Result]) -> _Result:
        """Raises FleetError once the loop is closed."""
        with self._closing:
            if self._closed:
                operation.close()
                raise errors.FleetError("this fleet is closed")
            future = asyncio.run_coroutine_threadsafe(operation, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C interrupts the caller's thread only
            raise

    def iterate(self, results: AsyncIterator[_Result]) -> Iterator[_Result]:
        async def step() -> _Result | None:
            return await anext(results, None)

        while (result := self.run(step())) is not None:
            yield result

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs *last*, then ends the thread."""
        with self._closing:
            if self._closed:
                last.close()
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(last, self._loop).result()
            asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
