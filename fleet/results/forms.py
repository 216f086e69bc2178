"""The forms of results: tables for people, lines of JSON or CSV, and Parquet."""

from __future__ import annotations

import contextlib
import csv
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Column, Table

from fleet import console
from fleet.results import files
from imagefleet import errors
from imagefleet.job.message import image_stem
from imagefleet.records import columns
from imagefleet.records.overview import Counts
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
    seed, steps = ("" if each is None else str(each) for each in (record.seed, record.steps))
    return [name, seed, size, steps, seconds, record.worker, _short(record.prompt)]


def _short(text: str | None) -> str:
    return textwrap.shorten((text or "")[:1000], _SHOWN_CHARACTERS, placeholder=" ...")


#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t")


Write = Callable[[Iterable[Record]], object]


@contextlib.contextmanager
def _text_file(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with files.whole(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextlib.contextmanager
def _json_lines(path: Path | None, address: columns.Address) -> Iterator[Write]:
    with _text_file(path) as file:

        def write(records: Iterable[Record]) -> None:
            for record in records:
                file.write(console.json_text(columns.row(record, address), indent=None))
            file.flush()

        yield write


@contextlib.contextmanager
def _csv(path: Path | None, address: columns.Address) -> Iterator[Write]:
    """One line per result; a prompt may go over several."""
    with _text_file(path) as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns.COLUMNS)

        def write(records: Iterable[Record]) -> None:
            for record in records:
                lines.writerow(itertools.starmap(_cell, columns.row(record, address).items()))
            file.flush()

        yield write


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


@contextlib.contextmanager
def _parquet(path: Path | None, address: columns.Address) -> Iterator[Write]:
    assert path is not None  # noqa: S101 - `Output.check`
    pa, schema = arrow(), parquet_schema()
    with (
        files.whole(path) as draft,
        pa.parquet.ParquetWriter(draft, schema, compression="zstd") as writer,
    ):
        group: list[Any] = []

        def write(records: Iterable[Record]) -> None:
            rows = [parquet_cells(columns.row(record, address)) for record in records]
            group.append(pa.Table.from_pylist(rows, schema))
            if sum(map(len, group)) >= ROW_GROUP:
                writer.write_table(pa.concat_tables(group))
                group.clear()

        yield write
        if group:
            writer.write_table(pa.concat_tables(group))


Writing = Callable[[Path | None, columns.Address], contextlib.AbstractContextManager[Write]]
"""Opens a file that appears whole or not at all, None for stdout, to write records to."""

WRITERS: Mapping[str, Writing] = {"json": _json_lines, "csv": _csv, "parquet": _parquet}
