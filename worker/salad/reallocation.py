"""Reallocation: leaving a node that cannot do its work for another one.

SaladCloud moves a container that ends with a code other than 0 to another node, but without a
reason; a request to its metadata service carries one. Either way the node is kept from the group
for 48 hours. So a worker requests once, then waits to be stopped: if it exited as well, that could
count against this node, or the next one, a second time.
"""

from __future__ import annotations

import asyncio
import logging

from imagefleet import errors
from worker.metrics import WorkerMetrics
from worker.salad import metadata as salad_metadata

log = logging.getLogger(__name__)

#: SaladCloud may take minutes to stop a container; one that is still running then exits.
WAIT_SECONDS = 600.0


class Reallocation:
    """Requests another node; *metadata* is None off SaladCloud, where none can be requested."""

    def __init__(
        self,
        metadata: salad_metadata.SaladMetadata | None,
        metrics: WorkerMetrics,
    ) -> None:
        self._metadata = metadata
        self._requests = metrics.reallocations
        self._granted = False

    @property
    def is_possible(self) -> bool:
        return self._metadata is not None

    async def request(self, reason: str) -> bool:
        """Requests another node unless that is granted already; returns whether it is granted.

        A request whose reply is lost counts as refused: the next one comes a quarter of an hour
        later, if this container is still running.
        """
        if self._metadata is None or self._granted:
            return self._granted
        try:
            await self._metadata.reallocate(reason)
        except errors.TransientError as error:
            self._requests.labels("refused").inc()
            log.error(  # noqa: TRY400 - its message says it all
                "requesting another node failed: %s",
                error,
                extra={"action": "reallocation_failed", "reason": reason},
            )
        else:
            self._granted = True
            self._requests.labels("granted").inc()
            log.warning(
                "requested another node, waiting to be stopped: %s",
                reason,
                extra={"action": "reallocation", "reason": reason},
            )
        return self._granted

    async def wait(self) -> None:
        """Waits for SaladCloud to stop this container, at most for WAIT_SECONDS."""
        await asyncio.sleep(WAIT_SECONDS)
