"""The order of jobs: those that are not begun, and those of several images that have some left."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Any

from worker.engine import contract
from worker.jobs.in_flight import InFlightImage, InFlightJob


@dataclass(slots=True, eq=False)
class BegunJob:
    """A job and its images that the engine has not been given yet.

    They share what was prepared for the first: their prompts and their LoRAs in memory.
    """

    entry: InFlightJob
    requests: deque[tuple[int, contract.ImageRequest]]
    """The requests left, each with its image's index."""
    first: contract.PreparedRequest

    def take(self) -> tuple[InFlightImage, contract.PreparedRequest]:
        """The next image."""
        entry = self.entry
        if entry.job is None:
            raise RuntimeError("read the job first")
        index, request = self.requests.popleft()
        prepared = self.first
        if request is not prepared.request:
            dataclass_of_engine: Any = prepared
            prepared = dataclasses.replace(dataclass_of_engine, request=request)
        size = final = request.width, request.height
        if (last := request.upscale or request.hires) is not None:
            final = last.width, last.height
        elif entry.overlay is not None:
            final = entry.overlay.size
        image = InFlightImage(entry, entry.job, index, size, final, request.embeddings)
        return image, prepared


class Turns:
    """Lets every other image be one of a job that is not begun, while there are both.

    So neither does a job of a thousand images hold up the others, nor they it.
    """

    def __init__(self, most_new: int) -> None:
        """*most_new*: jobs that may wait here to be begun; then `put` waits."""
        self._new: asyncio.Queue[InFlightJob] = asyncio.Queue(most_new)
        self._begun: deque[BegunJob] = deque()
        self._waiting = asyncio.Semaphore(0)
        self._was_new = False

    async def put(self, entry: InFlightJob) -> None:
        """A job that is not begun."""
        await self._new.put(entry)
        self._waiting.release()

    def go_on(self, job: BegunJob) -> None:
        """A job with images left; others that are begun come first."""
        self._begun.append(job)
        self._waiting.release()

    async def next(self) -> InFlightJob | BegunJob:
        await self._waiting.acquire()
        self._was_new = not self._new.empty() and not (self._was_new and self._begun)
        return self._new.get_nowait() if self._was_new else self._begun.popleft()
