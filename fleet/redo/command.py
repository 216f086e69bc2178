"""`imagefleet redo`: has images drawn again, by other workers, and replaces them."""

import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import typer
from pydantic import AwareDatetime, BaseModel, Field, ValidationError

from cli import console, options
from cli.options import argument, option
from cli.target import Target, check_campaign, images, unknown_job
from fleet.failed.command import How, move
from fleet.redo import replace
from imagefleet.errors import SetupError, UnusableFileError
from imagefleet.job.change import Change
from imagefleet.job.message import CHECKS, job_key
from imagefleet.job.names import ASIDE, DUPLICATES, SUSPECT, worker_file_name
from imagefleet.keeping.rule import Keep
from imagefleet.records import catalog, decisions, reader
from imagefleet.records.record import Record, Spot
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage, signer_of
from imagefleet.storage.proofs import machine_of
from imagefleet.storage.protocol import BlobRecord, BlobStore, Metadata
from imagefleet.storage.settings import SignerSettings, StorageSettings
from imagefleet.validation import JSONDict
from loadgen import sources
from worker.node import quarantine

#: The longest record of suspect images; a worker's is far shorter.
_MAX_RECORD_BYTES = 2**16


#: Fields of the record of an image in a pack that the metadata of other images have.
_TOLD = {"worker", "started_at", "digest", "sha256"}


class Suspects(BaseModel):
    """A worker's images of a time, as a record says. Untrusted: a worker stores it."""

    worker: str = Field(min_length=1, max_length=200)
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    def include(self, worker: str, at: datetime) -> bool:
        """True for an image that *worker* stored then."""
        return (
            self.worker in {worker, machine_of(worker)}
            and (self.since is None or self.since <= at)
            and (self.until is None or at <= self.until)
        )


@dataclass
class Images:
    """Images by name, each with its metadata."""

    images: dict[str, Metadata] = field(default_factory=dict)
    #: Where images in packs are; the metadata of each are its record's.
    packed: dict[str, Spot] = field(default_factory=dict)
    damaged_records: int = 0

    def add(self, record: Record) -> None:
        """Adds an image that is in a pack."""
        self.images[record.spot.blob] = {
            "job": record.id,
            **record.model_dump(mode="json", include=_TOLD, exclude_none=True),
        }
        self.packed[record.spot.blob] = record.spot

    @property
    def by_worker(self) -> Counter[str]:
        return Counter(each.get("worker", "") for each in self.images.values())


@dataclass(frozen=True)
class ImageChoice:
    job: str | None = argument(
        "The images of this job, or this image of it, as in spring/a-2.png; for --worker"
        " and --suspect, only images of this campaign.",
        None,
        metavar="CAMPAIGN[/ID]",
    )
    worker: str | None = option(
        "Images of this worker, or machine on SaladCloud.", metavar="ID"
    )
    suspect: bool = option(
        "Images that nodes which failed their checks have marked as suspect.",
        default=False,
    )
    since: datetime | None = options.moment("Only what was stored since then")
    keep: Keep | None = options.keep(
        "Jobs of CAMPAIGN[/ID] that were dropped, and that this rule may keep by their"
        " scores: they are drawn and judged again by it."
    )

    def __post_init__(self) -> None:
        of_dropped = self.keep is not None
        named = self.named.campaign if of_dropped else self.named.id
        given = self.worker is not None, self.suspect, named is not None
        if sum(given) != 1 or (of_dropped and named is None):
            raise SetupError(
                "choose the images: CAMPAIGN/ID, --worker or --suspect; or dropped jobs:"
                " CAMPAIGN[/ID] with --keep"
            )
        if self.worker is None and self.since:
            raise SetupError("--since goes with --worker")

    @property
    def named(self) -> Target:
        return images(self.job)


