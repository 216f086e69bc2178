"""`imagefleet results --download` of pictures in packs: each pack is read once, and checked."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.results import download
from imagefleet.files import pack
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from storages import flags
from stored_images import member, pack_name, store_alone, store_pack

Fetch = Callable[..., Any]


@pytest.fixture
def fetch(in_process: Imagefleet, storage_settings: StorageSettings) -> Fetch:
    async def run(*arguments: str, code: int = 0) -> JSONDict:
        command = ["results", "spring", "--download", "images", "--json", *arguments]
        result = await asyncio.to_thread(in_process, *command, *flags(storage_settings))
        assert result.returncode == code, result.stderr
        return {**json.loads(result.stdout), "stderr": result.stderr}

    return run


def content(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


async def test_pictures_of_packs_and_of_single_jobs_are_unpacked_side_by_side(
    storage: Storage, fetch, tmp_path: Path
):
    held = [member("a"), member("b")]
    alone = member("c")
    await store_pack(storage, held)
    await store_alone(storage, alone)

    first = await fetch()
    second = await fetch()

    assert content(tmp_path / "images") == {
        f"{each.record.id}.png": each.data for each in (*held, alone)
    }
    assert (first["images"], second["images"], second["already_there"]) == (3, 0, 3)


async def test_a_pack_is_read_once_however_many_pictures_it_holds(
    storage: Storage, tmp_path: Path
):
    for bundle in range(3):
        names = [f"{bundle}-{number}" for number in range(16)]
        await store_pack(storage, list(map(member, names)), name=pack_name(bundle))
    parts = reader.drawings(storage, "spring", damaged := Damaged())
    records = [record async for some in parts for record in some]

    for packed in (False, True):
        folder = tmp_path / str(packed)
        before = dataclasses.replace(storage.operations)
        with download.opened(folder, storage, damaged, packed=packed) as running:
            await running.run(records, lambda: None)
        assert running.images == 48
        assert storage.operations.blob_reads - before.blob_reads == 3


async def test_packs_are_taken_as_they_are(storage: Storage, fetch, tmp_path: Path):
    await store_pack(storage, [member("a"), member("b")])
    second = pack_name(1)
    await store_pack(storage, [member("c")], name=second)
    await store_alone(storage, member("d"))

    first = await fetch("--packed")
    again = await fetch("--packed")

    names = [pack_name(), second]
    assert content(tmp_path / "images") == {
        **{each.rpartition("/")[2]: await storage.packs.read(each) for each in names},
        "d.png": member("d").data,
    }
    assert (first["images"], again["images"], again["already_there"]) == (4, 0, 4)


async def test_a_half_file_of_a_pack_is_stored_again(
    storage: Storage, fetch, tmp_path: Path
):
    await store_pack(storage, [member("a"), member("b")])
    await fetch("--packed")
    (file,) = (tmp_path / "images").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:2_000])

    assert (await fetch("--packed"))["images"] == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("packed", [(), ("--packed",)])
@pytest.mark.parametrize("how", ["cut", "another", "gone"])
async def test_what_is_not_in_its_pack_as_recorded_is_named(
    storage: Storage, fetch, tmp_path: Path, packed: tuple[str, ...], how: str
):
    await store_pack(storage, [member("good")], name=pack_name(1))
    made = pack.write(pack_name(), [member("a"), member("b")])
    data = {
        "cut": made.data[:1_000],
        "another": pack.write(pack_name(), [member("a", shade=1)]).data,
        "gone": None,
    }[how]
    if data is not None:
        await storage.packs.create(pack_name(), data, "application/x-tar", {})
    await RecordLog(storage.blobs, "w1").add(made.records)

    found = await fetch(*packed, code=4)

    assert found["images"] == 1
    assert found["missing"] + found["changed"] == 2
    assert len(list((tmp_path / "images").iterdir())) == 1
    assert "good" in " ".join(content(tmp_path / "images")) or packed


async def test_packed_without_a_download_is_refused(
    in_process: Imagefleet, local_settings: StorageSettings
):
    command = ["results", "spring", "--packed", *flags(local_settings)]
    ended = await asyncio.to_thread(in_process, *command)
    assert "--packed and --c2pa go with --download" in ended.stderr
