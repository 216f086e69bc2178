"""`imagefleet export`: writes a campaign's images as shards of a data set."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import typer
from rich import filesize

from cli import console, files, options, target
from cli.options import argument, option
from fleet.export.plan import (
    MANIFEST,
    WORK_FOLDER,
    ExportPlan,
    Manifest,
    PlanDatabase,
)
from fleet.export.shards import Exporter
from fleet.files import stored
from fleet.results import credentials, download
from fleet.results.credentials import Credentials
from imagefleet.errors import SetupError
from imagefleet.files import kinds
from imagefleet.keeping.rule import Keep
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.signing import SigningKey
from imagefleet.storage.open import Storage, absolute_url
from imagefleet.storage.settings import SignerSettings, StorageSettings

#: Images of a shard, as many as by img2dataset's default.
_SHARD_SIZE = 10_000

#: Bytes of an image beyond its own file: its texts, parameters and the padding of a tar.
_BYTES_BESIDE = 5_000


@options.flat
async def command(
    settings: SignerSettings,
    campaign: target.Campaign,
    folder: Path = argument("For the shards.", metavar="FOLDER"),
    shard_size: int = option(
        "Images in each shard.", _SHARD_SIZE, min=1, max=1_000_000, metavar="IMAGES"
    ),
    keep: Keep | None = options.keep(
        "Only images that this rule keeps by their recorded scores, the best first."
    ),
    c2pa: str | None = credentials.OPTION,
    dry_run: bool = options.dry_run("what would be written, and its size"),
    as_json: options.AsJson = False,
) -> None:
    """Writes a campaign's images as a verified data set, in shards.

    They are tar files, as the libraries webdataset and datasets read them; packs are copied.
    What was interrupted goes on with the same command. A manifest.json names the shards, which
    follow from the campaign alone. Each image has the SHA-256 of its record and can be decoded.
    Exit code 4: images are missing or not so; they are left out, and named. With the signing key
    the manifest is signed; `imagefleet verify ./spring` checks an export without the storage.

    imagefleet export spring ./spring

    imagefleet export spring ./spring --dry-run
    """
    signs = credentials.Credentials.read(c2pa) if c2pa else None
    plan = ExportPlan(
        campaign=target.campaign(campaign),
        shard_size=shard_size,
        keep=keep,
        has_credentials=signs is not None,
    )
    if dry_run:
        async with console.connected(settings) as fleet:
            await target.check_campaign(fleet.storage, plan.campaign)
            with contextlib.closing(PlanDatabase("")) as database:
                plan = await _plan(fleet.storage, database, plan)
            plan = plan.model_copy(update={"storage": absolute_url(fleet.storage)})
        record = {
            **plan.model_dump(),
            "shards": plan.shard_count,
            "bytes_needed": _needed(plan),
            "reads": plan.images - plan.packed + plan.packs,
            "folder": str(folder),
        }
        facts = {
            "images": f"{plan.images:,}, {filesize.decimal(plan.bytes)}",
            "shards": f"{plan.shard_count:,} of {plan.shard_size:,} images",
            "on the disk": f"about {filesize.decimal(_needed(plan))} in {folder}",
        }
        console.show(record, facts, as_json=as_json)
        return
    with console.only_one(folder):
        made = await _export(settings, folder, plan, signs, quiet=as_json)
    _report(made, folder, as_json=as_json)
    if made.missing or made.changed:
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


async def _export(
    settings: StorageSettings,
    folder: Path,
    wanted: ExportPlan,
    signs: Credentials | None = None,
    *,
    quiet: bool,
) -> Manifest:
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        wanted = wanted.model_copy(update={"storage": absolute_url(storage)})
        with files.writing(folder):
            found = Manifest.read(folder)
            if found is None:
                found = await _make(
                    storage, folder, wanted, fleet.keys.signing, signs, quiet=quiet
                )
            else:
                _check_same(found, wanted, folder)
                stored = (await reader.counts(storage, wanted.campaign)).images
                new = max(0, stored - found.images - found.missing - found.changed)
                since = f"; {console.counted(new, 'image')} stored since are not in it"
                console.print_note(
                    f"{folder} has the whole export already"
                    f"{since if new and not wanted.keep else ''}"
                )
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
        return found


async def _make(
    storage: Storage,
    folder: Path,
    wanted: ExportPlan,
    key: SigningKey | None,
    signs: Credentials | None,
    *,
    quiet: bool,
) -> Manifest:
    """Goes on with the export in *folder*, or begins one; *key* signs it, *signs* its pictures."""
    if not (folder / WORK_FOLDER).exists():
        await target.check_campaign(storage, wanted.campaign)
        counts = await reader.counts(storage, wanted.campaign)
        if not counts.images:
            raise SetupError(
                f"campaign {wanted.campaign} has no images yet: nothing to export"
            )
        if counts.pending:
            console.print_warning(
                f"{console.counted(counts.pending, 'job')} of {wanted.campaign} still to do: their"
                " images will not be in this export"
            )
        if await asyncio.to_thread(lambda: folder.exists() and any(folder.iterdir())):
            raise SetupError(
                f"{folder} is not empty: choose another folder for the export"
            )
        (folder / WORK_FOLDER).mkdir(parents=True)
    with contextlib.closing(
        PlanDatabase(folder / WORK_FOLDER / "plan.sqlite")
    ) as database:
        plan = database.plan() or await _plan(storage, database, wanted, folder)
        _check_same(plan, wanted, folder)
        with console.counting("exported", plan.images, quiet=quiet) as on_images:
            shards = await Exporter(folder, database, plan, storage, signs).run(
                on_images
            )
        loras = await _hashes(storage, database.loras())
    made = Manifest.of(plan, shards, loras, key)
    console.write_file(folder / MANIFEST, made.model_dump_json(indent=2) + "\n")
    return made


async def _hashes(storage: Storage, names: set[str]) -> dict[str, str]:
    """The hashes of those LoRAs that are in the storage, where it can be read."""
    try:
        found = await stored.read(storage, kinds.LORA)
    except SetupError:
        return {}
    by_name = {kinds.LORA.stem(lora.name): lora.short_hash for lora in found}
    return {
        name: sha256 for name, sha256 in by_name.items() if sha256 and name in names
    }


async def _plan(
    storage: Storage,
    database: PlanDatabase,
    wanted: ExportPlan,
    folder: Path | None = None,
) -> ExportPlan:
    """Makes the plan; raises SetupError if *folder* has no space for it."""
    damaged = Damaged()
    records = reader.drawings(storage, wanted.campaign, damaged, wanted.keep)
    listings = [
        store.records(f"{wanted.campaign}/") for store in (storage.blobs, storage.packs)
    ]
    with console.counting("planned", None) as on_records:
        made = await database.make(records, listings, wanted, damaged, on_records)
    if damaged.count:
        console.print_warning(str(damaged))
    if folder and _needed(made) > (free := shutil.disk_usage(folder).free):
        raise SetupError(
            f"{folder} has {filesize.decimal(free)} of free space, and the export takes about"
            f" {filesize.decimal(_needed(made))}: free some, or choose another folder"
        )
    return made


def _check_same(begun: ExportPlan | Manifest, wanted: ExportPlan, folder: Path) -> None:
    """Raises SetupError if *folder* has an export with other options."""
    for name in ("campaign", "storage", "shard_size", "keep", "has_credentials"):
        has = getattr(begun, name)
        asked = getattr(wanted, name)
        if has != asked:
            raise SetupError(
                f"{folder} has an export with the {name.replace('_', ' ')} {has}, not {asked}:"
                " choose another folder"
            )


def _needed(plan: ExportPlan) -> int:
    return plan.bytes + _BYTES_BESIDE * plan.stored


def _report(made: Manifest, folder: Path, *, as_json: bool) -> None:
    download.report_undelivered(
        {
            "missing": (made.missing, made.first_missing),
            "not as recorded or damaged": (made.changed, made.first_changed),
        }
    )
    if made.misfits:
        console.print_warning(
            f"skipped {console.counted(made.misfits, 'record')} that do not match their image"
        )
    images = f"{console.counted(made.images, 'image')}, {filesize.decimal(made.bytes)}"
    line = f"{images}, in {console.counted(len(made.shards), 'shard')}: {folder}"
    console.show(
        {**made.model_dump(exclude={"shards"}), "folder": str(folder)},
        line,
        as_json=as_json,
    )
