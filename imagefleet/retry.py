"""The retry policy: exponential back-off with full jitter, for transient errors."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from imagefleet import errors

#: What somebody has to end: new credentials, or space.
_CLOSED = (errors.NoAccessError, errors.StorageFullError)

_LOGGER = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def jitter(seconds: float, low: float = 0.5, high: float = 1.0) -> float:
    """*seconds* times a random factor, so that replicas do not act in lockstep."""
    return seconds * random.uniform(low, high)  # noqa: S311 - no secret


def backoff(retries: int, first_seconds: float, longest_seconds: float) -> float:
    """The pause before retry number *retries* (from 0): doubled each time, jittered."""
    return jitter(min(longest_seconds, first_seconds * 2 ** min(retries, 30)))


def log_retry(error: errors.TransientError) -> None:
    _LOGGER.info("retrying: %s", error.message, extra={"action": "storage_retry"})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is retried; `on_retry` is called before each retry.

    The default waits add up to 8 seconds on average and 16 at most, without the attempts
    themselves. No attempt starts after `give_up_seconds`. Jitter is full (from 0), so that a fleet
    does not return to a recovered storage in lockstep.

    With `waits_for_access`, new credentials for expired ones, and space on the full disk of a
    storage, are waited for without limit, and such attempts do not count.
    """

    tries: int = 6
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 8
    give_up_seconds: float = math.inf
    waits_for_access: bool = False
    on_retry: Callable[[errors.TransientError], None] = log_retry

    async def call(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Awaits *operation* until it succeeds, fails permanently, or the attempts are used up.

        Raises:
            FleetError: the error of the last attempt.
        """
        began_at = time.monotonic()
        failures = 0
        while True:
            try:
                return await operation()
            except errors.TransientError as error:
                pause_seconds = self.longest_wait_seconds
                if not (self.waits_for_access and isinstance(error, _CLOSED)):
                    pause_seconds = min(pause_seconds, self.first_wait_seconds * 2**failures)
                    failures += 1
                    if (
                        failures >= self.tries
                        or time.monotonic() - began_at >= self.give_up_seconds
                    ):
                        raise
                self.on_retry(error)
            await asyncio.sleep(jitter(pause_seconds, low=0))


#: Inside the storage. Longer outages are the caller's to retry, with the job still in flight; and
#: a renewal must have a result before its lease ends.
DEFAULT = RetryPolicy(give_up_seconds=30)

#: For operations that the caller retries: only missing access is waited for.
UNTIL_ACCESS = RetryPolicy(tries=1, waits_for_access=True)

#: No retries: every fault surfaces at once.
NEVER = RetryPolicy(tries=1)
