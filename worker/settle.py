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
from worker.in_flight import InFlightJob
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
        storage: protocol.Storage,
        keeper: LeaseKeeper,
        metrics: WorkerMetrics,
        *,
        max_attempts: int,
        worker_name: str,
        retry_policy: retry.RetryPolicy,
        on_settled: Callable[[InFlightJob, Outcome], None],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.in_flight: set[InFlightJob] = set()
        self.nothing_in_flight = asyncio.Event()
        self.nothing_in_flight.set()
        self._storage = storage
        self._keeper = keeper
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._worker_name = worker_name
        self._retry_policy = retry_policy
        self._on_settled = on_settled

    def take(self, in_flight: InFlightJob) -> None:
        """From here on the job is in hand until it is settled."""
        self.in_flight.add(in_flight)
        self.nothing_in_flight.clear()

    async def completed(self, in_flight: InFlightJob) -> None:
        """Every image is stored: acknowledges."""
        if in_flight.settle():
            outcome: Outcome = "completed" if in_flight.images_written else "duplicate"
            await self._end(in_flight, outcome, lambda: self._keeper.acknowledge(in_flight.lease))

    async def failed(self, in_flight: InFlightJob, error: Exception) -> None:
        """One of its images, or the job itself, failed.

        Raises:
            NodeError, SetupError: *error* is not about the job.
        """
        if isinstance(error, (errors.NodeError, errors.SetupError)):
            raise error
        if not in_flight.settle():
            return
        if isinstance(error, errors.LeaseLost):
            self._ended(in_flight, "lost")
            return
        if not isinstance(error, errors.FleetError):
            # A defect of ours. Retried like a fault: were it to end the worker, one such job
            # could end a whole fleet.
            log.error(
                "job %s met a defect",
                in_flight.id,
                exc_info=error,
                extra={"action": "job_defect", "job_id": in_flight.id},
            )
            error = errors.TransientError(f"{type(error).__name__}: {error}")
        attempts = in_flight.lease.message.delivery_count
        if isinstance(error, errors.JobError) or attempts >= self._max_attempts:
            await self._dead_letter(in_flight, error)
        else:
            await self._retry(in_flight, error, attempts)

    async def hand_back(self, in_flight: InFlightJob) -> None:
        """Not begun, or not finished in time: another worker may have it at once."""
        if in_flight.settle():
            await self._end(in_flight, "handed_back", lambda: self._keeper.release(in_flight.lease))

    async def _dead_letter(self, in_flight: InFlightJob, error: errors.FleetError) -> None:
        log.warning(
            "job %s failed for good: %s",
            in_flight.id,
            error,
            extra={"action": "job_failed", "job_id": in_flight.id, "error": type(error).__name__},
        )

        async def add() -> None:
            async with in_flight.lease.lock:
                in_flight.lease.check()
                message = in_flight.lease.message
                await dead_letter.add(
                    self._storage, message, in_flight.job, error, self._worker_name
                )
                self._keeper.drop(in_flight.lease)

        if await self._end(in_flight, "failed", add) == "failed":
            self._metrics.failed_jobs.labels(type(error).__name__).inc()

    async def _retry(self, in_flight: InFlightJob, error: errors.FleetError, attempts: int) -> None:
        longest = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (attempts - 1))
        delay_seconds = random.uniform(longest / 2, longest)  # noqa: S311 - jitter
        log.warning(
            "job %s failed, attempt %d of %d, again in %.0f s: %s",
            in_flight.id,
            attempts,
            self._max_attempts,
            delay_seconds,
            error,
            extra={"action": "job_retried", "job_id": in_flight.id, "error": type(error).__name__},
        )
        await self._end(
            in_flight, "retried", lambda: self._keeper.release(in_flight.lease, delay_seconds)
        )

    async def _end(
        self, in_flight: InFlightJob, outcome: Outcome, call: Callable[[], Awaitable[None]]
    ) -> Outcome:
        """Tells what it ended as: *outcome*, or lost where the storage did not take it."""
        try:
            await self._retry_policy.call(call)
        except errors.LeaseLost:
            outcome = "lost"
        except errors.TransientError as error:
            # The lease runs out and the job comes again; what is stored stays stored.
            log.warning(
                "the storage does not answer; job %s will come again: %s",
                in_flight.id,
                error,
                extra={"action": "job_abandoned", "job_id": in_flight.id},
            )
            outcome = "lost"
        self._ended(in_flight, outcome)
        return outcome

    def _ended(self, in_flight: InFlightJob, outcome: Outcome) -> None:
        self._keeper.drop(in_flight.lease)
        self.in_flight.discard(in_flight)
        if not self.in_flight:
            self.nothing_in_flight.set()
        self.outcomes[outcome] += 1
        self._metrics.jobs.labels(outcome).inc()
        self._on_settled(in_flight, outcome)
