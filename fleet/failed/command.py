"""`imagefleet failed`, `replay` and `discard`: jobs in the poison queue, each with its error."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from cli import console, options, target
from cli.options import AsJson, JobPriority, Yes, option
from fleet.failed import jobs as failed_jobs
from fleet.failed.jobs import Verb
from imagefleet.aio import Fleet
from imagefleet.errors import SetupError
from imagefleet.job.change import Change
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.dead_letter_queue import Swept
from imagefleet.storage.open import signer_of
from imagefleet.storage.settings import SignerSettings


@dataclass(frozen=True)
class JobFilter:
    job: target.OnlyJobs = None
    error: str | None = option(
        "Only errors with this text in their class or message.", metavar="TEXT"
    )
    model: str | None = option("Only jobs that name this model.", metavar="NAME")

    def selection(self) -> Selection:
        return Selection(self.error, *target.read(self.job), self.model)


@dataclass(frozen=True)
class How:
    everything: bool = option("All failed jobs.", False, "--all")
    dry_run: bool = options.dry_run("what would be moved or deleted")
    yes: Yes = False
    as_json: AsJson = False


@options.flat
async def command(
    settings: SignerSettings,
    which: JobFilter,
    limit: int = option("Jobs to list.", 20, min=0, metavar="COUNT"),
    export: bool = option(
        "Print whole jobs, one JSON object per line, which `load` takes.", default=False
    ),
    as_json: AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists them, or shows one.

    With a signing or trusted key it says which of them are signed, and exports no others. An
    exported job has in `failure` why it failed; once it is mended and loaded, `discard` takes the
    failed one off the list.

    imagefleet failed spring --error lora --limit 100

    imagefleet failed spring/0001

    imagefleet failed --error InvalidMessageError --export > fix.jsonl
    """
    selection = which.selection()
    async with console.connected(settings) as fleet:
        records = dead_letter_queue.recorded(fleet.storage, selection)
        if export:
            await failed_jobs.export(fleet, records)
        elif selection.id is not None:
            found = [failed_jobs.whole(record) async for record in records]
            if not found:
                raise failed_jobs.no_such_job(fleet, selection)
            failed_jobs.print_jobs(found, as_json=as_json)
        else:
            kinds, shown = await failed_jobs.listing(fleet, records, limit)
            if not kinds:
                await target.check_campaign(fleet.storage, selection.campaign)
            failed_jobs.print_listing(kinds, shown, as_json=as_json)


@options.flat
async def replay_command(
    settings: SignerSettings,
    which: JobFilter,
    how: How,
    priority: JobPriority = "normal",
    set_: list[str] | None = option(
        "Change a field of each job, steps=20 say; repeatable. Signed jobs need --signing-key.",
        None,
        "--set",
        metavar="NAME=VALUE",
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
    selection = _chosen(which, how)
    change = Change.read(set_, signer_of(settings)) if set_ else None
    async with console.connected(settings) as fleet:
        check = fleet.check(change)
        work = partial(dead_letter_queue.replay, check=check, priority=priority)
        await move(fleet, selection, check, how, "replayed", work)


@options.flat
async def discard_command(
    settings: SignerSettings,
    which: JobFilter,
    how: How,
) -> None:
    """Deletes failed jobs for good.

    imagefleet discard spring

    imagefleet discard --error UntrustedJobError
    """
    selection = _chosen(which, how)
    async with console.connected(settings) as fleet:
        await move(fleet, selection, None, how, "discarded", dead_letter_queue.discard)


def _chosen(which: JobFilter, how: How) -> Selection:
    """The failed jobs to move; raises SetupError without a choice."""
    if how.everything == (which != JobFilter()):
        raise SetupError(
            "choose the failed jobs: --all, or a CAMPAIGN[/ID], --error or --model"
        )
    return which.selection()


async def move(
    fleet: Fleet,
    selection: Selection,
    check: Check | None,
    how: How,
    verb: Verb,
    work: Callable[..., Awaitable[Swept]],
) -> None:
    """Shows what would be moved, asks, and has *work* move it; only the first for a dry run."""
    if how.dry_run or not how.yes:
        preview = await dead_letter_queue.preview(fleet.storage, selection, check)
        count = preview.kinds.total()
        if not (count or preview.refused):
            await _refuse_nothing(fleet, selection)
        if how.dry_run:
            failed_jobs.print_preview(
                preview, verb, console.stdout, as_json=how.as_json
            )
            return
        if count > (verb == "replayed"):
            failed_jobs.print_preview(preview, verb, console.stderr)
            jobs = console.counted(count, "job")
            console.confirm(
                f"Send {jobs} again?"
                if verb == "replayed"
                else f"Discard {jobs} for good?",
                yes=how.yes,
            )
    with console.counting(verb, None) as on:
        swept = await work(fleet.storage, selection, lambda count: on(done=count))
    if not (swept.done or swept.refused):
        await _refuse_nothing(fleet, selection)
    failed_jobs.report(verb, swept, as_json=how.as_json)


async def _refuse_nothing(fleet: Fleet, selection: Selection) -> None:
    """Raises SetupError where nothing was selected because what was named does not exist."""
    if selection.id is not None:
        raise failed_jobs.no_such_job(fleet, selection)
    await target.check_campaign(fleet.storage, selection.campaign)
