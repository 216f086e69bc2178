"""How tests wait for what other tasks, threads and processes do: nowhere for a fixed time."""

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any

#: Between two looks: short beside what is waited for, and long enough not to keep a processor busy.
_PAUSE_SECONDS = 0.005

#: After as many looks they become rare: who waits for what never comes is found idle (hang.py).
_MANY_LOOKS = 2000
_LONG_PAUSE_SECONDS = 0.2


async def until(look: Callable[[], Any], enough: Callable[[Any], Any] = bool) -> Any:
    """Returns the first result of *look* (or of awaiting it) of which *enough* is true.

    Without a limit of its own: what never comes is noticed by `hang.HangWatchdog`, and a busy
    machine may take any time.
    """
    for looks in itertools.count():
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if enough(found):
            return found
        await asyncio.sleep(_pause_seconds(looks))
    raise AssertionError


def until_in_thread(
    look: Callable[[], Any], enough: Callable[[Any], Any] = bool
) -> Any:
    """The same for a test or a thread without an event loop."""
    for looks in itertools.count():
        if enough(found := look()):
            return found
        time.sleep(_pause_seconds(looks))
    raise AssertionError


def _pause_seconds(looks: int) -> float:
    return _PAUSE_SECONDS if looks < _MANY_LOOKS else _LONG_PAUSE_SECONDS


async def turn(turns: int = 1) -> None:
    """Lets every other task of the loop that can go on do so, *turns* times."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until_leases_end(idle: Any, seconds: float) -> None:
    """Returns once what was leased before, for *seconds* at most, is another worker's to take.

    Seen by a message of *idle*, an empty queue of the same storage: whoever asked the queue itself
    would take its messages.
    """
    await idle.send(["a witness"])
    await idle.receive(1, seconds)
    (witness,) = await until(lambda: idle.receive(1, 60))
    await idle.delete(witness)
