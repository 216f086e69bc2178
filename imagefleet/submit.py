"""Sends many messages: bounded concurrency, an optional rate, confirmed in order."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from imagefleet import concurrency
from imagefleet.concurrency import Operation, RetryPolicy
from imagefleet.errors import FleetError
from imagefleet.storage import bundle
from imagefleet.storage.bundle import NameOf, Sent

#: Positions in flight: a disk sync for so many gives 34,000 jobs/s.
BATCH = 32

#: Sends a second under a rate limit: smaller batches keep the rate even.
_PACED_SENDS_PER_SECOND = 10

#: Seconds between confirmations of finished sends, while a send waits for the rate limit.
_PACING_STEP_SECONDS = 0.1

#: The longest pause between two notes of the jobs sent, on Azure a billed write for each campaign:
#: what is killed leaves the count of a moment before.
NOTE_SECONDS = 0.5

#: Rides out a storage outage of about a minute.
RETRIES = concurrency.RetryPolicy(
    tries=8, first_wait_seconds=1, longest_wait_seconds=30
)


class Progress(NamedTuple):
    """Positions confirmed so far, jobs sent by this run, and whether the source has ended."""

    confirmed: int
    sent: int
    finished: bool = False
    #: Messages sent in addition to the jobs, for second drawings.
    second_drawings: int = 0


async def keep_noting(note: Operation[None]) -> NoReturn:
    """Side task: calls *note* now and then."""
    while True:
        await asyncio.sleep(concurrency.jitter(NOTE_SECONDS))
        await note()


@dataclass(eq=False)
class BulkSender:
    """Calls *send* with messages; None in *bodies* is a position without one.

    *choose* returns a message, or None if it is not to be sent, or raises a FleetError to end.
    *second_drawing* returns a second message for some of them.
    """

    send: Callable[[list[str]], Awaitable[None]]
    bodies: Iterable[str | None]
    concurrency: int = 4
    #: Messages of a send.
    batch: int = BATCH
    #: The most jobs of a message.
    bundle_jobs: int = 1
    #: Names the bundle of some messages.
    bundle_name: NameOf = bundle.any_name
    rate: float | None = None
    choose: Callable[[str | None], Awaitable[str | None]] | None = None
    second_drawing: Callable[[str], str | None] = lambda _: None
    retry_policy: RetryPolicy = RETRIES

    def __post_init__(self) -> None:
        self.progress = Progress(0, 0)
        self._bodies = iter(self.bodies)
        self._stopping = asyncio.Event()
        self._window: deque[tuple[asyncio.Task[None], Progress]] = deque()
        self._source_error: FleetError | None = None

    def stop(self) -> None:
        """Starts no more sends; `run` waits for those in flight."""
        self._stopping.set()

    async def run(
        self, on_confirmed: Callable[[Progress], object] = lambda _: None
    ) -> Progress:
        """Sends until the source ends or `stop` is called; returns what is stored.

        *on_confirmed* is called for each batch, in order, once it and all before it are stored.
        """
        self._on_confirmed = on_confirmed
        try:
            finished = await self._send_all()
            while self._window:
                await self._confirm_oldest()
        finally:
            await self._finish_window()
        return self.progress._replace(finished=finished)

    async def _send_all(self) -> bool:
        """Returns whether the source has ended."""
        sent = self.progress
        next_send = time.monotonic()
        while True:
            await self._confirm_finished()
            await self._wait_until(next_send)
            if self._stopping.is_set():
                return False
            if not (batch := await self._take()):
                if self._source_error is not None:
                    raise self._source_error
                return True
            messages = [job.message for job in batch if job and job.is_sent]
            # After the batch, so that the worker that pulls a job has mostly not its second one.
            second = [also for body in messages if (also := self.second_drawing(body))]
            bundled = messages
            if self.bundle_jobs > 1:
                bundled = bundle.bundled(
                    [job for job in batch if job], self.bundle_jobs, self.bundle_name
                )
            task = asyncio.create_task(self._send([*bundled, *second]))
            sent = Progress(
                sent.confirmed + len(batch),
                sent.sent + len(messages),
                second_drawings=sent.second_drawings + len(second),
            )
            self._window.append((task, sent))
            if self.rate is not None:
                # From now on: time lost to slow storage is not made up for in a burst.
                count = len(messages) + len(second)
                next_send = max(next_send, time.monotonic()) + count / self.rate

    async def _take(self) -> list[Sent | None]:
        """The next positions: whole bundles, so that the same ones are in it another time."""
        size = self.batch * self.bundle_jobs
        if self.rate is not None:
            size = min(size, int(self.rate / _PACED_SENDS_PER_SECOND))
        size = max(1, size // self.bundle_jobs) * self.bundle_jobs
        batch = []
        try:
            for body in itertools.islice(self._bodies, size):
                # What came before an error is kept.
                chosen = await self.choose(body) if self.choose else body
                batch.append(None if body is None else Sent(body, chosen is not None))
        except FleetError as error:
            self._bodies = iter(())
            self._source_error = error  # raised once everything before it is sent
        return batch

    async def _send(self, messages: list[str]) -> None:
        if messages:
            await self.retry_policy.call(lambda: self.send(messages))

    async def _confirm_finished(self) -> None:
        """Confirms finished sends, and waits for the oldest while too many are in flight."""
        while self._window and (
            len(self._window) >= self.concurrency or self._window[0][0].done()
        ):
            await self._confirm_oldest()

    async def _wait_until(self, moment: float) -> None:
        """Waits for the rate limit or for `stop`, confirming finished sends meanwhile."""
        while (left := moment - time.monotonic()) > 0 and not self._stopping.is_set():
            await self._confirm_finished()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._stopping.wait(), min(left, _PACING_STEP_SECONDS)
                )

    async def _confirm_oldest(self) -> None:
        await self._window[0][0]
        _, self.progress = self._window.popleft()
        self._on_confirmed(self.progress)

    async def _finish_window(self) -> None:
        """Waits for the rest after an error or a cancellation; confirms up to the first gap."""
        ended = await asyncio.gather(
            *(task for task, _ in self._window), return_exceptions=True
        )
        for error in ended:
            if error is not None:
                break
            await self._confirm_oldest()
        self._window.clear()
