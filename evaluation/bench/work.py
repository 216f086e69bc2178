"""Measures images/s of an engine that is always full, and of a whole worker."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from imagefleet.errors import FleetError, NodeError, SetupError
from imagefleet.storage.open import Storage, open_storage
from worker.engine.contract import (
    Engine,
    Finished,
    ImageRequest,
    Pixels,
    PreparedRequest,
)
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings
from worker.stages.requests import PREPARERS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rate:
    """Finished images and the seconds that they took."""

    images: int
    seconds: float
    #: The images' requests with the times at which they were done, from the first round's end on.
    drawn: Sequence[tuple[float, ImageRequest]] = ()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


@dataclass(frozen=True)
class Tick:
    """One tick of an engine; times are by `time.monotonic`."""

    began_at: float
    ended_at: float
    #: Rows of the UNet's calls that its images took; 0 of an engine that does not count them.
    rows: int


class Ticks:
    """Times all ticks of an engine from now on."""

    def __init__(self, engine: Engine) -> None:
        self.all: list[Tick] = []
        self._engine = engine
        self._tick = engine.tick
        engine.tick = self._run  # type: ignore[method-assign]

    @property
    def idle_fraction(self) -> float:
        """Share of the time between the first and the last full tick that no tick took.

        At a run's start and end the engine has fewer images than it holds, which is no loss.
        """
        most = max((tick.rows for tick in self.all), default=0)
        full = [at for at, tick in enumerate(self.all) if tick.rows == most]
        if not full:
            return 0.0
        between = self.all[full[0] : full[-1] + 1]
        busy = sum(tick.ended_at - tick.began_at for tick in between)
        seconds = between[-1].ended_at - between[0].began_at
        return max(0.0, 1 - busy / seconds)

    def _run(self) -> list[Finished]:
        rows = self._rows()
        began_at = time.monotonic()
        finished = self._tick()
        self.all.append(Tick(began_at, time.monotonic(), self._rows() - rows))
        return finished

    def _rows(self) -> int:
        return int(getattr(self._engine, "unet_rows", 0))


def images_at_once(engine: Engine) -> int:
    """Images that finish together if all jobs are alike; at most the capacity."""
    return int(getattr(engine, "slots", engine.capacity))


def draw(engine: Engine, requests: Sequence[ImageRequest]) -> list[Pixels]:
    """Draws images as fast as the engine takes them; raises FleetError if one failed."""
    waiting = deque(enumerate(requests))
    images = {}
    while waiting or engine.busy:
        while waiting and engine.free:
            ticket, request = waiting.popleft()
            engine.admit(ticket, engine.prepare(request))
        for finished in engine.tick():
            if isinstance(finished.outcome, FleetError):
                raise finished.outcome
            images[finished.ticket] = finished.outcome
    return [images[ticket] for ticket in range(len(requests))]


def drive(
    engine: Engine,
    requests: Iterator[ImageRequest],
    seconds: float,
    on_progress: Callable[[float], None] = lambda _: None,
    *,
    width: int | None = None,
) -> Rate:
    """Keeps *engine* full for *seconds*; *on_progress* is called with the seconds so far.

    *width*: how many images finish together if they are alike; larger ones than the native size are
    fewer than the default.

    Raises:
        FleetError: an image failed.
    """
    width = width or images_at_once(engine)
    drawn = []
    finished_at = []
    for finished in draw_on(engine, requests, width):
        drawn += finished
        finished_at += [time.perf_counter()] * len(finished)
        if finished_at:
            on_progress(finished_at[-1] - finished_at[0])
        if _is_enough(finished_at, width, seconds):
            break
    while engine.busy:
        engine.tick()
    return rate_of(finished_at, width, drawn)


def draw_on(
    engine: Engine, requests: Iterator[ImageRequest], width: int
) -> Generator[list[ImageRequest], None, None]:
    """Keeps *engine* full; yields, after each tick, the requests whose images are done.

    *width*: how many images are there before it waits for the preparation of no other.

    Raises:
        FleetError: an image failed.
    """
    preparing: deque[Future[PreparedRequest]] = deque()
    admitted: list[ImageRequest] = []
    with ThreadPoolExecutor(PREPARERS) as threads:
        while True:
            while engine.free:
                while len(preparing) < max(2 * width, PREPARERS):
                    preparing.append(threads.submit(engine.prepare, next(requests)))
                # As the worker does; waits only to fill the engine for the first time.
                if len(admitted) >= width and engine.busy and not preparing[0].done():
                    break
                prepared = preparing.popleft().result()
                engine.admit(len(admitted), prepared)
                admitted.append(prepared.request)
            finished = []
            for one in engine.tick():
                if isinstance(one.outcome, FleetError):
                    raise one.outcome
                finished.append(admitted[one.ticket])
            yield finished


def rate_of(
    finished_at: Sequence[float], width: int, drawn: Sequence[ImageRequest] = ()
) -> Rate:
    """The rate over whole rounds of *width* images, without the first round.

    Images that start together finish together, so a part of a round would be an error of up to a
    round. *drawn*: each image's request, if they are to be counted further.
    """
    counted = (len(finished_at) - width) // width * width
    if counted <= 0:
        raise SetupError(f"too few images to measure a rate: {len(finished_at)}")
    seconds = finished_at[width + counted - 1] - finished_at[width - 1]
    rest = zip(finished_at[width - 1 :], drawn[width - 1 :], strict=False)
    return Rate(counted, seconds, list(rest))


async def work(
    settings: WorkerSettings,
    load: Callable[[], tuple[Engine, Sequence[str]]],
    *,
    wrap: Callable[[Storage], Storage] = lambda storage: storage,
    width_of: Callable[[Engine], int] = images_at_once,
    on_images: Callable[[float], None] = lambda _: None,
) -> tuple[Rate, float]:
    """A whole worker's rate, from the queue to the stored image, and the engine's idle fraction.

    *load* runs on the engine's thread, may measure there, and returns the engine and the messages
    to work on. The rate excludes the first and the last round of images, and counts no UNet calls
    or pixels; the idle fraction is that of `Ticks`.
    *wrap* may wrap the worker's storage, for example to add latency. *width_of*: how many images
    finish together, if not as many as of the native size.

    Raises:
        FleetError: a job or the worker failed.
    """
    loop = asyncio.get_running_loop()
    completed_at: list[float] = []
    others: Counter[str] = Counter()
    ticks: list[Ticks] = []
    width = 0

    def on_settled(outcome: str) -> None:
        if outcome == "completed":
            completed_at.append(time.perf_counter())
            on_images(len(completed_at))
        else:
            others[outcome] += 1

    async with open_storage(settings) as storage:
        await storage.create()

        def load_and_fill() -> Engine:
            nonlocal width
            engine, messages = load()
            asyncio.run_coroutine_threadsafe(
                storage.queue.send(messages), loop
            ).result()
            width = width_of(engine)
            ticks.append(Ticks(engine))
            return engine

        pipeline = Pipeline(
            wrap(storage), load_and_fill, settings, on_settled=on_settled
        )
        await pipeline.run(asyncio.Event(), asyncio.Event())
    if others:
        ends = ", ".join(f"{count} {outcome}" for outcome, count in others.items())
        raise NodeError(f"not every job was completed: {ends}")
    rate = rate_of(completed_at[: len(completed_at) - width], width)
    idle_seconds = pipeline.engine_thread.clock.idle_seconds
    idle = ", ".join(
        f"{reason} {seconds:.2f}" for reason, seconds in idle_seconds.items()
    )
    log.info(
        "the engine was idle for these seconds, start and end included: %s",
        idle or "none",
    )
    return rate, ticks[0].idle_fraction


def _is_enough(finished_at: Sequence[float], width: int, seconds: float) -> bool:
    """True if the rounds after the first took *seconds*."""
    last_round_end = len(finished_at) // width * width
    if last_round_end <= width:
        return False
    return finished_at[last_round_end - 1] - finished_at[width - 1] >= seconds
