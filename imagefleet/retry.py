"""The one policy of retries: exponential back-off with full jitter, for errors that may pass."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from imagefleet import errors

_LOGGER = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def jitter(seconds: float, low: float = 0.5, high: float = 1.0) -> float:
    """*seconds* times a random factor, so that replicas that start together do not stay in step."""
    return seconds * random.uniform(low, high)  # noqa: S311 - no secret


def backoff(retries: int, first_seconds: float, longest_seconds: float) -> float:
    """The pause before the next try after *retries* earlier ones: doubled each time, jittered."""
    return jitter(min(longest_seconds, first_seconds * 2 ** min(retries, 30)))


def log_retry(error: errors.TransientError) -> None:
    _LOGGER.info("trying again: %s", error.message, extra={"action": "storage_retry"})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a call is repeated; `on_retry` is told of every repetition.

    The default waits come to 8 seconds on average, 16 at most, beside the time that the tries
    themselves take. No try begins after `give_up_seconds`. Jitter is full (0 to the whole wait),
    so that a fleet whose storage comes back does not come back in step.

    `waits_for_access`: credentials that have run out are waited for without end, and that counts
    as no try.
    """

    tries: int = 6
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 8
    give_up_seconds: float = math.inf
    waits_for_access: bool = False
    on_retry: Callable[[errors.TransientError], None] = log_retry

    async def call(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Awaits *operation* until it succeeds, fails for good, or the tries are used up.

        Raises:
            FleetError: that of the last try.
        """
        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.tries)
            | tenacity.stop_after_delay(self.give_up_seconds),
            wait=tenacity.wait_random_exponential(
                multiplier=self.first_wait_seconds, max=self.longest_wait_seconds
            ),
            retry=tenacity.retry_if_exception_type(errors.TransientError),
            before_sleep=self._tell,
            reraise=True,
        )

        async def attempt() -> _Result:
            while True:
                try:
                    return await operation()
                except errors.NoAccessError as error:
                    if not self.waits_for_access:
                        raise
                    self.on_retry(error)
                await asyncio.sleep(jitter(self.longest_wait_seconds, low=0))

        return await tries(attempt)

    def _tell(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, errors.TransientError):
            self.on_retry(error)


#: Inside the storage. What lasts longer is the caller's to repeat, who still holds the job; and a
#: renewal must know where it stands before its lease is over.
DEFAULT = RetryPolicy(give_up_seconds=30)

#: For what is the caller's to repeat, except that nothing can be done without access.
UNTIL_ACCESS = RetryPolicy(tries=1, waits_for_access=True)

#: Switches retries off: every fault surfaces at once.
NEVER = RetryPolicy(tries=1)
