"""What the forms of results do: print, write to a file, download, go on as new ones come."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from fleet import console
from fleet.campaigns import target
from fleet.results import download, files, lines, parquet, table
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.records.stored import Damaged
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

#: Results in each table: about a screen.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for."""

    campaign: str
    outcomes: frozenset[str]
    limit: int | None
    as_json: bool
    as_csv: bool
    output: Path | None
    parquet: Path | None
    download: Path | None
    follow: bool


@dataclass(slots=True)
class _Run:
    wanted: Wanted
    storage: Storage
    damaged: Damaged = field(default_factory=Damaged)

    def records(self) -> AsyncIterator[list[Record]]:
        """The results so far, some at a time; with --follow those that come, too."""
        wanted = self.wanted
        if wanted.follow:
            return self.followed(wanted.limit)
        return reader.results(
            self.storage, wanted.campaign, wanted.outcomes, self.damaged, wanted.limit
        )

    async def followed(
        self, left: int | None, position: dict[str, int] | None = None
    ) -> AsyncIterator[list[Record]]:
        """Results from a follower's *position* on, until the campaign's end; *left* at most."""
        wanted = self.wanted
        follower = reader.Follower(self.storage, wanted.campaign, position, self.damaged)
        polls = reader.follow(
            self.storage, follower, wanted.campaign, wanted.outcomes, console.print_warning
        )
        if left is not None and left <= 0:
            return
        async for batch in polls:
            yield batch[:left]
            if left is not None and (left := left - len(batch)) <= 0:
                return

    async def total(self) -> int:
        """How many results there are, for a bar."""
        counts = await reader.counts(self.storage, self.wanted.campaign)
        total = self.total_of(counts)
        return total if self.wanted.limit is None else min(total, self.wanted.limit)

    def total_of(self, counts: reader.Counts) -> int:
        each = {
            "completed": counts.images,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        }
        return sum(each[outcome] for outcome in self.wanted.outcomes)


async def run(settings: StorageSettings, wanted: Wanted) -> bool:
    """Does what is *wanted*; False if images are missing."""
    async with console.connected(settings) as fleet:
        if unsure := await target.check_campaign(fleet.storage, wanted.campaign):
            console.print_warning(unsure)
        this = _Run(wanted, fleet.storage)
        is_whole = True
        try:
            # Ctrl-C is how one stops to follow; asyncio turns it into this cancellation.
            with contextlib.suppress(*([asyncio.CancelledError] if wanted.follow else [])):
                if wanted.download is not None:
                    is_whole = await _download(this, wanted.download)
                elif wanted.parquet is not None:
                    await _write_parquet(this, wanted.parquet)
                elif wanted.as_json or wanted.as_csv:
                    await _write_lines(this)
                else:
                    await _show(this)
        finally:
            if this.damaged.count:
                console.print_warning(str(this.damaged))
    return is_whole


async def _write_parquet(this: _Run, path: Path) -> None:
    with console.counting("written", await this.total()) as on_records:
        await parquet.write(this.records(), path, this.storage.blobs.address, on_records)


async def _write_lines(this: _Run) -> None:
    to_text: lines.ToText = lines.csv_lines if this.wanted.as_csv else lines.json_lines
    path = this.wanted.output
    total = None if path is None else await this.total()
    with _text_file(path) as file, console.counting("written", total, quiet=path is None) as on:
        if this.wanted.as_csv:
            file.write(lines.csv_header())
        async for records in this.records():
            file.write(to_text(records, this.storage.blobs.address))
            on(len(records))
            file.flush()


@contextlib.contextmanager
def _text_file(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with files.whole(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        yield file


async def _download(this: _Run, folder: Path) -> bool:
    wanted = this.wanted
    total = None if wanted.follow else await this.total()
    with download.opened(folder, this.storage.blobs, wanted.campaign) as running:
        try:
            with console.counting("downloaded", total) as on_image:
                async for records in this.records():
                    await running.run(records, on_image)
        finally:
            _report_download(running.done, folder, as_json=wanted.as_json)
    return not running.done.missing


def _report_download(done: download.Downloaded, folder: Path, *, as_json: bool) -> None:
    if done.missing:
        more = done.missing - len(done.first_missing)
        names = ", ".join(done.first_missing) + (f" and {more:,} more" if more else "")
        console.print_error(f"{console.counted(done.missing, 'image')} missing: {names}")
    if done.changed:
        console.print_warning(
            f"{console.counted(done.changed, 'image')} of another size than recorded: drawn again,"
            " or edited"
        )
    if as_json:
        console.print_json_line({"folder": str(folder), **asdict(done)})
        return
    there = f"; {done.already_there:,} were there already" if done.already_there else ""
    console.print_plain(
        f"{console.counted(done.images, 'image')} downloaded to {folder},"
        f" {done.bytes / 1e6:,.1f} MB{there}"
    )


async def _show(this: _Run) -> None:
    wanted, storage = this.wanted, this.storage
    # Before the tables, so that none is in neither.
    shown_until = await reader.end(storage, wanted.campaign) if wanted.follow else None
    counts = await reader.counts(storage, wanted.campaign)
    console.print_tables(table.counts_table(counts))
    limit = wanted.limit or _SHOWN
    shown = 0
    for outcomes, to_table in (
        (wanted.outcomes & {"completed"}, table.images_table),
        (wanted.outcomes - {"completed"}, table.ended_table),
    ):
        found = reader.results(storage, wanted.campaign, outcomes, this.damaged, limit)
        records = [record async for some in found for record in some]
        shown += len(records)
        if records:
            console.print_tables("", to_table(records))
    if shown < (total := this.total_of(counts)):
        console.print_note(
            f"{shown:,} of {console.counted(total, 'result')} shown: --limit COUNT shows more of"
            " each kind; --json and --format have all"
        )
    if wanted.follow:
        left = None if wanted.limit is None else wanted.limit - shown
        async for batch in this.followed(left, shown_until):
            for record in batch:
                console.print_plain(table.line(record))
