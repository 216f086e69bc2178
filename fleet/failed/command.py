"""`imagefleet failed`: lists, exports, replays and discards failed jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from fleet import console, options
from fleet.failed import output, read
from fleet.failed.output import Verb
from imagefleet import errors
from imagefleet.job.change import Change
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.dead_letter_queue import Preview, Swept
from imagefleet.storage.settings import Priority, SignerSettings, StorageSettings, checked_priority

app = typer.Typer(
    no_args_is_help=True,
    help="Failed jobs wait in the poison queue, each with its error, to be mended, replayed or"
    " discarded.",
)

Error = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only errors with this text in their class or message."),
]
Campaign = Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this campaign.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs that name this model.")]
JobId = Annotated[str | None, typer.Option("--id", metavar="ID", help="Only this job or message.")]
All = Annotated[bool, typer.Option("--all", help="All failed jobs.")]
DryRun = Annotated[bool, options.dry_run("what would be moved or deleted")]
FromQueue = Annotated[
    bool,
    typer.Option(
        "--from-queue",
        help="Read the poison queue's messages, not the records: also those of older workers. On"
        " Azure this hides them from other readers meanwhile.",
    ),
]


@app.command("list")
@options.from_settings(SignerSettings)
def list_command(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    model: Model = None,
    job_id: JobId = None,
    limit: Annotated[int, typer.Option(min=0, metavar="COUNT", help="Jobs to list.")] = 20,
    from_queue: FromQueue = False,
    as_json: options.AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists the first ones.

    With a signing or trusted key it says which of them are signed.

    imagefleet failed list

    imagefleet failed list --error lora --campaign spring --limit 100
    """
    selection = Selection(error, campaign, job_id, model=model)

    async def list_() -> read.Listing:
        async with console.connected(settings) as fleet:
            return await read.listing(fleet, selection, limit, from_queue=from_queue)

    listing = console.run(list_())
    if as_json:
        console.print_json(listing.as_record())
    else:
        output.print_listing(listing)


