"""All campaigns, or one, in numbers: a part of `imagefleet status`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
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


class Campaigns:
    """The campaigns of *storage* in numbers, the latest first, or the one named *only*."""

    def __init__(self, storage: Storage, only: str | None = None) -> None:
        self.rows: Sequence[tuple[str, Counts]] = ()
        self.damaged_files = 0
        """Files of records that are damaged, in part at least, and so not in the figures."""
        self._refusal: str | None = None
        self._storage = storage
        self._only = only
        self._read_at = -math.inf

    async def refresh(self) -> None:
        """Counts again; the numbers of all campaigns may be half a minute old."""
        now = time.monotonic()
        if self._only is None and now - self._read_at < _FRESH_SECONDS:
            return
        try:
            await self._count()
        except errors.SetupError as error:  # of a token that may not read records
            if self._only is not None:
                raise
            self._refusal = error.message
        self._read_at = now

    async def _count(self) -> None:
        damaged = Damaged()
        names = [self._only] if self._only else [n async for n in reader.campaigns(self._storage)]
        rows: list[tuple[str, Counts]] = []

        async def count(name: str) -> None:
            rows.append((name, await reader.counts(self._storage, name, damaged)))

        await concurrency.for_each(names, count, _AT_ONCE)
        self.rows = sorted(rows, key=lambda row: row[1].last_at or _LONG_AGO, reverse=True)
        self.damaged_files = len(damaged.shards)
        self._refusal = None

    def records(self) -> list[dict[str, Any]]:
        return [
            {"campaign": name, **asdict(counts), "pending": counts.pending}
            for name, counts in self.rows
        ]

    def table(self, count: int) -> Table:
        """The first *count* campaigns."""
        figures = ("sent", "completed", "failed", "cancelled", "pending", "images")
        rows = []
        for campaign, counts in self.rows[:count]:
            numbers = (getattr(counts, figure) for figure in figures)
            rows.append((campaign, *numbers, _moment(counts.first_at), _moment(counts.last_at)))
        return console.table(
            console.name_column("campaign"),
            *map(console.number_column, figures),
            *map(console.name_column, ("first (UTC)", "last (UTC)")),
            rows=rows,
        )

    def notes(self, count: int, messages: int) -> list[str]:
        """What the table of *count* campaigns lacks; the job queue holds *messages*."""
        found = []
        if self._refusal:
            found.append(f"campaigns cannot be counted: {self._refusal}")
        if (more := len(self.rows) - count) > 0:
            found.append(f"{console.counted(more, 'earlier campaign')} not shown (--count)")
        pending = sum(counts.pending or 0 for _, counts in self.rows)
        if pending > messages:
            found.append(
                f"{console.counted(pending - messages, 'pending job')} in no queue: deleted with"
                " `cancel --all` or by somebody, or their records are written in a moment"
            )
        if self.damaged_files:
            files = console.counted(self.damaged_files, "damaged file")
            found.append(f"{files} of records: what is damaged is not in these figures")
        return found


def _moment(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}" if at else "-"
