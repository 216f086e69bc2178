"""Fills a queue from a source of jobs: what `imagefleet load` and `sweep` share."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich import markup

from cli import console, options
from cli.options import option
from imagefleet import concurrency
from imagefleet.errors import SetupError, TransientError
from imagefleet.job import differences
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import OnProgress
from imagefleet.telemetry.logs import duration
from imagefleet.validation import JSONObject
from loadgen.campaigns import changes_of, shown
from loadgen.load import Load, Summary
from loadgen.settings import LoadSettings
from loadgen.sources import JobSource, Source

#: Seconds between two lines of progress where there is no terminal.
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Sending:
    """Options of `load` and `sweep` for sending jobs."""

    priority: options.JobPriority = "normal"
    model: list[str] | None = option(
        "A model that workers have from elsewhere than the storage; repeatable.",
        metavar="NAME",
    )
    restart: bool = option(
        "Begin anew: send all jobs, also those sent before.", default=False
    )
    quiet: bool = option("No progress.", default=False)


Reading = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def reading(path: Path, doing: str, *, is_shown: bool) -> Iterator[None]:
    """Shows on a terminal that a file is read; Ctrl-C ends it with a note."""
    try:
        with console.counting(
            markup.escape(f"{doing} {path.name}"), None, quiet=not is_shown
        ):
            yield
    except KeyboardInterrupt:
        console.print_note(f"stopped while {doing} {path}; nothing was sent")
        raise


def fill(
    settings: LoadSettings,
    source: JobSource,
    file: str,
    sending: Sending,
    reading: Reading | None = None,
    *,
    as_json: bool,
    facts: Callable[[], JSONObject] = dict,
    **terms: Any,
) -> None:
    """Sends the jobs and prints what was sent, with *facts* as JSON; typer.Exit if it was stopped.

    *reading* shows how the file is checked first, if it is; *terms* are those of `Load`.
    """
    storage = open_storage(settings, concurrency.PATIENT)
    load = Load(
        storage,
        source,
        settings,
        on_notice=console.print_note,
        restart=sending.restart,
        priority=sending.priority,
        models=sending.model or (),
        **terms,
    )
    if not source.count:
        console.print_note(f"{file} is empty: nothing was sent")
    if reading is not None:
        with reading("checking"):
            load.check()  # before the event loop begins: Ctrl-C can interrupt a long file
    with showing(
        source.count,
        is_live=console.stderr.is_terminal and not as_json,
        quiet=sending.quiet,
    ) as show:
        summary = console.run(_send(storage, load, show))
    told = facts()
    if as_json:
        console.print_json({**asdict(summary), **told})
    elif not sending.quiet:
        _print_summary(summary, told)
        found = summary.changed or summary.as_before or told.get("invalid")
        if source.count and not summary.sent and summary.finished:
            where = "" if found else f"no jobs in {file}: "
            again = "; --restart sends them again" if summary.as_before else ""
            console.print_note(f"{where}nothing was sent{again}")
    if not summary.finished:
        raise typer.Exit(console.EXIT_INTERRUPTED)


def preview(settings: LoadSettings, source: Source) -> str:
    """Checks the jobs, and tells which of them were sent before; creates and sends nothing."""
    source.check()

    async def compare() -> str:
        try:
            async with open_storage(settings) as storage:
                return shown(await changes_of(storage, source))
        except (SetupError, TransientError) as error:
            return f"what of it was sent before is not known: {error.message}"

    return console.run(compare())


async def _send(storage: Storage, load: Load, show: OnProgress) -> Summary:
    """The first Ctrl-C waits for the sends in flight; the second stops at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        console.print_note(
            "stopping after the sends in flight; Ctrl-C again to stop at once"
        )
        load.stop()

    async with storage:
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            return await load.run(show)
        finally:
            loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def showing(total: int, *, is_live: bool, quiet: bool) -> Iterator[OnProgress]:
    """A bar if *is_live*, else occasional lines on stderr with the rate since the last one."""
    said = 0
    said_at = time.monotonic()
    with console.counting("sending", total, quiet=quiet or not is_live) as move:

        def show(confirmed: int) -> None:
            nonlocal said, said_at
            move(0, done=confirmed)
            seconds = time.monotonic() - said_at
            if quiet or is_live or seconds < SECONDS_BETWEEN_LINES:
                return
            speed = (confirmed - said) / seconds
            said = confirmed
            said_at = time.monotonic()
            rate = f"{console.number(speed)} jobs/s"
            if speed:
                rate += f", {duration((total - confirmed) / speed)} left"
            console.print_note(f"{confirmed:,} of {total:,} jobs sent, {rate}")

        yield show


def _print_summary(summary: Summary, told: JSONObject) -> None:
    if summary.sent:
        second = summary.second_drawings
        also = f" and {console.counted(second, 'second drawing')}" if second else ""
        named = [f"{name} ({count:,})" for name, count in summary.queues.items()]
        if len(named) == 1:
            named = list(summary.queues)
        console.print_note(
            f"{console.counted(summary.sent, 'job')}{also} sent to {', '.join(named)} in"
            f" {summary.storage}, {summary.jobs_per_second:,.0f} jobs/s"
        )
    if mended := told.get("mended"):
        console.print_note(
            f"{mended:,} of them had failed and may stay on the list of failed jobs: `imagefleet"
            " discard` takes them off"
        )
    show_comments(told.get("comments", 0))
    if repeated := told.get("repeated"):
        console.print_note(
            f"left out {console.counted(repeated, 'job')} whose prompt an earlier one has"
        )
    if skipped := told.get("invalid"):
        console.print_note(f"{console.counted(skipped, 'invalid job')} skipped")
    show_differences(told.get("differs", {}))
    if not summary.finished:
        console.print_note(
            f"stopped after {console.counted(summary.confirmed, 'job')}; the same command goes on"
            " there"
        )


def show_comments(count: int) -> None:
    if count:
        console.print_note(
            f"left out {console.counted(count, 'line')} that begin with #"
        )


def show_differences(counts: Mapping[str, int]) -> None:
    """Says how many jobs may differ from AUTOMATIC1111's, and by what."""
    for name, count in counts.items():
        console.print_note(
            f"{console.counted(count, 'job')} may differ from AUTOMATIC1111's:"
            f" {differences.KNOWN[name]}"
        )
