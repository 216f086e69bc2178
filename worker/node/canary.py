"""Finds out whether failed images are the fault of the jobs or of this node.

A LoRA that gives NaN, or a size too large for a GPU class's memory, fails every image of a
campaign on any node, and each node that is given up for it is kept from the group for 48 hours.
So before failed images count against a node, a plain image is generated alongside the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from imagefleet import errors
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.node import check
from worker.stages import encode

log = logging.getLogger(__name__)

#: The engine's work until the canary has to be finished, with all that waits before it: the
#: largest images on the slowest card. Not wall time, since storage that is down blocks the engine
#: and the canary with it; an engine that hangs is for `EngineThread.watch`.
LONGEST_BUSY_SECONDS = 600.0

#: Between two readings of the engine's clock.
POLL_SECONDS = 1.0


class Canary:
    """Generates plain images, one at a time, with tickets that belong to no job."""

    def __init__(
        self, engine: contract.Engine, engine_thread: EngineThread, tickets: Iterator[int]
    ) -> None:
        self._engine = engine
        self._engine_thread = engine_thread
        self._tickets = tickets
        self._ticket: int | None = None
        self._outcome: asyncio.Future[contract.Outcome | None] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def diagnose(self, alarm: str) -> str | None:
        """What is wrong with this node; None if its jobs are at fault, or the worker drains."""
        async with self._one_at_a_time:
            generating = asyncio.create_task(self._generate(), name="canary")
            try:
                is_generated = await self._bounded(generating)
            except errors.FleetError as error:
                return f"{alarm}; and a plain image failed as well: {error}"
            finally:
                generating.cancel()
        if is_generated:
            log.warning(
                "%s; but a plain image succeeded: the jobs are at fault, not this node",
                alarm,
                extra={"action": "node_proved"},
            )
        return None

    def finished(self, ticket: int, outcome: contract.Outcome | None) -> None:
        """The outcome of a ticket without a job; None: not begun, since the worker drains."""
        if ticket == self._ticket and self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)

    async def _generate(self) -> bool:
        """Returns whether the image was generated; False: the worker drains.

        Raises:
            FleetError: the image failed.
        """
        ticket = self._ticket = next(self._tickets)
        finished = self._outcome = asyncio.get_running_loop().create_future()
        request = check.plain_request(self._engine, seed=0)
        prepared = await asyncio.to_thread(self._engine.prepare, request)
        outcome = await finished if await self._engine_thread.submit(ticket, prepared) else None
        if isinstance(outcome, errors.FleetError):
            raise outcome
        if outcome is not None:
            encode.refuse_one_colour(outcome)
        return outcome is not None

    async def _bounded(self, generating: asyncio.Task[bool]) -> bool:
        clock = self._engine_thread.clock
        latest = clock.busy_seconds + LONGEST_BUSY_SECONDS
        while not (await asyncio.wait({generating}, timeout=POLL_SECONDS))[0]:
            if clock.busy_seconds > latest:
                raise errors.TransientError(
                    f"it did not come in {LONGEST_BUSY_SECONDS:g} s of the engine's work"
                )
        return generating.result()
