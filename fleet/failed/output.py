"""What the commands about failed jobs print."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table

from fleet import console
from fleet.failed.read import Listing
from imagefleet.job.message import job_key
from imagefleet.storage.dead_letter_queue import Preview, Refused, Swept

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
