"""The forms of results: tables for people, lines of JSON or CSV."""

import csv
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.table import Column, Table

from cli import console
from imagefleet.job.message import image_stem
from imagefleet.records import columns
from imagefleet.records.overview import Counts
from imagefleet.records.record import Record
from imagefleet.redaction import printable

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
    return console.totals(
        {name: f"{n:,}" for name, n in rows.items() if n or name == "images"}
    )


def table(records: Sequence[Record]) -> Table:
    """A row for each image, or for each job that has failed or was cancelled."""
    names, numbers = console.name_column, console.number_column
    if records[0].outcome == "completed":
        heads = map(numbers, ("seed", "size", "steps", "seconds"))
        made: list[Column | str] = [names("image"), *heads, "worker", "prompt"]
    else:
        made = [*map(names, ("job", "outcome", "error")), numbers("attempts"), "reason"]
    return console.table(*made, rows=map(_cells, records))


def line(record: Record) -> str:
    """A result in one line, for what is followed."""
    return "  ".join(each for each in _cells(record) if each)


def _cells(record: Record) -> list[str]:
    if record.outcome != "completed":
        ended = (record.outcome, record.error or "", str(record.attempts))
        return [record.id, *ended, _short(record.reason)]
    name = image_stem(record.id, record.index, record.stage)
    size = f"{record.width}x{record.height}" if record.width and record.height else ""
    seconds = "" if record.seconds is None else f"{record.seconds:.1f}"
    seed, steps = (
        "" if each is None else str(each) for each in (record.seed, record.steps)
    )
    return [name, seed, size, steps, seconds, record.worker, _short(record.prompt)]


def _short(text: str | None) -> str:
    return textwrap.shorten((text or "")[:1000], _SHOWN_CHARACTERS, placeholder=" ...")


#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t")


def writer(
    address: columns.Address, *, is_csv: bool
) -> Callable[[Iterable[Record]], None]:
    """Writes a line of JSON or of CSV per result to stdout; in CSV, prompts may have more."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    if is_csv:
        table.writerow(columns.COLUMNS)

    def write(records: Iterable[Record]) -> None:
        for row in (columns.row(record, address) for record in records):
            if is_csv:
                table.writerow(itertools.starmap(_cell, row.items()))
            else:
                console.print_json_line(row)
        sys.stdout.flush()

    return write


def _cell(name: str, value: Any) -> Any:
    """A value for a table: nested ones as text, and nothing that a spreadsheet would execute."""
    if name == "loras":
        value = " ".join(f"{lora['name']}:{lora['weight']:g}" for lora in value)
    elif name == "embeddings":
        value = " ".join(each["name"] for each in value)
    elif name == "metadata":
        value = columns.json_text(value) if value else None
    elif isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str):
        return printable(f"'{value}" if value.startswith(_FORMULA) else value)
    return value
