"""Results for people: the campaign's counts, and a table of some results."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.table import Table

from fleet import console
from imagefleet.job.chain import SEPARATOR
from imagefleet.records.reader import Counts
from imagefleet.records.record import Record

#: The most characters of a prompt or a reason: about a line.
_SHOWN_CHARACTERS = 72


def counts_table(counts: Counts) -> Table:
    """The campaign in numbers, without what is zero or not known."""
    rows = {
        "jobs sent": counts.sent,
        "jobs queued or running": counts.pending,
        "jobs completed": counts.completed,
        "images": counts.images,
        "jobs failed": counts.failed,
        "jobs cancelled": counts.cancelled,
        "jobs discarded": counts.discarded,
    }
    return console.totals({name: f"{n:,}" for name, n in rows.items() if n or name == "images"})


def images_table(records: Sequence[Record]) -> Table:
    """A row for each image."""
    table = console.table(
        console.name_column("image"),
        *map(console.number_column, ("seed", "size", "steps", "seconds")),
        "worker",
        "prompt",
    )
    for record in records:
        table.add_row(*map(console.untrusted, _image_cells(record)))
    return table


def ended_table(records: Sequence[Record]) -> Table:
    """A row for each job that has failed or was cancelled."""
    table = console.table(
        *map(console.name_column, ("job", "outcome", "error")),
        console.number_column("attempts"),
        "reason",
    )
    for record in records:
        table.add_row(*map(console.untrusted, _ended_cells(record)))
    return table


def line(record: Record) -> str:
    """A result in one line, for what is followed."""
    cells = _image_cells(record) if record.outcome == "completed" else _ended_cells(record)
    return "  ".join(each for each in cells if each)


def _image_cells(record: Record) -> list[str]:
    name = record.id if record.images == 1 else f"{record.id} {record.index}"
    if record.stage > 1:
        name += f"{SEPARATOR}{record.stage}"
    size = f"{record.width}x{record.height}" if record.width and record.height else ""
    seconds = "" if record.seconds is None else f"{record.seconds:.1f}"
    seed, steps = ("" if each is None else str(each) for each in (record.seed, record.steps))
    return [name, seed, size, steps, seconds, record.worker, _short(record.prompt)]


def _ended_cells(record: Record) -> list[str]:
    attempts = str(record.attempts)
    return [record.id, record.outcome, record.error or "", attempts, _short(record.reason)]


def _short(text: str | None) -> str:
    return textwrap.shorten((text or "")[:1000], _SHOWN_CHARACTERS, placeholder=" ...")
