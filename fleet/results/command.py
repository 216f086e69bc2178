"""`imagefleet results`: shows, writes or downloads the results of a campaign."""

import heapq
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import typer

from cli import console, options, target
from cli.options import option
from fleet.results import credentials, download, forms
from imagefleet.errors import SetupError
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.keeping.rule import Keep
from imagefleet.records import columns, reader
from imagefleet.records.catalog import Damaged, RecordParts
from imagefleet.records.counts import Counts
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

#: Outcomes to show, as typer reads them from the command line.
Outcome = StrEnum("Outcome", ["COMPLETED", "FAILED", "CANCELLED", "DROPPED"])


@dataclass(frozen=True)
class Output:
    as_json: options.AsJsonLines = False
    download: Path | None = option(
        "Download the images; what is there is kept.", metavar="FOLDER"
    )
    packed: bool = option(
        "With --download: packs as they are, not their images.", default=False
    )
    c2pa: str | None = credentials.OPTION
    outcome: list[Outcome] | None = option("Only these; repeatable.")
    keep: Keep | None = options.keep(
        "Only images that this rule keeps by their recorded scores, the best first."
    )
    limit: int | None = option(
        "At most so many [default: all; table: 20].", min=1, metavar="COUNT"
    )

    @property
    def outcomes(self) -> frozenset[str]:
        """The outcomes asked for; a download and what a rule keeps are images."""
        if (self.download or self.keep) and not self.outcome:
            return frozenset({"completed"})
        return frozenset(each.value for each in self.outcome or Outcome)

    def check(self) -> None:
        """Raises SetupError for options that cannot go together."""
        if self.download is not None and self.outcomes != {"completed"}:
            raise SetupError("--download is for images: leave out --outcome")
        if (self.packed or self.c2pa) and self.download is None:
            raise SetupError("--packed and --c2pa go with --download")
        if self.packed and self.c2pa:
            raise SetupError("--c2pa changes images: leave out --packed")


@options.flat
async def command(
    settings: StorageSettings, to: Output, campaign: target.Campaign = DEFAULT_CAMPAIGN
) -> None:
    """Shows a campaign's images, and jobs that ended without one.

    Each is a row with the job, its image's parameters, the worker and the seconds it took, and the
    image's address or the reason. Exit code 4: a download found images missing.

    imagefleet results spring

    imagefleet results spring --outcome failed --json

    imagefleet results spring --download ./spring

    imagefleet results spring --keep clip=28,by=aesthetic --limit 50
    """
    to.check()
    named = target.campaign(campaign)
    async with console.connected(settings) as fleet:
        if unsure := await target.check_campaign(fleet.storage, named):
            console.print_warning(unsure)
        results = _Results(to, named, fleet.storage)
        is_whole = True
        try:
            if to.download is not None:
                is_whole = await _download(results, to.download)
            elif to.as_json:
                await _write(results)
            else:
                await _show(results)
        finally:
            if results.damaged.count:
                console.print_warning(str(results.damaged))
    if not is_whole:
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


@dataclass
class _Results:
    to: Output
    campaign: str
    storage: Storage
    damaged: Damaged = field(default_factory=Damaged)

    def found(self, outcomes: Collection[str], limit: int | None) -> RecordParts:
        return self.first(
            reader.results(self.storage, self.campaign, outcomes, self.damaged), limit
        )

    def first(self, parts: RecordParts, limit: int | None) -> RecordParts:
        """The first records, or with a rule the best."""
        if self.to.keep is None:
            return _limited(parts, limit)
        return best(parts, self.to.keep, limit or sys.maxsize)

    async def total(self, counts: Counts | None = None) -> int:
        counts = counts or await reader.counts(self.storage, self.campaign)
        return sum(map(counts.of, self.to.outcomes))


async def best(parts: RecordParts, rule: Keep, limit: int) -> RecordParts:
    """Sorts what a rule keeps; all of it is in memory, unless it is limited."""

    def place(record: Record) -> tuple[float, str]:
        return rule.rank(record.scores), record.key

    found: list[Record] = []
    async for records in parts:
        found += [each for each in records if rule.reason(each.scores) is None]
        if len(found) > limit:
            found = heapq.nsmallest(limit, found, place)
    yield sorted(found, key=place)


async def _limited(parts: RecordParts, left: int | None) -> RecordParts:
    async for records in parts:
        yield records[:left]
        if left is not None and (left := left - len(records)) <= 0:
            return


async def _write(results: _Results) -> None:
    address = columns.addresses(results.storage)
    async for records in results.found(results.to.outcomes, results.to.limit):
        for record in records:
            console.print_json_line(columns.row(record, address))
        sys.stdout.flush()


async def _download(results: _Results, folder: Path) -> bool:
    to = results.to
    damaged = results.damaged
    # What a rule keeps of them is not known before all are read.
    total = None if to.keep else min(await results.total(), to.limit or sys.maxsize)
    # With the records of second drawings: one of them may be that of the stored image.
    drawings = reader.drawings(results.storage, results.campaign, damaged, to.keep)
    if to.limit is not None:
        drawings = results.first(drawings, to.limit)
    signs = credentials.Credentials.read(to.c2pa) if to.c2pa else None
    with download.opened(
        folder, results.storage, damaged, packed=to.packed, signs=signs
    ) as running:
        try:
            with console.counting("downloaded", total) as on_image:
                async for records in drawings:
                    await running.run(records, on_image)
        finally:
            _report_download(running, as_json=to.as_json)
    return not running.undelivered


def _report_download(running: download.Download, *, as_json: bool) -> None:
    missing = running.named("missing")
    changed = running.named("misfit")
    download.report_undelivered(
        {"missing": (len(missing), missing), "not as recorded": (len(changed), changed)}
    )
    if as_json:
        console.print_json_line(
            {
                "folder": str(running.folder),
                "images": running.images,
                "bytes": running.bytes,
                "already_there": running.already_there,
                "missing": len(missing),
                "first_missing": missing[: download.SHOWN],
                "changed": len(changed),
                "first_changed": changed[: download.SHOWN],
                "misfits": running.unfit.count,
            }
        )
        return
    there = (
        f"; {running.already_there:,} were there already"
        if running.already_there
        else ""
    )
    console.print_plain(
        f"{console.counted(running.images, 'image')} downloaded to {running.folder},"
        f" {running.bytes / 1e6:,.1f} MB{there}"
    )


async def _show(results: _Results) -> None:
    to = results.to
    counts = await reader.counts(results.storage, results.campaign)
    console.print_tables(forms.counts_table(counts))
    shown = 0
    limit = to.limit or console.SCREEN_LINES
    for outcomes in (to.outcomes & {"completed"}, to.outcomes - {"completed"}):
        found = results.found(outcomes, limit)
        if records := [record async for some in found for record in some]:
            shown += len(records)
            console.print_tables("", forms.table(records))
    total = await results.total(counts)
    if shown < total and (to.keep is None or shown >= limit):
        console.print_note(
            f"{shown:,} of {console.counted(total, 'result')} shown: --limit COUNT shows more of"
            " each kind; --json has all"
        )
