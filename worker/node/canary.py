"""Who is at fault when images fail: the jobs, or this node.

A LoRA that gives NaN, or a size too large for a GPU class's memory, fails every image of a
campaign on any node, and each node that is given up for it is kept from the group for 48 hours.
So before failed images count against a node, a plain image is generated beside the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import NoReturn

from imagefleet import errors
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.node import check
from worker.node.watchdog import NodeWatchdog
from worker.stages import encode

log = logging.getLogger(__name__)

#: Failed images in a row that call for a canary: more than one broken job's, fewer than a
#: minute's work of a slow card.
FAILURES_IN_A_ROW = 10

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
        """The outcome of a ticket that is no job's; None: not begun, since the worker drains."""
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


class EngineFailures:
    """Counts failed images in a row; too many raise an alarm, which the canary settles."""

    def __init__(self, canary: Canary, watchdog: NodeWatchdog) -> None:
        self._canary = canary
        self._watchdog = watchdog
        self._in_a_row = 0
        self._alarms: asyncio.Queue[str] = asyncio.Queue()

    def add(self, error: errors.FleetError) -> None:
        """An image failed; a JobError is the job's own and does not count."""
        if not isinstance(error, errors.TransientError):
            return
        self._watchdog.image_failed(error)
        self._in_a_row += 1
        # Once: what fails while the canary runs is part of the same alarm.
        if self._in_a_row == FAILURES_IN_A_ROW:
            self._alarms.put_nowait(
                f"the engine failed {self._in_a_row} images in a row, the last with: {error}"
            )

    def reset(self) -> None:
        """An image succeeded."""
        self._in_a_row = 0

    async def run(self) -> NoReturn:
        """Side task: raises NodeError once an alarm turns out to be the node's fault."""
        while True:
            reason = await self._canary.diagnose(await self._alarms.get())
            if reason is not None:
                raise errors.NodeError(reason)
            self.reset()
