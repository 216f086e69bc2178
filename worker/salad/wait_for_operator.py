"""Waiting, on SaladCloud, for what no other node would have either.

There an exit code is an instruction: after any but 0 the node is blocked for the group and its
container moved, after 0 it may be restarted where it is. So workers that end because a SAS token
expired or the storage is down would use up one node after the other, or restart in a loop, all of
them billed. They wait instead and try again, with renewed credentials as soon as there are; the
probes' `/started` and `/live` are true meanwhile, `/ready` is not.

After `GIVE_UP_SECONDS` a worker ends with code 0: the node is not at fault. What is wrong before
there is a worker, an unknown setting say, still ends with code 2 at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from imagefleet import errors, retry
from worker import tasks

log = logging.getLogger(__name__)

#: The first pause ends before anybody has read the log; the longest is short compared to renewing
#: credentials, and a thousand workers' attempts in it do not harm the storage.
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0

#: An operator who reads the alert has an hour; a fleet that waits longer costs more than a restart.
GIVE_UP_SECONDS = 3600.0

Result = TypeVar("Result")


async def retry_until_fixed(
    attempt: Callable[[], Awaitable[Result]],
    *,
    stop: asyncio.Event,
    set_waiting: Callable[[bool], None],
    has_worked: Callable[[], bool],
) -> Result | None:
    """Repeats *attempt* until it succeeds; None if *stop* or `GIVE_UP_SECONDS` ended the waiting.

    If the last attempt got as far as working (*has_worked*), pauses and time start anew. A
    NodeError is raised at once.
    """
    pauses, waiting_since = 0, time.monotonic()
    while True:
        try:
            return await attempt()
        except (errors.SetupError, errors.TransientError) as error:
            if has_worked():
                pauses, waiting_since = 0, time.monotonic()
            waited_seconds = time.monotonic() - waiting_since
            longest = min(FIRST_PAUSE_SECONDS * 2**pauses, LONGEST_PAUSE_SECONDS)
            if waited_seconds + longest > GIVE_UP_SECONDS:
                log.error(  # noqa: TRY400 - its message says it all
                    "giving up after %.0f s: %s",
                    waited_seconds,
                    error,
                    extra={"action": "setup_given_up"},
                )
                return None
            seconds = retry.backoff(pauses, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            log.error(  # noqa: TRY400
                "no node could work like this, retrying in %.0f s: %s",
                seconds,
                error,
                extra={"action": "setup_awaited", "error": type(error).__name__},
            )
        set_waiting(True)
        await tasks.first_of(stop.wait(), timeout_seconds=seconds)
        set_waiting(False)
        if stop.is_set():
            return None
        pauses += 1
