"""The depth of the queues, for the metrics and for whoever shows progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from imagefleet import errors, retry
from imagefleet.storage.protocol import JobQueue
from imagefleet.storage.routing.queue import RoutedQueue
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

#: Seconds between two measurements. Every worker measures, so the metrics are fresher the larger
#: the fleet; more often would only be billed.
DEPTH_SECONDS = 60.0


async def measure_depth(
    jobs: RoutedQueue,
    poison: JobQueue,
    metrics: WorkerMetrics,
    on_depth: Callable[[int], None],
) -> NoReturn:
    """Side task: measures both queues, and calls *on_depth* with the messages in *jobs*."""
    unmeasured: set[str] = set()
    while True:
        for queue in (jobs, poison):
            try:
                depth = await queue.depth()
            except errors.FleetError as error:
                # A worker's token may not allow it, and no job depends on it.
                if queue.name not in unmeasured:
                    unmeasured.add(queue.name)
                    log.info(
                        "the depth of %s is not measured: %s",
                        queue.name,
                        error,
                        extra={"action": "depth_unknown"},
                    )
            else:
                metrics.queues.update(queue.name, depth)
                if queue is jobs:
                    on_depth(depth.messages)
        await asyncio.sleep(retry.jitter(jobs.look_seconds(DEPTH_SECONDS), high=1.5))
