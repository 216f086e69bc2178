"""All campaigns, or one, in numbers: a part of `imagefleet status`."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rich.table import Table

from cli import console
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import SetupError
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.counts import CachedCounts, Counts
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import duration
from imagefleet.validation import JSONDict

#: A watch counts all campaigns no more often: that takes a listing and some reads for each.
_FRESH_SECONDS = 30.0

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Campaigns:
    """The campaigns of *storage* in numbers, or the one named *only*.

    The latest are first; after those that somebody is known to have sent, the others.
    """

    def __init__(self, storage: Storage, only: str | None = None) -> None:
        self.rows: Sequence[tuple[str, Counts]] = ()
        #: Records that are damaged or forged, and so not in the figures.
        self.unfit_records = 0
        self.refusal: str | None = None
        self.paused: frozenset[str] = frozenset()
        self._storage = storage
        self._only = only
        self._counted: dict[str, CachedCounts] = {}
        self._read_at = -math.inf

    async def refresh(self) -> None:
        """Counts again; all campaigns at most twice a minute."""
        now = time.monotonic()
        if self._only is None and now - self._read_at < _FRESH_SECONDS:
            return
        damaged = Damaged()
        try:
            if self._only is None:
                found = await reader.all_counts(self._storage, damaged, self._counted)
            else:
                found = {
                    self._only: await reader.counts(self._storage, self._only, damaged)
                }
        except SetupError as error:  # of a token that may not read records
            if self._only is not None:
                raise
            self.refusal = error.message
        else:
            # Whoever stores images may make up campaigns, but not that their jobs were sent.
            self.rows = sorted(
                found.items(),
                key=lambda row: (row[1].sent is not None, row[1].last_at or _LONG_AGO),
                reverse=True,
            )
            self.unfit_records = damaged.count
            self.refusal = None
        known = CancelledCampaigns(self._storage.files, self._storage.queue.name)
        await known.refresh()
        self.paused = known.paused
        self._read_at = now

    @property
    def failed(self) -> int | None:
        """Failed jobs of all campaigns; None where they were not all counted."""
        if self._only is not None or self.refusal:
            return None
        return sum(counts.failed for _, counts in self.rows)

    def records(self) -> list[JSONDict]:
        return [
            {
                "campaign": name,
                **asdict(counts),
                "pending": counts.pending,
                "seconds_left": seconds_left(counts),
                "paused": name in self.paused,
            }
            for name, counts in self.rows
        ]

    def table(self, count: int) -> Table:
        figures = (
            "sent",
            "completed",
            "failed",
            "cancelled",
            "dropped",
            "discarded",
            "pending",
            "images",
        )
        rows = []
        for campaign, counts in self.rows[:count]:
            numbers = (getattr(counts, figure) for figure in figures)
            left = seconds_left(counts)
            time_left = "-" if left is None else duration(left)
            last = (
                f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
                if (at := counts.last_at)
                else "-"
            )
            rows.append((campaign, *numbers, time_left, last))
        return console.table(
            ["campaign"], [*figures, "time left", "last (UTC)"], rows=rows
        )

    def notes(self, count: int, messages: int) -> list[str]:
        """Notes on what the table of *count* campaigns lacks; the job queue holds *messages*."""
        found = []
        if self.refusal:
            found.append(f"campaigns cannot be counted: {self.refusal}")
        if (more := len(self.rows) - count) > 0:
            found.append(
                f"{console.counted(more, 'earlier campaign')} not shown (--count)"
            )
        pending = sum(counts.pending or 0 for _, counts in self.rows)
        if (left := pending - messages) > 0:
            found.append(
                f"of {console.counted(pending, 'pending job')} {messages:,} at most in this queue"
                f" or in flight, {left:,} not: they wait in another queue of this storage, were"
                " deleted with `cancel --all` or by somebody, or their records are written in a"
                " moment; `imagefleet load FILE --restart` sends deleted ones again; what is stored"
                " is not drawn twice"
            )
        shown = {name for name, _ in self.rows[:count]}
        found += [
            f"{campaign} is paused: `imagefleet cancel {campaign} --resume` goes on"
            for campaign in sorted(self.paused & shown)
        ]
        for campaign, counts in self.rows[:count]:
            if counts.unknown:
                found.append(
                    f"{campaign}: {console.counted(counts.unknown, 'job')} with records"
                    " not in these figures: no load, sweep or client has noted that they were sent"
                )
        if self.unfit_records:
            found.append(
                f"{console.counted(self.unfit_records, 'record')} not in these figures: they do not"
                " fit what was sent or stored"
            )
        return found


def seconds_left(counts: Counts) -> float | None:
    """Seconds until the pending jobs have ended, at the mean speed so far; None without one."""
    if not (counts.pending and counts.ended and counts.first_at and counts.last_at):
        return None
    seconds = (counts.last_at - counts.first_at).total_seconds()
    return counts.pending * seconds / counts.ended if seconds > 0 else None
