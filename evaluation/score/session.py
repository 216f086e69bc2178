"""One scoring run: the reference, then the campaign, then the figures."""

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from cli import console, options, target
from cli.options import option
from evaluation.score import plan, reference, scores
from evaluation.score import run as running
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.figures import Scores
from evaluation.score.networks import load
from evaluation.score.plan import ScorePlan
from evaluation.score.reference import Reference
from evaluation.score.run import Done, FeatureTask, NetworkPair
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.records.follower import Follower
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

#: More only wait for the storage, and each has the networks in memory.
_MOST_PROCESSES = 4

#: Seconds between two polls, each of which is a listing and a read for each shard that has grown.
POLL_SECONDS = 5.0

#: Polls without a record after which a campaign without pending jobs has ended: its filler may
#: be slower than the workers. One that has not ended is counted again after twice as many: on Azure
#: that is a read of each shard.
_QUIET_POLLS = 3


@dataclass(frozen=True)
class Networks:
    """Options: the reference, and the networks."""

    reference: str | None = option(
        "Pictures to compare with, or an .npz of theirs: of --write-reference, or with `mu` and"
        " `sigma` of pytorch-fid or clean-fid, for FID alone.",
        metavar="FOLDER|STATISTICS",
    )
    extractor: str | None = option(
        "Network for FID and KID: TorchScript (Inception's, say) or ONNX. `demo`: that of the demo"
        " checkpoint, for all figures.",
        metavar="FILE",
    )
    clip: str | None = option(
        "CLIP of transformers, for CLIP score and CMMD.", metavar="FOLDER"
    )
    device: options.Device = "auto"


@dataclass(frozen=True)
class Computing:
    """Options: how the features are computed and kept."""

    processes: int | None = option(
        "At the same time. [default: the cores, at most 4]", min=1, max=256
    )
    state: Path | None = option(
        "Features, to go on after an interruption [default: NAME-score].",
        metavar="FOLDER",
    )
    follow: bool = option("Wait until the campaign has ended.", default=False)


@dataclass(frozen=True)
class ScoreRequest:
    """A scoring run as the options ask for it; *folder* keeps the features."""

    settings: StorageSettings
    campaign: str
    networks: Networks
    computing: Computing
    write_reference: Path | None
    quiet: bool

    @property
    def folder(self) -> Path:
        return self.computing.state or Path(f"{self.campaign}-score")


def run(asked: ScoreRequest) -> Scores:
    """The figures; raises FleetError for unusable sources."""
    networks = asked.networks
    device = load.find_device((networks.extractor, networks.clip), networks.device)
    pair = NetworkPair(networks.extractor, networks.clip, device)
    work = FeatureTask(asked.settings, (), pair)
    extractor, clip = pair.facts
    compared = _compared(asked, work, extractor, clip)
    if asked.write_reference and compared:
        reference.write(compared, asked.write_reference, extractor, clip)
    planned = console.run(_plan(asked))
    if planned.damaged.count:
        console.print_warning(str(planned.damaged))
    every = [chunk for some in planned.chunks.values() for chunk in some]
    _extract(asked, replace(work, chunks=every), "scored")
    with console.counting(
        "compared", len(planned.groups), quiet=asked.quiet
    ) as on_group:
        return scores.compute(
            planned, asked.campaign, compared, (extractor, clip), on_group
        )


def _compared(
    asked: ScoreRequest,
    work: FeatureTask,
    extractor: ExtractorFacts | None,
    clip: ExtractorFacts | None,
) -> Reference | None:
    """The reference; a folder's is computed first, as it is what the rest is compared with."""
    named = asked.networks.reference
    if named is None:
        return None
    folder = Path(named)
    if not folder.is_dir():
        return reference.read(named, extractor, clip)
    names = plan.pictures(folder)
    if not names:
        raise errors.SetupError(
            f"the reference {folder} has no pictures (PNG, JPEG, WebP)"
        )
    with console.counting("hashed", len(names), quiet=asked.quiet) as on_files:
        chunks = plan.of_folder(folder, names, asked.folder, on_files)
    _extract(asked, replace(work, chunks=chunks), "reference")
    return reference.of_chunks(folder, chunks, extractor, clip)


async def until_ended(storage: Storage, campaign: str) -> None:
    """Returns once the campaign has ended, if it is known how many jobs were sent."""
    follower = Follower(storage, campaign, trusts_images=True)
    quiet = 0
    count_at = _QUIET_POLLS
    while True:
        try:
            if await follower.poll():
                quiet = 0
                count_at = _QUIET_POLLS
                continue
            quiet += 1
            if quiet >= count_at:
                count_at = 2 * quiet
                if (await reader.counts(storage, campaign)).pending == 0:
                    return
        except errors.TransientError as error:
            console.print_warning(f"trying again: {error.message}")
        await asyncio.sleep(POLL_SECONDS)


async def _plan(asked: ScoreRequest) -> ScorePlan:
    async with console.connected(asked.settings) as fleet:
        storage = fleet.storage
        await target.check_campaign(storage, asked.campaign)
        if asked.computing.follow:
            console.print_note(f"waiting for the end of {asked.campaign}")
            await until_ended(storage, asked.campaign)
        pending = (await reader.counts(storage, asked.campaign)).pending
        if pending:
            console.print_warning(
                f"{console.counted(pending, 'job')} of {asked.campaign} still to do: their images"
                " are not in these figures (--follow waits for them)"
            )
        with console.counting("planned", None, quiet=asked.quiet) as on_records:
            return await plan.make(storage, asked.campaign, asked.folder, on_records)


def _extract(asked: ScoreRequest, work: FeatureTask, verb: str) -> None:
    """Computes the features that are not there yet, with a bar and the speed."""
    done = Done()
    processes = asked.computing.processes or min(os.cpu_count() or 1, _MOST_PROCESSES)
    began_at = time.monotonic()
    images = sum(len(chunk.rows()) for chunk in work.chunks)
    with console.counting(verb, images, quiet=asked.quiet) as on_images:
        running.extract(work, processes, on_images, done)
    seconds = time.monotonic() - began_at
    if done.images and seconds > 0:
        kept = f", {done.kept:,} were done already" if done.kept else ""
        console.print_note(
            f"{verb}: {console.counted(done.images, 'image')} in {seconds:,.1f} s,"
            f" {done.images / seconds:,.1f} images/s{kept}"
        )
