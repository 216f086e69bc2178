"""`imagefleet failed`: list, replay and discard failed jobs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from fleet import console, options
from imagefleet import aio, errors
from imagefleet.storage.dead_letter import Entry
from imagefleet.storage.dead_letter_queue import Preview, Refused, Swept
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import (
    Priority,
    SignerSettings,
    StorageSettings,
    checked_priority,
)

#: At most this many kinds of errors and refused messages are printed: about a screen.
_SHOWN = 20

#: Of a prompt in a preview: about two lines.
_PROMPT_CHARACTERS = 150

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
DryRun = Annotated[bool, options.dry_run("what would be moved or deleted")]


@app.command("list")
@options.from_settings(SignerSettings)
def list_command(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    limit: Annotated[int, typer.Option(min=0, metavar="COUNT", help="Jobs to list.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Counts the failed jobs by error and lists the first ones.

    With a signing or trusted key it says which of them are signed.

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
@options.from_settings(SignerSettings)
def replay(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    everything: All = False,
    priority: options.JobPriority = "normal",
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

    Each must be a valid job; with a signing or trusted key it must be signed. Shows what would be
    sent, and asks, if it is more than one job.

    imagefleet failed replay --error MissingFileError

    imagefleet failed replay --all --dry-run
    """
    which = _selection(error, campaign, job_id, everything=everything)
    chosen = checked_priority(priority)
    if dry_run or not yes:
        preview = console.run(_preview(settings, which, invalid=invalid))
        if dry_run and as_json:
            console.print_json(_as_record(preview))
            return
        if dry_run:
            _print_preview(preview, console.stdout)
            return
        if preview.count > 1:
            _print_preview(preview, console.stderr)
            jobs = console.counted(preview.count, "failed job")
            console.confirm(f"Send {jobs} again?", yes=yes)
    swept = console.run(_replay(settings, which, chosen, invalid=invalid))
    _report("replayed", swept, as_json=as_json)


