"""Results as Parquet, a row group at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.results import files
from imagefleet import errors
from imagefleet.records import columns
from imagefleet.records.record import Record

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of a group: some 10 MB of a file.
ROW_GROUP = 50_000


def arrow() -> Any:
    """The library, with its Parquet module.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise errors.SetupError("Parquet needs pyarrow: pip install '.[parquet]'") from None
    return pa


def schema() -> pa.Schema:
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


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row for Parquet, whose columns have one type."""
    return row | {"metadata": columns.json_text(row["metadata"]) if row["metadata"] else None}


def table(records: Sequence[Record], address: columns.Address) -> pa.Table:
    """The rows of some records."""
    rows = [cells(columns.row(record, address)) for record in records]
    return arrow().Table.from_pylist(rows, schema())


async def write(
    records: AsyncIterator[list[Record]],
    path: Path,
    address: columns.Address,
    on_records: Callable[[int], None],
) -> None:
    """Writes a file whole or not at all."""
    pa = arrow()
    with (
        files.whole(path) as draft,
        pa.parquet.ParquetWriter(draft, schema(), compression="zstd") as writer,
    ):
        group: list[Any] = []
        async for batch in records:
            group.append(await asyncio.to_thread(table, batch, address))
            if sum(part.num_rows for part in group) >= ROW_GROUP:
                await asyncio.to_thread(writer.write_table, pa.concat_tables(group))
                group = []
            on_records(len(batch))
        if group:
            writer.write_table(pa.concat_tables(group))
