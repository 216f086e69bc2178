"""The forms of results: tables for people, lines of JSON or CSV, and Parquet."""

from __future__ import annotations

import asyncio
import csv
import io
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fleet import console
from fleet.results import files
from imagefleet import errors
from imagefleet.job.chain import SEPARATOR
from imagefleet.records import columns
from imagefleet.records.reader import Counts
from imagefleet.records.record import Record
from imagefleet.redaction import printable

if TYPE_CHECKING:
    import pyarrow as pa

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
    return console.table(
        console.name_column("image"),
        *map(console.number_column, ("seed", "size", "steps", "seconds")),
        *("worker", "prompt"),
        rows=map(_image_cells, records),
    )


def ended_table(records: Sequence[Record]) -> Table:
    """A row for each job that has failed or was cancelled."""
    return console.table(
        *map(console.name_column, ("job", "outcome", "error")),
        *(console.number_column("attempts"), "reason"),
        rows=map(_ended_cells, records),
    )


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


#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t")


def json_lines(records: Iterable[Record], address: columns.Address) -> str:
    """One JSON object per line."""
    return "".join(
        console.json_text(columns.row(record, address), indent=None) for record in records
    )


def csv_lines(records: Iterable[Record], address: columns.Address) -> str:
    """One line per result; a prompt may go over several."""
    rows = (columns.row(record, address) for record in records)
    return csv_text([[_cell(name, value) for name, value in row.items()] for row in rows])


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
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


#: Rows of a group: some 10 MB of a file.
ROW_GROUP = 50_000


def arrow() -> Any:
    """The library, with its Parquet module; raises SetupError if it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise errors.SetupError("Parquet needs pyarrow: pip install '.[parquet]'") from None
    return pa


def parquet_schema() -> pa.Schema:
    """The columns of results; text and numbers are null where a record lacks them."""
    pa = arrow()
    text, real = pa.string(), pa.float64()
    types = {
        **dict.fromkeys(columns.COLUMNS, text),
        **dict.fromkeys(columns.INTEGERS, pa.int64()),
        **dict.fromkeys(columns.REALS, real),
        "loras": pa.list_(pa.struct([("name", text), ("weight", real)])),
        "embeddings": pa.list_(pa.struct([("name", text), ("sha256", text)])),
        "at": pa.timestamp("us", "UTC"),
    }
    return pa.schema(list(types.items()))


def parquet_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row for Parquet, whose columns have one type."""
    return row | {"metadata": columns.json_text(row["metadata"]) if row["metadata"] else None}


async def write_parquet(
    records: AsyncIterator[list[Record]],
    path: Path,
    address: columns.Address,
    on_records: Callable[[int], None],
) -> None:
    """Writes a file whole or not at all."""
    pa = arrow()
    with (
        files.whole(path) as draft,
        pa.parquet.ParquetWriter(draft, parquet_schema(), compression="zstd") as writer,
    ):
        group: list[Any] = []
        async for batch in records:
            rows = [parquet_cells(columns.row(record, address)) for record in batch]
            group.append(await asyncio.to_thread(pa.Table.from_pylist, rows, parquet_schema()))
            if sum(part.num_rows for part in group) >= ROW_GROUP:
                await asyncio.to_thread(writer.write_table, pa.concat_tables(group))
                group = []
            on_records(len(batch))
        if group:
            writer.write_table(pa.concat_tables(group))
