"""The generate stage: prepared requests go to the engine's thread, its images to the encoders."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from imagefleet.errors import FleetError, JobCancelled
from imagefleet.job.passes.fields import Pass
from imagefleet.pricing import families
from worker.engine.contract import Engine, ImageRequest, Pixels, PreparedRequest
from worker.files.library import FileLibrary
from worker.gpu_thread import Delivery, EngineThread
from worker.jobs.in_flight import Generated, InFlightImage, InFlightJob
from worker.node.watchdog import NodeWatchdog
from worker.pull import Puller
from worker.settle import Settler
from worker.stages import details
from worker.stages.encode import EncodeStage
from worker.stages.judge import JudgeStage

#: Images at once of which parts are drawn again.
DETAILED = 8


class _DrainingError(Exception):
    """The worker drains: the image is left to another one."""


@dataclass(eq=False)
class GenerateStage:
    """Matches the engine's tickets with images; the engine's thread does the waiting."""

    engine: Engine
    engine_thread: EngineThread
    settler: Settler
    watchdog: NodeWatchdog
    puller: Puller
    encode: EncodeStage
    judge: JudgeStage
    detectors: FileLibrary

    def __post_init__(self) -> None:
        # Without a limit: the engine must go on while parts of images wait for it.
        self._detailed: asyncio.Queue[Generated] = asyncio.Queue()
        self.nothing_at_engine = asyncio.Event()
        self._tickets = itertools.count()
        self._at_engine: dict[int, InFlightImage] = {}
        self._family = families.find(self.engine.family)
        self.nothing_at_engine.set()
        self.engine_thread.is_cancelled = self._is_cancelled

    async def leave_out(self, entry: InFlightJob, images: int) -> None:
        """Drops this many images that have not started; those in the engine are still stored."""
        is_cancelled = entry.is_of(self.settler.cancelled_campaigns)
        entry.is_cancelled = entry.is_cancelled or is_cancelled
        self.puller.not_ahead(entry, images)
        await self.settler.less_to_store(entry, images)

    async def submit(self, image: InFlightImage, request: PreparedRequest) -> bool:
        """Waits until the engine's thread accepts the request; False: the worker drains."""
        ticket = next(self._tickets)
        self._at_engine[ticket] = image
        self.nothing_at_engine.clear()
        is_urgent = image.owner.is_urgent
        if await self.engine_thread.submit(ticket, request, is_urgent=is_urgent):
            image.owner.images_to_submit -= 1
            return True
        self._take(ticket)
        return False

    def stop_accepting(self) -> list[InFlightJob]:
        """Returns the jobs in flight of which the engine has begun nothing.

        Of the others, the images that it has begun are stored; the rest is left to another worker.
        """
        for ticket in self.engine_thread.stop_accepting():
            image = self._take(ticket)
            image.owner.images_to_submit += 1
            if not image.index:  # none of the others is begun before it
                image.owner.is_first_awaited = False
        for entry in self.settler.in_flight:
            entry.images_to_store -= entry.images_to_submit
            entry.images_to_submit = 0
        return [
            entry
            for entry in self.settler.in_flight
            if not (entry.images_to_store or entry.has_ended)
        ]

    async def run(self) -> NoReturn:
        while True:
            delivery = await self.engine_thread.finished()
            finished = delivery.finished
            if finished.is_estimate:
                image = self._at_engine[finished.ticket]
                if isinstance(finished.outcome, FleetError):
                    await self.settler.failed(image.owner, finished.outcome)
                else:
                    await self.judge.queue.put((image, finished.outcome, True))
                continue
            image = self._take(finished.ticket)
            entry = image.owner
            is_left = isinstance(finished.outcome, JobCancelled)
            if is_left and not image.is_dropped:  # not begun
                await self.settler.attempt(entry, partial(self.leave_out, entry, 1))
                if not image.index:
                    await entry.first_ended()
                continue
            passes = image.job.passes(*image.size, enlarges=self._family.enlarges)
            if is_left:  # halfway
                passes = [passes[0]._replace(calls=passes[0].calls // 2)]
            self.watchdog.image_generated(self.engine.family, passes)
            seconds = self.settler.metrics.stage_seconds
            seconds["wait_gpu"].observe(max(0.0, delivery.admitted_at - image.ready_at))
            seconds["generate"].observe(delivery.finished_at - delivery.admitted_at)
            self.puller.not_ahead(entry, 1)
            if not image.is_dropped:
                await self.settler.attempt(
                    entry, partial(self._pass_on, image, delivery), image
                )

    def _is_cancelled(self, ticket: int) -> bool:
        """True if an image is not to be begun; called on the engine's thread."""
        image = self._at_engine.get(ticket)
        if image is None:
            return False
        entry = image.owner
        return (
            entry.settled
            or entry.is_stopping
            or entry.is_of(self.settler.cancelled_campaigns)
        )

    def _take(self, ticket: int) -> InFlightImage:
        """The image of a ticket that has left the engine."""
        image = self._at_engine.pop(ticket)
        if not self._at_engine:
            self.nothing_at_engine.set()
        return image

    async def _pass_on(self, image: InFlightImage, delivery: Delivery) -> None:
        outcome = delivery.finished.outcome
        if isinstance(outcome, FleetError):
            if not image.owner.failures:  # one bad job is not a broken node
                self.watchdog.image_failed(outcome)
            raise outcome
        if image.job.details:
            self._detailed.put_nowait((image, outcome))
        else:
            await self._drawn(image, outcome)

    async def draw_details(self) -> NoReturn:
        """Draws again what the detectors of images' jobs find in them."""
        while True:
            image, pixels = await self._detailed.get()
            work = partial(self._detail, image, pixels)
            await self.settler.attempt(image.owner, work, image)

    async def _detail(self, image: InFlightImage, pixels: Pixels) -> None:
        request = image.request
        assert request is not None  # noqa: S101 - it was drawn here
        passes = image.job.detail_passes(request.width, request.height)
        draw = partial(self._draw, passes)
        try:
            pixels = await details.draw(
                self.detectors, image.job, request, pixels, draw
            )
        except _DrainingError:
            await self.settler.hand_back(image.owner)
        else:
            await self._drawn(image, pixels)

    async def _drawn(self, image: InFlightImage, pixels: Pixels) -> None:
        if image.job.keep is None:
            await self.encode.queue.put((image, pixels))
        else:
            await self.judge.queue.put((image, pixels, False))

    async def _draw(
        self, passes: Sequence[Pass], request: ImageRequest, at: int
    ) -> Pixels:
        """Draws a part of an image, beside all else."""
        prepared = await asyncio.to_thread(self.engine.prepare, request)
        delivery = await self.engine_thread.draw(prepared)
        if delivery is None:
            raise _DrainingError
        self.watchdog.image_generated(self.engine.family, [passes[at]])
        return delivery.pixels()
