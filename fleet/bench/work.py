"""Images/s: of an engine that is always full, and of a whole worker around it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from imagefleet import errors
from imagefleet.storage import protocol
from imagefleet.storage.open import open_storage
from worker.engine import contract

if TYPE_CHECKING:
    from worker.settings import WorkerSettings

#: As many as the worker's own (worker.stages.PREPARERS).
PREPARERS = 8


@runtime_checkable
class SlotEngine(Protocol):
    """What an engine of slots has beside `contract.Engine`."""

    @property
    def slots(self) -> int:
        """Images that share a call of the UNet."""

    @property
    def recompiles(self) -> int:
        """Times that something was compiled after the warm-up."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Images that were finished one after the other, and the time that they took."""

    images: int
    unet_calls: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def unet_calls_per_second(self) -> float:
        """Each image's calls counted by themselves, however many share one."""
        return self.unet_calls / self.seconds


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """What a whole worker came to, from the queue to the stored image."""

    rate: Rate
    idle_fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and the jobs that a worker is to do with it: messages of so many steps each."""

    engine: contract.Engine
    messages: Sequence[str]
    steps: int


def width_of(engine: contract.Engine) -> int:
    """Images that come out together where all jobs are alike; at least so many."""
    return engine.slots if isinstance(engine, SlotEngine) else engine.capacity


def recompiles_of(engine: contract.Engine) -> int | None:
    """None for an engine that compiles nothing."""
    return engine.recompiles if isinstance(engine, SlotEngine) else None


def draw(
    engine: contract.Engine, requests: Sequence[contract.ImageRequest]
) -> list[contract.Pixels]:
    """Draws a few images, no more than the engine takes at once, and waits for all of them.

    Raises:
        FleetError: the engine cannot draw one of them.
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
    on_images: Callable[[float], None] = lambda _: None,
) -> Rate:
    """Keeps *engine* full for so many seconds; *on_images* hears how many of them are over.

    Raises:
        FleetError: the engine cannot draw one of the requests.
    """
    width = width_of(engine)
    finished_at: list[float] = []
    calls: list[int] = []
    with ThreadPoolExecutor(PREPARERS) as threads:
        feed = _Feed(engine, requests, threads, width)
        while not _is_enough(finished_at, width, seconds):
            feed.fill()
            for finished in engine.tick():
                request = feed.take(finished)
                finished_at.append(time.perf_counter())
                calls.append(request.steps)
            if finished_at:
                on_images(finished_at[-1] - finished_at[0])
        while engine.busy:
            engine.tick()
    return rate_of(finished_at, calls, width)


def rate_of(finished_at: Sequence[float], calls: Sequence[int], width: int) -> Rate:
    """The rate between the first *width* images and the last: whole rounds of alike jobs.

    Images that began together end together, so a count that starts or stops within such a round
    would be wrong by up to a round. *calls* are each image's.
    """
    counted = (len(finished_at) - width) // width * width
    if counted <= 0:
        raise errors.SetupError(f"too few images to tell a rate from: {len(finished_at)}")
    end = width + counted
    return Rate(counted, sum(calls[width:end]), finished_at[end - 1] - finished_at[width - 1])


async def work(
    settings: WorkerSettings,
    load: Callable[[], Loaded],
    *,
    reach: Callable[[protocol.Storage], protocol.Storage] = lambda storage: storage,
    on_images: Callable[[float], None] = lambda _: None,
) -> WorkerRate:
    """Runs a whole worker on a queue of its own until that is empty.

    *load* runs on the engine's own thread, and may measure there before it returns. The rate
    leaves the first and the last round of images out. *reach* may put a distance between the
    worker and its storage.

    Raises:
        FleetError: a job did not end in an image, or the worker failed.
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

    async with open_storage(settings) as near:
        await near.create()

        def load_and_fill() -> contract.Engine:
            loaded = load()
            asyncio.run_coroutine_threadsafe(near.queue.send(loaded.messages), loop).result()
            all_loaded.append(loaded)
            return loaded.engine

        pipeline = Pipeline(reach(near), load_and_fill, settings, on_settled=on_settled)
        await pipeline.run(asyncio.Event(), asyncio.Event())
    if others:
        ends = ", ".join(f"{count} {outcome}" for outcome, count in others.items())
        raise errors.NodeError(f"not every job ended in an image: {ends}")
    (loaded,) = all_loaded
    width = width_of(loaded.engine)
    kept = completed_at[: len(completed_at) - width]
    rate = rate_of(kept, [loaded.steps] * len(kept), width)
    return WorkerRate(rate, pipeline.engine_thread.clock.idle_fraction)


class _Feed:
    """Requests, prepared ahead in other threads as in the worker, on their way to the engine."""

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
        self._preparing: deque[Future[contract.Prepared]] = deque()
        self._in_engine: dict[int, contract.ImageRequest] = {}
        self._tickets = 0

    def fill(self) -> None:
        """Admits what is ready; waits for it only to fill the engine for the first time."""
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
        """The request of a finished image; raises the error that stands for it."""
        if isinstance(finished.outcome, errors.FleetError):
            raise finished.outcome
        return self._in_engine.pop(finished.ticket)


def _is_enough(finished_at: Sequence[float], width: int, seconds: float) -> bool:
    """Whether *seconds* lie between the end of the first round and that of the last."""
    last_round_end = len(finished_at) // width * width
    if last_round_end <= width:
        return False
    return finished_at[last_round_end - 1] - finished_at[width - 1] >= seconds
