"""Async helpers: gather, back-off, and the retry policy.

A transient error is tried again after exponential back-off with full jitter.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import random
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

import tenacity

from imagefleet.errors import BusyError, NoAccessError, StorageFullError, TransientError
from imagefleet.telemetry.logs import log

#: A container's limit of processor time: microseconds, of so many.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")
Item = TypeVar("Item")

#: What runs as a task of its own, and its result.
Work = Coroutine[Any, Any, Result]

#: What is tried, again if it fails.
Operation = Callable[[], Awaitable[Result]]


def cores() -> int:
    """The CPU cores of this process, by its affinity and its container's limit."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(found, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file here, or "max": no limit
        return found


@overload
async def gather(
    first: Work[First], second: Work[Second], /
) -> tuple[First, Second]: ...
@overload
async def gather(*works: Work[Result]) -> tuple[Result, ...]: ...
async def gather(*works: Work[Any]) -> tuple[Any, ...]:
    """The results of *works*; the first error cancels the others, and is raised once they ended."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    parts = [asyncio.ensure_future(work) for work in works]
    try:
        return tuple(await asyncio.gather(*parts))
    except BaseException as error:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        if task is not None and task.cancelling() > cancels:
            # An error at the same moment, as in a TaskGroup, would hide that this task is to end.
            raise asyncio.CancelledError from None
        raise error from None


async def for_each(
    items: Iterable[Item], work: Callable[[Item], Awaitable[None]], at_once: int
) -> None:
    """Awaits *work* for each item, some at the same time; the first error ends them all."""
    left = iter(items)

    async def run(first: Item) -> None:
        await work(first)
        for item in left:
            await work(item)

    # No more tasks than items: most callers have few.
    await gather(*map(run, list(islice(left, at_once))))


@contextlib.asynccontextmanager
async def beside(*works: Work[object]) -> AsyncIterator[None]:
    """Runs *works* during the block, and then cancels them; raises the error of one that failed."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def jitter(seconds: float, low: float = 0.5, high: float = 1.0) -> float:
    """*seconds* times a random factor, so that replicas do not act in lockstep."""
    return seconds * random.uniform(low, high)  # noqa: S311 - no secret


def backoff(
    retries: int, first_seconds: float, longest_seconds: float, low: float = 0.5
) -> float:
    """The pause before retry number *retries* (from 0): doubled each time, jittered from *low*."""
    return jitter(min(longest_seconds, first_seconds * 2 ** min(retries, 30)), low)


def after_seconds(value: str | None, longest: float) -> float | None:
    """A Retry-After header in seconds, *longest* at most; None if it is a date or none."""
    text = (value or "").strip()
    return min(longest, float(text[:10])) if re.fullmatch("[0-9]+", text) else None


def http_date(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def log_retry(error: TransientError) -> None:
    log.info(f"retrying: {error.message}", action="storage_retry")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry policy: how often and how long a call is retried; calls `on_retry` before each retry.

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
    on_retry: Callable[[TransientError], None] = log_retry

    async def call(self, operation: Operation[Result]) -> Result:
        """Awaits *operation* until it succeeds; raises the error of the last attempt."""
        return await self.call_in_doubt(lambda _: operation())

    async def call_in_doubt(
        self, operation: Callable[[bool], Awaitable[Result]]
    ) -> Result:
        """Like `call`; *operation* gets whether an attempt without a reply may have done it."""
        began_at = time.monotonic()
        try:
            return await operation(False)  # outside tenacity: most calls succeed
        except TransientError as error:
            return await self._again(operation, error, began_at)

    async def _again(
        self,
        operation: Callable[[bool], Awaitable[Result]],
        error: TransientError,
        began_at: float,
    ) -> Result:
        failures = [error]
        attempts = _Attempts(self, began_at, error)

        async def attempt() -> Result:
            if failures:
                raise failures.pop()
            return await operation(attempts.is_in_doubt)

        retrying = tenacity.AsyncRetrying(
            retry=attempts.note,
            stop=lambda _: attempts.is_over,
            wait=lambda _: attempts.pause,
            before_sleep=lambda _: self.on_retry(attempts.error),
            sleep=asyncio.sleep,
            reraise=True,
        )
        return await retrying(attempt)


@dataclass(slots=True)
class _Attempts:
    """The failed attempts of one call: whether to try again, and after what pause."""

    policy: RetryPolicy
    began_at: float
    #: The last one.
    error: TransientError
    failed: int = 0
    #: Number of waits for a busy storage since the last failure that counts.
    waited: int = 0
    is_in_doubt: bool = False
    is_over: bool = False
    pause: float = 0.0

    def note(self, state: tenacity.RetryCallState) -> bool:
        """Decides what follows an attempt; False if it did not fail in a transient way."""
        outcome = state.outcome
        error = outcome.exception() if outcome else None
        if not isinstance(error, TransientError):
            return False
        self.error = error
        self.is_in_doubt |= error.outcome_is_unknown
        error.outcome_is_unknown = self.is_in_doubt
        policy = self.policy
        longest = policy.longest_wait_seconds
        if (
            isinstance(error, NoAccessError | StorageFullError)
            and policy.waits_for_access
        ):
            self.pause = jitter(longest, low=0)
            return True
        if isinstance(error, BusyError) and policy.waits_while_busy:
            self.pause = backoff(self.waited, policy.first_wait_seconds / 10, longest)
            self.waited += 1
            return True
        self.failed += 1
        self.waited = 0
        is_late = time.monotonic() - self.began_at >= policy.give_up_seconds
        self.is_over = self.failed >= policy.tries or is_late
        self.pause = backoff(self.failed - 1, policy.first_wait_seconds, longest, low=0)
        if error.after_seconds is not None:
            self.pause = error.after_seconds
        return True


#: The policy inside the storage; longer outages are the caller's to retry, with the job in flight.
DEFAULT = RetryPolicy(give_up_seconds=30)

#: The policy of whoever fills a queue: more slowly, for as long as the storage asks for it.
PATIENT = dataclasses.replace(DEFAULT, waits_while_busy=True)

#: The policy of operations that the caller retries: only missing access is waited for.
UNTIL_ACCESS = RetryPolicy(tries=1, waits_for_access=True)

NEVER = RetryPolicy(tries=1)
