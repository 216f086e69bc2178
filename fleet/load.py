"""`imagefleet load`: fills the job queue from a template or a file of jobs."""

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
from rich import progress

from fleet import console, options
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from loadgen.settings import LoadSettings

if TYPE_CHECKING:
    from loadgen.load import Load, Summary
    from loadgen.sources import Source

DRY_RUN_JOBS = 10

#: Seconds between two lines of progress where there is no terminal.
SECONDS_BETWEEN_LINES = 5.0

#: Skipped lines that are reported one by one.
_SHOWN_SKIPPED = 10

#: Checking more jobs than this takes seconds, so it is announced.
_MANY_JOBS = 100_000


@options.from_settings(LoadSettings)
def command(
    settings: LoadSettings,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A template (.yaml, .toml), a file with one job per line (.jsonl), or - for jobs"
            " from standard input.",
        ),
    ],
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of jobs; overrides FILE's.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**63 - 1,
            help="Overrides the template's seed; another seed gives other jobs.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the first ten jobs; send nothing.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the checkpoint; begin with the first job.")
    ] = False,
    checkpoint_file: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Path of the checkpoint; default: next to FILE."),
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Skip lines that are not valid jobs.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Fills the job queue from a template or a file of jobs.

    The same file and seed give the same jobs. After an interruption, the same command resumes at
    its checkpoint.

    imagefleet load templates/demo.yaml --dry-run

    imagefleet load templates/demo.yaml --count 1000000 --rate 500

    zcat jobs.jsonl.gz | imagefleet load -
    """
    from loadgen import sources
    from loadgen.load import Load, default_path

    skipped = _Skipped()
    on_invalid = skipped if skip_invalid else None
    source = sources.open_source(file, count=count, seed=seed, on_invalid=on_invalid)
    if dry_run:
        _print_jobs(source)
        return
    if file == "-":
        if checkpoint_file or restart:
            raise errors.SetupError("standard input has no checkpoint: it cannot be read twice")
        path = None
    else:
        path = checkpoint_file or default_path(Path(file), settings.queue)
    storage = open_storage(settings)
    load = Load(storage, source, settings, path, restart=restart)
    _announce(load, path)
    if not quiet and not load.is_done and (source.count or 0) > _MANY_JOBS:
        console.print_note(f"checking the jobs in {file}")
    load.check()  # before the event loop begins: a long file can be interrupted by Ctrl-C
    with _progress(source.count, load.confirmed, quiet=quiet) as show:
        summary = console.run(_run(storage, load, show))
    if as_json:
        console.print_json({**asdict(summary), "invalid": skipped.count})
    elif not quiet:
        _print_summary(summary, skipped.count, path)
    if not summary.finished:
        raise typer.Exit(console.EXIT_INTERRUPTED)


class _Skipped:
    """Counts the skipped lines and reports the first of them."""

    count = 0

    def __call__(self, line: int, reason: str) -> None:
        self.count += 1
        if self.count <= _SHOWN_SKIPPED:
            console.print_note(f"line {line} is skipped: {reason}")
        elif self.count == _SHOWN_SKIPPED + 1:
            console.print_note("more lines are skipped; the summary counts them")


async def _run(storage: Storage, load: Load, show: Callable[[int], None]) -> Summary:
    """The first Ctrl-C waits for the sends in flight; the second stops at once."""
    loop = asyncio.get_running_loop()

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print_note("stopping after the sends in flight; Ctrl-C again to stop at once")
        # Safe in a signal handler: it wakes the loop.
        loop.call_soon_threadsafe(load.stop)

    async with storage:
        before = signal.signal(signal.SIGINT, stop)
        try:
            return await load.run(show)
        finally:
            signal.signal(signal.SIGINT, before)


def _announce(load: Load, path: Path | None) -> None:
    if load.is_done:
        console.print_note(
            f"all {load.confirmed:,} jobs are already loaded, according to {path}; --restart sends"
            " them again, another --seed gives other jobs"
        )
    elif load.confirmed:
        console.print_note(f"resuming after {load.confirmed:,} jobs, according to {path}")


@contextlib.contextmanager
def _progress(total: int | None, start: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, occasional lines elsewhere."""
    began = reported_at = time.monotonic()

    def rate(confirmed: int) -> str:
        return f"{(confirmed - start) / max(time.monotonic() - began, 1e-6):,.0f} jobs/s"

    def show_line(confirmed: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= SECONDS_BETWEEN_LINES:
            reported_at = time.monotonic()
            of_total = "" if total is None else f" of {total:,}"
            console.print_note(f"{confirmed:,}{of_total} jobs sent, {rate(confirmed)}")

    if quiet:
        yield lambda _confirmed: None
    elif not console.stderr.is_terminal:
        yield show_line
    else:
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.stderr) as bar:
            task = bar.add_task("", total=total, completed=start, rate="")
            yield lambda confirmed: bar.update(task, completed=confirmed, rate=rate(confirmed))


def _print_jobs(source: Source) -> None:
    source.check(0)
    jobs = (body for body in source.bodies(0) if body is not None)
    for body in itertools.islice(jobs, DRY_RUN_JOBS):
        sys.stdout.write(body + "\n")
    sys.stdout.flush()


def _print_summary(summary: Summary, skipped: int, path: Path | None) -> None:
    if summary.sent:
        console.print_note(
            f"{console.counted(summary.sent, 'job')} sent to {summary.queue} in {summary.storage},"
            f" {summary.jobs_per_second:,.0f} jobs/s"
        )
    if skipped:
        console.print_note(f"{console.counted(skipped, 'line')} skipped")
    if not summary.finished:
        resume = "; the same command resumes there" if path else ""
        console.print_note(f"stopped after {console.counted(summary.confirmed, 'job')}{resume}")
