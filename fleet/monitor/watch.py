"""A screen that is looked at again and again, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from rich.console import Group
from rich.live import Live
from rich.text import Text

from fleet import console
from imagefleet import errors

#: A few calls to the store each time: often enough to watch, too seldom to cost.
SECONDS = 2.0


async def watch(look: Callable[[], Awaitable[Group]]) -> None:
    """Shows what *look* returns; an outage is told under the last screen and outlived."""
    # Ctrl-C is how a watch ends; asyncio turns it into this cancellation.
    with (
        contextlib.suppress(asyncio.CancelledError),
        Live(console=console.stdout, auto_refresh=False) as live,
    ):
        seen: Group | None = None
        while True:
            try:
                seen = screen = await look()
            except errors.TransientError as error:
                screen = Group(*(seen.renderables if seen else ()), _no_answer(error))
            if console.stdout.is_terminal:
                live.update(screen, refresh=True)
            else:
                console.stdout.print(screen)
            await asyncio.sleep(SECONDS)


def _no_answer(error: errors.TransientError) -> Text:
    """A watch outlives what passes: who watches wants to see when it has."""
    return Text(f"looking again: {error.message}", style="red")
