"""Results as lines of text: JSON, or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from fleet import console
from imagefleet.records import columns
from imagefleet.records.record import Record
from imagefleet.redaction import printable

#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t")

ToText = Callable[[Iterable[Record], columns.Address], str]


def json_lines(records: Iterable[Record], address: columns.Address) -> str:
    """One JSON object per line."""
    return "".join(
        console.json_text(columns.row(record, address), indent=None) for record in records
    )


def csv_header() -> str:
    return _csv([columns.COLUMNS])


def csv_lines(records: Iterable[Record], address: columns.Address) -> str:
    """One line per result; a prompt may go over several."""
    rows = (columns.row(record, address) for record in records)
    return _csv([[_cell(name, value) for name, value in row.items()] for row in rows])


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


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
