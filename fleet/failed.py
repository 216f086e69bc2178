"""`imagefleet failed`: list, replay and discard failed jobs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Column, Table

from fleet import console, options
from imagefleet import aio, errors
from imagefleet.storage.dead_letter_queue import Entry, Swept
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings

#: At most this many kinds of errors and refused messages are printed: about a screen.
_SHOWN = 20

_Verb = Literal["replayed", "discarded"]

_NO_RECORD = "not a record of a failed job"

app = typer.Typer(
    no_args_is_help=True,
    help="Failed jobs wait in the poison queue, each with its error, to be replayed or discarded.",
)

Error = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only errors with this text in their class or message."),
]
Campaign = Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this campaign.")]
JobId = Annotated[str | None, typer.Option("--id", metavar="ID", help="Only this job or message.")]
All = Annotated[bool, typer.Option("--all", help="All failed jobs.")]
DryRun = Annotated[bool, options.dry_run("the number of jobs")]


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    limit: Annotated[int, typer.Option(min=0, metavar="COUNT", help="Jobs to list.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists the first ones.

    imagefleet failed list

    imagefleet failed list --error lora --campaign spring --limit 100
    """
    which: aio.Which = {"error": error, "campaign": campaign, "id": job_id}
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
    records = console.run(_find(settings, job_id))
    if as_json:
        console.print_json({"jobs": records})
        return
    for record in records:
        table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None)
        for name, value in record.items():
            shown = value if isinstance(value, str) else console.json_text(value).rstrip()
            table.add_row(f"[bold]{name}[/bold]", console.untrusted(shown))
        console.print_tables(table)


@app.command(short_help="Puts failed jobs back into the job queue.")
@options.from_settings(StorageSettings)
def replay(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    everything: All = False,
    dry_run: DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Puts failed jobs back into the job queue; their attempts start from zero.

    imagefleet failed replay --error MissingFileError

    imagefleet failed replay --all --dry-run
    """
    which = _selection(error, campaign, job_id, everything=everything)
    _run("replayed", settings, which, dry_run=dry_run, as_json=as_json)


@app.command()
@options.from_settings(StorageSettings)
def discard(
    settings: StorageSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Deletes failed jobs for good.

    imagefleet failed discard --campaign spring

    imagefleet failed discard --all --yes
    """
    which = _selection(error, campaign, job_id, everything=everything)
    if not (yes or dry_run) and (count := console.run(_count(settings, which))):
        jobs = console.counted(count, "failed job")
        console.confirm(f"Discard {jobs} for good?", yes=yes)
    _run("discarded", settings, which, dry_run=dry_run, as_json=as_json)


def _selection(
    error: str | None, campaign: str | None, job_id: str | None, *, everything: bool
) -> aio.Which:
    if everything == any(each is not None for each in (error, campaign, job_id)):
        raise errors.SetupError(
            "choose the failed jobs: --all, or one or more of --error, --campaign and --id"
        )
    return {"error": error, "campaign": campaign, "id": job_id}


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


async def _find(settings: StorageSettings, job_id: str) -> list[dict[str, Any]]:
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


async def _sweep(verb: _Verb, settings: StorageSettings, which: aio.Which) -> Swept:
    async with console.connected(settings) as fleet:
        sweep = fleet.replay if verb == "replayed" else fleet.discard
        if not console.stderr.is_terminal:
            return await sweep(**which)
        with console.stderr.status("") as status:
            return await sweep(lambda count: status.update(f"{count:,} {verb}"), **which)


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


def _run(
    verb: _Verb, settings: StorageSettings, which: aio.Which, *, dry_run: bool, as_json: bool
) -> None:
    if dry_run:
        count = console.run(_count(settings, which))
        if as_json:
            console.print_json({"count": count})
        else:
            console.stdout.print(f"{console.counted(count, 'failed job')} would be {verb}")
        return
    swept = console.run(_sweep(verb, settings, which))
    if as_json:
        refused = [asdict(each) for each in swept.refused]
        console.print_json({verb: swept.done, "refused": refused})
        return
    console.stdout.print(f"{console.counted(swept.done, 'failed job')} {verb}")
    for each in swept.refused[:_SHOWN]:
        console.stdout.print(console.untrusted(f"{each.id} stays: {each.reason}"), soft_wrap=True)
    if len(swept.refused) > _SHOWN:
        console.stdout.print(f"and {len(swept.refused) - _SHOWN:,} others stay")


def _print_listing(listing: dict[str, Any]) -> None:
    kinds, jobs, count = listing["errors"], listing["jobs"], listing["count"]
    if not count:
        console.stdout.print("no failed jobs")
        return
    summary = console.table(
        console.number_column("count"),
        console.name_column("error"),
        Column("reason", overflow="fold"),
        title=console.counted(count, "failed job"),
    )
    for each in kinds[:_SHOWN]:
        summary.add_row(
            f"{each['count']:,}",
            console.untrusted(each["error"]),
            console.untrusted(each["reason"]),
        )
    console.print_tables(summary)
    if len(kinds) > _SHOWN:
        console.stdout.print(f"and {len(kinds) - _SHOWN:,} other errors (--json lists them)")
    if jobs:
        # `failed show` takes ids, `--campaign` campaigns and `--error` errors.
        names = map(console.name_column, ("id", "campaign", "error"))
        rows = console.table(*names, Column("failed (UTC)", no_wrap=True))
        for job in jobs:
            failed_at = job.get("failed_at", "")[5:16].replace("T", " ")
            cells = job["id"], job.get("campaign", ""), job["error"], failed_at
            rows.add_row(*map(console.untrusted, cells))
        console.print_tables("", rows)
    if count > len(jobs):
        console.stdout.print(f"the first {len(jobs):,} are shown (--limit)")
