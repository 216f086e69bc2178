"""`imagefleet campaigns`: all campaigns in numbers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from fleet import console, options
from imagefleet import concurrency
from imagefleet.storage.settings import StorageSettings

if TYPE_CHECKING:
    from imagefleet.records.reader import Counts

#: Campaigns that are counted at the same time.
_AT_ONCE = 8

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class _Row(NamedTuple):
    campaign: str
    counts: Counts


class _Listing(NamedTuple):
    rows: list[_Row]
    messages: int
    damaged_files: int
    """Files of records that are damaged, in part at least, and so not in the figures."""


@options.from_settings(StorageSettings)
def command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the campaigns with their jobs by outcome.

    The latest come first. The figures are from the records that workers write beside the images:
    no image is listed.

    imagefleet campaigns

    imagefleet campaigns --json
    """
    listing = console.run(_list(settings))
    if as_json:
        console.print_json(
            {
                "messages": listing.messages,
                "campaigns": [_record(row) for row in listing.rows],
                "damaged_files": listing.damaged_files,
            }
        )
    else:
        _print(listing)


async def _list(settings: StorageSettings) -> _Listing:
    from imagefleet.records import reader

    damaged: set[str] = set()
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        names = [name async for name in reader.campaigns(storage)]
        slots = asyncio.Semaphore(_AT_ONCE)
        with console.counting("campaigns", len(names)) as count_one:

            async def count(name: str) -> _Row:
                async with slots:
                    found = await reader.counts(storage, name, lambda shard, _: damaged.add(shard))
                count_one()
                return _Row(name, found)

            rows = await concurrency.gather(*map(count, names))
        messages = (await storage.queue.depth()).messages
    newest_first = sorted(rows, key=lambda row: row.counts.last_at or _LONG_AGO, reverse=True)
    return _Listing(newest_first, messages, len(damaged))


def _record(row: _Row) -> dict[str, Any]:
    return {"campaign": row.campaign, **asdict(row.counts), "pending": row.counts.pending}


def _print(listing: _Listing) -> None:
    if not listing.rows:
        console.print_plain("no campaigns: workers and `imagefleet load` have recorded nothing yet")
        return
    figures = ("sent", "completed", "failed", "cancelled", "pending", "images")
    shown = console.table(
        console.name_column("campaign"),
        *map(console.number_column, figures),
        *map(console.name_column, ("first (UTC)", "last (UTC)")),
    )
    for campaign, counts in listing.rows:
        numbers = {**asdict(counts), "pending": counts.pending}
        shown.add_row(
            console.untrusted(campaign),
            *(console.number(numbers[figure]) for figure in figures),
            _moment(counts.first_at),
            _moment(counts.last_at),
        )
    console.print_tables(shown)
    messages = console.counted(listing.messages, "message")
    console.print_note(f"the job queue holds {messages}, those in flight included")
    pending = sum(row.counts.pending or 0 for row in listing.rows)
    if pending > listing.messages:
        console.print_note(
            f"{console.counted(pending - listing.messages, 'pending job')} in no queue: deleted"
            " with `cancel --all` or by somebody, or their records are written in a moment"
        )
    if listing.damaged_files:
        files = console.counted(listing.damaged_files, "damaged file")
        console.print_warning(f"{files} of records: what is damaged is not in these figures")


def _moment(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}" if at else "-"
