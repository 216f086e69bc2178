"""A worker that draws by turns with what it is compared with.

Rates of a machine that others use as well differ by more than what is measured; those of short
turns next to each other differ less, and the median of their ratios hardly.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from evaluation.bench import work
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from worker.engine import contract
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

#: Draws jobs of its own; returns images/s.
Turn = Callable[[], Awaitable[float]]


class Worker:
    """A worker of this process, and when it has stored what."""

    def __init__(self, storage: Storage, *, may_fail: bool = False) -> None:
        """*may_fail*: not every job has to be completed."""
        self.storage = storage
        #: Images that it draws at once.
        self.slots = 0
        self._may_fail = may_fail
        self._stored_at: list[float] = []
        self._settled = 0
        self._has_settled = asyncio.Event()
        create = storage.blobs.create

        async def create_and_note(name: str, *arguments: Any, **named: Any) -> Any:
            answer = await create(name, *arguments, **named)
            if name.endswith(".png"):
                self._stored_at.append(time.perf_counter())
            return answer

        # A job is settled with others of the same second; the time of its image is its own.
        storage.blobs.create = create_and_note  # type: ignore[method-assign]

    def settled(self, outcome: str) -> None:
        if outcome != "completed" and not self._may_fail:
            raise errors.NodeError(f"a job was not completed: {outcome}")
        self._settled += 1
        self._has_settled.set()

    async def rate(self, images: int, send: Awaitable[object]) -> float:
        """Images/s of what *send* sends."""
        self._stored_at.clear()
        self._settled = 0
        await send
        while self._settled < images:
            self._has_settled.clear()
            await self._has_settled.wait()
        return rate_of(self._stored_at, self.slots)


def rate_of(done_at: list[float], slots: int) -> float:
    """Images/s without the first quarter, in which whatever waits for jobs begins."""
    begun = len(done_at) // 4 // slots * slots
    return work.rate_of(done_at[begun:], slots).images_per_second


@contextlib.asynccontextmanager
async def working(
    settings: WorkerSettings,
    load: Callable[[], contract.Engine],
    *,
    may_fail: bool = False,
) -> AsyncIterator[Worker]:
    """Runs a worker during the block, which begins once its engine is loaded."""
    stop, loaded = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with open_storage(settings) as storage:
        await storage.create()
        worker = Worker(storage, may_fail=may_fail)

        def load_and_tell() -> contract.Engine:
            engine = load()
            worker.slots = work.images_at_once(engine)
            loop.call_soon_threadsafe(loaded.set)
            return engine

        pipeline = Pipeline(storage, load_and_tell, settings, on_settled=worker.settled)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run(stop, asyncio.Event()))
            await loaded.wait()
            try:
                yield worker
            finally:
                stop.set()


async def compare(one: Turn, other: Turn, pairs: int) -> list[tuple[float, float]]:
    """Both rates of each pair; each begins every second pair, so that neither has the better."""
    found = []
    for pair in range(pairs):
        order = (one, other) if pair % 2 else (other, one)
        rates = {turn: await turn() for turn in order}
        found.append((rates[one], rates[other]))
        print(
            f"pair {pair + 1}: {rates[one]:.2f} and {rates[other]:.2f} images/s",
            flush=True,
        )
    return found


def ratio(pairs: list[tuple[float, float]]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(one / other for one, other in pairs)
