"""How a job ends here: the class of an error decides, and nothing ends twice."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from imagefleet import errors, retry
from imagefleet.storage import dead_letter, protocol
from worker.in_flight import JobInHand
from worker.leases import LeaseKeeper
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

Outcome = Literal["completed", "duplicate", "retried", "failed", "lost", "handed_back"]

#: A job that failed waits this long before its next attempt, doubling with each.
FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 120.0


class Settler:
    """Ends jobs, each once, and keeps the list of those that are not ended yet."""

    def __init__(
        self,
        home: protocol.Storage,
        keeper: LeaseKeeper,
        metrics: WorkerMetrics,
        *,
        max_attempts: int,
        worker_name: str,
        patience: retry.RetryPolicy,
        on_settled: Callable[[JobInHand, Outcome], None],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.in_hand: set[JobInHand] = set()
        self.nothing_in_hand = asyncio.Event()
        self.nothing_in_hand.set()
        self._home = home
        self._keeper = keeper
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._worker_name = worker_name
        self._patience = patience
        self._on_settled = on_settled

    def take(self, held: JobInHand) -> None:
        """From here on the job is in hand until it is settled."""
        self.in_hand.add(held)
        self.nothing_in_hand.clear()

    async def completed(self, held: JobInHand) -> None:
        """Every image is stored: acknowledges."""
        if held.settle():
            outcome: Outcome = "completed" if held.images_written else "duplicate"
            await self._end(held, outcome, lambda: self._keeper.acknowledge(held.lease))

    async def failed(self, held: JobInHand, error: Exception) -> None:
        """One of its images, or the job itself, failed.

        Raises:
            NodeError, SetupError: *error* is not about the job.
        """
        if isinstance(error, (errors.NodeError, errors.SetupError)):
            raise error
        if not held.settle():
            return
        if isinstance(error, errors.LeaseLost):
            self._ended(held, "lost")
            return
        if not isinstance(error, errors.FleetError):
            # A defect of ours. Retried like a fault: were it to end the worker, one such job
            # could end a whole fleet.
            log.error(
                "job %s met a defect",
                held.id,
                exc_info=error,
                extra={"action": "job_defect", "job_id": held.id},
            )
            error = errors.TransientError(f"{type(error).__name__}: {error}")
        attempts = held.lease.message.delivery_count
        if isinstance(error, errors.JobError) or attempts >= self._max_attempts:
            await self._bury(held, error)
        else:
            await self._retry(held, error, attempts)

    async def hand_back(self, held: JobInHand) -> None:
        """Not begun, or not finished in time: another worker may have it at once."""
        if held.settle():
            await self._end(held, "handed_back", lambda: self._keeper.release(held.lease))

    async def _bury(self, held: JobInHand, error: errors.FleetError) -> None:
        log.warning(
            "job %s failed for good: %s",
            held.id,
            error,
            extra={"action": "job_failed", "job_id": held.id, "error": type(error).__name__},
        )

        async def bury() -> None:
            async with held.lease.lock:
                held.lease.check()
                message = held.lease.message
                await dead_letter.bury(self._home, message, held.job, error, self._worker_name)
                self._keeper.drop(held.lease)

        if await self._end(held, "failed", bury) == "failed":
            self._metrics.failed_jobs.labels(type(error).__name__).inc()

    async def _retry(self, held: JobInHand, error: errors.FleetError, attempts: int) -> None:
        longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (attempts - 1))
        delay_seconds = random.uniform(longest / 2, longest)  # noqa: S311 - jitter
        log.warning(
            "job %s failed, attempt %d of %d, again in %.0f s: %s",
            held.id,
            attempts,
            self._max_attempts,
            delay_seconds,
            error,
            extra={"action": "job_retried", "job_id": held.id, "error": type(error).__name__},
        )
        await self._end(held, "retried", lambda: self._keeper.release(held.lease, delay_seconds))

    async def _end(
        self, held: JobInHand, outcome: Outcome, call: Callable[[], Awaitable[None]]
    ) -> Outcome:
        """Tells what it ended as: *outcome*, or lost where the storage did not take it."""
        try:
            await self._patience.call(call)
        except errors.LeaseLost:
            outcome = "lost"
        except errors.TransientError as error:
            # The lease runs out and the job comes again; what is stored stays stored.
            log.warning(
                "the storage does not answer; job %s will come again: %s",
                held.id,
                error,
                extra={"action": "job_abandoned", "job_id": held.id},
            )
            outcome = "lost"
        self._ended(held, outcome)
        return outcome

    def _ended(self, held: JobInHand, outcome: Outcome) -> None:
        self._keeper.drop(held.lease)
        self.in_hand.discard(held)
        if not self.in_hand:
            self.nothing_in_hand.set()
        self.outcomes[outcome] += 1
        self._metrics.jobs.labels(outcome).inc()
        self._on_settled(held, outcome)
