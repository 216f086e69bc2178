"""All campaigns, or one, in numbers: a part of `imagefleet status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from fleet import console
from imagefleet import concurrency, errors
from imagefleet.records import reader
from imagefleet.records.reader import Counts
from imagefleet.records.stored import Damaged
from imagefleet.storage.open import Storage

#: Campaigns that are counted at the same time.
_AT_ONCE = 8

#: A watch counts all campaigns no more often: that takes a listing and some reads for each.
_FRESH_SECONDS = 30.0

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Listing:
    """Campaigns in numbers, the latest first."""

    rows: Sequence[tuple[str, Counts]]
    damaged_files: int
    """Files of records that are damaged, in part at least, and so not in the figures."""
    refusal: str | None = None
    """Why the records cannot be read, where the storage refuses it."""

    def records(self) -> list[dict[str, Any]]:
        return [
            {"campaign": name, **asdict(counts), "pending": counts.pending}
            for name, counts in self.rows
        ]


class Campaigns:
    """Counts the campaigns of *storage*, or the one named *only*."""

    def __init__(self, storage: Storage, only: str | None = None) -> None:
        self._storage = storage
        self._only = only
        self._last: Listing | None = None
        self._read_at = 0.0

    async def read(self) -> Listing:
        """The numbers now; those of all campaigns may be half a minute old."""
        fresh_seconds = _FRESH_SECONDS if self._only is None else 0.0
        if self._last is None or time.monotonic() - self._read_at >= fresh_seconds:
            try:
                self._last = await self._list()
            except errors.SetupError as error:
                if self._only is not None:
                    raise
                self._last = Listing((), 0, error.message)
            self._read_at = time.monotonic()
        return self._last

    async def _list(self) -> Listing:
        damaged = Damaged()
        names = [self._only] if self._only else [n async for n in reader.campaigns(self._storage)]
        slots = asyncio.Semaphore(_AT_ONCE)

        async def count(name: str) -> tuple[str, Counts]:
            async with slots:
                return name, await reader.counts(self._storage, name, damaged)

        rows = await concurrency.gather(*map(count, names))
        latest = sorted(rows, key=lambda row: row[1].last_at or _LONG_AGO, reverse=True)
        return Listing(latest, len(damaged.shards))


def table(listing: Listing, count: int) -> Table:
    """The first *count* campaigns."""
    figures = ("sent", "completed", "failed", "cancelled", "pending", "images")
    rows = []
    for campaign, counts in listing.rows[:count]:
        numbers = (getattr(counts, figure) for figure in figures)
        rows.append((campaign, *numbers, _moment(counts.first_at), _moment(counts.last_at)))
    return console.table(
        console.name_column("campaign"),
        *map(console.number_column, figures),
        *map(console.name_column, ("first (UTC)", "last (UTC)")),
        rows=rows,
    )


def notes(listing: Listing, count: int, messages: int) -> list[str]:
    """What the table of *count* campaigns does not show; the job queue holds *messages*."""
    found = []
    if listing.refusal:
        found.append(f"campaigns cannot be counted: {listing.refusal}")
    if (more := len(listing.rows) - count) > 0:
        found.append(f"{console.counted(more, 'earlier campaign')} not shown (--count)")
    pending = sum(counts.pending or 0 for _, counts in listing.rows)
    if pending > messages:
        found.append(
            f"{console.counted(pending - messages, 'pending job')} in no queue: deleted with"
            " `cancel --all` or by somebody, or their records are written in a moment"
        )
    if listing.damaged_files:
        files = console.counted(listing.damaged_files, "damaged file")
        found.append(f"{files} of records: what is damaged is not in these figures")
    return found


def _moment(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}" if at else "-"
