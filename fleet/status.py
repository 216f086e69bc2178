"""`imagefleet status`: what waits, what is in hand and what has failed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet import console, options
from jobs import errors, homes
from jobs.settings import StorageSettings
from jobs.storage import JobQueue, Storage

#: Two calls to the store each time: often enough to watch, too seldom to cost.
WATCH_SECONDS = 2.0

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue's depth; None where the home cannot tell what is visible and what is leased."""

    name: str
    messages: int
    visible: int | None
    leased: int | None
    oldest_age_seconds: float | None


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The job queue and its poison queue, at one moment."""

    storage: str
    queue: QueueStatus
    failed: QueueStatus


async def read_status(storage: Storage) -> FleetStatus:
    """Asks both queues for their depth."""
    queue, failed = await asyncio.gather(_read(storage.queue), _read(storage.poison))
    return FleetStatus(storage.url, queue, failed)


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows what waits, what is leased and what has failed.

    imagefleet status --watch

    imagefleet status --json
    """
    if watch and as_json:
        raise errors.SetupError("--watch is for people and --json for programs: choose one")
    console.run(_watch(settings) if watch else _show_once(settings, as_json=as_json))


async def _read(queue: JobQueue) -> QueueStatus:
    depth = await queue.depth()
    visible = None if depth.leased is None else depth.messages - depth.leased
    return QueueStatus(queue.name, depth.messages, visible, depth.leased, depth.oldest_age_seconds)


async def _show_once(settings: StorageSettings, *, as_json: bool) -> None:
    async with homes.open_storage(settings) as storage:
        await storage.check()
        status = await read_status(storage)
    if as_json:
        console.print_json(asdict(status))
    else:
        console.stdout.print(_screen(status))


async def _watch(settings: StorageSettings) -> None:
    # Ctrl-C is how a watch ends; asyncio turns it into this cancellation.
    with contextlib.suppress(asyncio.CancelledError):
        async with homes.open_storage(settings) as storage:
            await storage.check()
            with Live(console=console.stdout, auto_refresh=False) as live:
                seen: Group | None = None
                while True:
                    try:
                        seen = screen = _screen(await read_status(storage))
                    except errors.TransientError as error:
                        screen = Group(*(seen.renderables if seen else ()), _no_answer(error))
                    if console.stdout.is_terminal:
                        live.update(screen, refresh=True)
                    else:
                        console.stdout.print(screen)
                    await asyncio.sleep(WATCH_SECONDS)


def _no_answer(error: errors.TransientError) -> Text:
    """A watch outlives what passes: who watches wants to see when it has."""
    return Text(f"looking again: {error.message}", style="red")


def _screen(status: FleetStatus) -> Group:
    table = Table()
    table.add_column("queue")
    for heading in ("messages", "visible", "leased", "oldest"):
        table.add_column(heading, justify="right")
    for each in (status.queue, status.failed):
        table.add_row(
            each.name,
            _count(each.messages),
            _count(each.visible),
            _count(each.leased),
            _age(each.oldest_age_seconds),
        )
    return Group(Text(status.storage, style="bold"), table)


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
