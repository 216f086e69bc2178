"""The pull: just enough jobs ahead of the GPU, and rare polls of an empty queue."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from imagefleet import concurrency
from imagefleet.errors import TransientError
from imagefleet.job.message import images_of, is_bundle
from imagefleet.storage import bundle
from imagefleet.storage.protocol import MAX_RECEIVE
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.telemetry.logs import Occasion, log
from worker import tasks
from worker.gpu_thread import EngineThread
from worker.jobs import bundles
from worker.jobs.in_flight import InFlightJob
from worker.leases import Lease
from worker.settle import Settler

#: Images beyond those that the engine holds, however slow it is: enough for one slow reply of the
#: storage.
LEAST_AHEAD = 8

#: However fast the engine: when a worker dies, jobs of this many images, and one more job at most,
#: wait for their leases.
MOST_AHEAD = 1024

#: No jobs are pulled while done ones wait so long to be acknowledged: a queue at its limit would
#: spend its operations on renewing ever more leases, and then deliver their jobs again.
MOST_BEHIND_SECONDS = 15.0

#: Pauses between polls of empty queues, doubled up to the longest: a new job waits five seconds on
#: average. What an idle worker's polls cost in a day is in docs/storage.md.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0

#: Longest pause where a poll costs nothing: somebody may wait for one picture.
LOCAL_PAUSE_SECONDS = 0.03

#: Longest pause with --until-empty, where somebody waits for the end.
UNTIL_EMPTY_PAUSE_SECONDS = 1.0

#: Takes a job that was leased.
Add = Callable[[InFlightJob], None]


@dataclass(eq=False)
class Puller:
    """Leases jobs while the GPU has less than `prefetch_seconds` of work ahead."""

    queue: RoutedQueue
    settler: Settler
    engine_thread: EngineThread
    _queue_was_empty: bool = False
    _queue_answers: bool = True
    #: Images of jobs pulled that the engine has not finished, by their level.
    _ahead: Counter[int] = field(default_factory=Counter)
    _images_per_message: float = bundle.MAX_JOBS  # of those received last
    _less_ahead: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _warning: Occasion = field(default_factory=Occasion)

    def __post_init__(self) -> None:
        self.engine_thread.why_idle = self.why_idle

    def why_idle(self) -> str:
        """The reason an idle engine has no work, as the metrics label it."""
        return "queue_empty" if self.is_idle else "starved"

    @property
    def why_waiting(self) -> str | None:
        """The reason the queue gives no jobs; None if it gives some, or has not answered yet."""
        if not self._queue_answers:
            return "the queue does not answer"
        return "the queue is empty" if self._queue_was_empty else None

    def not_ahead(self, entry: InFlightJob, images: int | None = None) -> None:
        """Counts so many images of a job, by default all, as no longer ahead of the engine."""
        less = min(entry.ahead, entry.ahead if images is None else images)
        entry.ahead -= less
        self._ahead[entry.level] -= less
        self._less_ahead.set()

    @property
    def is_idle(self) -> bool:
        """True if the queues had no jobs when they were last asked, and none is left here."""
        return self._queue_was_empty and not self._images_ahead()

    def restart(self) -> None:
        """Lets `run` be called again after `stop`."""
        self._stopped.clear()
        self._queue_was_empty = False

    def stop(self) -> None:
        """Ends `run` after its current call; the messages that it leases are still processed."""
        self._stopped.set()
        self._less_ahead.set()

    async def run(self, add: Add) -> None:
        """Pulls until it is stopped, or with --until-empty until nothing is left."""
        empty_polls = 0
        settings = self.settler.settings
        longest_seconds = (
            LOCAL_PAUSE_SECONDS if settings.is_local else LONGEST_PAUSE_SECONDS
        )
        if settings.until_empty:
            longest_seconds = UNTIL_EMPTY_PAUSE_SECONDS
        while not self._stopped.is_set():
            count = self._count_to_pull()
            if not count:
                await self._pull_urgent(add)
                continue
            leases = await self._receive(count)
            if not leases and self._queue_answers and await self._is_done():
                return
            self._queue_was_empty = self._queue_answers and not leases
            if leases:
                await self._take(leases, add)
                empty_polls = 0
            else:
                waits = [self._stopped.wait()]
                if settings.until_empty and self.settler.in_flight:
                    waits.append(self.settler.nothing_in_flight.wait())
                seconds = concurrency.backoff(
                    empty_polls, FIRST_PAUSE_SECONDS, longest_seconds
                )
                await tasks.first_of(*waits, timeout_seconds=seconds)
                empty_polls += 1

    async def _pull_urgent(self, add: Add) -> None:
        """Waits for room, and pulls jobs that go before those that are here meanwhile."""
        self._less_ahead.clear()
        lowest = max(
            (level for level, images in self._ahead.items() if images), default=0
        )
        count = self._count_to_pull(lowest)
        seconds = self.queue.seconds_until_due(lowest) if count else math.inf
        if seconds > 0:
            limit = None if math.isinf(seconds) else seconds
            await tasks.first_of(self._less_ahead.wait(), timeout_seconds=limit)
        elif leases := await self._receive(count, lowest):
            await self._take(leases, add, lowest)

    async def _receive(self, count: int, above: int | None = None) -> list[Lease]:
        """The jobs that were leased; none if the queue does not answer, which is logged."""
        asked_at = time.monotonic()
        seconds = self.settler.settings.lease_seconds
        try:
            messages = await self.queue.receive(count, seconds, above)
        except TransientError as error:
            if self._warning.is_due():
                log.warning(f"the queue does not answer: {error}", action="pull_failed")
            self._queue_answers = False
            return []
        self._queue_answers = True
        self.settler.metrics.stage_seconds["pull"].observe(time.monotonic() - asked_at)
        return [self.settler.keeper.hold(each, asked_at) for each in messages]

    async def _take(
        self,
        leases: list[Lease],
        add: Add,
        above: int | None = None,
    ) -> None:
        """Hands back what is too much, since the jobs before it have more images than expected."""
        messages = list(map(self._entries, leases))
        images = sum(entry.ahead for entries in messages for entry in entries)
        if above is None:
            self._images_per_message = images / len(messages)
        target = self._target
        surplus = []
        for entries in messages:
            is_surplus = self._images_ahead(above) >= target and images > len(messages)
            for entry in entries:
                self.settler.add(entry)
                if is_surplus:
                    entry.ahead = 0
                    surplus.append(entry)
                    continue
                entry.is_urgent = any(
                    images
                    for level, images in self._ahead.items()
                    if level > entry.level
                )
                self._ahead[entry.level] += entry.ahead
                add(entry)
        if surplus:
            await concurrency.gather(*map(self.settler.hand_back, surplus))

    def _entries(self, lease: Lease) -> list[InFlightJob]:
        """The jobs of a message: one, or those of a bundle."""
        is_several = is_bundle(lease.message.body)
        entries = bundles.entries_of(lease) if is_several else [InFlightJob(lease)]
        for entry in entries:
            entry.ahead = images_of(entry.message.body)
            entry.level = self.queue.level_of(lease.message)
        return entries

    async def _is_done(self) -> bool:
        """True if nothing is visible or in flight, nor hidden by a dead worker's lease."""
        if not self.settler.settings.until_empty or self.settler.in_flight:
            return False
        return (await self.queue.depth()).messages == 0

    def _images_ahead(self, above: int | None = None) -> int:
        """Images ahead of the engine, or in it; of priorities *above* a level."""
        if above is None:
            return self._ahead.total()
        return sum(images for level, images in self._ahead.items() if level < above)

    def _count_to_pull(self, above: int | None = None) -> int:
        """Jobs to pull now; 0 while there is only room for a handful of images.

        *above*: for jobs that go before those of this level and lower ones, which take no room.
        """
        if self.settler.pending.behind_seconds > MOST_BEHIND_SECONDS:
            return 0
        target = self._target
        room = target - self._images_ahead(above)
        # The engine must not run out of them meanwhile: its slots would be empty one by one.
        if room < min(MAX_RECEIVE, max(1, (target - self.engine_thread.capacity) // 2)):
            return 0
        per_message = self._images_per_message if above is None else 1.0
        return min(math.ceil(room / per_message), MAX_RECEIVE)

    @property
    def _target(self) -> int:
        """Images that should be ahead of the engine, or in it."""
        clock = self.engine_thread.clock
        images_per_second = (
            clock.images / clock.busy_seconds if clock.busy_seconds else 0.0
        )
        wanted = max(
            self.engine_thread.capacity + LEAST_AHEAD,
            math.ceil(images_per_second * self.settler.settings.prefetch_seconds),
        )
        return min(wanted, MOST_AHEAD)
