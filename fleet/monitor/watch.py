"""A result shown once or until Ctrl-C, as a table or as JSON."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, NoReturn

import typer
from rich.console import Group
from rich.live import Live

from cli import console
from imagefleet.errors import TransientError
from imagefleet.validation import JSONObject

#: Often enough to follow a fleet; a few storage operations each time.
SECONDS = 2.0

Watch = Annotated[
    bool,
    typer.Option("--follow", help=f"Repeat every {SECONDS:g} seconds until Ctrl-C."),
]

Read = Callable[[], Awaitable[JSONObject]]
Screen = Callable[[JSONObject], Group]


async def show(read: Read, screen: Screen, *, is_live: bool, as_json: bool) -> None:
    """Prints what *read* returns as a table or JSON, or repeats that until Ctrl-C.

    While it repeats, an outage is shown below the last table, or on stderr with JSON, which is then
    one object per line.
    """
    if not is_live:
        found = await read()
        console.show(found, screen(found), as_json=as_json)
        return
    # Ctrl-C is how a watch ends; asyncio turns it into this cancellation.
    with contextlib.suppress(asyncio.CancelledError):
        await (_stream(read) if as_json else _refresh(read, screen))


async def _stream(read: Read) -> NoReturn:
    while True:
        try:
            console.print_json_line(await read())
        except TransientError as error:
            console.print_warning(f"trying again: {error.message}")
        await asyncio.sleep(SECONDS)


async def _refresh(read: Read, screen: Screen) -> NoReturn:
    with Live(console=console.stdout, auto_refresh=False) as live:
        last = Group()
        while True:
            try:
                last = shown = screen(await read())
            except TransientError as error:
                outage = console.untrusted(f"trying again: {error.message}", "red")
                shown = Group(*last.renderables, outage)
            if console.stdout.is_terminal:
                console.keep_whole(shown)
                live.update(shown, refresh=True)
            else:
                console.print_tables(shown)
            await asyncio.sleep(SECONDS)
