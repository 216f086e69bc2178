"""Finds out whether failed images are the fault of the jobs or of this node.

A LoRA that gives NaN, or a size too large for a GPU class's memory, fails every image of a
campaign on any node, and each node that is given up for it is kept from the group for 48 hours.
So before failed images count against a node, a plain image is generated alongside the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from imagefleet import errors
from imagefleet.telemetry import logs
from worker import tasks
from worker.engine import contract
from worker.gpu_thread import Delivery, EngineThread
from worker.node import check
from worker.stages import encode

log = logs.EventLog(__name__)

#: The engine's work until the canary has to be finished, with all that waits before it: the
#: largest images on the slowest card. Not wall time, since storage that is down blocks the engine
#: and the canary with it; an engine that hangs is for `EngineThread.watch`.
LONGEST_BUSY_SECONDS = 600.0

#: Seconds between two readings of the engine's clock.
POLL_SECONDS = 1.0


class DrainsError(Exception):
    """The worker drains, and draws no canaries any more."""


@dataclass(slots=True, eq=False)
class Canary:
    """Generates images with tickets that belong to no job."""

    _engine: contract.Engine
    _engine_thread: EngineThread
    _tickets: Iterator[int]
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def diagnose(self, alarm: str) -> str | None:
        """What is wrong with this node; None if its jobs are at fault, or the worker drains."""
        try:
            await self.draw([check.plain_request(self._engine, seed=0)])
        except DrainsError:
            return None
        except errors.FleetError as error:
            return f"{alarm}; and a plain image failed as well: {error}"
        text = f"{alarm}; but a plain image succeeded: the jobs are at fault, not this node"
        log.warning(text, action="node_proved")
        return None

    async def draw(self, requests: Sequence[contract.ImageRequest]) -> list[contract.Pixels]:
        """The images; raises FleetError if one failed, DrainsError if the worker drains."""
        clock = self._engine_thread.clock
        async with self._one_at_a_time:
            latest = clock.busy_seconds + LONGEST_BUSY_SECONDS
            async with tasks.background(self._generate(requests), "canary") as generating:
                while not (await asyncio.wait({generating}, timeout=POLL_SECONDS))[0]:
                    if clock.busy_seconds > latest:
                        raise errors.TransientError(
                            f"it did not come in {LONGEST_BUSY_SECONDS:g} s of the engine's work"
                        )
                drawn: list[contract.Pixels] = generating.result()
                return drawn

    async def _generate(self, requests: Sequence[contract.ImageRequest]) -> list[contract.Pixels]:
        drawn = []
        for delivery in await asyncio.gather(*map(self._deliver, requests)):
            outcome = delivery.finished.outcome
            if isinstance(outcome, errors.FleetError):
                raise outcome
            encode.refuse_one_colour(outcome)
            drawn.append(outcome)
        return drawn

    async def _deliver(self, request: contract.ImageRequest) -> Delivery:
        ticket = next(self._tickets)
        prepared = await asyncio.to_thread(self._engine.prepare, request)
        delivery = await self._engine_thread.draw(ticket, prepared)
        if delivery is None:
            raise DrainsError
        return delivery
