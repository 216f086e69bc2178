"""Failed jobs: read by their records or by the messages of the poison queue, and printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table

from fleet import console
from imagefleet import errors
from imagefleet.aio import Fleet
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    DELIVERIES_FIELD,
    FAILURE_FIELD,
    SIGNATURE_FIELD,
    fields_if_any,
    job_key,
)
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Entry, Selection
from imagefleet.storage.dead_letter_queue import Preview, Refused, Swept
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore

#: The reason given for a message that is in the poison queue by mistake.
NO_RECORD = "not a record of a failed job"

#: The fields of a failure that are shown.
SHOWN = {"id", "campaign", "error", "reason", "attempts", "worker", "at", "stage", "source"}

#: Kinds of failures that are counted apart: a reason may name what no other job has.
MOST_KINDS = 1000

#: Jobs whose images are looked for at the same time.
_LOOKED_UP = 32


@dataclass(slots=True)
class Listing:
    """The failed jobs counted by error, and the first of them."""

    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    others: int = 0
    """Failed jobs of further kinds, beyond those that are counted apart."""
    jobs: list[dict[str, Any]] = field(default_factory=list)
    unrecorded: int = 0
    """Messages of the poison queue that were not counted, about; 0 where these were."""

    @property
    def count(self) -> int:
        return self.errors.total() + self.others

    def add(self, kind: tuple[str, str]) -> None:
        """Counts a failed job."""
        if kind in self.errors or len(self.errors) < MOST_KINDS:
            self.errors[kind] += 1
        else:
            self.others += 1

    def as_record(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "errors": [
                {"error": error, "reason": reason, "count": count}
                for (error, reason), count in self.errors.most_common()
            ],
            "other_errors": self.others,
            "jobs": self.jobs,
            "unrecorded": self.unrecorded,
        }


def entries(fleet: Fleet, selection: Selection, *, from_queue: bool) -> AsyncIterator[Entry]:
    """The selected failed jobs."""
    if from_queue:
        return dead_letter_queue.browse(fleet.storage, selection)
    return dead_letter_queue.recorded(fleet.storage, selection)


async def listing(fleet: Fleet, selection: Selection, limit: int, *, from_queue: bool) -> Listing:
    """Counts the selected failed jobs, and describes the first of them."""
    found = Listing()
    shown: list[Entry] = []
    check = fleet.checks_signatures() if fleet.keys.trusted else None
    async for entry in entries(fleet, selection, from_queue=from_queue):
        record = entry.record
        found.add((record.error, record.reason) if record else (NO_RECORD, ""))
        if len(found.jobs) < limit:
            shown.append(entry)
            found.jobs.append(facts(entry))
            if check is not None:
                found.jobs[-1]["signed"] = await check.is_signed(entry, fleet.storage.blobs)
    for start in range(0, len(shown), _LOOKED_UP):
        some = shown[start : start + _LOOKED_UP]
        done = await dead_letter_queue.are_completed(fleet.storage, some)
        for job, is_completed in zip(found.jobs[start:], done, strict=False):
            job["completed_since"] = is_completed
    if not from_queue:
        found.unrecorded = await dead_letter_queue.unrecorded(fleet.storage)
    return found


async def find(fleet: Fleet, selection: Selection, *, from_queue: bool) -> list[dict[str, Any]]:
    """The selected failed jobs, each with its message; raises SetupError if there is none."""
    blobs = fleet.storage.blobs
    found = [
        {**facts(entry), "job": await _job(entry, blobs)}
        async for entry in entries(fleet, selection, from_queue=from_queue)
    ]
    if not found:
        hint = ""
        if not from_queue and (count := await dead_letter_queue.unrecorded(fleet.storage)):
            hint = f"; {count:,} messages there have no record: add --from-queue to look at them"
        raise errors.SetupError(no_such_job(selection, fleet.storage) + hint)
    return found


def no_such_job(selection: Selection, storage: Storage) -> str:
    job = job_key(selection.campaign, selection.id)
    return f"no failed job {job!r} in {storage.poison.name}; `imagefleet failed` lists those there"


def facts(entry: Entry) -> dict[str, Any]:
    """A failed job without its message."""
    if entry.record is None:
        known = {"id": entry.message.id, "error": NO_RECORD}
    else:
        shown = SHOWN if entry.record.stages > 1 else SHOWN - {"stage"}
        known = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    return {**known, "message_id": entry.message.id}


async def exported(entry: Entry, blobs: BlobStore) -> dict[str, Any]:
    """A whole job to load, with why it failed; raises JobError if its message is lost or bad."""
    if entry.record is None:
        raise errors.JobError(f"it is {NO_RECORD}")
    if not (fields := fields_if_any(await entry.record.message(blobs))):
        raise errors.JobError("its message is no job in JSON")
    # A signature is of the fields as they were: a load signs the mended job.
    for name in (DELIVERIES_FIELD, SIGNATURE_FIELD, FAILURE_FIELD):
        fields.pop(name, None)
    named = {"id": entry.id}
    if entry.record.campaign != DEFAULT_CAMPAIGN:
        named["campaign"] = entry.record.campaign
    shown = SHOWN - {"id", "campaign", "stage"}
    reasons = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    # A job without an id took its message's: it stays the same job.
    given = {name: each for name, each in fields.items() if each is not None or name not in named}
    return named | given | {FAILURE_FIELD: reasons}


def sources_of(path: Path) -> frozenset[str]:
    """The failures of the jobs in a file of `failed --export`; raises SetupError without any."""
    try:
        with path.open("rb") as lines:
            sources = frozenset(source for source in map(_source, lines) if source is not None)
    except OSError as error:
        raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
    if not sources:
        raise errors.SetupError(
            f"{path} has no failed jobs: give a file that `imagefleet failed --export` has written"
        )
    return sources


def _source(line: bytes) -> str | None:
    try:
        source = json.loads(line)[FAILURE_FIELD]["source"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return source if isinstance(source, str) else None


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


#: The most kinds of errors and of refused messages that are printed: about a screen.
_SHOWN = 20

#: The most characters of a text in a preview: about two lines.
_TEXT_CHARACTERS = 150

Verb = Literal["replayed", "discarded"]


def report(verb: Verb, swept: Swept, *, missing: int = 0, as_json: bool) -> None:
    """Prints what was done; *missing* failed jobs have no message that could be moved."""
    if as_json:
        record = {verb: swept.done, "refused": [asdict(each) for each in swept.refused]}
        console.print_json(record | ({"missing": missing} if verb == "replayed" else {}))
        return
    console.print_plain(f"{console.counted(swept.done, 'failed job')} {verb}")
    others = [each for each in swept.refused if not each.is_unsigned]
    _print_staying(others, len(others), len(swept.refused) - len(others), console.stdout)
    if missing:
        console.print_plain(
            f"{console.counted(missing, 'failed job')} cannot be sent now: another command reads"
            " the poison queue, or their messages were deleted from it"
        )


def without_records(count: int) -> str:
    """Says that the poison queue holds more than the records tell."""
    messages = console.counted(count, "message")
    return f"the poison queue holds {messages} more, without a record: --from-queue reads it"


def _print_staying(some: list[Refused], count: int, unsigned: int, to: Console) -> None:
    """The failed jobs that stay: *some* of *count*, and those that are not signed."""
    for each in some[:_SHOWN]:
        console.print_plain(f"{each.id} stays: {each.reason}", to)
    if (more := count - len(some[:_SHOWN])) > 0:
        console.print_plain(f"and {more:,} others stay", to)
    if unsigned:
        # With a key, a message that is not signed came from somebody else, or before the key.
        is_or_are = "record is" if unsigned == 1 else "records are"
        console.print_plain(
            f"{unsigned:,} {is_or_are} not signed with your key: `imagefleet discard --unsigned`"
            " deletes what is not",
            to,
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
        "changes": [
            {"field": name, "from": json.loads(before), "to": json.loads(after), "count": count}
            for (name, before, after), count in preview.changes.most_common()
        ],
    }


def print_preview(preview: Preview, to: Console, *, as_json: bool = False) -> None:
    if as_json:
        console.print_json(_as_record(preview))
        return
    jobs = console.counted(preview.count, "failed job")
    console.print_plain(f"{jobs} would be replayed", to)
    if preview.count:
        columns = console.number_column("count"), *map(console.name_column, ("campaign", "error"))
        rows = ((count, *kind) for kind, count in preview.kinds.most_common(_SHOWN))
        console.print_tables(console.table(*columns, rows=rows), to=to)
        if (more := len(preview.kinds) - _SHOWN) > 0:
            console.print_plain(f"and {more:,} other kinds (--json lists them)", to)
    for (name, before, after), count in preview.changes.most_common(_SHOWN):
        changed = f"{_shortened(before)} -> {_shortened(after)}"
        console.print_plain(f"  {name}: {changed}, {count:,} times", to)
    if (more := len(preview.changes) - _SHOWN) > 0:
        console.print_plain(f"  and {more:,} other changes (--json lists them)", to)
    for prompt in preview.prompts:
        console.print_plain(f"  {_shortened(prompt)}", to)
    _print_staying(preview.reasons, preview.refused, preview.unsigned, to)


def print_jobs(records: list[dict[str, Any]], *, as_json: bool) -> None:
    """Prints whole failed jobs."""
    if as_json:
        console.print_json({"jobs": records})
        return
    for record in records:
        table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None)
        for name, value in record.items():
            shown = value if isinstance(value, str) else console.json_text(value).rstrip()
            table.add_row(f"[bold]{name}[/bold]", console.untrusted(shown))
        console.print_tables(table)


def print_listing(listing: Listing, *, as_json: bool) -> None:
    if as_json:
        console.print_json(listing.as_record())
        return
    count = listing.count
    if count:
        _print_errors(listing, count)
    else:
        console.print_plain("no failed jobs")
    if listing.jobs:
        _print_jobs(listing.jobs)
    if count > len(listing.jobs):
        console.print_plain(f"the first {len(listing.jobs):,} are shown (--limit)")
    if done := sum(job["completed_since"] for job in listing.jobs):
        console.print_note(
            f"{console.counted(done, 'job')} of those shown completed since: `imagefleet"
            " discard --completed` takes such jobs off the list"
        )
    if listing.unrecorded:
        console.print_warning(without_records(listing.unrecorded))


def _print_errors(listing: Listing, count: int) -> None:
    columns = (
        *(console.number_column("count"), console.name_column("error")),
        Column("reason", overflow="fold"),
    )
    rows = ((number, *kind) for kind, number in listing.errors.most_common(_SHOWN))
    title = console.counted(count, "failed job")
    console.print_tables(console.table(*columns, rows=rows, title=title))
    if (more := len(listing.errors) - _SHOWN) > 0:
        console.print_plain(f"and {more:,} other errors (--json lists them)")
    if listing.others:
        others = console.counted(listing.others, "failed job")
        console.print_plain(f"and {others} with still others: --error narrows the list")


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    # What `failed`, `replay` and `discard` take.
    names = map(console.name_column, ("job", "error"))
    signed = [Column("signed")] if "signed" in jobs[0] else []
    stage = [console.number_column("stage")] if any("stage" in job for job in jobs) else []
    failed = Column("failed (UTC)", no_wrap=True)
    rows = []
    for job in jobs:
        failed_at = job.get("at", "")[5:16].replace("T", " ")
        cells = [job_key(job.get("campaign"), job["id"]), job["error"]]
        cells += [str(job.get("stage", ""))] if stage else []
        cells += [failed_at]
        cells += ["yes" if job["completed_since"] else ""]
        cells += ["yes" if job["signed"] else "NO"] if signed else []
        rows.append(cells)
    shown = console.table(*names, *stage, failed, "completed since", *signed, rows=rows)
    console.print_tables("", shown)


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else text[:_TEXT_CHARACTERS] + "…"
