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
    """Prints what *read* returns as a table or JSON, or refreshes the table until Ctrl-C."""

    async def refresh() -> Group:
        return screen(await read())

    if is_live:
        await watch(refresh)
    elif as_json:
        console.print_json(record(await read()))
    else:
        console.stdout.print(await refresh())


async def watch(refresh: Callable[[], Awaitable[Group]]) -> None:
    """Shows an outage below the last table and tries again."""
    # Ctrl-C is how a watch ends; asyncio turns it into this cancellation.
    with (
        contextlib.suppress(asyncio.CancelledError),
        Live(console=console.stdout, auto_refresh=False) as live,
    ):
        last: Group | None = None
        while True:
            try:
                last = screen = await refresh()
            except errors.TransientError as error:
                outage = Text(f"trying again: {error.message}", style="red")
                screen = Group(*(last.renderables if last else ()), outage)
            if console.stdout.is_terminal:
                live.update(screen, refresh=True)
            else:
                console.stdout.print(screen)
            await asyncio.sleep(SECONDS)
