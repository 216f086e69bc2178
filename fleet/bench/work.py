"""Measures images/s of an engine that is always full, and of a whole worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imagefleet import errors
from imagefleet.storage import protocol
from imagefleet.storage.open import open_storage
from worker.engine import contract

if TYPE_CHECKING:
    from worker.settings import WorkerSettings

#: As in the worker (worker.stages).
PREPARERS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """Finished images and the seconds that they took."""

    images: int
    unet_calls: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def unet_calls_per_second(self) -> float:
        """Each image's calls are counted, even if images share them."""
        return self.unet_calls / self.seconds


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """A whole worker's rate, from the queue to the stored image."""

    rate: Rate
    idle_fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine and a worker's jobs: messages of *steps* steps each."""

    engine: contract.Engine
    messages: Sequence[str]
    steps: int


def images_at_once(engine: contract.Engine) -> int:
    """Images that finish together if all jobs are alike; at most the capacity."""
    return int(getattr(engine, "slots", engine.capacity))


def recompiles_of(engine: contract.Engine) -> int | None:
    """None for an engine that compiles nothing."""
    return getattr(engine, "recompiles", None)


def draw(
    engine: contract.Engine, requests: Sequence[contract.ImageRequest]
) -> list[contract.Pixels]:
    """Draws at most the engine's capacity of images.

    Raises:
        FleetError: an image failed.
    """
    for ticket, request in enumerate(requests):
        engine.admit(ticket, engine.prepare(request))
    images: dict[int, contract.Pixels] = {}
    while engine.busy:
        for finished in engine.tick():
            if isinstance(finished.outcome, errors.FleetError):
                raise finished.outcome
            images[finished.ticket] = finished.outcome
    return [images[ticket] for ticket in range(len(requests))]


def drive(
    engine: contract.Engine,
    requests: Iterator[contract.ImageRequest],
    seconds: float,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Rate:
    """Keeps *engine* full for *seconds*; *on_progress* is called with the seconds so far.

    Raises:
        FleetError: an image failed.
    """
    width = images_at_once(engine)
    finished_at: list[float] = []
    calls: list[int] = []
    with ThreadPoolExecutor(PREPARERS) as threads:
        feeder = _Feeder(engine, requests, threads, width)
        while not _is_enough(finished_at, width, seconds):
            feeder.fill()
            for finished in engine.tick():
                request = feeder.take(finished)
                finished_at.append(time.perf_counter())
                calls.append(request.steps)
            if finished_at:
                on_progress(finished_at[-1] - finished_at[0])
        while engine.busy:
            engine.tick()
    return rate_of(finished_at, calls, width)


def rate_of(finished_at: Sequence[float], calls: Sequence[int], width: int) -> Rate:
    """The rate over whole rounds of *width* images, without the first round.

    Images that start together finish together, so a part of a round would be an error of up to a
    round. *calls* are each image's UNet calls.
    """
    counted = (len(finished_at) - width) // width * width
    if counted <= 0:
        raise errors.SetupError(f"too few images to measure a rate: {len(finished_at)}")
    end = width + counted
    return Rate(counted, sum(calls[width:end]), finished_at[end - 1] - finished_at[width - 1])


async def work(
    settings: WorkerSettings,
    load: Callable[[], Loaded],
    *,
    wrap: Callable[[protocol.Storage], protocol.Storage] = lambda storage: storage,
    on_images: Callable[[float], None] = lambda _: None,
) -> WorkerRate:
    """Runs a whole worker until its queue is empty.

    *load* runs on the engine's thread and may measure there. The rate excludes the first and the
    last round of images. *wrap* may wrap the worker's storage, for example to add latency.

    Raises:
        FleetError: a job or the worker failed.
    """
    from worker.pipeline import Pipeline

    loop = asyncio.get_running_loop()
    completed_at: list[float] = []
    others: Counter[str] = Counter()
    all_loaded: list[Loaded] = []

    def on_settled(outcome: str) -> None:
        if outcome == "completed":
            completed_at.append(time.perf_counter())
            on_images(len(completed_at))
        else:
            others[outcome] += 1

    async with open_storage(settings) as storage:
        await storage.create()

        def load_and_fill() -> contract.Engine:
            loaded = load()
            asyncio.run_coroutine_threadsafe(storage.queue.send(loaded.messages), loop).result()
            all_loaded.append(loaded)
            return loaded.engine

        pipeline = Pipeline(wrap(storage), load_and_fill, settings, on_settled=on_settled)
        await pipeline.run(asyncio.Event(), asyncio.Event())
    if others:
        ends = ", ".join(f"{count} {outcome}" for outcome, count in others.items())
        raise errors.NodeError(f"not every job was completed: {ends}")
    (loaded,) = all_loaded
    width = images_at_once(loaded.engine)
    kept = completed_at[: len(completed_at) - width]
    rate = rate_of(kept, [loaded.steps] * len(kept), width)
    return WorkerRate(rate, pipeline.engine_thread.clock.idle_fraction)


class _Feeder:
    """Prepares requests ahead in other threads, as the worker does, and admits them."""

    def __init__(
        self,
        engine: contract.Engine,
        requests: Iterator[contract.ImageRequest],
        threads: ThreadPoolExecutor,
        width: int,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._threads = threads
        self._width = width
        self._preparing: deque[Future[contract.PreparedRequest]] = deque()
        self._in_engine: dict[int, contract.ImageRequest] = {}
        self._tickets = 0

    def fill(self) -> None:
        """Admits prepared requests; blocks only to fill the engine for the first time."""
        engine = self._engine
        while engine.free:
            while len(self._preparing) < 2 * self._width:
                self._preparing.append(self._threads.submit(engine.prepare, next(self._requests)))
            is_begun = self._tickets >= self._width and engine.busy
            if is_begun and not self._preparing[0].done():
                return
            prepared = self._preparing.popleft().result()
            engine.admit(self._tickets, prepared)
            self._in_engine[self._tickets] = prepared.request
            self._tickets += 1

    def take(self, finished: contract.Finished) -> contract.ImageRequest:
        """The request of a finished image; raises its error, if any."""
        if isinstance(finished.outcome, errors.FleetError):
            raise finished.outcome
        return self._in_engine.pop(finished.ticket)


def _is_enough(finished_at: Sequence[float], width: int, seconds: float) -> bool:
    """True if the rounds after the first took *seconds*."""
    last_round_end = len(finished_at) // width * width
    if last_round_end <= width:
        return False
    return finished_at[last_round_end - 1] - finished_at[width - 1] >= seconds
