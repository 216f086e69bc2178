"""`imagefleet load`: a template or a file of jobs fills the job queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from fleet import console, options
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from loadgen.settings import LoadSettings

if TYPE_CHECKING:
    from loadgen.load import Load, Summary
    from loadgen.sources import Source

DRY_RUN_JOBS = 10

#: Where no bar can be drawn, in a log, one line each so many seconds.
SECONDS_BETWEEN_LINES = 5.0

#: Lines left out that are named one by one.
_SHOWN_COMPLAINTS = 10

#: Checking more jobs than this takes seconds, in which nothing else is to be seen.
_MANY_JOBS = 100_000


@options.from_settings(LoadSettings)
def command(
    settings: LoadSettings,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A template (.yaml, .toml), a file with one job a line (.jsonl), or - for jobs"
            " from standard input.",
        ),
    ],
    count: Annotated[
        int | None, typer.Option(min=1, help="So many jobs, whatever the file says.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="The template's seed: another one, other jobs."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the first ten jobs and send nothing.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget the checkpoint: begin with the first job.")
    ] = False,
    checkpoint_file: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Where the checkpoint is kept; beside FILE without it."),
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave out lines that are no valid jobs.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Fills the job queue from a template or a file of jobs.

    The same file and seed give the same jobs. Interrupted or killed, the same command goes on
    where it was: FILE's checkpoint counts the jobs that are stored for certain.

    imagefleet load templates/demo.yaml --dry-run

    imagefleet load templates/demo.yaml --count 1000000 --rate 500

    zcat jobs.jsonl.gz | imagefleet load -
    """
    from loadgen import checkpoint, sources
    from loadgen.load import Load

    skipped = _Skipped()
    on_invalid = skipped if skip_invalid else None
    source = sources.open_source(file, count=count, seed=seed, on_invalid=on_invalid)
    if dry_run:
        _print_jobs(source)
        return
    if file == "-" and (checkpoint_file or restart):
        raise errors.SetupError("standard input cannot be read twice, so it has no checkpoint")
    place = None
    if file != "-":
        place = checkpoint_file or checkpoint.default_path(Path(file), settings.queue)
    storage = open_storage(settings)
    load = Load(
        storage,
        source,
        place=place,
        restart=restart,
        concurrency=settings.concurrency,
        rate=settings.rate,
    )
    _announce(load, place)
    if not quiet and not load.is_done and (source.count or 0) > _MANY_JOBS:
        _say(f"looking for invalid jobs in {file} before any is sent")
    load.check()  # before the event loop begins: a long file can be interrupted by Ctrl-C
    with _progress(source.count, load.confirmed, quiet=quiet) as show:
        summary = console.run(_run(storage, load, show))
    if as_json:
        console.print_json({**asdict(summary), "invalid": skipped.count})
    elif not quiet:
        _print_summary(summary, skipped.count, place)
    if not summary.finished:
        raise typer.Exit(console.EXIT_INTERRUPTED)


class _Skipped:
    """Tells of the first lines that are no jobs, and counts them all."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, line: int, reason: str) -> None:
        self.count += 1
        if self.count <= _SHOWN_COMPLAINTS:
            _say(f"line {line} is left out: {reason}")
        elif self.count == _SHOWN_COMPLAINTS + 1:
            _say("more lines are left out; the summary counts them")


async def _run(storage: Storage, load: Load, show: Callable[[int], None]) -> Summary:
    loop = asyncio.get_running_loop()
    async with storage:
        # Thread-safe also means signal-safe: it wakes a loop that sleeps.
        with _stopped_by_ctrl_c(lambda: loop.call_soon_threadsafe(load.stop)):
            return await load.run(show)


def _announce(load: Load, place: Path | None) -> None:
    if load.is_done:
        _say(
            f"all {load.confirmed:,} jobs are loaded already, says {place}; another --seed makes"
            " other jobs, --restart sends the same ones again"
        )
    elif load.confirmed:
        _say(f"going on after {load.confirmed:,} jobs, says {place}")


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: Callable[[], object]) -> Iterator[None]:
    """The first Ctrl-C lets the sends in flight end; the second ends at once."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _say("stopping when the sends in flight are done; Ctrl-C again to stop at once")
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(total: int | None, start: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line now and then elsewhere, or nothing."""
    if quiet:
        yield lambda _confirmed: None
    elif not console.stderr.is_terminal:
        yield _Lines(total, start)
    else:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console.stderr) as bar:
            task = bar.add_task("", total=total, completed=start, rate="")
            began = time.monotonic()

            def show(confirmed: int) -> None:
                rate = (confirmed - start) / max(time.monotonic() - began, 1e-6)
                bar.update(task, completed=confirmed, rate=f"{rate:,.0f} jobs/s")

            yield show


class _Lines:
    """Progress for a log."""

    def __init__(self, total: int | None, start: int) -> None:
        self._of = "" if total is None else f" of {total:,}"
        self._start = start
        self._began = self._said_at = time.monotonic()

    def __call__(self, confirmed: int) -> None:
        now = time.monotonic()
        if now - self._said_at >= SECONDS_BETWEEN_LINES:
            self._said_at = now
            rate = (confirmed - self._start) / (now - self._began)
            _say(f"{confirmed:,}{self._of} jobs sent, {rate:,.0f} jobs/s")


def _print_jobs(source: Source) -> None:
    source.check(0)
    jobs = (body for body in source.bodies(0) if body is not None)
    for body in itertools.islice(jobs, DRY_RUN_JOBS):
        sys.stdout.write(body + "\n")
    sys.stdout.flush()


def _print_summary(summary: Summary, left_out: int, place: Path | None) -> None:
    if summary.sent:
        _say(
            f"{console.counted(summary.sent, 'job')} sent to {summary.queue} in {summary.storage},"
            f" {summary.jobs_per_second:,.0f} jobs/s"
        )
    if left_out:
        _say(f"{console.counted(left_out, 'line')} left out")
    if not summary.finished:
        way_on = "; the same command goes on there" if place else ""
        _say(f"stopped after {console.counted(summary.confirmed, 'job')}{way_on}")


def _say(text: str) -> None:
    console.stderr.print(text, highlight=False, markup=False, soft_wrap=True)
