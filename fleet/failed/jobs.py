"""Failed jobs: described, exported and printed."""

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Literal

from rich.console import Console

from cli import console
from imagefleet.aio import Fleet
from imagefleet.errors import JobError, SetupError
from imagefleet.job import message
from imagefleet.job.chain import STAGE_FIELD
from imagefleet.job.message import DELIVERIES_FIELD, DIGEST_FIELD, FAILURE_FIELD
from imagefleet.records.record import Record
from imagefleet.signing import SIGNATURE_FIELD
from imagefleet.storage.dead_letter import Refused, Selection
from imagefleet.storage.dead_letter_queue import Preview, Swept
from imagefleet.validation import JSONDict

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

#: Failed jobs by error and reason, or by campaign and error.
Kinds = Counter[tuple[str, str]]

Verb = Literal["replayed", "discarded"]


async def listing(
    fleet: Fleet, records: AsyncIterator[Record], limit: int
) -> tuple[Kinds, list[JSONDict]]:
    """Counts failed jobs by error and reason, and describes the first of them."""
    kinds = Kinds()
    jobs = list[JSONDict]()
    check = fleet.check()
    async for record in records:
        kind = record.error or "", record.reason or ""
        kinds[kind if kind in kinds or len(kinds) < MOST_KINDS else OTHERS] += 1
        if len(jobs) < limit:
            jobs.append(facts(record))
            if check.trusted is not None:
                jobs[-1]["signed"] = check.is_signed(record)
    return kinds, jobs


def no_such_job(fleet: Fleet, selection: Selection) -> SetupError:
    job = message.job_key(selection.campaign, selection.id)
    if selection.keep:
        return SetupError(f"no dropped job {job!r} that the rule may keep")
    return SetupError(
        f"no failed job {job!r} in {fleet.storage.poison.name}; `imagefleet failed` lists those"
        " there"
    )


def facts(record: Record) -> JSONDict:
    """A failed job without its message."""
    shown = SHOWN if record.stages > 1 else SHOWN - {"stage"}
    return record.model_dump(mode="json", include=shown, exclude_none=True)


def whole(record: Record) -> JSONDict:
    """A failed job with its fields, or its message where that is not JSON."""
    job = record.body
    with contextlib.suppress(ValueError, RecursionError):
        job = json.loads(str(job))
    return {**facts(record), "job": job}


async def export(fleet: Fleet, records: AsyncIterator[Record]) -> None:
    """Prints whole jobs, one JSON object a line; with a key, only those that are signed."""
    count = unsigned = 0
    check = fleet.check()
    async for record in records:
        if check.trusted is not None and not check.is_signed(record):
            unsigned += 1
            continue
        try:
            job = exported(record)
        except JobError as reason:
            console.print_warning(f"{record.id} is left out: {reason.message}")
            continue
        console.print_json_line(job)
        count += 1
    console.print_note(f"{console.counted(count, 'failed job')} exported")
    if unsigned:
        console.print_warning(
            f"{unsigned:,} are left out: they are not signed with your key"
        )


def exported(record: Record) -> JSONDict:
    """A whole job to load, with why it failed; raises JobError if its message is no JSON."""
    if not (fields := message.fields_if_any(record.body or "")):
        raise JobError("its message is no job in JSON")
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
    named = {"id": record.id}
    if record.campaign != message.DEFAULT_CAMPAIGN:
        named["campaign"] = record.campaign
    reasons = record.model_dump(
        mode="json", include=SHOWN - {"id", "campaign", "stage"}, exclude_none=True
    )
    # A job without an id took its message's: it stays the same job.
    given = {
        name: each
        for name, each in fields.items()
        if each is not None or name not in named
    }
    return named | given | {FAILURE_FIELD: reasons}


def report(verb: Verb, swept: Swept, *, as_json: bool) -> None:
    if as_json:
        console.print_json(
            {verb: swept.done, "refused": [asdict(each) for each in swept.refused]}
        )
        return
    console.print_plain(f"{console.counted(swept.done, 'job')} {verb}")
    _print_staying(swept.refused, len(swept.refused), console.stdout)


def _print_staying(some: list[Refused], count: int, to: Console) -> None:
    """The failed jobs that stay: *some* of *count*."""
    shown = some[: console.SCREEN_LINES]
    for refused in shown:
        console.print_plain(f"{refused.id} stays: {refused.reason}", to)
    console.print_more(count - len(shown), "others stay", to)


def print_preview(
    preview: Preview, verb: Verb, to: Console, *, as_json: bool = False
) -> None:
    count = preview.kinds.total()
    if as_json:
        console.print_json(
            {
                "count": count,
                "jobs": _counted(preview.kinds, "campaign", "error"),
                "prompts": preview.prompts,
                "refused": preview.refused,
            }
        )
        return
    console.print_plain(f"{console.counted(count, 'job')} would be {verb}", to)
    _print_counts(preview.kinds, "campaign", "error", to=to)
    for prompt in preview.prompts:
        is_long = len(prompt) > _TEXT_CHARACTERS
        console.print_plain(f"  {prompt[:_TEXT_CHARACTERS]}{'…' * is_long}", to)
    _print_staying(preview.reasons, preview.refused, to)


def print_jobs(records: list[JSONDict], *, as_json: bool) -> None:
    lines = (
        f"{name}: {value if isinstance(value, str) else console.json_text(value).rstrip()}"
        for record in records
        for name, value in record.items()
    )
    console.show({"jobs": records}, *lines, as_json=as_json)


def print_listing(kinds: Kinds, jobs: list[JSONDict], *, as_json: bool) -> None:
    """Prints the counts and the first jobs."""
    count = kinds.total()
    if as_json:
        console.print_json(
            {"count": count, "errors": _counted(kinds, "error", "reason"), "jobs": jobs}
        )
        return
    console.print_plain(
        console.counted(count, "failed job") if count else "no failed jobs"
    )
    _print_counts(kinds, "error", "reason")
    if jobs:
        _print_jobs(jobs)
    if count > len(jobs):
        console.print_plain(f"the first {len(jobs):,} are shown (--limit)")


def _print_jobs(jobs: list[JSONDict]) -> None:
    rows = [
        {
            # As all commands take it.
            "job": message.job_key(job.get("campaign"), job["id"]),
            "error": job["error"],
            "stage": job.get("stage"),
            "failed (UTC)": job["at"][5:16].replace("T", " "),
            "signed": {True: "yes", False: "NO"}.get(job.get("signed", "")),
        }
        for job in jobs
    ]
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = ([row[name] for name in known] for row in rows)
    console.print_tables("", console.table(known, rows=cells))


def _counted(kinds: Kinds, *names: str) -> list[JSONDict]:
    """Counts as JSON, the most frequent first."""
    return [
        {**dict(zip(names, kind, strict=True)), "count": count}
        for kind, count in kinds.most_common()
    ]


def _print_counts(kinds: Kinds, *names: str, to: Console = console.stdout) -> None:
    if not kinds:
        return
    first, second = names
    rows = (
        (kind[0], count, kind[1])
        for kind, count in kinds.most_common(console.SCREEN_LINES)
    )
    table = console.table([first], ["count"], [second], rows=rows)
    console.print_tables(table, to=to)
    console.print_more(
        len(kinds) - len(table.rows), "other kinds (--json lists them)", to
    )
