"""The pull: just enough jobs ahead of the GPU, and rare polls of an empty queue."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from imagefleet import errors, retry
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker import tasks
from worker.gpu_thread import EngineThread
from worker.leases import LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.settle import InFlightJob, Settler

log = logging.getLogger(__name__)

#: Jobs beyond what the engine holds, however slow it is: enough for one slow reply of the storage.
LEAST_AHEAD = 8

#: However fast the engine: when a worker dies, this many jobs at most wait for their leases.
MOST_AHEAD = 1024

#: Pauses between polls of empty queues, doubled up to the longest: a new job waits five seconds on
#: average. What an idle worker's polls cost in a day is in docs/storage.md.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0

#: Longest pause with --until-empty, where somebody waits for the end.
UNTIL_EMPTY_PAUSE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Puller:
    """Leases jobs while the GPU has less than `prefetch_seconds` of work ahead."""

    queue: protocol.JobQueue
    keeper: LeaseKeeper
    settler: Settler
    engine_thread: EngineThread
    metrics: WorkerMetrics
    settings: WorkerSettings
    _queue_was_empty: bool = False
    _queue_answers: bool = True
    _paused: bool = False
    _ahead: int = 0  # jobs pulled whose images the engine has not finished
    _jobs_generated: int = 0
    _less_ahead: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _warning: logs.Occasion = field(default_factory=logs.Occasion, init=False)

    def why_idle(self) -> str:
        """Why an idle engine has no work."""
        return "queue_empty" if self._queue_was_empty and not self._ahead else "starved"

    @property
    def why_waiting(self) -> str | None:
        """Why there are no jobs; None before the first reply."""
        if self._paused:
            return "the node failed its checks"
        if not self._queue_answers:
            return "the queue does not answer"
        return "the queue is empty" if self._queue_was_empty else None

    def generated(self, entry: InFlightJob) -> None:
        """The engine finished a job."""
        self._jobs_generated += 1
        self.not_ahead(entry)

    def not_ahead(self, entry: InFlightJob) -> None:
        """A job is no longer ahead of the engine, whatever its outcome."""
        if entry.ahead:
            entry.ahead = False
            self._ahead -= 1
            self._less_ahead.set()

    @property
    def is_idle(self) -> bool:
        """Whether the queues had no jobs when they were last asked, and none is left here."""
        return self._queue_was_empty and not self._ahead

    @property
    def seconds_per_job(self) -> float:
        """Of the engine's time; 0 where it is not known yet."""
        if not self._jobs_generated:
            return 0.0
        return self.engine_thread.clock.busy_seconds / self._jobs_generated

    def restart(self) -> None:
        """Lets `run` be called again after `stop`."""
        self._stopped.clear()
        self._queue_was_empty = False

    def stop(self) -> None:
        """Ends `run` after its current call; the messages that it leases are still processed."""
        self._stopped.set()
        self._less_ahead.set()

    def pause(self) -> None:
        """Receives nothing until `resume`; a receive in flight still leases its messages."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._less_ahead.set()

    async def run(self, put: Callable[[InFlightJob], Awaitable[None]]) -> None:
        """Pulls until it is stopped, or with --until-empty until nothing is left."""
        empty_polls = 0
        while not self._stopped.is_set():
            count = self._count_to_pull()
            if not count:
                self._less_ahead.clear()
                await self._less_ahead.wait()
                continue
            asked_at = time.monotonic()
            try:
                messages = await self.queue.receive(count, self.settings.lease_seconds)
                self.metrics.stage_seconds.labels("pull").observe(time.monotonic() - asked_at)
                if not messages and await self._is_done():
                    return
            except errors.TransientError as error:
                if self._warning.is_due():
                    log.warning(
                        "the queue does not answer: %s", error, extra={"action": "pull_failed"}
                    )
                messages, self._queue_answers = [], False
            else:
                self._queue_answers = True
            self._queue_was_empty = self._queue_answers and not messages
            for message in messages:
                entry = InFlightJob(self.keeper.hold(message, asked_at))
                self._ahead += 1
                self.settler.add(entry)
                await put(entry)
            if messages:
                empty_polls = 0
            else:
                await self._pause(empty_polls)
                empty_polls += 1

    async def _is_done(self) -> bool:
        """Nothing visible, nothing in flight, nothing that a dead worker's lease still hides."""
        if not self.settings.until_empty or self.settler.in_flight:
            return False
        return (await self.queue.depth()).messages == 0

    async def _pause(self, empty_polls: int) -> None:
        until_empty = self.settings.until_empty
        longest = UNTIL_EMPTY_PAUSE_SECONDS if until_empty else LONGEST_PAUSE_SECONDS
        waits = [self._stopped.wait()]
        if until_empty and self.settler.in_flight:
            waits.append(self.settler.nothing_in_flight.wait())
        seconds = retry.backoff(empty_polls, FIRST_PAUSE_SECONDS, longest)
        await tasks.first_of(*waits, timeout_seconds=seconds)

    def _count_to_pull(self) -> int:
        """Jobs to pull now; 0 while there is only room for a handful."""
        if self._paused:
            return 0
        busy_seconds = self.engine_thread.clock.busy_seconds
        jobs_per_second = self._jobs_generated / busy_seconds if busy_seconds else 0.0
        target = max(
            self.engine_thread.capacity + LEAST_AHEAD,
            math.ceil(jobs_per_second * self.settings.prefetch_seconds),
        )
        room = min(target, MOST_AHEAD) - self._ahead
        least = min(protocol.MAX_RECEIVE, target // 2)
        return min(room, protocol.MAX_RECEIVE) if room >= least else 0