@app.command()
@options.from_settings(StorageSettings)
def show(
    settings: StorageSettings,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the job or message.")],
    from_queue: FromQueue = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows a failed job with its error and its message.

    imagefleet failed show 3fbd0a1c
    """

    async def find() -> list[dict[str, object]]:
        async with console.connected(settings) as fleet:
            return await read.find(fleet, job_id, from_queue=from_queue)

    records = console.run(find())
    if as_json:
        console.print_json({"jobs": records})
        return
    for record in records:
        table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None)
        for name, value in record.items():
            shown = value if isinstance(value, str) else console.json_text(value).rstrip()
            table.add_row(f"[bold]{name}[/bold]", console.untrusted(shown))
        console.print_tables(table)


@app.command()
@options.from_settings(SignerSettings)
@console.synchronous
async def export(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    model: Model = None,
    job_id: JobId = None,
    from_queue: FromQueue = False,
) -> None:
    """Prints whole failed jobs, to be mended and loaded.

    One JSON object per line, which `imagefleet load` takes: the job, and in `failure` why it
    failed. With a signing or trusted key only jobs that are signed. Once they are completed,
    `failed discard --completed` takes them off the list.

    imagefleet failed export --error InvalidMessageError > fix.jsonl
    """
    selection = Selection(error, campaign, job_id, model=model)
    count = unsigned = 0
    async with console.connected(settings) as fleet:
        blobs = fleet.storage.blobs
        check = fleet.checks_signatures() if fleet.keys.trusted else None
        async for entry in read.entries(fleet, selection, from_queue=from_queue):
            if check is not None and not await check.is_signed(entry, blobs):
                unsigned += 1
                continue
            try:
                job = await read.exported(entry, blobs)
            except errors.JobError as reason:
                console.print_warning(f"{entry.id} is left out: {reason.message}")
                continue
            console.print_json_line(job)
            count += 1
        unrecorded = 0 if from_queue else await dead_letter_queue.unrecorded(fleet.storage)
    console.print_note(f"{console.counted(count, 'failed job')} exported")
    if unsigned:
        console.print_warning(f"{unsigned:,} are left out: they are not signed with your key")
    if unrecorded:
        console.print_warning(output.without_records(unrecorded))


@app.command(short_help="Puts failed jobs back into the job queue.")
@options.from_settings(SignerSettings)
def replay(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    model: Model = None,
    job_id: JobId = None,
    everything: All = False,
    priority: options.JobPriority = "normal",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a field of each job, steps=20 say; repeatable. Signed jobs are signed"
            " again, for which it needs --signing-key.",
        ),
    ] = None,
    invalid: Annotated[
        bool,
        typer.Option(
            "--invalid",
            help="Also jobs that are not valid for this version: newer workers may take them.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Puts failed jobs back into the job queue; their attempts start from zero.

    Each must be a valid job, with the changes of --set; with a signing or trusted key it must be
    signed. Shows what would be sent, and asks, if it is more than one job.

    imagefleet failed replay --error MissingFileError

    imagefleet failed replay --error memory --set width=512 --set height=512

    imagefleet failed replay --all --dry-run
    """
    chosen = checked_priority(priority)
    selection = _selection(error, campaign, job_id, model=model, everything=everything)
    check = console.run(_check(settings, set_ or [], takes_invalid=invalid))
    if dry_run or not yes:
        preview = console.run(_preview(settings, selection, check))
        if dry_run and as_json:
            console.print_json(output.as_record(preview))
            return
        if dry_run:
            output.print_preview(preview, console.stdout)
            return
        if preview.count > 1:
            output.print_preview(preview, console.stderr)
            jobs = console.counted(preview.count, "failed job")
            console.confirm(f"Send {jobs} again?", yes=yes)
    swept, missing = console.run(_replay(settings, selection, check, chosen))
    output.report("replayed", swept, missing=missing, as_json=as_json)


@app.command()
@options.from_settings(SignerSettings)
def discard(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    model: Model = None,
    job_id: JobId = None,
    jobs_file: Annotated[
        Path | None,
        typer.Option(
            "--jobs",
            metavar="FILE",
            help="Only the jobs in this file of `failed export`, once they are loaded again.",
        ),
    ] = None,
    everything: All = False,
    unsigned: Annotated[
        bool,
        typer.Option("--unsigned", help="Only what is not signed with a key of yours."),
    ] = False,
    completed: Annotated[
        bool,
        typer.Option(
            "--completed",
            help="Only jobs that were sent again since, and whose images are all stored.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Deletes failed jobs for good.

    imagefleet failed discard --campaign spring

    imagefleet failed discard --completed

    imagefleet failed discard --jobs fix.jsonl

    imagefleet failed discard --all --yes

    imagefleet failed discard --unsigned
    """
    alone = unsigned or completed
    selection = _selection(
        error, campaign, job_id, jobs_file, model=model, everything=everything, alone=alone
    )
    if dry_run or not yes:
        count = console.run(_count(settings, selection, unsigned=unsigned, completed=completed))
        jobs = console.counted(count, "failed job")
        if dry_run:
            if as_json:
                console.print_json({"count": count})
            else:
                console.stdout.print(f"{jobs} would be discarded")
            return
        if count:
            console.confirm(f"Discard {jobs} for good?", yes=yes)
    swept = console.run(_discard(settings, selection, unsigned=unsigned, completed=completed))
    output.report("discarded", swept, as_json=as_json)


def _selection(
    error: str | None,
    campaign: str | None,
    job_id: str | None,
    jobs_file: Path | None = None,
    *,
    model: str | None,
    everything: bool,
    alone: bool = False,
) -> Selection:
    """The failed jobs of the options; *alone*: another option suffices."""
    has_filter = any(each is not None for each in (error, campaign, job_id, jobs_file, model))
    if (everything and has_filter) or not (everything or has_filter or alone):
        raise errors.SetupError(
            "choose the failed jobs: --all, or one or more of --error, --campaign, --model and --id"
        )
    sources = None if jobs_file is None else read.sources_of(jobs_file)
    return Selection(error, campaign, job_id, sources, model)


async def _check(settings: SignerSettings, changes: list[str], *, takes_invalid: bool) -> Check:
    """What a job must be to be sent again; the changes are checked before anything is read."""
    async with console.connected(settings) as fleet:
        keys = fleet.keys
        change = Change.read(changes, keys.signing) if changes else None
        return Check(keys.trusted, takes_invalid, change)


async def _count(
    settings: SignerSettings, selection: Selection, *, unsigned: bool, completed: bool
) -> int:
    count = 0
    async with console.connected(settings) as fleet:
        check, storage = fleet.checks_signatures() if unsigned else None, fleet.storage
        found = dead_letter_queue.find(storage, selection)
        async for some in dead_letter_queue.in_batches(found):
            count += len(
                await dead_letter_queue.to_discard(storage, some, check, completed=completed)
            )
    return count


async def _preview(settings: SignerSettings, selection: Selection, check: Check) -> Preview:
    async with console.connected(settings) as fleet:
        return await dead_letter_queue.preview(fleet.storage, selection, check)


async def _replay(
    settings: SignerSettings, selection: Selection, check: Check, priority: Priority
) -> tuple[Swept, int]:
    """Replays the selected jobs; also returns how many have no message that could be sent."""
    began_at = datetime.now(UTC)
    async with console.connected(settings) as fleet:
        with _counting("replayed") as show:
            swept = await dead_letter_queue.replay(fleet.storage, selection, show, check, priority)
        refused = {each.id for each in swept.refused}
        missing = 0
        async for entry in dead_letter_queue.recorded(fleet.storage, selection):
            missing += entry.id not in refused and entry.message.enqueued_at < began_at
    return swept, missing


async def _discard(
    settings: SignerSettings, selection: Selection, *, unsigned: bool, completed: bool
) -> Swept:
    async with console.connected(settings) as fleet:
        keep_signed = fleet.checks_signatures() if unsigned else None
        with _counting("discarded") as show:
            return await dead_letter_queue.discard(
                fleet.storage, selection, show, keep_signed, completed=completed
            )


@contextlib.contextmanager
def _counting(verb: Verb) -> Iterator[Callable[[int], None] | None]:
    """Shows the jobs so far on a terminal."""
    if not console.stderr.is_terminal:
        yield None
        return
    with console.stderr.status("") as status:
        yield lambda count: status.update(f"{count:,} {verb}")
