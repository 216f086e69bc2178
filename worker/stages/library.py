"""The engine as a library: draws jobs with one checkpoint in this process, without a queue.

It stands on the worker's own loop (`worker.gpu_thread`): jobs with different LoRAs, steps and sizes
share the slots, and one that fails is a result of its own. `imagefleet.Engine` is the class here.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import tempfile
import threading
import uuid
from asyncio import Task
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Iterable,
    Iterator,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack
from weakref import WeakSet

from PIL import Image

from imagefleet import concurrency, validation
from imagefleet.client import LoopThread
from imagefleet.errors import (
    FleetError,
    JobError,
    NodeError,
    SetupError,
    TransientError,
)
from imagefleet.job.message import Job
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict, JSONObject
from worker import tasks
from worker.engine import load
from worker.engine.contract import ImageRequest, Pixels
from worker.files import check
from worker.gpu_thread import EngineThread
from worker.inputs.reader import JobFiles
from worker.process import engine_settings
from worker.settings import WorkerSettings
from worker.stages import details
from worker.stages.requests import PREPARERS, RequestReader

#: Finished images that may wait for their reader before the engine does.
_BACKLOG = 64


#: A job, or the fields of one by their names.
JobOrFields = Job | JSONObject


class EngineOptions(TypedDict, total=False):
    """Settings that are the worker's, by their names there."""

    device: str
    slots: int
    precision: Literal["auto", "float32", "float16", "bfloat16", "int8"]
    compile: Literal["auto", "off"]
    embedding_directory: str | Path
    #: A folder of ADetailer's detectors, NAME.onnx; no setting of a worker's.
    detectors: Path | None
    cache: str | Path


@dataclass(frozen=True)
class Drawn:
    """A job that was drawn: its images, or why there are none."""

    job: Job
    images: tuple[Image.Image, ...] = ()
    error: FleetError | None = None


