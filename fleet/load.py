"""`imagefleet load`: fills the job queue from a template or a file of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich import markup, progress

from fleet import console, load_progress, options
from fleet.campaigns import target
from fleet.files import missing
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.queue_names import MAX_SHARDS
from imagefleet.storage.settings import checked_priority
from loadgen import sources
from loadgen.load import Load, Summary, default_path
from loadgen.processes.frames import Refusals
from loadgen.settings import LoadSettings
from loadgen.sources import Source

DRY_RUN_JOBS = 10

#: Skipped lines that are reported one by one.
_SHOWN_SKIPPED = 10

#: Queues that are named when jobs of many models were sent.
SHOWN_QUEUES = 5

#: A file below this size is checked in a moment.
_LONG_FILE_BYTES = 5_000_000

#: Fewer jobs of a template are made in a moment.
_MANY_JOBS = 20_000


@dataclass(frozen=True, slots=True)
class Jobs:
    """Which jobs are made of the file."""

    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A template (.yaml, .toml), a file of jobs (.jsonl, .json, .csv, .parquet, .txt"
            " with a prompt per line; all but Parquet also as .gz), or - for standard input.",
        ),
    ]
    form: options.JobFormat = None
    count: Annotated[int | None, typer.Option(min=1, help="Number of jobs; overrides FILE's.")] = (
        None
    )
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**63 - 1,
            help="Overrides the template's seed; another seed gives other jobs.",
        ),
    ] = None
    campaign: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Campaign of the jobs without one: the folder of their images."
        ),
    ] = None
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Skip what is not a valid job.")
    ] = False


@dataclass(frozen=True, slots=True)
class Sending:
    """Where the jobs are sent, and from which of them on."""

    priority: options.JobPriority = "normal"
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A model that workers have from elsewhere than the storage; repeatable.",
        ),
    ] = None
    shards: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SHARDS,
            metavar="N",
            help="Queues of the storage that each job queue is spread over from now on, for more"
            " than 2,000 messages/s; workers find out. Default: as it is.",
        ),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the checkpoint; begin with the first job.")
    ] = False
    state: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The checkpoint; default: next to FILE."),
    ] = None


@dataclass(frozen=True, slots=True)
class Checking:
    """What is looked up in place of a load."""

    dry_run: Annotated[
        bool, options.dry_run("the number of jobs, and ten of them as JSON lines")
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Show which LoRAs, models and embeddings the jobs name that are not in the"
            " storage; send nothing.",
        ),
    ] = False
    lora_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With --check: the folder of LoRAs that workers have besides those in the storage."
            f" [env: {options.variable('lora_directory')}]",
        ),
    ] = None


@options.from_settings(LoadSettings)
def command(
    settings: LoadSettings,
    jobs: Jobs,
    sending: Sending,
    checking: Checking,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Fills the job queue from a template or a file of jobs.

    The same file and seed give the same jobs. After an interruption, the same command resumes at
    its checkpoint.

    imagefleet load templates/demo.yaml --dry-run

    imagefleet load templates/demo.yaml --count 1000000 --rate 500

    imagefleet load prompts.csv --check

    shuf prompts.txt | imagefleet load - --format txt
    """
    checked_priority(sending.priority)
    target.check_name("--campaign", jobs.campaign)
    if checking.lora_directory and not checking.check:
        raise errors.SetupError("--lora-directory goes with --check")
    skipped = _Skipped()
    read = functools.partial(reading, Path(jobs.file), is_shown=not (quiet or as_json))
    with read("reading") as on_read:
        source = sources.open_source(
            jobs.file,
            form=jobs.form,
            count=jobs.count,
            seed=jobs.seed,
            on_invalid=skipped if jobs.skip_invalid else None,
            on_read=on_read,
            key=settings.keys().signing,
            campaign=jobs.campaign,
        )
    if checking.check:
        directory, models = checking.lora_directory, sending.model
        _check(settings, source, skipped, directory, models, read, as_json=as_json)
    elif checking.dry_run:
        with read("checking") as on_read:
            source.check(0, on_read)
        _print_jobs(source, quiet=quiet)
    else:
        path = _checkpoint(settings, jobs.file, sending)
        summary, was_done = _load(
            settings, jobs.file, path, source, sending, read, quiet=quiet, as_json=as_json
        )
        mended = getattr(source, "mended", 0)  # a template has no failed jobs
        if as_json:
            console.print_json({**asdict(summary), "invalid": skipped.count, "mended": mended})
        elif not quiet:
            print_summary(summary, skipped.count, path, mended)
            if not (was_done or summary.sent or skipped.count) and summary.finished:
                console.print_note(f"no jobs in {jobs.file}: nothing was sent")
        if not summary.finished:
            raise typer.Exit(console.EXIT_INTERRUPTED)


def _checkpoint(settings: LoadSettings, file: str, sending: Sending) -> Path | None:
    if file != "-":
        return sending.state or default_path(Path(file), settings.queue)
    if sending.state or sending.restart:
        raise errors.SetupError("standard input has no checkpoint: it cannot be read twice")
    return None