@options.flat
def command(
    settings: SignerSettings,
    which: ImageChoice,
    jobs: Path | None = option(
        "The jobs, a line each or as a template, for images without their job in them; it"
        " takes precedence.",
        metavar="FILE",
    ),
    dry_run: bool = options.dry_run("how many would be drawn again"),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Has images or dropped jobs drawn again, and replaces them.

    Each image is put aside under -replaced/, then its job is sent again, as the image has it in
    itself. If this is interrupted, the next run finishes what was begun, with the same --jobs if
    there were any. It deletes images: the tokens of `imagefleet keys mint operator` allow that.
    Exit code 4: some images stay, because their jobs are not known.

    imagefleet redo --worker 0d8f5c1e-7 --since 2026-12-01T08:00 --dry-run

    imagefleet redo --suspect

    imagefleet redo spring/0001

    imagefleet redo spring --keep clip=22,best=2
    """
    if which.keep is not None:
        if jobs is not None:
            raise SetupError("--jobs is for images: a dropped job is in its record")
        how = How(everything=False, dry_run=dry_run, yes=yes, as_json=as_json)
        console.run(_redo_dropped(settings, which, how))
        return
    given = {}
    if jobs is not None:
        source = sources.open_source(str(jobs), signer=signer_of(settings))
        given = replace.by_key(source.bodies())
    result = console.run(
        _run(settings, which, given, dry_run=dry_run, yes=yes, quiet=as_json)
    )
    if as_json:
        console.print_json(result)
    else:
        _show(result, dry_run=dry_run)
    if result.get("not_redone"):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


async def _run(
    settings: StorageSettings,
    which: ImageChoice,
    given: dict[str, str],
    *,
    dry_run: bool,
    yes: bool,
    quiet: bool,
) -> JSONDict:
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        if not dry_run:
            await replace.check_access(storage)
        with console.counting("listed", None, quiet=quiet) as on_listed:
            found = await select(storage, which, on_listed)
        interrupted = await replace.interrupted(storage)
        for copy, metadata in interrupted.items():
            found.images.pop(replace.original(copy), None)
            found.images[copy] = metadata
        result = {
            "images": len(found.images),
            "workers": dict(found.by_worker.most_common()),
            "damaged_records": found.damaged_records,
            "interrupted": len(interrupted),
        }
        if dry_run or not found.images:
            return result
        await _warn_of_nodes_at_work(storage, found)
        console.confirm(
            f"Have {console.counted(len(found.images), 'image')} drawn again?", yes=yes
        )
        finder = replace.JobFinder(storage.blobs, given, fleet.check())
        await finder.list_duplicates(which.named.prefix)
        with console.counting("replaced", len(found.images), quiet=quiet) as on_image:
            replaced = await replace.replace(
                storage, found.images, found.packed, finder, on_image
            )
    return result | {
        "replaced": replaced.images,
        "jobs": replaced.jobs,
        "not_redone": [
            {"image": name, "reason": why} for name, why in replaced.refused.items()
        ],
    }


async def _redo_dropped(settings: SignerSettings, which: ImageChoice, how: How) -> None:
    """Sends dropped jobs again with another rule."""
    change = Change({"keep": which.keep}, signer_of(settings))
    selection = Selection(
        campaign=which.named.campaign, id=which.named.id, keep=which.keep
    )
    async with console.connected(settings) as fleet:
        check = fleet.check(change)
        work = functools.partial(dead_letter_queue.replay, check=check)
        await move(fleet, selection, check, how, "replayed", work)


async def _warn_of_nodes_at_work(storage: Storage, found: Images) -> None:
    """A worker that may draw its own images again, as wrong as before."""
    known = {node.name for node in (await quarantine.read(storage.files)).nodes}
    for worker in sorted(set(found.by_worker) - {""}):
        if known.isdisjoint({worker, machine_of(worker)}):
            console.print_warning(
                f"{worker} is not in the quarantine and may draw its images again; `imagefleet"
                " verify --quarantine` adds workers that draw wrong"
            )


def _show(result: JSONDict, *, dry_run: bool) -> None:
    if interrupted := result["interrupted"]:
        images = console.counted(interrupted, "image")
        console.print_note(f"with {images} of a run that was interrupted")
    if damaged := result["damaged_records"]:
        console.print_warning(
            f"{console.counted(damaged, 'suspect record')} left out: damaged, or without"
            " proof of their worker"
        )
    images = console.counted(result["images"], "image")
    if not result["images"]:
        console.print_plain("no images to draw again")
    elif dry_run:
        rows = (
            (worker or "(none)", count) for worker, count in result["workers"].items()
        )
        console.print_tables(
            console.table(
                ["worker"],
                ["images"],
                rows=itertools.islice(rows, console.SCREEN_LINES),
            )
        )
        console.print_plain(f"{images} would be drawn again")
    else:
        replaced = console.counted(result["replaced"], "image")
        jobs = console.counted(result["jobs"], "job")
        console.print_plain(f"{replaced} put aside, {jobs} sent")
        refused = result["not_redone"]
        for each in refused[: console.SCREEN_LINES]:
            console.print_plain(f"{each['image']} stays: {each['reason']}")
        console.print_more(
            len(refused) - console.SCREEN_LINES, "others stay (--json lists them)"
        )


async def select(
    storage: Storage, which: ImageChoice, on_listed: console.Move
) -> Images:
    """Reads which images are wanted; *on_listed* is called for each that is looked at."""
    named = which.named
    if named.campaign is not None and named.id is not None:
        return await _of_job(storage, named.campaign, named.id)
    await check_campaign(storage, named.campaign)
    found = Images()
    if which.worker is not None:
        wanted = [Suspects(worker=which.worker, since=which.since)]
    else:
        wanted, found.damaged_records = await _recorded(storage)
    if not wanted:
        return found
    async for record in _records(storage.blobs, named.campaign):
        on_listed()
        worker = record.metadata.get("worker", "")
        if any(each.include(worker, record.created_at) for each in wanted):
            found.images[record.name] = record.metadata
    packed = await catalog.packed_campaigns(storage) or set()
    for campaign in packed & {named.campaign} if named.campaign else packed:
        async for image in reader.images(storage, campaign):
            if image.pack is not None and any(
                each.include(image.worker, image.at) for each in wanted
            ):
                found.add(image)
    return found


async def _of_job(storage: Storage, campaign: str, job_id: str) -> Images:
    """The images of a job, or the one image of that name."""
    name = job_key(campaign, job_id)
    if (metadata := await storage.blobs.metadata(name)) is not None:
        return Images({name: metadata})
    images = await decisions.job_images(storage, campaign, job_id)
    found = Images()
    for image in images:
        if image.pack is not None:
            found.add(image)
        elif (told := await storage.blobs.metadata(image.spot.blob)) is not None:
            found.images[image.spot.blob] = told
    if not found.images:
        raise await unknown_job(storage, Target(campaign, job_id))
    return found


async def _records(blobs: BlobStore, campaign: str | None) -> AsyncIterator[BlobRecord]:
    prefixes = (
        [""]
        if campaign is None
        else [f"{each}{campaign}/" for each in ("", CHECKS, DUPLICATES)]
    )
    for prefix in prefixes:
        async for record in blobs.records(prefix):
            # What a job draws, an image or a second drawing, and no other thing that is put aside.
            is_drawn = record.name.startswith((CHECKS, DUPLICATES))
            if is_drawn or not record.name.startswith(ASIDE):
                yield record


async def _recorded(storage: Storage) -> tuple[list[Suspects], int]:
    """The images that workers recorded as suspect, and the number of damaged records."""
    found = list[Suspects]()
    damaged = 0
    blobs = storage.blobs
    proofs = await storage.proofs()
    async for blob in blobs.records(SUSPECT):
        if not blob.name.endswith(".json"):
            continue
        try:
            data = await blobs.read(blob.name, _MAX_RECORD_BYTES) or b""
            suspects = Suspects.model_validate_json(data)
        except (ValidationError, UnusableFileError):
            damaged += 1
            continue
        author = worker_file_name(suspects.worker)
        if proofs and proofs.author(blob.name, blob.metadata, data) != author:
            damaged += 1
        else:
            found.append(suspects)
    return found, damaged