@app.command()
@options.from_settings(SignerSettings)
def discard(
    settings: SignerSettings,
    error: Error = None,
    campaign: Campaign = None,
    job_id: JobId = None,
    everything: All = False,
    unsigned: Annotated[
        bool,
        typer.Option("--unsigned", help="Only what is not signed with a key of yours."),
    ] = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Deletes failed jobs for good.

    imagefleet failed discard --campaign spring

    imagefleet failed discard --all --yes

    imagefleet failed discard --unsigned
    """
    which = _selection(error, campaign, job_id, everything=everything, unsigned=unsigned)
    if dry_run or not yes:
        count = console.run(_count(settings, which, unsigned=unsigned))
        jobs = console.counted(count, "failed job")
        if dry_run:
            if as_json:
                console.print_json({"count": count})
            else:
                console.stdout.print(f"{jobs} would be discarded")
            return
        if count:
            console.confirm(f"Discard {jobs} for good?", yes=yes)
    swept = console.run(_discard(settings, which, unsigned=unsigned))
    _report("discarded", swept, as_json=as_json)


def _selection(
    error: str | None,
    campaign: str | None,
    job_id: str | None,
    *,
    everything: bool,
    unsigned: bool = False,
) -> aio.Which:
    has_filter = any(each is not None for each in (error, campaign, job_id))
    if (everything and has_filter) or not (everything or has_filter or unsigned):
        raise errors.SetupError(
            "choose the failed jobs: --all, or one or more of --error, --campaign and --id"
        )
    return {"error": error, "campaign": campaign, "id": job_id}


async def _list(settings: StorageSettings, which: aio.Which, limit: int) -> dict[str, Any]:
    """The failed jobs counted by error, and the first of them."""
    kinds = Counter[tuple[str, str]]()
    jobs: list[dict[str, Any]] = []
    async with console.connected(settings) as fleet:
        check = fleet.checks_signatures() if fleet.keys.trusted else None
        async for entry in fleet.failed(**which):
            record = entry.record
            kinds[(record.error, record.reason) if record else (_NO_RECORD, "")] += 1
            if len(jobs) < limit:
                jobs.append(_record(entry))
                if check is not None:
                    jobs[-1]["signed"] = await check.is_signed(entry, fleet.storage.blobs)
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


async def _count(settings: SignerSettings, which: aio.Which, *, unsigned: bool) -> int:
    async with console.connected(settings) as fleet:
        check, blobs = fleet.checks_signatures() if unsigned else None, fleet.storage.blobs
        found = [
            entry.message.id
            async for entry in fleet.failed(**which)
            if check is None or not await check.is_signed(entry, blobs)
        ]
        return len(found)


async def _preview(settings: SignerSettings, which: aio.Which, *, invalid: bool) -> Preview:
    async with console.connected(settings) as fleet:
        return await fleet.preview_replay(invalid=invalid, **which)


async def _replay(
    settings: SignerSettings, which: aio.Which, priority: Priority, *, invalid: bool
) -> Swept:
    async with console.connected(settings) as fleet:
        with _counting("replayed") as show:
            return await fleet.replay(show, invalid=invalid, priority=priority, **which)


async def _discard(settings: SignerSettings, which: aio.Which, *, unsigned: bool) -> Swept:
    async with console.connected(settings) as fleet:
        with _counting("discarded") as show:
            return await fleet.discard(show, unsigned=unsigned, **which)


@contextlib.contextmanager
def _counting(verb: _Verb) -> Iterator[Callable[[int], None] | None]:
    """Shows the jobs so far on a terminal."""
    if not console.stderr.is_terminal:
        yield None
        return
    with console.stderr.status("") as status:
        yield lambda count: status.update(f"{count:,} {verb}")


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


def _report(verb: _Verb, swept: Swept, *, as_json: bool) -> None:
    if as_json:
        refused = [asdict(each) for each in swept.refused]
        console.print_json({verb: swept.done, "refused": refused})
        return
    console.stdout.print(f"{console.counted(swept.done, 'failed job')} {verb}")
    others = [each for each in swept.refused if not each.is_unsigned]
    _print_staying(others, len(others), len(swept.refused) - len(others), console.stdout)


def _print_staying(some: list[Refused], count: int, unsigned: int, to: Console) -> None:
    """The failed jobs that stay: *some* of *count*, and those that are not signed."""
    for each in some[:_SHOWN]:
        to.print(console.untrusted(f"{each.id} stays: {each.reason}"), soft_wrap=True)
    if (more := count - len(some[:_SHOWN])) > 0:
        to.print(f"and {more:,} others stay")
    if unsigned:
        # With a key, a message that is not signed came from somebody else, or before the key.
        is_or_are = "record is" if unsigned == 1 else "records are"
        to.print(
            f"{unsigned:,} {is_or_are} not signed with your key:"
            " `imagefleet failed discard --unsigned` deletes what is not",
            soft_wrap=True,
        )


def _as_record(preview: Preview) -> dict[str, Any]:
    return {
        "count": preview.count,
        "jobs": [
            {"campaign": campaign, "error": error, "count": count}
            for (campaign, error), count in preview.kinds.most_common()
        ],
        "prompts": preview.prompts,
        "unsigned": preview.unsigned,
        "refused": preview.refused,
    }


def _print_preview(preview: Preview, to: Console) -> None:
    jobs = console.counted(preview.count, "failed job")
    to.print(f"{jobs} would be replayed")
    if preview.count:
        kinds = console.table(
            console.number_column("count"),
            console.name_column("campaign"),
            console.name_column("error"),
        )
        for (campaign, error), count in preview.kinds.most_common(_SHOWN):
            kinds.add_row(
                f"{count:,}", console.untrusted(campaign or "-"), console.untrusted(error)
            )
        console.print_tables(kinds, to=to)
        if (more := len(preview.kinds) - _SHOWN) > 0:
            to.print(f"and {more:,} other kinds (--json lists them)")
    for prompt in preview.prompts:
        shown = prompt if len(prompt) <= _PROMPT_CHARACTERS else prompt[:_PROMPT_CHARACTERS] + "…"
        to.print(console.untrusted(f"  {shown}"), soft_wrap=True)
    _print_staying(preview.reasons, preview.refused, preview.unsigned, to)


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
        signed = [Column("signed")] if "signed" in jobs[0] else []
        rows = console.table(*names, Column("failed (UTC)", no_wrap=True), *signed)
        for job in jobs:
            failed_at = job.get("failed_at", "")[5:16].replace("T", " ")
            cells = [job["id"], job.get("campaign", ""), job["error"], failed_at]
            cells += ["yes" if job["signed"] else "NO"] if signed else []
            rows.add_row(*map(console.untrusted, cells))
        console.print_tables("", rows)
    if count > len(jobs):
        console.stdout.print(f"the first {len(jobs):,} are shown (--limit)")
