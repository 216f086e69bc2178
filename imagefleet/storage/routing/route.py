"""One job queue as a worker polls it: when it is asked again, by what it answered before.

One that was empty is asked again after a pause that doubles, one that is missing after a minute.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from imagefleet.errors import FleetError, MissingResourceError, SetupError
from imagefleet.storage.protocol import JobQueue, QueueDepth
from imagefleet.telemetry.logs import log

#: One of so many receives that return jobs asks the queues of lower priorities first.
FAIR_EVERY = 8

#: A queue that was empty is asked again after this pause, which doubles up to the longest.
FIRST_PAUSE_SECONDS = 0.5

#: A queue that does not exist, whose token is missing, or that does not answer while the main one
#: does, is asked again after this time.
MISSING_PAUSE_SECONDS = 60.0

#: The longest pauses of a queue that is empty: short where other queues have jobs, since a job of
#: high priority may arrive, long where none has any. For three queues an idle worker makes some
#: 23,000 receives a day, half of them for these pauses: 0.1 cents.
LONGEST_PAUSE_SECONDS = 2.0
LONGEST_IDLE_PAUSE_SECONDS = 10.0

#: The longest pause where a receive costs nothing: a client may wait behind jobs of low priority.
LOCAL_PAUSE_SECONDS = 0.03


@dataclass(eq=False)
class Route:
    """A plain queue of one priority and model, and what the receives so far have found there."""

    queue: JobQueue
    #: Rank of the queue's priority; 0 is the highest.
    level: int = 0
    model: str | None = None
    clock: Callable[[], float] = time.monotonic
    #: Time of the clock from which on it is asked again.
    due_at: float = 0.0
    empty_receives: int = 0
    #: The number of the last receive that it had jobs for.
    last_receive: int = 0
    #: True if it did not exist, had no token or did not answer when it was asked last.
    is_missing: bool = False

    async def depth(self, *, must_exist: bool = False) -> QueueDepth | None:
        """The queue's size; None if it is missing, unless it *must_exist*."""
        try:
            depth = await self.queue.depth()
        except SetupError as error:
            if must_exist:
                raise
            # One that is not there, of another fleet's model say, matters to those who take jobs.
            if not isinstance(error, MissingResourceError):
                self.set_missing(error)
            return None
        self.is_missing = False
        if depth.oldest_age_seconds is not None:
            self.due_at = 0.0  # there is something to receive
        return replace(depth, model=self.model)

    def set_missing(self, error: FleetError) -> None:
        """Notes that it cannot be asked for a while, and reports it once."""
        self.due_at = self.clock() + MISSING_PAUSE_SECONDS
        if self.is_missing:
            return
        self.is_missing = True
        # The next `imagefleet load` makes a queue that does not exist: that is usual.
        is_usual = isinstance(error, MissingResourceError)
        log.log(
            logging.INFO if is_usual else logging.WARNING,
            f"no jobs are taken from the queue {self.queue.name}: {error.message}",
            action="queue_missing",
            queue=self.queue.name,
        )
