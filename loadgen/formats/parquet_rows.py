"""Parquet: the columns are job fields; read in batches, row group by row group."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
from collections.abc import Iterator
from typing import Any, BinaryIO

from imagefleet import errors
from loadgen.formats.columns import Columns
from loadgen.formats.entry import Entry, FormatError

#: Rows that are in memory as Python's values.
_BATCH_ROWS = 1_000


class ParquetRows:
    """The rows of a Parquet file, read by pyarrow, which is an extra, `parquet`."""

    name = "parquet"
    unit = "row"
    is_stream = False

    def count(self, stream: BinaryIO) -> int:
        with _opened(stream) as file:
            Columns(file.schema_arrow.names)
            return int(file.metadata.num_rows)

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        with _opened(stream) as file:
            columns = Columns(file.schema_arrow.names)
            number = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= start:
                    number += rows
                    continue
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
                    for row in batch.to_pylist():
                        number += 1
                        if number > start:
                            yield _entry(columns, number, row)


def _entry(columns: Columns, number: int, row: dict[str, Any]) -> Entry:
    place = f"row {number}"
    try:
        return Entry(place, columns.job(map(_plain, row.values())))
    except ValueError as error:
        return Entry(place, problem=str(error))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    match value:
        case decimal.Decimal():
            return float(value)
        case dt.date() | dt.time():
            return value.isoformat()
        case bytes() | dt.timedelta():
            raise ValueError(f"a cell holds {type(value).__name__}, which a job cannot")
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return tuple(_plain(each) for each in value)
    return value


@contextlib.contextmanager
def _opened(stream: BinaryIO) -> Iterator[Any]:
    """A ParquetFile, whose errors are FormatErrors in the block."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise errors.SetupError(
            "to read Parquet, install pyarrow: pip install '.[parquet]'"
        ) from None
    try:
        yield parquet.ParquetFile(stream)
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise FormatError(f"it is not a Parquet file, or damaged: {reason[:200]}") from None
