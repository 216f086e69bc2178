"""The retry policy: exponential back-off with full jitter, for transient errors."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from imagefleet import errors
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

_Result = TypeVar("_Result")


def jitter(seconds: float, low: float = 0.5, high: float = 1.0) -> float:
    """*seconds* times a random factor, so that replicas do not act in lockstep."""
    return seconds * random.uniform(low, high)  # noqa: S311 - no secret


def backoff(retries: int, first_seconds: float, longest_seconds: float, low: float = 0.5) -> float:
    """The pause before retry number *retries* (from 0): doubled each time, jittered from *low*."""
    return jitter(min(longest_seconds, first_seconds * 2 ** min(retries, 30)), low)


def after_seconds(value: str | None, longest: float, date: str | None = None) -> float | None:
    """A Retry-After header in seconds, *longest* at most; *date* is the server's time, if known."""
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        return min(longest, float(text[:10]))
    until = _moment(text)
    if until is None:
        return None
    seconds = (until - (_moment(date) or datetime.now(UTC))).total_seconds()
    return min(longest, max(0.0, seconds))


def _moment(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def log_retry(error: errors.TransientError) -> None:
    log.info(f"retrying: {error.message}", action="storage_retry")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is retried; `on_retry` is called before each retry.

    The default waits add up to 8 seconds on average. No attempt starts after `give_up_seconds`.
    Without limit and count, `waits_for_access` waits for new credentials and for space on a full
    disk, and `waits_while_busy` for a storage that asks to slow down.
    """

    tries: int = 6
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 8
    give_up_seconds: float = math.inf
    waits_for_access: bool = False
    waits_while_busy: bool = False
    on_retry: Callable[[errors.TransientError], None] = log_retry

    async def call(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        """Awaits *operation* until it succeeds; raises the error of the last attempt."""
        return await self.call_in_doubt(lambda _: operation())

    async def call_in_doubt(self, operation: Callable[[bool], Awaitable[_Result]]) -> _Result:
        """The same; *operation* gets whether an attempt whose reply was lost may have done it."""
        began_at = time.monotonic()
        failed = waited = 0
        is_in_doubt = False
        while True:
            try:
                return await operation(is_in_doubt)
            except errors.TransientError as error:
                is_in_doubt = is_in_doubt or error.outcome_is_unknown
                error.outcome_is_unknown = is_in_doubt
                closed = isinstance(error, errors.NoAccessError | errors.StorageFullError)
                if closed and self.waits_for_access:
                    pause = jitter(self.longest_wait_seconds, low=0)
                elif isinstance(error, errors.BusyError) and self.waits_while_busy:
                    pause = backoff(waited, self.first_wait_seconds / 10, self.longest_wait_seconds)
                    waited += 1
                else:
                    failed, waited = failed + 1, 0
                    is_late = time.monotonic() - began_at >= self.give_up_seconds
                    if failed >= self.tries or is_late:
                        raise
                    first, longest = self.first_wait_seconds, self.longest_wait_seconds
                    pause = backoff(failed - 1, first, longest, low=0)
                    if error.after_seconds is not None:
                        pause = error.after_seconds
                self.on_retry(error)
            await asyncio.sleep(pause)


#: The policy inside the storage; longer outages are the caller's to retry, with the job in flight.
DEFAULT = RetryPolicy(give_up_seconds=30)

#: The policy of whoever fills a queue: more slowly, for as long as the storage asks for it.
PATIENT = dataclasses.replace(DEFAULT, waits_while_busy=True)

#: The policy of operations that the caller retries: only missing access is waited for.
UNTIL_ACCESS = RetryPolicy(tries=1, waits_for_access=True)

NEVER = RetryPolicy(tries=1)
