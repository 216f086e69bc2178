"""Leaving a node that cannot do its work, in favour of another one.

A container that ends with a code other than 0 is moved to another node by itself, but says
nothing of why; asked through its metadata service, SaladCloud is told. Either way the node is
kept from the group for 48 hours. So a worker asks first, once, and then stays until it is ended:
an exit beside the answer could count against the node, or the next one, a second time.
"""

from __future__ import annotations

import asyncio
import logging

from imagefleet import errors
from worker.metrics import WorkerMetrics
from worker.salad import metadata as salad_metadata

log = logging.getLogger(__name__)

#: SaladCloud's platform may take minutes to stop a container; what is still here then ends itself.
STAY_SECONDS = 600.0


class Reallocation:
    """The way off one node; *metadata* is None where there is nobody to ask."""

    def __init__(
        self,
        metadata: salad_metadata.SaladMetadata | None,
        metrics: WorkerMetrics,
    ) -> None:
        self.granted = False
        self._metadata = metadata
        self._asked = metrics.reallocations

    @property
    def is_possible(self) -> bool:
        """Whether there is anybody to ask."""
        return self._metadata is not None

    async def ask(self, reason: str) -> bool:
        """Asks for another node, and no more once that is granted; tells whether it is.

        A call whose answer is lost counts as refused: the next one comes a quarter of an hour
        later, if this container is still there.
        """
        if self._metadata is None or self.granted:
            return self.granted
        try:
            await self._metadata.reallocate(reason)
        except errors.TransientError as error:
            self._asked.labels("refused").inc()
            log.error(  # noqa: TRY400 - its message says it all
                "another node was asked for in vain: %s",
                error,
                extra={"action": "reallocation_failed", "reason": reason},
            )
        else:
            self.granted = True
            self._asked.labels("granted").inc()
            log.warning(
                "asked for another node, and wait to be stopped: %s",
                reason,
                extra={"action": "reallocation", "reason": reason},
            )
        return self.granted

    async def stay(self) -> None:
        """Waits to be ended, without end but for the time that this takes at most."""
        await asyncio.sleep(STAY_SECONDS)
