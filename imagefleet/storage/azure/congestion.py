"""How many sends a queue takes at once: more while it answers, fewer when it asks to slow down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from imagefleet import errors

#: Sends in flight at first, and at most: from far away, 128 at 50 ms are a queue's limit.
FIRST_SENDS = 32
MOST_SENDS = 128


class SendWindow:
    """The sends in flight to one queue.

    Additive increase, multiplicative decrease, as of TCP (RFC 5681): one more after as many
    successes as there are sends in flight, and half of them after a failure. What was in flight at
    that moment may fail for the same reason and does not count again.
    """

    def __init__(self, first: int = FIRST_SENDS, most: int = MOST_SENDS) -> None:
        self.size = float(first)
        self._most = most
        self._room = asyncio.Semaphore(first)
        self._permits = first  # of the semaphore, those that are taken included
        self._decreases = 0

    async def run(self, send: Callable[[], Awaitable[None]]) -> None:
        """Awaits *send* once there is room for it."""
        await self._room.acquire()
        decreases = self._decreases
        try:
            await send()
        except errors.TransientError:
            if decreases == self._decreases:
                self._decreases += 1
                self.size = max(1.0, self.size / 2)
            raise
        else:
            self.size = min(self._most, self.size + 1 / self.size)
        finally:
            self._permits -= 1
            while self._permits < int(self.size):
                self._permits += 1
                self._room.release()
            while self._permits > int(self.size) and not self._room.locked():
                self._permits -= 1
                await self._room.acquire()  # at once
