"""`imagefleet load`: fills the job queue from a template or a file of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from rich import markup, progress

from fleet import console, options
from imagefleet import errors, signing
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

#: A file below this size is checked in a moment.
_LONG_FILE_BYTES = 5_000_000


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
    dry_run: Annotated[bool, options.dry_run("the first ten jobs as JSON lines")] = False,
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
    reading = functools.partial(_reading, Path(file), is_shown=not (quiet or as_json))
    with reading("reading") as on_read:
        key = signing.Keys.of(settings).signing
        source = sources.open_source(
            file, count=count, seed=seed, on_invalid=on_invalid, on_read=on_read, key=key
        )
    if dry_run:
        with reading("checking") as on_read:
            source.check(0, on_read)
        _print_jobs(source)
        return
    if file == "-":
        if checkpoint_file or restart:
            raise errors.SetupError("standard input has no checkpoint: it cannot be read twice")
        path = None
    else:
        path = checkpoint_file or default_path(Path(file), settings.queue)
    in_use = f"another `imagefleet load` is at work with the checkpoint {path}"
    with console.only_one(path, in_use) if path else contextlib.nullcontext():
        storage = open_storage(settings)
        load = Load(storage, source, settings, path, restart=restart, on_notice=console.print_note)
        _announce(load, file, path)
        with reading("checking") as on_read:
            load.check(on_read)  # before the event loop begins: Ctrl-C can interrupt a long file
        is_live = console.stderr.is_terminal and not as_json
        with _progress(source.count, load.confirmed, is_live=is_live, quiet=quiet) as show:
            summary = console.run(_run(storage, load, show))
    if as_json:
        console.print_json({**asdict(summary), "invalid": skipped.count})
    elif not quiet:
        _print_summary(summary, skipped.count, path)
        if not load.is_done and not summary.sent and not skipped.count and summary.finished:
            console.print_note(f"no jobs in {file}: nothing was sent")
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


def _announce(load: Load, file: str, path: Path | None) -> None:
    jobs = console.counted(load.confirmed, "job")
    if load.is_done and not load.confirmed:
        console.print_note(f"{file} is empty: nothing was sent")
    elif load.is_done:
        console.print_note(
            f"nothing to send: {file} is already loaded ({jobs}), according to {path}; --restart"
            " sends it again"
        )
    elif load.confirmed:
        console.print_note(f"resuming after {jobs}, according to {path}")


@contextlib.contextmanager
def _reading(path: Path, doing: str, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes that are read of a long file, on a terminal, and the end by Ctrl-C."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        if not is_shown or not console.stderr.is_terminal or size < _LONG_FILE_BYTES:
            yield lambda _read_bytes: None
            return
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.stderr, transient=True) as bar:
            task = bar.add_task(f"{doing} {markup.escape(path.name)}", total=size)
            yield lambda read_bytes: bar.update(task, completed=read_bytes)
    except KeyboardInterrupt:
        console.print_note(f"stopped while {doing} {path}; nothing was sent")
        raise


@contextlib.contextmanager
def _progress(
    total: int | None, start: int, *, is_live: bool, quiet: bool
) -> Iterator[Callable[[int], None]]:
    """A bar if *is_live*, else occasional lines."""
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
    elif not is_live:
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
    jobs = (body for body in source.bodies(0) if body is not None)
    for body in itertools.islice(jobs, DRY_RUN_JOBS):
        sys.stdout.write(body + "\n")
    sys.stdout.flush()


def _print_summary(summary: Summary, skipped: int, path: Path | None) -> None:
    if summary.sent:
        second = summary.second_drawings
        also = f" and {console.counted(second, 'second drawing')}" if second else ""
        console.print_note(
            f"{console.counted(summary.sent, 'job')}{also} sent to {summary.queue} in"
            f" {summary.storage}, {summary.jobs_per_second:,.0f} jobs/s"
        )
    if skipped:
        console.print_note(f"{console.counted(skipped, 'line')} skipped")
    for campaign, jobs in summary.cancelled.items():
        again = "; --restart sends all its jobs again" if path else ""
        console.print_note(
            f"{console.counted(jobs, 'job')} not sent: campaign {campaign} was cancelled{again}"
        )
    if not summary.finished:
        resume = "; the same command resumes there" if path else ""
        console.print_note(f"stopped after {console.counted(summary.confirmed, 'job')}{resume}")
