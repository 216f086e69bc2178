"""The generate stage: prepared requests go to the engine's thread, its images to the encoders."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from imagefleet import errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.passes.fields import Pass
from imagefleet.pricing import families
from worker import tasks
from worker.engine import contract
from worker.gpu_thread import Delivery, EngineThread
from worker.jobs.in_flight import InFlightImage, InFlightJob
from worker.metrics import WorkerMetrics
from worker.node.canary import Canary
from worker.node.self_check import NodeSelfCheck
from worker.node.watchdog import NodeWatchdog
from worker.pull import Puller
from worker.settle import Settler
from worker.stages.upload import EncodeStage, GeneratedImage


@dataclass(slots=True, eq=False)
class GenerateStage:
    """Matches the engine's tickets with images; the engine's thread does the waiting."""

    engine: contract.Engine
    engine_thread: EngineThread
    encode: EncodeStage
    puller: Puller
    settler: Settler
    metrics: WorkerMetrics
    watchdog: NodeWatchdog
    cancelled: CancelledCampaigns
    checks: NodeSelfCheck = field(init=False)
    nothing_at_engine: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _tickets: Iterator[int] = field(default_factory=itertools.count, init=False)
    _held: deque[Delivery] = field(default_factory=deque, init=False)
    _at_engine: dict[int, InFlightImage] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.checks = NodeSelfCheck(
            self.engine,
            self.engine_thread,
            Canary(self.engine, self.engine_thread, self._tickets),
            self.metrics,
            self.encode.upload.suspects,
        )
        self.nothing_at_engine.set()
        self.engine_thread.is_cancelled = self._is_cancelled

    def is_cancelled(self, entry: InFlightJob) -> bool:
        """Whether the campaign of a job has been cancelled since it was sent."""
        return entry.is_of(self.cancelled)

    async def leave_out(self, entry: InFlightJob, images: int) -> None:
        """Draws so many images of a job no more; those that are begun are stored."""
        entry.is_cancelled = entry.is_cancelled or self.is_cancelled(entry)
        entry.images_to_store -= images
        self.puller.not_ahead(entry, images)
        if not entry.images_to_store:
            await self.settler.images_ended(entry)

    async def submit(self, image: InFlightImage, request: contract.PreparedRequest) -> bool:
        """Waits until the engine's thread accepts the request; False: the worker drains."""
        ticket = next(self._tickets)
        self._at_engine[ticket] = image
        self.nothing_at_engine.clear()
        if await self.engine_thread.submit(ticket, request):
            image.owner.images_to_submit -= 1
            return True
        self._take(ticket)
        return False

    def stop_accepting(self) -> list[InFlightJob]:
        """Returns the jobs in flight of which the engine has begun nothing.

        Of the others, the images that it has begun are stored; the rest is left to another worker.
        """
        waiting: Counter[InFlightJob] = Counter()
        for ticket in self.engine_thread.stop_accepting():
            waiting[self._take(ticket).owner] += 1
        for entry in self.settler.in_flight:
            left = waiting[entry] + entry.images_to_submit
            entry.is_put_off = entry.is_put_off or left > 0
            entry.images_to_store -= left
            entry.images_to_submit = 0
        return [
            entry
            for entry in self.settler.in_flight
            if not (entry.images_to_store or entry.has_ended)
        ]

    async def run(self) -> NoReturn:
        while True:
            delivery = await self._next()
            image = self._take(delivery.finished.ticket)
            image.generated_at = delivery.finished_at
            entry = image.owner
            if isinstance(delivery.finished.outcome, errors.JobCancelled):  # not begun
                await self.settler.attempt(entry, partial(self.leave_out, entry, 1))
                continue
            passes = self._passes(image)
            self.watchdog.image_generated(self.engine.family, passes)
            waited = self.metrics.stage_seconds["wait_gpu"]
            waited.observe(max(0.0, delivery.admitted_at - image.ready_at))
            generated = self.metrics.stage_seconds["generate"]
            generated.observe(delivery.finished_at - delivery.admitted_at)
            self.puller.generated(entry)
            await self.settler.attempt(entry, partial(self._pass_on, image, delivery), image)

    def _is_cancelled(self, ticket: int) -> bool:
        """Whether an image is not to be begun; on the engine's thread."""
        image = self._at_engine.get(ticket)
        if image is None:
            return False
        entry = image.owner
        return entry.settled or entry.is_stopping or self.is_cancelled(entry)

    async def _next(self) -> Delivery:
        """The next outcome; while the node is in doubt, they are kept back here."""
        trusted = self.checks.trusted
        while True:
            if trusted.is_set() and self._held:
                return self._held.popleft()
            if trusted.is_set() and (delivery := self.engine_thread.finished_already()):
                return delivery
            finished = asyncio.ensure_future(self.engine_thread.finished())
            waits = (
                [finished]
                if trusted.is_set()
                else [finished, asyncio.ensure_future(trusted.wait())]
            )
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if finished.done():
                    self._held.append(finished.result())
            finally:
                await tasks.cancel(waits)

    def _take(self, ticket: int) -> InFlightImage:
        """The image of a ticket that has left the engine."""
        image = self._at_engine.pop(ticket)
        if not self._at_engine:
            self.nothing_at_engine.set()
        return image

    def _passes(self, image: InFlightImage) -> list[Pass]:
        family = families.find(self.engine.family)
        return image.job.passes(*image.size, enlarges=family.enlarges)

    async def _pass_on(self, image: InFlightImage, delivery: Delivery) -> None:
        outcome = delivery.finished.outcome
        if isinstance(outcome, errors.FleetError):
            if not image.owner.failures:  # one bad job is not a broken node
                self.watchdog.image_failed(outcome)
            raise outcome
        if self.checks.is_possible:
            self.checks.generated(
                await self.checks.fingerprint(outcome),
                seed=image.job.image_seed(image.index),
                steps=sum(each.calls for each in self._passes(image)),
                size=image.size,
                is_of_seed=not image.job.init_images,
                seconds=delivery.finished_at - delivery.admitted_at,
            )
        await self.encode.queue.put(GeneratedImage(image, outcome))
