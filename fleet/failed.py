"""`imagefleet failed`: look at the jobs that failed, put them back, or discard them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fleet import console, options
from imagefleet import errors
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter_queue import Entry, Selection, Swept
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

#: Kinds of errors in the summary, and refused messages that are named: a screen, no more.
_SHOWN = 20

_NO_RECORD = "no failed job's record"

app = typer.Typer(
    no_args_is_help=True,
    help="Failed jobs: they wait in the poison queue, each with its error, until somebody decides.",
)

Error = Annotated[
    str | None,
    typer.Option("--error", help="Only errors whose class or text has this in it."),
]
Campaign = Annotated[str | None, typer.Option("--campaign", help="Only jobs of this campaign.")]
Id = Annotated[str | None, typer.Option("--id", help="Only this job (or message).")]
All = Annotated[bool, typer.Option("--all", help="All failed jobs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many, and change nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(slots=True)
class Listing:
    """The failed jobs counted by error, and the first few of them."""

    count: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: Id = None,
    limit: Annotated[int, typer.Option(min=0, help="So many jobs, below the summary.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists the first of them.

    imagefleet failed list

    imagefleet failed list --error lora --campaign spring --limit 100
    """
    listing = console.run(_list(settings, Selection(error, campaign, job_id), limit))
    if as_json:
        console.print_json(
            {
                "count": listing.count,
                "errors": [
                    {"error": error, "reason": reason, "count": count}
                    for (error, reason), count in listing.errors.most_common()
                ],
                "jobs": [_record(entry) for entry in listing.entries],
            }
        )
    else:
        _print_listing(listing)


@app.command()
@options.from_settings(StorageSettings)
def show(
    settings: StorageSettings,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id, or the message's.")],
    as_json: AsJson = False,
) -> None:
    """Shows everything about one failed job, the job itself included.

    imagefleet failed show 3fbd0a1c
    """
    records = console.run(_show(settings, job_id))
    if as_json:
        console.print_json({"jobs": records})
        return
    for record in records:
        table = Table(show_header=False, box=None)
        for name, value in record.items():
            shown = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
            )
            table.add_row(f"[bold]{name}[/bold]", _plain(shown))
        console.stdout.print(table)


