"""`imagefleet results --download`: each file whole or absent, none twice, none elsewhere."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import polling
from cli import files
from fleet.keys import mint
from fleet.results import download
from imagefleet.job.names import duplicate_name
from imagefleet.records import catalog
from imagefleet.records.catalog import Damaged
from imagefleet.records.log import RecordLog
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from storages import flags

Add = Callable[..., Awaitable[Any]]


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def fetch(
    in_process: Imagefleet, settings: StorageSettings, *arguments: str, code: int = 0
) -> JSONDict:
    command = ["results", "spring", "--download", "images", "--json"]
    result = await asyncio.to_thread(in_process, *command, *flags(settings), *arguments)
    assert result.returncode == code, result.stderr
    return {**json.loads(result.stdout), "stderr": result.stderr}


async def test_all_images_are_there_and_the_second_time_none_is_read(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    tmp_path,
):
    records = await store_images(storage, *(f"{number:04}" for number in range(40)))

    first = await fetch(in_process, storage_settings)
    second = await fetch(in_process, storage_settings)

    assert (first["images"], second["images"], second["already_there"]) == (40, 0, 40)
    assert first["bytes"] == sum(record.size_bytes for record in records)
    names = sorted(each.name for each in (tmp_path / "images").iterdir())
    assert names == [f"{number:04}.png" for number in range(40)]
    for name in names:
        data = await storage.blobs.read(f"spring/{name}")
        assert (tmp_path / "images" / name).read_bytes() == data


async def test_what_a_kill_left_is_downloaded_again(
    local_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001", "0002")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / ".0002.png.partial").write_bytes(b"half")
    (tmp_path / "images" / "0001.png").write_bytes(b"")  # by a power failure

    done = await fetch(in_process, local_settings)

    assert (done["images"], done["already_there"]) == (2, 0)
    assert names_in(tmp_path / "images") == ["0001.png", "0002.png"]


async def test_a_missing_image_is_named_and_the_exit_code_says_so(
    local_settings: StorageSettings, in_process: Imagefleet, store_images: Add
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001", "0002")
        await storage.blobs.delete("spring/0002.png")

    done = await fetch(in_process, local_settings, code=4)

    assert (done["images"], done["missing"]) == (1, 1)
    assert done["first_missing"] == ["spring/0002.png"]
    assert "error: 1 image missing: spring/0002.png" in done["stderr"]


async def test_what_took_an_images_name_is_not_delivered_as_its_picture(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    tmp_path,
):
    first, _ = await store_images(storage, "0001", "0002")
    drawing = await storage.blobs.read("spring/0001.png") or b""
    for name in ("0001", "0002"):
        await storage.blobs.delete(f"spring/{name}.png")
        await storage.blobs.create(f"spring/{name}.png", b"garbage", "image/png", {})
    await storage.blobs.create(
        duplicate_name(first.blob, "w1"), drawing, "image/png", {}
    )

    done = await fetch(in_process, storage_settings, code=4)

    assert (done["images"], done["changed"], done["misfits"]) == (1, 1, 1)
    assert done["first_changed"] == ["spring/0002.png"]
    assert "1 record does not fit" in done["stderr"]
    assert names_in(tmp_path / "images") == ["0001.png"]
    assert (tmp_path / "images" / "0001.png").read_bytes() == drawing, (
        "as it was kept aside"
    )


async def test_a_second_record_of_an_image_loses_to_the_one_that_fits(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
):
    (record,) = await store_images(storage, "0001")
    forged = {"sha256": "0" * 64, "prompt": "forged", "at": NOON - timedelta(days=1)}
    await RecordLog(storage.blobs, "a").add([record.model_copy(update=forged)])

    first = await fetch(in_process, storage_settings)
    second = await fetch(in_process, storage_settings)

    assert (first["images"], first["changed"], first["misfits"]) == (1, 0, 1)
    assert (second["images"], second["already_there"], second["misfits"]) == (0, 1, 1)


async def test_no_record_writes_outside_of_the_folder(
    local_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        for number, blob in enumerate(
            ("spring/a/b.png", "autumn/x.png", "-checks/spring/x.png", "spring/é.png")
        ):
            await store_images(storage, f"x{number}", blob=blob)

    done = await fetch(in_process, local_settings)

    assert done["images"] == 1
    assert "a record of what is no image of this campaign; and 1 more" in done["stderr"]
    assert names_in(tmp_path / "images") == ["0001.png"]


@pytest.mark.parametrize(
    "blob", ["spring/../x.png", "spring/.x", "spring//x", "../x", "x", ""]
)
def test_no_name_leads_out_of_a_folder(blob: str):
    assert catalog.image_name(blob, "spring") is None


async def test_names_that_differ_in_capitals_are_two_files_on_every_disk(
    local_settings: StorageSettings,
    store_images: Add,
    tmp_path,
    monkeypatch,
):
    async with open_storage(local_settings) as storage:
        first, second = await store_images(storage, "cat", "Cat")
        monkeypatch.setattr(files, "ignores_case", lambda _: True)
        with download.opened(tmp_path / "images", storage, Damaged()) as running:
            await running.run([first, second], lambda: None)

    (other,) = matching(tmp_path / "images", "Cat~*.png")
    assert other.stat().st_size == second.size_bytes
    assert (tmp_path / "images" / "cat.png").stat().st_size == first.size_bytes


async def test_only_one_process_downloads_to_a_folder(
    local_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        with download.opened(tmp_path / "images", storage, Damaged()):
            command = ["results", "spring", *flags(local_settings)]
            result = await asyncio.to_thread(
                in_process, *command, "--download", "images"
            )

    assert result.returncode == 2
    assert "images: wait for it or end it first" in result.stderr


async def test_a_download_that_is_interrupted_leaves_whole_files(
    local_settings: StorageSettings,
    store_images: Add,
    in_process: Imagefleet,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        records = await store_images(
            storage, *(f"{number:04}" for number in range(100))
        )
    command = [
        "results",
        "spring",
        "--storage",
        local_settings.storage,
        "--download",
        str(tmp_path / "images"),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fleet.entry",
        *command,
        stdout=asyncio.subprocess.DEVNULL,
    )
    await polling.until(
        lambda: (
            process.returncode is not None or matching(tmp_path / "images", "0*.png")
        )
    )
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()

    sizes = {f"{record.id}.png": record.size_bytes for record in records}
    left = matching(tmp_path / "images", "0*.png")
    assert all(path.stat().st_size == sizes[path.name] for path in left)
    done = await fetch(in_process, local_settings)
    assert (done["images"], done["already_there"]) == (100 - len(left), len(left))
    assert len(names_in(tmp_path / "images")) == 100


async def test_the_tokens_of_a_monitor_suffice(
    azurite_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    monkeypatch,
):
    async with open_storage(azurite_settings) as storage:
        await store_images(storage, "0001", "0002")
    minted = mint.Minter(azurite_settings).mint(ROLES["monitor"], timedelta(hours=1))
    monkeypatch.setenv("IMAGEFLEET_SAS", minted.sas)
    reader = azurite_settings.model_copy(update={"storage": minted.storage})

    assert (await fetch(in_process, reader))["images"] == 2
    command = ["export", "spring", *flags(reader), "shards"]
    exported = await asyncio.to_thread(in_process, *command)

    assert exported.returncode == 0, exported.stderr
    assert "2 images" in exported.stdout


def matching(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))
