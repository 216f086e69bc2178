"""Reads a campaign's results, and what is wrong with some of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable
from dataclasses import dataclass, field

from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.protocol import Storage

#: The most reasons for damage that are shown.
_SHOWN_REASONS = 3


@dataclass(slots=True)
class Damaged:
    """Records that are left out: their number, and the first reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, shard: str, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < _SHOWN_REASONS:
            self.reasons.append(printable(f"{shard[:200]}: {reason[:300]}"))

    def __str__(self) -> str:
        more = self.count - len(self.reasons)
        return (
            f"damaged records are left out: {'; '.join(self.reasons)}"
            f"{f'; and {more:,} more' if more else ''}"
        )


async def read(
    storage: Storage, campaign: str, outcomes: Collection[str], damaged: Damaged
) -> AsyncGenerator[Record]:
    """A campaign's images, and then the jobs that have failed or were cancelled."""
    if "completed" in outcomes:
        async for record in reader.images(storage, campaign, damaged.add):
            yield record
    if set(outcomes) - {"completed"}:
        async for record in reader.ended(storage, campaign, damaged.add):
            if record.outcome in outcomes:
                yield record


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
