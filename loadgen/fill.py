"""Filling a queue: bounded concurrent sends, paced, and confirmed in the order of the source."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imagefleet import errors, retry
from imagefleet.storage import protocol
from loadgen.sources import Source

#: Positions in one send. The embedded queue pays once for each; more makes the window larger that
#: a kill sends twice.
BATCH = 100

#: Sends a second under a rate limit: smaller batches then, so that the pace is even.
_PACED_SENDS_A_SECOND = 10

#: While the pace is waited for, what was sent is confirmed so often.
_PACING_STEP_SECONDS = 0.1

#: A storage that is down for longer than about a minute ends the load, which can be resumed.
_RETRIES = retry.RetryPolicy(tries=8, first_wait_seconds=1, longest_wait_seconds=30)


@dataclass(frozen=True, slots=True)
class Progress:
    """Positions confirmed so far, how many jobs this run sent, and whether the source ended."""

    confirmed: int
    sent: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class _Sending:
    end: int
    jobs: int
    task: asyncio.Task[None]


class Filler:
    """Sends a source's messages to a queue from a position on."""

    def __init__(
        self,
        queue: protocol.JobQueue,
        source: Source,
        *,
        start: int = 0,
        concurrency: int = 4,
        rate: float | None = None,
        retries: retry.RetryPolicy = _RETRIES,
    ) -> None:
        self.progress = Progress(start, 0)
        self._queue = queue
        self._source = source
        self._concurrency = concurrency
        self._rate = rate
        self._on_confirmed: Callable[[Progress], None] | None = None
        self._retries = retries
        self._stopping = asyncio.Event()
        self._window: deque[_Sending] = deque()
        self._source_error: errors.FleetError | None = None

    def stop(self) -> None:
        """No more sends; those in flight are waited for."""
        self._stopping.set()

    async def run(self, on_confirmed: Callable[[Progress], None] | None = None) -> Progress:
        """Sends until the source ends or `stop` is called; the answer counts what is stored.

        *on_confirmed* hears of each batch, in order, after it and all before it are stored.

        Raises:
            FleetError: a send failed for good, or the source has an invalid job.
        """
        self._on_confirmed = on_confirmed
        try:
            finished = await self._fill()
            while self._window:
                await self._confirm_oldest()
        finally:
            await self._finish_window()
        return dataclasses.replace(self.progress, finished=finished)

    async def _fill(self) -> bool:
        """Tells whether the source has ended."""
        bodies = self._source.bodies(self.progress.confirmed)
        position = self.progress.confirmed
        next_send = time.monotonic()
        while True:
            await self._make_room()
            await self._wait_until(next_send)
            if self._stopping.is_set():
                return False
            if not (batch := self._take(bodies)):
                if self._source_error is not None:
                    raise self._source_error
                return True
            position += len(batch)
            messages = [body for body in batch if body is not None]
            task = asyncio.create_task(self._send(messages))
            self._window.append(_Sending(position, len(messages), task))
            if self._rate is not None:
                # Counted from now: what a slow storage held up is not made up for in a burst.
                next_send = max(next_send, time.monotonic()) + len(messages) / self._rate

    def _take(self, bodies: Iterator[str | None]) -> list[str | None]:
        size = BATCH
        if self._rate is not None:
            size = max(1, min(BATCH, int(self._rate / _PACED_SENDS_A_SECOND)))
        batch: list[str | None] = []
        try:
            for body in itertools.islice(bodies, size):
                batch.append(body)  # noqa: PERF402 - what came before an error is kept
        except errors.FleetError as error:
            self._source_error = error  # raised once what came before it is sent
        return batch

    async def _send(self, messages: list[str]) -> None:
        if messages:
            await self._retries.call(lambda: self._queue.send(messages))

    async def _make_room(self) -> None:
        """Confirms what is stored by now, and waits for the oldest send while too many fly."""
        while self._window and (
            len(self._window) >= self._concurrency or self._window[0].task.done()
        ):
            await self._confirm_oldest()

    async def _wait_until(self, moment: float) -> None:
        """Waits for the pace, unless told to stop; what is stored meanwhile is confirmed."""
        while (left := moment - time.monotonic()) > 0 and not self._stopping.is_set():
            await self._make_room()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(left, _PACING_STEP_SECONDS))

    async def _confirm_oldest(self) -> None:
        oldest = self._window[0]
        await oldest.task
        self._window.popleft()
        self.progress = Progress(oldest.end, self.progress.sent + oldest.jobs)
        if self._on_confirmed is not None:
            self._on_confirmed(self.progress)

    async def _finish_window(self) -> None:
        """After an error or a cancellation: counts what is stored without a gap, ends the rest."""
        await asyncio.gather(*(each.task for each in self._window), return_exceptions=True)
        while self._window and _succeeded(self._window[0].task):
            await self._confirm_oldest()
        self._window.clear()


def _succeeded(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