def _load(
    settings: LoadSettings,
    file: str,
    path: Path | None,
    source: Source,
    sending: Sending,
    read: Callable[..., contextlib.AbstractContextManager[Callable[[int], None]]],
    *,
    quiet: bool,
    as_json: bool,
) -> tuple[Summary, bool]:
    """Sends the jobs; also returns whether all were sent before."""
    in_use = f"another `imagefleet load` is at work with the checkpoint {path}"
    with console.only_one(path, in_use) if path else contextlib.nullcontext():
        refusals = Refusals()
        storage = open_storage(settings, refusals.policy)
        load = Load(
            storage,
            source,
            settings,
            path,
            restart=sending.restart,
            priority=checked_priority(sending.priority),
            models=sending.model or (),
            refusals=refusals,
            shards=sending.shards,
            on_notice=console.print_note,
        )
        announce(load, file, path)
        with read("checking") as on_read:
            load.check(on_read)  # before the event loop begins: Ctrl-C can interrupt a long file
        is_live = console.stderr.is_terminal and not as_json
        with load_progress.showing(
            load, source.count, is_live=is_live, quiet=quiet, as_json=as_json
        ) as show:
            return console.run(send(storage, load, show)), load.is_done


class _Skipped:
    """Counts the skipped lines and reports the first of them."""

    count = 0

    def __call__(self, place: str, reason: str) -> None:
        self.count += 1
        if self.count <= _SHOWN_SKIPPED:
            console.print_note(f"{place} is skipped: {reason}")
        elif self.count == _SHOWN_SKIPPED + 1:
            console.print_note("more jobs are skipped; the summary counts them")


def _check(
    settings: LoadSettings,
    source: Source,
    skipped: _Skipped,
    lora_directory: Path | None,
    models: list[str] | None,
    read: Callable[..., contextlib.AbstractContextManager[Callable[[int], None]]],
    *,
    as_json: bool,
) -> None:
    """Reads all jobs, and tells what they name that workers would not find."""
    if lora_directory is None and (folder := os.environ.get(options.variable("lora_directory"))):
        lora_directory = Path(folder)
    uses = missing.Uses()
    with read("checking", jobs=source.jobs_to_make) as on_read:
        source.check(0, on_read, uses.add)
    elsewhere = missing.Elsewhere(lora_directory, models or ())
    found = console.run(missing.look(settings, uses, elsewhere))
    if as_json:
        console.print_json(missing.summary(uses, found) | {"invalid": skipped.count})
    else:
        missing.show(uses, found)
    if found:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


async def send(storage: Storage, load: Load, show: Callable[[int], None]) -> Summary:
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


def announce(load: Load, file: str, path: Path | None) -> None:
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
def reading(
    path: Path, doing: str, *, is_shown: bool, jobs: int | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar of a long file's bytes, or of so many *jobs*, on a terminal; the end by Ctrl-C."""
    size = jobs or (path.stat().st_size if path.is_file() else 0)
    is_long = size >= (_MANY_JOBS if jobs else _LONG_FILE_BYTES)
    try:
        if not (is_shown and is_long and console.stderr.is_terminal):
            yield lambda _done: None
            return
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn() if jobs else progress.DownloadColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.stderr, transient=True) as bar:
            task = bar.add_task(f"{doing} {markup.escape(path.name)}", total=size)
            yield lambda done: bar.update(task, completed=done)
    except KeyboardInterrupt:
        console.print_note(f"stopped while {doing} {path}; nothing was sent")
        raise


def _print_jobs(source: Source, *, quiet: bool) -> None:
    if not quiet and (what := source.describe()):
        console.print_note(what)
    for body in source.examples(DRY_RUN_JOBS):
        sys.stdout.write(body + "\n")
    sys.stdout.flush()


def _named(queues: Mapping[str, int]) -> str:
    """The queues that jobs were sent to, with how many each if there are several."""
    if len(queues) == 1:
        return next(iter(queues))
    most = sorted(queues.items(), key=lambda each: -each[1])
    shown = [f"{name} ({count:,})" for name, count in most[:SHOWN_QUEUES]]
    if len(most) > SHOWN_QUEUES:
        rest = sum(count for _, count in most[SHOWN_QUEUES:])
        shown.append(f"{len(most) - SHOWN_QUEUES} more queues ({rest:,})")
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def print_summary(summary: Summary, skipped: int, path: Path | None, mended: int) -> None:
    if summary.sent:
        second = summary.second_drawings
        also = f" and {console.counted(second, 'second drawing')}" if second else ""
        console.print_note(
            f"{console.counted(summary.sent, 'job')}{also} sent to"
            f" {_named(summary.queues)} in {summary.storage}, {summary.jobs_per_second:,.0f} jobs/s"
        )
    if summary.refusals:
        console.print_note(
            f"the storage asked to slow down {console.counted(summary.refusals, 'time')}"
        )
    if mended:
        console.print_note(
            f"{mended:,} of them had failed and stay on the list of failed jobs until they are"
            " completed; then `imagefleet discard --completed` takes them off"
        )
    if skipped:
        console.print_note(f"{console.counted(skipped, 'invalid job')} skipped")
    for campaign, jobs in summary.cancelled.items():
        again = "; --restart sends all its jobs again" if path else ""
        console.print_note(
            f"{console.counted(jobs, 'job')} not sent: campaign {campaign} was cancelled{again}"
        )
    if not summary.finished:
        resume = "; the same command resumes there" if path else ""
        console.print_note(f"stopped after {console.counted(summary.confirmed, 'job')}{resume}")
