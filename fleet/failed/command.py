"""`imagefleet failed`, `replay` and `discard`: jobs in the poison queue, each with its error."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fleet import console, options
from fleet.campaigns import target
from fleet.failed import jobs as failed_jobs
from fleet.options import option
from imagefleet import aio, errors
from imagefleet.job.change import Change
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.dead_letter_queue import Swept
from imagefleet.storage.settings import Priority, SignerSettings, checked_priority


@dataclass(frozen=True, slots=True)
class Which:
    """The failed jobs that a command is about."""

    job: target.OnlyJobs = None
    error: str | None = option(
        "Only errors with this text in their class or message.", metavar="TEXT"
    )
    model: str | None = option("Only jobs that name this model.", metavar="NAME")

    @property
    def target(self) -> target.Target:
        return target.read(self.job)

    def selection(self, jobs_file: Path | None = None) -> Selection:
        sources = None if jobs_file is None else failed_jobs.sources_of(jobs_file)
        return Selection(self.error, *self.target, sources, self.model)


@dataclass(frozen=True, slots=True)
class How:
    """What a command that moves failed jobs asks before it does."""

    everything: bool = option("All failed jobs.", False, "--all")
    dry_run: bool = options.dry_run("what would be moved or deleted")
    yes: options.Yes = False
    as_json: options.AsJson = False


@options.from_settings(SignerSettings)
async def command(
    settings: SignerSettings,
    which: Which,
    limit: int = option("Jobs to list.", 20, min=0, metavar="COUNT"),
    export: bool = option(
        "Print whole jobs, one JSON object per line, which `load` takes.", default=False
    ),
    from_queue: bool = option(
        "Read the poison queue's messages, not the records: also those of older workers."
        " On Azure this hides them from other readers meanwhile.",
        default=False,
    ),
    as_json: options.AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists them, or shows one.

    With a signing or trusted key it says which of them are signed, and exports no others. An
    exported job has in `failure` why it failed; once mended and loaded jobs are completed,
    `discard --completed` takes them off the list.

    imagefleet failed spring --error lora --limit 100

    imagefleet failed spring/0001

    imagefleet failed --error InvalidMessageError --export > fix.jsonl
    """
    named, selection = which.target, which.selection()
    async with console.connected(settings) as fleet:
        if export:
            await _export(fleet, selection, from_queue=from_queue)
        elif named.id is not None:
            records = await failed_jobs.find(fleet, selection, from_queue=from_queue)
            failed_jobs.print_jobs(records, as_json=as_json)
        else:
            listing = await failed_jobs.listing(fleet, selection, limit, from_queue=from_queue)
            if not listing.count:
                await target.check_campaign(fleet.storage, named.campaign)
            failed_jobs.print_listing(listing, as_json=as_json)


async def _export(fleet: aio.Fleet, selection: Selection, *, from_queue: bool) -> None:
    count = unsigned = 0
    blobs = fleet.storage.blobs
    check = fleet.checks_signatures() if fleet.keys.trusted else None
    async for entry in failed_jobs.entries(fleet, selection, from_queue=from_queue):
        if check is not None and not await check.is_signed(entry, blobs):
            unsigned += 1
            continue
        try:
            job = await failed_jobs.exported(entry, blobs)
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
        console.print_warning(failed_jobs.without_records(unrecorded))


@options.from_settings(SignerSettings)
async def replay_command(
    settings: SignerSettings,
    which: Which,
    how: How,
    priority: options.JobPriority = "normal",
    set_: list[str] | None = option(
        "Change a field of each job, steps=20 say; repeatable. Signed jobs are signed"
        " again, for which it needs --signing-key.",
        None,
        "--set",
        metavar="NAME=VALUE",
    ),
    invalid: bool = option(
        "Also jobs that are not valid for this version: newer workers may take them.", default=False
    ),
) -> None:
    """Puts failed jobs back into the job queue.

    Their attempts start from zero. Each must be a valid job, with the changes of --set; with a
    signing or trusted key it must be signed. Shows what would be sent, and asks, if it is more than
    one job.

    imagefleet replay --error MissingFileError

    imagefleet replay spring --error memory --set width=512 --set height=512

    imagefleet replay --all --dry-run
    """
    chosen = checked_priority(priority)
    selection = _chosen(which, how)
    keys = settings.keys()
    check = Check(keys.trusted, invalid, Change.read(set_, keys.signing) if set_ else None)
    async with console.connected(settings) as fleet:
        if how.dry_run or not how.yes:
            preview = await dead_letter_queue.preview(fleet.storage, selection, check)
            if not (preview.count or preview.refused or preview.unsigned):
                await _refuse_nothing(fleet, selection)
            if how.dry_run:
                failed_jobs.print_preview(preview, console.stdout, as_json=how.as_json)
                return
            if preview.count > 1:
                failed_jobs.print_preview(preview, console.stderr)
                jobs = console.counted(preview.count, "failed job")
                console.confirm(f"Send {jobs} again?", yes=how.yes)
        swept, missing = await _replay(fleet, selection, check, chosen)
    failed_jobs.report("replayed", swept, missing=missing, as_json=how.as_json)


