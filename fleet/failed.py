"""`imagefleet failed`: list, replay and discard failed jobs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fleet import console, options
from imagefleet import aio, errors
from imagefleet.storage.dead_letter_queue import Entry, OnProgress, Swept
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings

#: At most this many kinds of errors and refused messages are printed: about a screen.
_SHOWN = 20

_NO_RECORD = "not a record of a failed job"

app = typer.Typer(
    no_args_is_help=True,
    help="Failed jobs wait in the poison queue, each with its error, to be replayed or discarded.",
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the number of jobs and stop.")]

Sweep = Callable[[aio.Fleet, OnProgress | None], Awaitable[Swept]]


def _filters(
    error: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only errors with this text in their class or message."),
    ] = None,
    campaign: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only jobs of this campaign.")
    ] = None,
    job_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only this job or message.")
    ] = None,
) -> aio.Which:
    return {"error": error, "campaign": campaign, "id": job_id}


@options.from_function(_filters)
def _selection(
    which: aio.Which,
    everything: Annotated[bool, typer.Option("--all", help="All failed jobs.")] = False,
) -> aio.Which:
    if everything == any(each is not None for each in which.values()):
        raise errors.SetupError(
            "choose the failed jobs: --all, or one or more of --error, --campaign and --id"
        )
    return which


@app.command("list")
@options.from_settings(StorageSettings)
@options.from_function(_filters)
def list_command(
    which: aio.Which,
    settings: StorageSettings,
    limit: Annotated[int, typer.Option(min=0, metavar="COUNT", help="Jobs to list.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists the first ones.

    imagefleet failed list

    imagefleet failed list --error lora --campaign spring --limit 100
    """
    listing = console.run(_list(settings, which, limit))
    if as_json:
        console.print_json(listing)
    else:
        _print_listing(listing)


@app.command()
@options.from_settings(StorageSettings)
def show(
    settings: StorageSettings,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the job or message.")],
    as_json: options.AsJson = False,
) -> None:
    """Shows a failed job with its error and its message.

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


@app.command(short_help="Puts failed jobs back into the job queue.")
@options.from_settings(StorageSettings)
@options.from_function(_selection)
def replay(
    which: aio.Which,
    settings: StorageSettings,
    dry_run: DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Puts failed jobs back into the job queue; their attempts start from zero.

    imagefleet failed replay --error MissingFileError

    imagefleet failed replay --all --dry-run
    """
    if dry_run:
        _print_count("would be replayed", settings, which, as_json=as_json)
    else:
        _sweep("replayed", settings, partial(aio.Fleet.replay, **which), as_json=as_json)


