"""A result shown once, as a table or as JSON, or refreshed until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fleet import console
from imagefleet import errors

#: Often enough to follow a fleet; a few storage operations each time.
SECONDS = 2.0

Watch = Annotated[
    bool, typer.Option("--watch", help=f"Refresh every {SECONDS:g} seconds until Ctrl-C.")
]

Result = TypeVar("Result")


def check_flags(*, watch: bool, as_json: bool) -> None:
    """Raises SetupError where both are given."""
    if watch and as_json:
        raise errors.SetupError("--watch is for people and --json for programs: choose one")


async def show(
    read: Callable[[], Awaitable[Result]],
    screen: Callable[[Result], Group],
    record: Callable[[Result], Mapping[str, Any]],
    *,
    is_live: bool,
    as_json: bool,
) -> None:
    """Prints what *read* returns as a table or JSON, or refreshes the table until Ctrl-C.

    While it refreshes, an outage is shown below the last table.
    """
    if as_json:
        console.print_json(record(await read()))
        return
    if not is_live:
        console.stdout.print(screen(await read()))
        return
    # Ctrl-C is how a watch ends; asyncio turns it into this cancellation.
    with (
        contextlib.suppress(asyncio.CancelledError),
        Live(console=console.stdout, auto_refresh=False) as live,
    ):
        last = Group()
        while True:
            try:
                last = shown = screen(await read())
            except errors.TransientError as error:
                outage = Text(f"trying again: {error.message}", style="red")
                shown = Group(*last.renderables, outage)
            if console.stdout.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.stdout.print(shown)
            await asyncio.sleep(SECONDS)