@options.from_settings(SignerSettings)
async def discard_command(
    settings: SignerSettings,
    which: Which,
    how: How,
    jobs_file: Path | None = option(
        "Only the jobs in this file of `failed --export`, once they are loaded again.",
        None,
        "--jobs",
        metavar="FILE",
    ),
    unsigned: bool = option("Only what is not signed with a key of yours.", default=False),
    completed: bool = option(
        "Only jobs that were sent again since, and whose images are all stored.", default=False
    ),
) -> None:
    """Deletes failed jobs for good.

    imagefleet discard spring

    imagefleet discard --completed

    imagefleet discard --jobs fix.jsonl

    imagefleet discard --unsigned
    """
    selection = _chosen(which, how, jobs_file, alone=unsigned or completed)
    async with console.connected(settings) as fleet:
        keep_signed = fleet.checks_signatures() if unsigned else None
        if how.dry_run or not how.yes:
            count = await _count(fleet, selection, keep_signed, completed=completed)
            jobs = console.counted(count, "failed job")
            if how.dry_run and how.as_json:
                console.print_json({"count": count})
            elif how.dry_run:
                console.stdout.print(f"{jobs} would be discarded")
            elif count:
                console.confirm(f"Discard {jobs} for good?", yes=how.yes)
            if how.dry_run:
                return
        with console.counting("discarded", None) as move:
            swept = await dead_letter_queue.discard(
                *(fleet.storage, selection, lambda count: move(done=count), keep_signed),
                completed=completed,
            )
        if not (swept.done or swept.refused or unsigned or completed):
            await _refuse_nothing(fleet, selection)
    failed_jobs.report("discarded", swept, as_json=how.as_json)


def _chosen(
    which: Which, how: How, jobs_file: Path | None = None, *, alone: bool = False
) -> Selection:
    """The failed jobs to move; *alone*: another option suffices to choose them."""
    has_filter = which != Which() or jobs_file is not None
    if (how.everything and has_filter) or not (how.everything or has_filter or alone):
        raise errors.SetupError(
            "choose the failed jobs: --all, or a CAMPAIGN[/ID], --error or --model"
        )
    return which.selection(jobs_file)


async def _refuse_nothing(fleet: aio.Fleet, selection: Selection) -> None:
    """Raises SetupError where nothing was selected because what was named does not exist.

    Messages without a record may be what was named: only their move tells.
    """
    if await dead_letter_queue.unrecorded(fleet.storage):
        return
    if selection.id is not None:
        raise errors.SetupError(failed_jobs.no_such_job(selection, fleet.storage))
    await target.check_campaign(fleet.storage, selection.campaign)


async def _count(
    fleet: aio.Fleet, selection: Selection, keep_signed: Check | None, *, completed: bool
) -> int:
    """How many jobs `discard` would delete."""
    found = count = 0
    storage = fleet.storage
    entries = dead_letter_queue.find(storage, selection)
    async for some in dead_letter_queue.in_batches(entries):
        found += len(some)
        chosen = await dead_letter_queue.to_discard(storage, some, keep_signed, completed=completed)
        count += len(chosen)
    if not found:
        await _refuse_nothing(fleet, selection)
    return count


async def _replay(
    fleet: aio.Fleet, selection: Selection, check: Check, priority: Priority
) -> tuple[Swept, int]:
    """Replays the selected jobs; also returns how many have no message that could be sent."""
    began_at = datetime.now(UTC)
    with console.counting("replayed", None) as move:
        swept = await dead_letter_queue.replay(
            fleet.storage, selection, lambda count: move(done=count), check, priority
        )
    refused = {each.id for each in swept.refused}
    missing = 0
    async for entry in dead_letter_queue.recorded(fleet.storage, selection):
        missing += entry.id not in refused and entry.message.enqueued_at < began_at
    if not (swept.done or refused or missing):
        await _refuse_nothing(fleet, selection)
    return swept, missing
