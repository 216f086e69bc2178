"""Failed jobs: described, exported and printed."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Literal

from rich.console import Console
from rich.table import Column

from cli import console
from imagefleet import concurrency, errors
from imagefleet.aio import Fleet
from imagefleet.job import message
from imagefleet.job.chain import STAGE_FIELD
from imagefleet.job.message import DELIVERIES_FIELD, DIGEST_FIELD, FAILURE_FIELD
from imagefleet.signing import SIGNATURE_FIELD
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Entry, Refused, Selection
from imagefleet.storage.dead_letter_queue import Preview, Swept
from imagefleet.storage.protocol import BlobStore

#: The reason given for a message that is in the poison queue by mistake.
NO_RECORD = "not a record of a failed job"

SHOWN = {
    "id",
    "campaign",
    "error",
    "reason",
    "attempts",
    "worker",
    "at",
    "stage",
    "source",
}

#: Kinds of failures that are counted apart: a reason may name what no other job has.
MOST_KINDS = 1000

#: What further kinds are counted as.
OTHERS = ("(others)", "--error narrows the list")

#: The most characters of a text in a preview: about two lines.
_TEXT_CHARACTERS = 150

Verb = Literal["replayed", "discarded"]


async def listing(
    fleet: Fleet, entries: AsyncIterator[Entry], limit: int
) -> tuple[Counter[tuple[str, str]], list[dict[str, Any]]]:
    """Counts failed jobs by error and reason, and describes the first of them."""
    kinds = Counter[tuple[str, str]]()
    jobs = list[dict[str, Any]]()
    check = fleet.checks_signatures() if fleet.keys.trusted else None
    async for some in dead_letter_queue.in_batches(entries):
        for entry in some:
            kind = (
                (entry.record.error, entry.record.reason)
                if entry.record
                else (NO_RECORD, "")
            )
            kinds[kind if kind in kinds or len(kinds) < MOST_KINDS else OTHERS] += 1
        shown = some[: limit - len(jobs)]
        works = (
            dead_letter_queue.is_completed(fleet.storage, entry) for entry in shown
        )
        for entry, is_completed in zip(
            shown, await concurrency.gather(*works), strict=True
        ):
            jobs.append({**facts(entry), "completed_since": is_completed})
            if check is not None:
                jobs[-1]["signed"] = await check.is_signed(entry, fleet.storage.blobs)
    return kinds, jobs


def no_such_job(fleet: Fleet, selection: Selection) -> errors.SetupError:
    job = message.job_key(selection.campaign, selection.id)
    return errors.SetupError(
        f"no failed job {job!r} in {fleet.storage.poison.name}; `imagefleet failed` lists those"
        " there"
    )


def facts(entry: Entry) -> dict[str, Any]:
    """A failed job without its message."""
    if entry.record is None:
        known = {"id": entry.message.id, "error": NO_RECORD}
    else:
        shown = SHOWN if entry.record.stages > 1 else SHOWN - {"stage"}
        known = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    return {**known, "message_id": entry.message.id}


async def whole(fleet: Fleet, entry: Entry) -> dict[str, Any]:
    """A failed job with its fields, or its message where that is not JSON."""
    job: object = entry.message.body
    try:
        if entry.record is not None:
            job = await entry.record.message(fleet.storage.blobs)
        job = json.loads(str(job))
    except errors.JobError as error:
        job = f"({error.message})"
    except (ValueError, RecursionError):
        pass
    return {**facts(entry), "job": job}


async def export(fleet: Fleet, entries: AsyncIterator[Entry]) -> None:
    """Prints whole jobs, one JSON object a line; with a key, only those that are signed."""
    count = unsigned = 0
    blobs = fleet.storage.blobs
    check = fleet.checks_signatures() if fleet.keys.trusted else None
    async for entry in entries:
        if check is not None and not await check.is_signed(entry, blobs):
            unsigned += 1
            continue
        try:
            job = await exported(entry, blobs)
        except errors.JobError as reason:
            console.print_warning(f"{entry.id} is left out: {reason.message}")
            continue
        console.print_json_line(job)
        count += 1
    console.print_note(f"{console.counted(count, 'failed job')} exported")
    if unsigned:
        console.print_warning(
            f"{unsigned:,} are left out: they are not signed with your key"
        )


async def exported(entry: Entry, blobs: BlobStore) -> dict[str, Any]:
    """A whole job to load, with why it failed; raises JobError if its message is lost or bad."""
    if entry.record is None:
        raise errors.JobError(f"it is {NO_RECORD}")
    if not (fields := message.fields_if_any(await entry.record.message(blobs))):
        raise errors.JobError("its message is no job in JSON")
    # A signature is of the fields as they were: a load signs the mended job. With another id its
    # first stage is not stored; with its own it is found, and the job goes on where it failed.
    for name in (
        DELIVERIES_FIELD,
        DIGEST_FIELD,
        SIGNATURE_FIELD,
        FAILURE_FIELD,
        STAGE_FIELD,
    ):
        fields.pop(name, None)
    named = {"id": entry.id}
    if entry.record.campaign != message.DEFAULT_CAMPAIGN:
        named["campaign"] = entry.record.campaign
    shown = SHOWN - {"id", "campaign", "stage"}
    reasons = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    # A job without an id took its message's: it stays the same job.
    given = {
        name: each
        for name, each in fields.items()
        if each is not None or name not in named
    }
    return named | given | {FAILURE_FIELD: reasons}


def report(verb: Verb, swept: Swept, *, as_json: bool) -> None:
    if as_json:
        record = {verb: swept.done, "refused": [asdict(each) for each in swept.refused]}
        console.print_json(
            record | ({"missing": swept.missing} if verb == "replayed" else {})
        )
        return
    console.print_plain(f"{console.counted(swept.done, 'failed job')} {verb}")
    others = [each for each in swept.refused if not each.is_unsigned]
    _print_staying(
        others, len(others), len(swept.refused) - len(others), console.stdout
    )
    if swept.missing:
        console.print_plain(
            f"{console.counted(swept.missing, 'failed job')} cannot be sent now: another command"
            " reads the poison queue, or their messages were deleted from it"
        )


def _print_staying(some: list[Refused], count: int, unsigned: int, to: Console) -> None:
    """The failed jobs that stay: *some* of *count*, and those that are not signed."""
    shown = some[: console.SCREEN_LINES]
    for refused in shown:
        console.print_plain(f"{refused.id} stays: {refused.reason}", to)
    console.print_more(count - len(shown), "others stay", to)
    if unsigned:
        # With a key, a message that is not signed came from somebody else, or before the key.
        is_or_are = "record is" if unsigned == 1 else "records are"
        console.print_plain(
            f"{unsigned:,} {is_or_are} not signed with your key: `imagefleet discard --unsigned`"
            " deletes what is not",
            to,
        )


def print_preview(
    preview: Preview, verb: Verb, to: Console, *, as_json: bool = False
) -> None:
    if as_json:
        record = {
            "count": preview.count,
            "jobs": _counted(preview.kinds, "campaign", "error"),
            "prompts": preview.prompts,
            "unsigned": preview.unsigned,
            "refused": preview.refused,
            "changes": [
                {**each, "from": json.loads(each["from"]), "to": json.loads(each["to"])}
                for each in _counted(preview.changes, "field", "from", "to")
            ],
        }
        console.print_json(record)
        return
    jobs = console.counted(preview.count, "failed job")
    console.print_plain(f"{jobs} would be {verb}", to)
    _print_counts(preview.kinds, "campaign", "error", to=to)
    _print_counts(preview.changes, "field", "from", "to", to=to)
    for prompt in preview.prompts:
        is_short = len(prompt) <= _TEXT_CHARACTERS
        console.print_plain(
            f"  {prompt if is_short else prompt[:_TEXT_CHARACTERS] + '…'}", to
        )
    _print_staying(preview.reasons, preview.refused, preview.unsigned, to)


def print_jobs(records: list[dict[str, Any]], *, as_json: bool) -> None:
    lines = (
        f"{name}: {value if isinstance(value, str) else console.json_text(value).rstrip()}"
        for record in records
        for name, value in record.items()
    )
    console.show({"jobs": records}, *lines, as_json=as_json)


def print_listing(
    kinds: Counter[tuple[str, str]],
    jobs: list[dict[str, Any]],
    unrecorded: int,
    *,
    as_json: bool,
) -> None:
    """Prints the counts and the first jobs; *unrecorded* messages were not counted, about."""
    count = kinds.total()
    if as_json:
        errors_found = _counted(kinds, "error", "reason")
        record = {
            "count": count,
            "errors": errors_found,
            "jobs": jobs,
            "unrecorded": unrecorded,
        }
        console.print_json(record)
        return
    console.print_plain(
        console.counted(count, "failed job") if count else "no failed jobs"
    )
    _print_counts(kinds, "error", "reason")
    if jobs:
        _print_jobs(jobs)
    if count > len(jobs):
        console.print_plain(f"the first {len(jobs):,} are shown (--limit)")
    if done := sum(job["completed_since"] for job in jobs):
        console.print_note(
            f"{console.counted(done, 'job')} of those shown completed since: `imagefleet"
            " discard --completed` takes such jobs off the list"
        )


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    rows = [
        {
            "job": message.job_key(
                job.get("campaign"), job["id"]
            ),  # as all commands take it
            "error": job["error"],
            "stage": job.get("stage"),
            "failed (UTC)": job.get("at", "")[5:16].replace("T", " "),
            "completed since": "yes" if job["completed_since"] else "",
            "signed": {True: "yes", False: "NO"}.get(job.get("signed", "")),
        }
        for job in jobs
    ]
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = ([row[name] for name in known] for row in rows)
    console.print_tables(
        "", console.table(*map(console.name_column, known), rows=cells)
    )


def _counted(kinds: Counter[Any], *names: str) -> list[dict[str, Any]]:
    """Counts as JSON, the most frequent first."""
    return [
        {**dict(zip(names, kind, strict=True)), "count": count}
        for kind, count in kinds.most_common()
    ]


def _print_counts(
    kinds: Counter[Any], *names: str, to: Console = console.stdout
) -> None:
    if not kinds:
        return
    columns = (
        console.name_column(names[0]),
        *(Column(name, overflow="fold") for name in names[1:]),
    )
    rows = ((count, *kind) for kind, count in kinds.most_common(console.SCREEN_LINES))
    table = console.table(console.number_column("count"), *columns, rows=rows)
    console.print_tables(table, to=to)
    console.print_more(
        len(kinds) - len(table.rows), "other kinds (--json lists them)", to
    )
