"""Records some at a time: in lists of one size, or the first of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from imagefleet.records.record import Record


async def batches(records: AsyncIterator[Record], size: int) -> AsyncIterator[list[Record]]:
    """The records in lists of that size, and one of what is left."""
    batch: list[Record] = []
    async for record in records:
        batch.append(record)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


async def first(records: AsyncGenerator[Record], limit: int | None) -> AsyncIterator[Record]:
    """The first of the records, or all of them."""
    left = limit
    async with contextlib.aclosing(records):
        async for record in records:
            yield record
            if left is not None and (left := left - 1) == 0:
                return


async def each(records: Iterable[Record]) -> AsyncIterator[Record]:
    """The records as an asynchronous iterator."""
    for record in records:
        yield record
