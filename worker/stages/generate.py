"""The generate stage: prepared requests go to the engine's thread, its images to the encoders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from imagefleet import errors
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.node.canary import Canary
from worker.node.watchdog import NodeWatchdog
from worker.pull import Puller
from worker.settle import InFlightImage, InFlightJob, Settler
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
    canary: Canary = field(init=False)
    nothing_at_engine: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _tickets: Iterator[int] = field(default_factory=itertools.count, init=False)
    _at_engine: dict[int, InFlightImage] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.canary = Canary(self.engine, self.engine_thread, self._tickets)
        self.nothing_at_engine.set()

    async def submit(self, image: InFlightImage, request: contract.PreparedRequest) -> bool:
        """Waits until the engine's thread accepts the request; False: the worker drains."""
        ticket = next(self._tickets)
        self._at_engine[ticket] = image
        self.nothing_at_engine.clear()
        if await self.engine_thread.submit(ticket, request):
            return True
        self._take(ticket)
        return False

    def stop_accepting(self) -> list[InFlightJob]:
        """Returns the jobs in flight that the engine has not begun, or only in part."""
        not_begun: set[InFlightJob] = set()
        for ticket in self.engine_thread.stop_accepting():
            image = self._take(ticket)
            if image is None:
                self.canary.finished(ticket, None)
            else:
                not_begun.add(image.owner)
        return [
            entry for entry in self.settler.in_flight if entry in not_begun or not entry.submitted
        ]

    async def run(self) -> NoReturn:
        while True:
            delivery = await self.engine_thread.finished()
            ticket, outcome = delivery.finished.ticket, delivery.finished.outcome
            image = self._take(ticket)
            if image is None:
                self.canary.finished(ticket, outcome)
                continue
            entry = image.owner
            self.watchdog.image_generated(image.job.steps, *image.size)
            waited = self.metrics.stage_seconds.labels("wait_gpu")
            waited.observe(max(0.0, delivery.admitted_at - image.ready_at))
            generated = self.metrics.stage_seconds.labels("generate")
            generated.observe(delivery.finished_at - delivery.admitted_at)
            entry.images_to_generate -= 1
            if not entry.images_to_generate:
                self.puller.generated(entry)
            await self.settler.attempt(
                entry, partial(self._pass_on, image, outcome), image_is_generated=True
            )

    def _take(self, ticket: int) -> InFlightImage | None:
        """The image of a ticket that has left the engine; None: it was the canary's."""
        image = self._at_engine.pop(ticket, None)
        if not self._at_engine:
            self.nothing_at_engine.set()
        return image

    async def _pass_on(self, image: InFlightImage, outcome: contract.Outcome) -> None:
        if isinstance(outcome, errors.FleetError):
            self.watchdog.image_failed(outcome)
            raise outcome
        await self.encode.queue.put(GeneratedImage(image, outcome))