class AsyncEngine:
    """Draws jobs with one checkpoint on one GPU, from `async with` on."""

    def __init__(
        self,
        model: str | Path,
        loras: str | Path | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """*model* is a .safetensors file or a folder, *loras* a folder; SetupError: it is none."""
        self._exit = contextlib.AsyncExitStack()
        self._process = os.getpid()
        self._folder = options.pop("detectors", None)
        given: JSONDict = {**options, "model": model, "lora_directory": loras}
        with validation.as_error(SetupError, known=WorkerSettings.model_fields):
            self._settings = WorkerSettings(**given)
        check.check_path(Path(self._settings.model))

    async def __aenter__(self) -> Self:
        self._thread = EngineThread(backlog=_BACKLOG)
        self._exit.push_async_callback(self._thread.stop)
        self._engine = await self._thread.start(
            lambda: load.load_engine(engine_settings(self._settings))
        )
        threads = self._exit.enter_context(ThreadPoolExecutor(PREPARERS, "prepare"))
        # Of which nothing is read: all files are in the folders that were given.
        folder = self._exit.enter_context(tempfile.TemporaryDirectory())
        nowhere = StorageSettings(storage=f"local:{folder}")
        storage = await self._exit.enter_async_context(open_storage(nowhere))
        await storage.create()
        files = JobFiles(storage, self._settings, self._folder, is_empty=True)
        self._reader = RequestReader(self._engine, files, threads)
        self._detectors = files.detectors
        self._threads = threads
        self._watching = asyncio.create_task(self._thread.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.stop_accepting()
        await tasks.cancel([self._watching])
        await self._exit.aclose()

    async def draw(
        self, jobs: Iterable[JobOrFields] | AsyncIterable[JobOrFields]
    ) -> AsyncGenerator[Drawn]:
        """Each job's result as it is done; takes more jobs as the engine has room for them.

        Jobs may be given by their fields. Raises JobError for fields that are no job's, NodeError
        where the GPU is broken, and SetupError in a fork of the process that began.
        """
        self.refuse_forks()
        source = (
            jobs.__aiter__()
            if isinstance(jobs, AsyncIterable)
            else _in_threads(iter(jobs))
        )
        token = uuid.uuid4().hex[:12]
        numbers = itertools.count(1)

        async def following() -> Job | None:
            given = await anext(source, None)
            return None if given is None else _job(given)

        fetching: Task[Job | None] | None = asyncio.create_task(following())
        drawing: set[Task[Drawn]] = set()
        try:
            while fetching is not None or drawing:
                awaited: set[Task[Any]] = {*drawing}
                if fetching is not None and len(drawing) < 2 * self._engine.capacity:
                    awaited.add(fetching)
                done, _ = await asyncio.wait(
                    awaited, return_when=asyncio.FIRST_COMPLETED
                )
                if fetching is not None and fetching in done:
                    job = fetching.result()
                    fetching = None
                    if job is not None:
                        fetching = asyncio.create_task(following())
                        known = job.identified(f"{token}-{next(numbers):06}")
                        drawing.add(asyncio.create_task(self._draw(known)))
                for task in drawing & done:
                    drawing.remove(task)
                    yield task.result()
        finally:
            left = [each for each in (*drawing, fetching) if each is not None]
            await tasks.cancel(left)

    def refuse_forks(self) -> None:
        """Raises SetupError in another process than the one that loaded the model."""
        if os.getpid() != self._process:
            raise SetupError(
                f"this engine is one of process {self._process}, and a fork has neither its GPU nor"
                " its threads: make an engine in the process that draws"
            )

    async def _draw(self, job: Job) -> Drawn:
        try:
            self._check(job)
            job = self._reader.fit(job)
            found = await self._reader.read_rested(job)
            drawn = await concurrency.gather(*map(self._pixels, found.requests))
            if found.inputs.overlay is not None:
                drawn = tuple(map(found.inputs.overlay.put_over, drawn))
            if job.details:
                detailed = (
                    details.draw(self._detectors, job, *each, self._pixels)
                    for each in zip(found.requests, drawn, strict=True)
                )
                drawn = await concurrency.gather(*detailed)
            return Drawn(job, tuple(map(Image.fromarray, drawn)))
        except (JobError, TransientError) as error:
            return Drawn(job, error=error)

    def _check(self, job: Job) -> None:
        if job.then or job.keep or job.model not in {None, self._engine.model_name}:
            raise JobError(
                "stages (then), rules of what to keep, and other models need a queue and its"
                " workers"
            )

    async def _pixels(self, request: ImageRequest, _: int = 0) -> Pixels:
        loop = asyncio.get_running_loop()
        prepare = self._engine.prepare
        prepared = await loop.run_in_executor(self._threads, prepare, request)
        drawing = asyncio.ensure_future(self._thread.draw(prepared))
        await tasks.first_of(
            drawing, asyncio.shield(self._watching)
        )  # which raises NodeError
        if (delivery := drawing.result()) is None:
            raise NodeError("the engine is closed")
        return delivery.pixels()


def _job(given: JobOrFields) -> Job:
    """The job of its fields; raises JobError."""
    if isinstance(given, Job):
        return given
    if not isinstance(given, Mapping):
        raise JobError(
            f"draw takes jobs or their fields, and not {type(given).__name__!r}"
        )
    with validation.as_error(JobError, known=Job.model_fields):
        return Job.model_validate(dict(given))


async def _in_threads(jobs: Iterator[JobOrFields]) -> AsyncGenerator[JobOrFields]:
    """Jobs of an iterator that may wait, for a file say."""
    while (job := await asyncio.to_thread(next, jobs, None)) is not None:
        yield job


class Engine:
    """Draws jobs with one checkpoint on one GPU of this process, without a queue.

    `AsyncEngine` for programs without an event loop; it loads at once.
    """

    def __init__(
        self,
        model: str | Path,
        loras: str | Path | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._inner = AsyncEngine(model, loras, **options)
        self._loop = LoopThread()
        try:
            self._loop.run(self._inner.__aenter__())
        except BaseException:
            self._loop.close(asyncio.sleep(0))
            raise

        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine's thread, and frees the GPU; at the program's end, too."""
        self._loop.close(self._inner.__aexit__())

    def draw(self, jobs: Iterable[JobOrFields]) -> Iterator[Drawn]:
        """Each job's result as it is done, as `AsyncEngine.draw`."""
        self._inner.refuse_forks()
        results = self._inner.draw(jobs)
        turn = asyncio.Lock()

        async def following() -> Drawn | None:
            async with turn:
                return await anext(results, None)

        async def leave() -> None:
            async with turn:  # after Ctrl-C the last call may not have ended yet
                await results.aclose()

        try:
            while (drawn := self._loop.run(following())) is not None:
                yield drawn
        finally:
            if not self._loop.is_closed:  # as after Ctrl-C between two results
                self._loop.run(leave())


_open: WeakSet[Engine] = WeakSet()


def _close_all() -> None:
    for engine in list(_open):
        engine.close()
    # What is alive now ends with the process: without this, the interpreter's last collections walk
    # through all of torch, which takes longer than everything else at the end.
    gc.freeze()


# A thread that is inside torch while the interpreter ends aborts the program. `atexit` is too late:
# by then executors take no work, which the engine needs for its last tick. A fork has none of its
# threads.
os.register_at_fork(after_in_child=_open.clear)
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # noqa: SLF001
