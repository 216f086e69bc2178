"""Which replica SaladCloud should rather keep when a group is made smaller: one with work in hand.

It concerns intended reductions alone; an owner who comes back ends any replica, unasked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable

from imagefleet import errors
from worker.salad import metadata as salad_metadata

log = logging.getLogger(__name__)

#: A group is made smaller every quarter of an hour at most; the service is asked no more often
#: than this, and only when the answer differs.
EVERY_SECONDS = 15.0

#: Work in hand that has not doubled or halved since is the same to whoever compares replicas.
_MATERIAL = 2


@contextlib.asynccontextmanager
async def telling(
    metadata: salad_metadata.SaladMetadata | None,
    jobs_in_flight: Callable[[], int],
) -> AsyncIterator[None]:
    """Keeps the deletion cost at the jobs in hand while the block runs; nobody waits for it."""
    if metadata is None:
        yield
        return
    task = asyncio.create_task(_tell(metadata, jobs_in_flight), name="deletion cost")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(metadata: salad_metadata.SaladMetadata, jobs_in_flight: Callable[[], int]) -> None:
    told = 0  # what a new container has
    has_failed = False
    while True:
        cost = jobs_in_flight()
        if _is_material(told, cost):
            try:
                await metadata.set_deletion_cost(cost)
            except errors.TransientError as error:
                if not has_failed:
                    log.warning(
                        "the deletion cost is not told, the work goes on: %s",
                        error,
                        extra={"action": "deletion_cost_failed"},
                    )
                has_failed = True
            else:
                told, has_failed = cost, False
        await asyncio.sleep(random.uniform(0.8, 1.2) * EVERY_SECONDS)  # noqa: S311 - jitter


def _is_material(told: int, cost: int) -> bool:
    if not told or not cost:
        return told != cost
    return cost >= _MATERIAL * told or told >= _MATERIAL * cost
