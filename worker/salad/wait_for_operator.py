"""Waiting, on SaladCloud, for what any other node would have to wait for as well.

There an exit code is an instruction: after any but 0 the node is blocked for the group and its
container moved, after 0 it may be started again where it is. So 750 workers that end because a
SAS token expired, or a queue has not been created, or the storage is down, would use up one node
after the other, or restart in a loop; all of them billed. They wait instead, ask again after ever
longer pauses, and say so in the log, in the metrics and to the probes (`/started` and `/live` are
true, `/ready` is not). A credential that is renewed, from a file or a broker, is met half way.

After `--setup-patience-seconds` a worker ends with code 0: it is not the node's fault. What is
wrong before there is a worker, a setting of an unknown name say, still ends with code 2 at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from imagefleet import errors

log = logging.getLogger(__name__)

#: The first pause is over before anybody has read the log; the longest is short beside the time
#: that it takes to mend a credential, and a thousand workers' questions in it harm no storage.
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0

Result = TypeVar("Result")


async def patiently(
    attempt: Callable[[], Awaitable[Result]],
    *,
    longest_seconds: float,
    stop: asyncio.Event,
    tell_waiting: Callable[[bool], None],
    has_worked: Callable[[], bool],
) -> Result | None:
    """Makes attempts until one ends well; None where the patience or a signal ended the waiting.

    *has_worked* says whether the last attempt got as far as working: then the patience, and the
    pauses, begin anew.

    Raises:
        NodeError: that of an attempt; it is never waited out.
    """
    pause_seconds, waits_since = FIRST_PAUSE_SECONDS, time.monotonic()
    while True:
        try:
            return await attempt()
        except (errors.SetupError, errors.TransientError) as error:
            if has_worked():
                pause_seconds, waits_since = FIRST_PAUSE_SECONDS, time.monotonic()
            waited_seconds = time.monotonic() - waits_since
            if waited_seconds + pause_seconds > longest_seconds:
                log.error(  # noqa: TRY400 - its message says it all
                    "waited for %.0f s in vain, and end: %s",
                    waited_seconds,
                    error,
                    extra={"action": "setup_given_up"},
                )
                return None
            seconds = random.uniform(pause_seconds / 2, pause_seconds)  # noqa: S311 - jitter
            log.error(  # noqa: TRY400
                "no node could work like this, again in %.0f s: %s",
                seconds,
                error,
                extra={"action": "setup_awaited", "error": type(error).__name__},
            )
        tell_waiting(True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)
        tell_waiting(False)
        if stop.is_set():
            return None
        pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does *work*, or as much of it as there is before *stop*; tells whether it is done."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
