"""The pull: just enough jobs ahead of the GPU, and no rush on an empty queue."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable

from imagefleet import errors
from imagefleet.storage import protocol
from worker.gpu_thread import EngineThread
from worker.in_flight import InFlightJob
from worker.leases import LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.settle import Settler

log = logging.getLogger(__name__)

#: Beyond what the engine holds, however slow it is: enough for one slow answer of the storage.
LEAST_AHEAD = 8

#: However fast the engine: a worker that dies makes others wait for this many jobs' leases.
MOST_AHEAD = 1024

FIRST_PAUSE_SECONDS = 0.1

#: Longest pause with --until-empty, where somebody waits for the end.
UNTIL_EMPTY_PAUSE_SECONDS = 1.0


class Puller:
    """Leases jobs while the GPU has less than `prefetch_seconds` of work ahead."""

    def __init__(
        self,
        queue: protocol.JobQueue,
        keeper: LeaseKeeper,
        settler: Settler,
        engine_thread: EngineThread,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
    ) -> None:
        self.queue_was_empty = False
        self._queue = queue
        self._keeper = keeper
        self._settler = settler
        self._engine_thread = engine_thread
        self._metrics = metrics
        self._settings = settings
        self._paused = False
        self._ahead = 0
        self._jobs_generated = 0
        self._less_ahead = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def ahead(self) -> int:
        """Jobs pulled whose images the engine has not finished."""
        return self._ahead

    def why_idle(self) -> str:
        """Why an engine without work has none."""
        return "queue_empty" if self.queue_was_empty and not self._ahead else "starved"

    def generated(self, in_flight: InFlightJob) -> None:
        """The engine is through with a job."""
        self._jobs_generated += 1
        self.left(in_flight)

    def left(self, in_flight: InFlightJob) -> None:
        """A job is no longer ahead of the engine, done or not."""
        if in_flight.ahead:
            in_flight.ahead = False
            self._ahead -= 1
            self._less_ahead.set()

    def stop(self) -> None:
        """Ends `run` with the call that it is in; what that leases is still taken."""
        self._stopped.set()
        self._less_ahead.set()

    def pause(self) -> None:
        """Takes nothing more until `resume`, but for what a receive in flight leases."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._less_ahead.set()

    async def run(self, take: Callable[[InFlightJob], Awaitable[None]]) -> None:
        """Pulls until it is stopped, or with --until-empty until nothing is left."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while not self._stopped.is_set():
            wanted = self._wanted()
            if not wanted:
                self._less_ahead.clear()
                await self._less_ahead.wait()
                continue
            asked_at = time.monotonic()
            try:
                messages = await self._queue.receive(wanted, self._settings.lease_seconds)
                self._metrics.stage_seconds.labels("pull").observe(time.monotonic() - asked_at)
                if not messages and await self._is_over():
                    return
            except errors.TransientError as error:
                log.warning("the queue does not answer: %s", error, extra={"action": "pull_failed"})
                messages = []
            self.queue_was_empty = not messages
            for message in messages:
                in_flight = InFlightJob(self._keeper.hold(message, asked_at))
                self._ahead += 1
                self._settler.take(in_flight)
                await take(in_flight)
            if messages:
                pause_seconds = FIRST_PAUSE_SECONDS
            else:
                await self._pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, self._longest_pause())

    async def _is_over(self) -> bool:
        """Nothing visible, nothing in hand, nothing that a dead worker's lease still hides."""
        if not self._settings.until_empty or self._settler.in_flight:
            return False
        return (await self._queue.depth()).messages == 0

    async def _pause(self, seconds: float) -> None:
        """Waits with jitter: a fleet that starts together must not ask together."""
        pause_seconds = random.uniform(seconds / 2, seconds)  # noqa: S311 - jitter
        waits = [asyncio.create_task(self._stopped.wait())]
        if self._settings.until_empty and self._settler.in_flight:
            waits.append(asyncio.create_task(self._settler.nothing_in_flight.wait()))
        await asyncio.wait(waits, timeout=pause_seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _longest_pause(self) -> float:
        if self._settings.until_empty:
            return min(UNTIL_EMPTY_PAUSE_SECONDS, self._settings.poll_seconds)
        return self._settings.poll_seconds

    def _wanted(self) -> int:
        """Jobs to pull now; none while that would be a call for a handful."""
        if self._paused:
            return 0
        busy_seconds = self._engine_thread.clock.busy_seconds
        jobs_per_second = self._jobs_generated / busy_seconds if busy_seconds else 0.0
        target = max(
            self._engine_thread.capacity + LEAST_AHEAD,
            math.ceil(jobs_per_second * self._settings.prefetch_seconds),
        )
        room = min(target, MOST_AHEAD) - self._ahead
        least = min(protocol.MAX_RECEIVE, target // 2)
        return min(room, protocol.MAX_RECEIVE) if room >= least else 0
