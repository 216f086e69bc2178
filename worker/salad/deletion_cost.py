"""The replica that SaladCloud should keep when a group is made smaller: one with jobs in flight.

It matters only for intended reductions; an owner who returns stops any replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

from imagefleet import errors, retry
from worker import tasks
from worker.salad import metadata as salad_metadata

log = logging.getLogger(__name__)

#: Seconds between two updates, sent only when the cost has changed: a group is made smaller every
#: quarter of an hour at most.
EVERY_SECONDS = 15.0

#: A smaller change does not matter when replicas are compared.
_MATERIAL_FACTOR = 2


@contextlib.asynccontextmanager
async def updating(
    metadata: salad_metadata.SaladMetadata | None,
    jobs_in_flight: Callable[[], int],
) -> AsyncIterator[None]:
    """Keeps the deletion cost at the number of jobs in flight while the block runs."""
    if metadata is None:
        yield
        return
    async with tasks.background(_update(metadata, jobs_in_flight), "deletion cost"):
        yield


async def _update(
    metadata: salad_metadata.SaladMetadata, jobs_in_flight: Callable[[], int]
) -> NoReturn:
    current = 0  # a new container's
    has_failed = False
    while True:
        cost = jobs_in_flight()
        if _is_material(current, cost):
            try:
                await metadata.set_deletion_cost(cost)
            except errors.TransientError as error:
                if not has_failed:
                    log.warning(
                        "the deletion cost is not updated, the work goes on: %s",
                        error,
                        extra={"action": "deletion_cost_failed"},
                    )
                has_failed = True
            else:
                current, has_failed = cost, False
        await asyncio.sleep(retry.jitter(EVERY_SECONDS, 0.8, 1.2))


def _is_material(current: int, cost: int) -> bool:
    if not current or not cost:
        return current != cost
    return cost >= _MATERIAL_FACTOR * current or current >= _MATERIAL_FACTOR * cost