@app.command()
@options.from_settings(StorageSettings)
@options.from_function(_selection)
def discard(
    which: aio.Which,
    settings: StorageSettings,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Deletes failed jobs for good.

    imagefleet failed discard --campaign spring

    imagefleet failed discard --all --yes
    """
    if dry_run:
        _print_count("would be discarded", settings, which, as_json=as_json)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise errors.SetupError("discard deletes for good; without a terminal it needs --yes")
        jobs = console.counted(console.run(_count(settings, which)), "failed job")
        if not typer.confirm(f"Discard {jobs} for good?", err=True):
            return
    _sweep("discarded", settings, partial(aio.Fleet.discard, **which), as_json=as_json)


async def _list(settings: StorageSettings, which: aio.Which, limit: int) -> dict[str, Any]:
    """The failed jobs counted by error, and the first of them."""
    kinds = Counter[tuple[str, str]]()
    jobs: list[dict[str, Any]] = []
    async with console.connected(settings) as fleet:
        async for entry in fleet.failed(**which):
            record = entry.record
            kinds[(record.error, record.reason) if record else (_NO_RECORD, "")] += 1
            if len(jobs) < limit:
                jobs.append(_record(entry))
    counts = [
        {"error": error, "reason": reason, "count": count}
        for (error, reason), count in kinds.most_common()
    ]
    return {"count": kinds.total(), "errors": counts, "jobs": jobs}


async def _show(settings: StorageSettings, job_id: str) -> list[dict[str, Any]]:
    async with console.connected(settings) as fleet:
        records = [
            {**_record(entry), "job": await _job(entry, fleet.storage.blobs)}
            async for entry in fleet.failed(id=job_id)
        ]
        if not records:
            raise errors.SetupError(f"no failed job {job_id!r} in {fleet.storage.poison.name}")
    return records


async def _count(settings: StorageSettings, which: aio.Which) -> int:
    async with console.connected(settings) as fleet:
        return sum([1 async for _ in fleet.failed(**which)])


def _sweep(verb: str, settings: StorageSettings, sweep: Sweep, *, as_json: bool) -> None:
    async def run() -> Swept:
        async with console.connected(settings) as fleet:
            with _progress(verb) as on_progress:
                return await sweep(fleet, on_progress)

    swept = console.run(run())
    if as_json:
        refused = [asdict(each) for each in swept.refused]
        console.print_json({verb: swept.done, "refused": refused})
        return
    console.stdout.print(f"{console.counted(swept.done, 'failed job')} {verb}")
    for each in swept.refused[:_SHOWN]:
        console.stdout.print(_plain(f"{each.id} stays: {each.reason}"), soft_wrap=True)
    if len(swept.refused) > _SHOWN:
        console.stdout.print(f"and {len(swept.refused) - _SHOWN:,} others stay")


async def _job(entry: Entry, blobs: BlobStore) -> object:
    """The job's fields, or its message where that is not JSON."""
    body = entry.message.body
    if entry.record is not None:
        try:
            body = await entry.record.message(blobs)
        except errors.JobError as error:
            return f"({error.message})"
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _record(entry: Entry) -> dict[str, Any]:
    """A failed job without its message."""
    if entry.record is None:
        known = {"id": entry.message.id, "error": _NO_RECORD}
    else:
        hidden = {"body", "packed_body", "body_blob"}
        known = entry.record.model_dump(mode="json", exclude=hidden, exclude_none=True)
    return {**known, "message_id": entry.message.id}


@contextlib.contextmanager
def _progress(verb: str) -> Iterator[OnProgress | None]:
    if not console.stderr.is_terminal:
        yield None
        return
    with console.stderr.status("") as status:
        yield lambda count: status.update(f"{count:,} {verb}")


def _print_listing(listing: dict[str, Any]) -> None:
    kinds, jobs, count = listing["errors"], listing["jobs"], listing["count"]
    if not count:
        console.stdout.print("no failed jobs")
        return
    title = console.counted(count, "failed job")
    summary = Table(title=title, title_justify="left", title_style="bold")
    summary.add_column("count", justify="right")
    summary.add_column("error")
    summary.add_column("reason", overflow="fold")
    for each in kinds[:_SHOWN]:
        summary.add_row(f"{each['count']:,}", _plain(each["error"]), _plain(each["reason"]))
    console.stdout.print(summary)
    if len(kinds) > _SHOWN:
        console.stdout.print(f"and {len(kinds) - _SHOWN:,} other errors (--json lists them)")
    if jobs:
        rows = Table(box=None)
        for heading in ("id", "campaign", "error", "failed (UTC)"):
            rows.add_column(heading, no_wrap=True)  # whole ids: `failed show` takes them
        for job in jobs:
            failed_at = job.get("failed_at", "")[5:16].replace("T", " ")
            cells = job["id"], job.get("campaign", ""), job["error"], failed_at
            rows.add_row(*map(_plain, cells))
        console.stdout.print(rows)
    if count > len(jobs):
        console.stdout.print(f"the first {len(jobs):,} are shown (--limit)")


def _print_count(verb: str, settings: StorageSettings, which: aio.Which, *, as_json: bool) -> None:
    count = console.run(_count(settings, which))
    if as_json:
        console.print_json({"count": count})
    else:
        console.stdout.print(f"{console.counted(count, 'failed job')} {verb}")


def _plain(text: str) -> Text:
    """Untrusted text: neither markup nor a terminal's control sequences take effect."""
    return Text("".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text))
