"""The client: `imagefleet.aio` for programs without an event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from imagefleet import aio
from imagefleet.aio import ConnectOptions
from imagefleet.concurrency import Work
from imagefleet.errors import FleetError
from imagefleet.records.outcomes import JobFacts, Status

if TYPE_CHECKING:
    from PIL import Image

_Made = TypeVar("_Made")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class LoopThread:
    """An event loop in a thread, for callers in other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="imagefleet-client", daemon=True
        )
        self._thread.start()

    def run(self, operation: Work[_Result]) -> _Result:
        """Raises FleetError once the loop is closed."""
        with self._closing:
            if self.is_closed:
                operation.close()
                raise FleetError("this fleet is closed")
            future = asyncio.run_coroutine_threadsafe(operation, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C interrupts the caller's thread only
            raise

    def close(self, last: Work[None]) -> None:
        """Runs *last*, then ends the thread."""
        with self._closing:
            if self.is_closed:
                last.close()
                return
            self.is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(last, self._loop).result()
            asyncio.run_coroutine_threadsafe(
                self._loop.shutdown_asyncgens(), self._loop
            ).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _blocking(
    method: Callable[Concatenate[Any, _Arguments], _Made],
    wrap: Callable[[LoopThread, _Made], _Result],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """The asynchronous *method* of `_inner` for any thread; *wrap* awaits or wraps its result."""

    @functools.wraps(method)
    def call(
        self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        return wrap(self._loop, method(self._inner, *args, **kwargs))

    return call


@dataclass(frozen=True, slots=True)
class Result(JobFacts):
    """A job's outcome; *index* counts the images of one job."""

    _loop: LoopThread = field(kw_only=True, repr=False, compare=False)
    _inner: aio.Result = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def awaited(cls, loop: LoopThread, result: Work[aio.Result]) -> Self:
        found = loop.run(result)
        return cls(**found.fields(), _loop=loop, _inner=found)

    data = _blocking(aio.Result.data, LoopThread.run)

    def image(self, index: int = 0) -> Image.Image:
        """The image, decoded by Pillow."""
        return aio.decode(self.data(index))


class Results(Iterator[Result]):
    """Results as they come, or together as a data frame."""

    def __init__(self, loop: LoopThread, results: aio.Results) -> None:
        self._loop = loop
        self._inner = results

    def __next__(self) -> Result:
        try:
            return Result.awaited(self._loop, self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    frame = _blocking(aio.Results.frame, LoopThread.run)


class JobHandle:
    """A job by its id, whoever submitted it."""

    def __init__(self, loop: LoopThread, job: aio.JobHandle) -> None:
        self.id = job.id
        self.campaign = job.campaign
        self._loop = loop
        self._inner = job

    @property
    def status(self) -> Status:
        """Pending (queued or running), completed, failed, cancelled, or unknown to this storage."""
        return self._loop.run(self._inner.status())

    result = _blocking(aio.JobHandle.result, Result.awaited)


class Batch:
    """Jobs that were submitted together."""

    def __init__(self, loop: LoopThread, batch: aio.Batch) -> None:
        self._loop = loop
        self._inner = batch
        self.ids = batch.ids

    @classmethod
    def awaited(cls, loop: LoopThread, batch: Work[aio.Batch]) -> Self:
        return cls(loop, loop.run(batch))

    def __len__(self) -> int:
        return len(self._inner)

    results = _blocking(aio.Batch.results, Results)


class Fleet:
    """A connection to a fleet's storage, for any thread."""

    def __init__(self, fleet: aio.Fleet) -> None:
        self._loop = LoopThread()
        self._inner = fleet
        self._loop.run(fleet.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    close = _blocking(aio.Fleet.close, LoopThread.close)
    submit = _blocking(aio.Fleet.submit, Batch.awaited)
    job = _blocking(aio.Fleet.job, JobHandle)
    results = _blocking(aio.Fleet.results, Results)
    campaigns = _blocking(aio.Fleet.campaigns, LoopThread.run)
    cancel = _blocking(aio.Fleet.cancel, LoopThread.run)
    depth = _blocking(aio.Fleet.depth, LoopThread.run)
    failed = _blocking(aio.Fleet.failed, Results)
    replay = _blocking(aio.Fleet.replay, LoopThread.run)
    discard = _blocking(aio.Fleet.discard, LoopThread.run)


def connect(storage: str | None = None, **settings: Unpack[ConnectOptions]) -> Fleet:
    """The fleet behind a storage address; a context manager, or `close` it.

    *storage* is `local:FOLDER`, an Azure connection string or `https://ACCOUNT.blob...`; it and the
    settings default to the `IMAGEFLEET_` variables. SetupError says which is not valid.
    """
    return Fleet(aio.connect(storage, **settings))
