"""The one way in which tests wait for what other tasks, threads and processes do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

#: Between two looks: short beside what is waited for, and long enough not to keep a processor busy.
_PAUSE_SECONDS = 0.005


async def until(look: Callable[[], Any], enough: Callable[[Any], Any] = bool) -> Any:
    """Returns the first result of *look* (or of awaiting it) of which *enough* is true.

    Without a limit of its own: a test has one, and a busy machine may take any share of it.
    """
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if enough(found):
            return found
        await asyncio.sleep(_PAUSE_SECONDS)