@app.command()
@options.from_settings(StorageSettings)
def replay(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: Id = None,
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Puts failed jobs back into the job queue, their attempts counted from the beginning.

    imagefleet failed replay --error MissingFileError

    imagefleet failed replay --all --dry-run
    """
    selection = _selection(error, campaign, job_id, everything=everything)
    if dry_run:
        _print_count("would be replayed", console.run(_count(settings, selection)), as_json=as_json)
        return
    _print_swept("replayed", console.run(_replay(settings, selection)), as_json=as_json)


@app.command()
@options.from_settings(StorageSettings)
def discard(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: Id = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Deletes failed jobs for good.

    imagefleet failed discard --campaign spring

    imagefleet failed discard --all --yes
    """
    selection = _selection(error, campaign, job_id, everything=everything)
    if dry_run or not yes:
        if not dry_run and not sys.stdin.isatty():
            raise errors.SetupError("discard deletes for good: add --yes where nobody can be asked")
        count = console.run(_count(settings, selection))
        if dry_run:
            _print_count("would be discarded", count, as_json=as_json)
            return
        if not typer.confirm(f"Discard {console.counted(count, 'failed job')} for good?", err=True):
            return
    _print_swept("discarded", console.run(_discard(settings, selection)), as_json=as_json)


def _selection(
    error: str | None, campaign: str | None, job_id: str | None, *, everything: bool
) -> Selection:
    selection = Selection(error, campaign, job_id)
    if everything == (selection != Selection()):
        raise errors.SetupError(
            "say which failed jobs: --error, --campaign or --id (together they narrow), or --all"
        )
    return selection


@contextlib.asynccontextmanager
async def _storage(settings: StorageSettings) -> AsyncIterator[Storage]:
    async with open_storage(settings) as storage:
        await storage.check()
        yield storage


async def _list(settings: StorageSettings, selection: Selection, limit: int) -> Listing:
    listing = Listing()
    async with _storage(settings) as storage:
        async for entry in dead_letter_queue.browse(storage, selection):
            record = entry.record
            kind = (record.error, record.reason) if record else (_NO_RECORD, "")
            listing.errors[kind] += 1
            listing.count += 1
            if len(listing.entries) < limit:
                listing.entries.append(entry)
    return listing


async def _show(settings: StorageSettings, job_id: str) -> list[dict[str, Any]]:
    async with _storage(settings) as storage:
        selection = Selection(id=job_id)
        records = [
            {**_record(entry), "job": await _job(entry, storage)}
            async for entry in dead_letter_queue.browse(storage, selection)
        ]
        if not records:
            raise errors.SetupError(
                f"no failed job {job_id!r} is to be seen in {storage.poison.name}"
            )
    return records


async def _count(settings: StorageSettings, selection: Selection) -> int:
    async with _storage(settings) as storage:
        return sum([1 async for _ in dead_letter_queue.browse(storage, selection)])


async def _replay(settings: StorageSettings, selection: Selection) -> Swept:
    async with _storage(settings) as storage:
        with _counter("replayed") as show_count:
            return await dead_letter_queue.replay(storage, selection, show_count)


async def _discard(settings: StorageSettings, selection: Selection) -> Swept:
    async with _storage(settings) as storage:
        with _counter("discarded") as show_count:
            return await dead_letter_queue.discard(storage, selection, show_count)


async def _job(entry: Entry, storage: Storage) -> object:
    """The job's fields; or its message as it is, where that is no JSON."""
    body = entry.message.body
    if entry.record is not None:
        try:
            body = await entry.record.message(storage.blobs)
        except errors.JobError as error:
            return f"({error.message})"
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _record(entry: Entry) -> dict[str, Any]:
    """What is known of a failed job, without the job."""
    if entry.record is None:
        known = {"id": entry.message.id, "error": _NO_RECORD}
    else:
        hidden = {"body", "packed_body", "body_blob"}
        known = entry.record.model_dump(mode="json", exclude=hidden, exclude_none=True)
    return {**known, "message_id": entry.message.id}


@contextlib.contextmanager
def _counter(verb: str) -> Iterator[dead_letter_queue.OnProgress | None]:
    if not console.stderr.is_terminal:
        yield None
        return
    with console.stderr.status("") as status:
        yield lambda count: status.update(f"{count:,} {verb}")


def _print_listing(listing: Listing) -> None:
    if not listing.count:
        console.stdout.print("no failed jobs")
        return
    summary = Table(
        title=console.counted(listing.count, "failed job"), title_justify="left", title_style="bold"
    )
    summary.add_column("count", justify="right")
    summary.add_column("error")
    summary.add_column("reason", overflow="fold")
    for (error, reason), count in listing.errors.most_common(_SHOWN):
        summary.add_row(f"{count:,}", _plain(error), _plain(reason))
    console.stdout.print(summary)
    others = len(listing.errors) - _SHOWN
    if others > 0:
        console.stdout.print(f"and {others:,} other errors (--json lists them)")
    if listing.entries:
        console.stdout.print(_rows(listing.entries))
    if listing.count > len(listing.entries):
        console.stdout.print(f"the first {len(listing.entries):,} are shown (--limit)")


def _rows(entries: list[Entry]) -> Table:
    """One line each, whole ids first: they are what `failed show` takes."""
    rows = Table(box=None)
    for heading in ("id", "campaign", "error", "failed (UTC)"):
        rows.add_column(heading, no_wrap=True)
    for entry in entries:
        record = entry.record
        if record is None:
            rows.add_row(_plain(entry.message.id), "", _NO_RECORD)
        else:
            failed_at = f"{record.failed_at:%m-%d %H:%M}"
            rows.add_row(
                _plain(record.id), _plain(record.campaign or ""), _plain(record.error), failed_at
            )
    return rows


def _print_count(verb: str, count: int, *, as_json: bool) -> None:
    if as_json:
        console.print_json({"count": count})
    else:
        console.stdout.print(f"{console.counted(count, 'failed job')} {verb}")


def _print_swept(verb: str, swept: Swept, *, as_json: bool) -> None:
    if as_json:
        refused = [asdict(each) for each in swept.refused]
        console.print_json({verb: swept.done, "refused": refused})
        return
    console.stdout.print(f"{console.counted(swept.done, 'failed job')} {verb}")
    for each in swept.refused[:_SHOWN]:
        console.stdout.print(_plain(f"{each.id} stays: {each.reason}"), soft_wrap=True)
    if len(swept.refused) > _SHOWN:
        console.stdout.print(f"and {len(swept.refused) - _SHOWN:,} others stay")


def _plain(text: str) -> Text:
    """Text of a stranger's: neither markup nor a terminal's control sequences take effect."""
    return Text("".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text))
