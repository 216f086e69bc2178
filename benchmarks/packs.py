"""What reading a campaign costs in packs, against single images: operations and seconds.

A campaign of each kind is listed, 1,000 of its images at random are fetched, and it is exported, on
a local storage that counts operations as Azure bills them. Single images are as many as a disk
takes in reasonable time: what grows with their number is counted in proportion.

    python benchmarks/packs.py [--images 1000000] [--single 20000] [--bundle 32]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from fleet.export import command
from fleet.export.plan import WORK_FOLDER, ExportPlan, PlanDatabase
from fleet.export.shards import Exporter
from imagefleet.files import pack
from imagefleet.files.pack import Member
from imagefleet.records import pictures, reader
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.local.blobs import METADATA_FOLDER
from imagefleet.storage.open import LocalStorage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

FETCHED = 1_000

#: Records that a worker appends at once.
RECORDED = 256


def picture() -> bytes:
    """A small file, so that the disk holds a million."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


PICTURE = picture()
SHA256 = hashlib.sha256(PICTURE).hexdigest()


def members(campaign: str, count: int) -> Iterator[Member]:
    for number in range(count):
        name = f"{number:07}"
        record = Record.model_validate(
            {
                "outcome": "completed",
                "id": name,
                "campaign": campaign,
                "blob": f"{campaign}/{name}.png",
                "digest": hashlib.sha256(name.encode()).hexdigest(),
                "at": "2026-11-30T12:00:00Z",
                "worker": "w1",
                "prompt": f"a house {name}",
                "seed": number,
                "sha256": SHA256,
                "size_bytes": len(PICTURE),
            }
        )
        yield Member(record, PICTURE)


async def fill_packs(storage: LocalStorage, count: int, bundle: int) -> None:
    log = RecordLog(storage.blobs, "w1")
    records: list[Record] = []
    held: list[Member] = []
    (storage.packs.folder / "packed").mkdir(parents=True)

    def close(number: int) -> None:
        name = pack.name_of("packed", f"{number:032x}", 1)
        made = pack.write(name, held)
        # Not by the storage: a million syncs of the disk measure nothing here.
        (storage.packs.folder / name).write_bytes(made.data)
        records.extend(made.records)
        held.clear()

    for number, member in enumerate(members("packed", count)):
        held.append(member)
        if len(held) == bundle:
            close(number)
        if len(records) >= RECORDED:
            await log.add(records)
            records.clear()
    if held:
        close(count)
    await log.add(records)


async def fill_single(
    storage: LocalStorage, campaign: str, count: int, *, stored: bool
) -> None:
    """Writes records and, if they are *stored*, their images."""
    log = RecordLog(storage.blobs, "w1")
    records: list[Record] = []
    folder = storage.blobs.folder
    for each in (folder / campaign, folder / METADATA_FOLDER / campaign):
        each.mkdir(parents=True)
    for member in members(campaign, count):
        if stored:
            name = str(member.record.blob)
            (folder / name).write_bytes(member.data)
            told = {"metadata": {"job": member.record.id, "sha256": SHA256}}
            sidecar = folder / METADATA_FOLDER / f"{name}.json"
            sidecar.write_text(json.dumps(told))
        records.append(member.record)
        if len(records) >= RECORDED:
            await log.add(records)
            records.clear()
    await log.add(records)


@asynccontextmanager
async def counted(storage: LocalStorage) -> AsyncIterator[JSONDict]:
    """Yields the figures, which are there once the block has ended."""
    before, began_at = dataclasses.replace(storage.operations), time.monotonic()
    figures: JSONDict = {}
    yield figures
    done = storage.operations
    figures["reads"] = done.blob_reads - before.blob_reads
    figures["writes_and_listings"] = done.blob_writes - before.blob_writes
    figures["seconds"] = round(time.monotonic() - began_at, 2)


async def list_all(storage: LocalStorage, campaign: str, count: int) -> JSONDict:
    found = 0
    async with counted(storage) as figures:
        async for records in reader.image_parts(storage, campaign):
            found += len(records)
    assert found == count
    return figures


async def fetch_some(storage: LocalStorage, campaign: str, count: int) -> JSONDict:
    rng = random.Random(0)
    chosen = {f"{number:07}" for number in rng.sample(range(count), FETCHED)}
    some: list[Record] = []
    async for records in reader.image_parts(storage, campaign):
        some += [record for record in records if record.id in chosen]
    async with counted(storage) as figures:
        for record in some:
            found = await pictures.find(storage, [record])
            assert not isinstance(found, str)
    return figures


async def export_all(
    storage: LocalStorage, campaign: str, count: int, folder: Path
) -> JSONDict:
    wanted = ExportPlan(campaign=campaign, shard_size=10_000)
    (folder / WORK_FOLDER).mkdir(parents=True)
    database = PlanDatabase(folder / WORK_FOLDER / "plan.sqlite")
    with contextlib.closing(database):
        async with counted(storage) as figures:
            plan = await command._plan(storage, database, wanted, folder)  # noqa: SLF001
            shards = await Exporter(folder, database, plan, storage).run(lambda _: None)
    assert sum(shard.images for shard in shards) == count
    return figures


async def run(images: int, single: int, bundle: int, folder: Path) -> JSONDict:
    storage = open_storage(StorageSettings(storage=f"local:{folder}/storage"))
    assert isinstance(storage, LocalStorage)
    async with storage:
        await storage.create()
        await fill_packs(storage, images, bundle)
        await fill_single(storage, "records", images, stored=False)
        await fill_single(storage, "single", single, stored=True)
        packed = {
            "listed": await list_all(storage, "packed", images),
            "fetched": await fetch_some(storage, "packed", images),
            "exported": await export_all(storage, "packed", images, folder / "a"),
        }
        alone = {
            "listed": await list_all(storage, "records", images),
            "fetched": await fetch_some(storage, "single", single),
            "exported": await export_all(storage, "single", single, folder / "b"),
        }
    for name, figure in alone["exported"].items():
        alone["exported"][name] = round(figure * images / single)
    sums = [
        sum(each["reads"] + each["writes_and_listings"] for each in kind.values())
        for kind in (packed, alone)
    ]
    return {
        "images": images,
        "bundle": bundle,
        "single_images_exported": single,
        "packed": packed,
        "single": alone,
        "operations_over_single": sums[0] / sums[1],
    }


def show(result: JSONDict) -> None:
    table = Table(
        "",
        *(
            f"{kind}, {what}"
            for kind in ("packs", "single")
            for what in ("operations", "s")
        ),
    )
    for deed in ("listed", "fetched", "exported"):
        cells = []
        for kind in ("packed", "single"):
            figures = result[kind][deed]
            operations = figures["reads"] + figures["writes_and_listings"]
            cells += [f"{operations:,}", f"{figures['seconds']:,.1f}"]
        table.add_row(deed, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--single", type=int, default=20_000)
    parser.add_argument("--bundle", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(
            run(given.images, given.single, given.bundle, Path(folder))
        )
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
