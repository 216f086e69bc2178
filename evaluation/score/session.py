"""One scoring run: the reference, then the campaign, then the figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.score import plan, reference, scores
from evaluation.score import run as running
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.networks import load
from evaluation.score.plan import Chunk, Plan
from evaluation.score.reference import Reference
from fleet import console
from fleet.campaigns import target
from imagefleet.records import reader
from imagefleet.scoring.scores import Scores
from imagefleet.storage.settings import StorageSettings


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options ask for."""

    settings: StorageSettings
    campaign: str
    reference: str | None
    extractor: str | None
    clip: str | None
    device: str
    folder: Path
    processes: int
    part: tuple[int, int]
    """The second number of parts, of which this run computes the first."""
    write_reference: Path | None
    follow: bool
    quiet: bool


def run(asked: Asked) -> Scores | None:
    """The figures; None where other parts are still to be computed.

    Raises:
        FleetError: an extractor, the reference or the storage cannot be used.
    """
    device = load.find_device((asked.extractor, asked.clip), asked.device)
    work = running.Work(asked.settings, (), asked.extractor, asked.clip, device)
    extractor, clip = (each.facts if each else None for each in work.loaded)
    number, parts = asked.part
    # A part has no figures: what it would be compared with is not needed yet.
    compared = _compared(asked, work, extractor, clip) if parts == 1 else None
    if asked.write_reference and compared:
        reference.write(compared, asked.write_reference, extractor, clip)
    planned = console.run(_plan(asked))
    if planned.damaged.count:
        console.print_warning(str(planned.damaged))
    every = [chunk for some in planned.chunks.values() for chunk in some]
    mine = every[number - 1 :: parts]
    _extract(asked, running.on_chunks(work, mine), "scored")
    if parts > 1:
        console.print_note(
            f"part {number} of {parts} is in {asked.folder}: copy the others' folders into it, and"
            " run this without --part"
        )
        return None
    with console.counting("compared", len(planned.groups), quiet=asked.quiet) as on_group:
        return scores.compute(planned, asked.campaign, compared, (extractor, clip), on_group)


def _compared(
    asked: Asked, work: running.Work, extractor: ExtractorFacts | None, clip: ExtractorFacts | None
) -> Reference | None:
    """The reference; a folder's is computed first, as it is what the rest is compared with."""
    if asked.reference is None:
        return None
    folder = Path(asked.reference)
    if not folder.is_dir():
        return reference.read(asked.reference, extractor, clip)
    chunks = plan.of_folder(folder, asked.folder)
    _extract(asked, running.on_chunks(work, chunks), "reference")
    return reference.of_chunks(folder, chunks, extractor, clip)


async def _plan(asked: Asked) -> Plan:
    async with console.connected(asked.settings) as fleet:
        storage = fleet.storage
        await target.check_campaign(storage, asked.campaign)
        if asked.follow:
            console.print_note(f"waiting for the end of {asked.campaign}")
            follower = reader.Follower(storage, asked.campaign)
            warn = console.print_warning
            async for _ in reader.follow(storage, follower, asked.campaign, (), warn):
                pass
        pending = (await reader.counts(storage, asked.campaign)).pending
        if pending:
            console.print_warning(
                f"{console.counted(pending, 'job')} of {asked.campaign} still to do: their images"
                " are not in these figures (--follow waits for them)"
            )
        with console.counting("planned", None, quiet=asked.quiet) as on_records:
            return await plan.make(storage, asked.campaign, asked.folder, on_records)


def _extract(asked: Asked, work: running.Work, verb: str) -> None:
    """Computes the features that are not there yet, with a bar and the speed."""
    done = running.Done()
    began_at = time.monotonic()
    with console.counting(verb, _images(work.chunks), quiet=asked.quiet) as on_images:
        running.extract(work, asked.processes, on_images, done)
    seconds = time.monotonic() - began_at
    if done.images and seconds > 0:
        kept = f", {done.kept:,} were done already" if done.kept else ""
        console.print_note(
            f"{verb}: {console.counted(done.images, 'image')} in {seconds:,.1f} s,"
            f" {done.images / seconds:,.1f} images/s{kept}"
        )


def _images(chunks: Sequence[Chunk]) -> int:
    return sum(len(chunk.rows()) for chunk in chunks)
