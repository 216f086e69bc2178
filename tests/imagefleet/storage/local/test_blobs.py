"""Blobs in a folder: atomic and durable writes."""

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.storage.local import blobs as local_blobs
from imagefleet.storage.local.blobs import LocalBlobs
from imagefleet.storage.protocol import Operations


@pytest.fixture
async def blobs(tmp_path) -> LocalBlobs:
    blobs = LocalBlobs(tmp_path / "images", Operations())
    await blobs.create_container()
    return blobs


async def names(blobs: LocalBlobs) -> list[str]:
    return sorted([name async for name in blobs.names()])


async def test_metadata_and_content_type_are_kept_in_a_sidecar_file(
    blobs: LocalBlobs,
):
    await blobs.create("night/fox.png", b"pixels", "image/png", {"seed": "7"})
    sidecar = blobs.folder / ".metadata" / "night" / "fox.png.json"
    assert json.loads(sidecar.read_text()) == {
        "content_type": "image/png",
        "metadata": {"seed": "7"},
    }
    assert await names(blobs) == ["night/fox.png"]


async def test_a_full_disk_leaves_no_partial_blob(blobs: LocalBlobs, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.TransientError, match="disk is full"):
        await blobs.create("fox.png", b"pixels", "image/png", {})
    monkeypatch.undo()
    assert await names(blobs) == []
    assert list((blobs.folder / ".temporary").iterdir()) == []
    assert await blobs.create("fox.png", b"pixels", "image/png", {})


async def test_leftovers_of_a_crash_are_ignored(blobs: LocalBlobs):
    (blobs.folder / ".temporary" / "half").write_bytes(b"pix")
    (blobs.folder / ".metadata" / "fox.png.json").write_text("{}")
    assert await names(blobs) == []
    assert await blobs.create("fox.png", b"pixels", "image/png", {})
    assert await blobs.read("fox.png") == b"pixels"


async def test_what_killed_workers_left_is_removed_a_day_later(
    blobs: LocalBlobs,
):
    for name, age_seconds in (
        ("new", 60),
        ("old", 100_000),
        ("of the future", -100_000),
    ):
        path = blobs.folder / ".temporary" / name
        path.write_bytes(b"pix")
        os.utime(path, (time.time() - age_seconds,) * 2)
    await blobs.create_container()
    assert [path.name for path in (blobs.folder / ".temporary").iterdir()] == ["new"]


async def test_a_file_without_metadata_is_listed(blobs: LocalBlobs):
    (blobs.folder / "copied.png").write_bytes(b"pixels")
    (record,) = [record async for record in blobs.records()]
    assert (record.name, record.size_bytes, record.metadata) == ("copied.png", 6, {})


async def test_the_file_and_its_folders_are_synced_before_create_returns(
    blobs: LocalBlobs, monkeypatch
):
    synced = []
    fsync = os.fsync

    def remember(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", remember)
    await blobs.create("a/b/fox.png", b"pixels", "image/png", {})
    for path in ("", "a", "a/b", "a/b/fox.png"):
        assert (blobs.folder / path).stat().st_ino in synced


async def test_of_two_blobs_of_one_name_in_the_same_moment_one_is_created(
    blobs: LocalBlobs,
):
    contents = [str(number).encode() for number in range(32)]
    created = await asyncio.gather(
        *(blobs.create("fox.png", each, "image/png", {}) for each in contents)
    )
    assert sorted(created) == [False] * 31 + [True]
    assert await blobs.read("fox.png") == contents[created.index(True)]


async def test_a_blob_that_cannot_be_created_fails_alone(blobs: LocalBlobs):
    (blobs.folder / "night").write_bytes(b"")
    names_ = ["a.png", "night/fox.png", "b.png", "night/owl.png"] * 4
    results = await asyncio.gather(
        *(blobs.create(each, b"pixels", "image/png", {}) for each in names_),
        return_exceptions=True,
    )
    for name, result in zip(names_, results, strict=True):
        assert isinstance(result, errors.SetupError if "/" in name else bool)
    assert await names(blobs) == ["a.png", "b.png", "night"]
    assert list((blobs.folder / ".temporary").iterdir()) == []


CREATE = """
import asyncio, sys
from pathlib import Path
from imagefleet.storage.local.blobs import LocalBlobs
from imagefleet.storage.protocol import Operations

async def create(blobs, lane):
    for number in range(1_000_000):
        name = f"{lane}/{number}.png"
        await blobs.create(name, name.encode() * 1000, "image/png", {"name": name})
        print(name, flush=True)

async def main():
    blobs = LocalBlobs(Path(sys.argv[1]), Operations())
    await asyncio.gather(*(create(blobs, lane) for lane in range(16)))

asyncio.run(main())
"""


def created_until_killed(folder: Path) -> list[str]:
    """The names that a process has reported before it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", CREATE, folder], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        reported = [process.stdout.readline().strip() for _ in range(100)]
        process.kill()
        return reported + process.stdout.read().splitlines()[:-1]


async def test_a_process_killed_while_it_creates_many_leaves_whole_blobs_alone(
    blobs: LocalBlobs,
):
    reported = await asyncio.to_thread(created_until_killed, blobs.folder)
    found = {record.name: record.metadata async for record in blobs.records()}
    assert set(reported) <= set(found)
    for name, metadata in found.items():
        assert await blobs.read(name) == name.encode() * 1000
        assert metadata == {"name": name}


async def test_a_missing_folder_is_a_setup_error(tmp_path):
    blobs = LocalBlobs(tmp_path / "none", Operations())
    with pytest.raises(errors.SetupError, match="no folder"):
        await blobs.create("fox.png", b"pixels", "image/png", {})
    with pytest.raises(errors.SetupError, match="no folder"):
        await names(blobs)
    assert not blobs.folder.exists()


async def test_a_read_only_folder_is_a_setup_error(blobs: LocalBlobs, monkeypatch):
    def refused(handle: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(errors.SetupError, match="Read-only"):
        await blobs.create("fox.png", b"pixels", "image/png", {})


async def test_names_are_listed_by_pages(blobs: LocalBlobs, monkeypatch):
    monkeypatch.setattr(local_blobs, "_NAMES_PAGE", 2)
    for number in range(5):
        await blobs.create(f"a/{number}.png", b"x", "image/png", {})
    assert await names(blobs) == [f"a/{number}.png" for number in range(5)]
    async for name in blobs.names():
        assert name.startswith("a/")
        break


@pytest.mark.parametrize(
    "path", [".metadata/night", "night", ".temporary", "night/fox.png/x"]
)
async def test_what_is_in_the_way_of_an_image_does_not_count_as_the_image(
    blobs: LocalBlobs, path: str
):
    obstacle = blobs.folder / path
    if obstacle.is_dir():
        obstacle.rmdir()
    obstacle.parent.mkdir(parents=True, exist_ok=True)
    obstacle.write_bytes(b"")
    with pytest.raises(errors.SetupError, match="is in the way"):
        await blobs.create("night/fox.png", b"pixels", "image/png", {})


async def test_hidden_folders_that_were_deleted_are_made_again(
    blobs: LocalBlobs,
):
    for name in (".metadata", ".temporary"):
        (blobs.folder / name).rmdir()
    assert await blobs.create("fox.png", b"pixels", "image/png", {})
    assert await blobs.read("fox.png") == b"pixels"


async def test_a_listing_that_is_cancelled_while_a_thread_reads_the_folder_ends_as_cancelled(
    blobs: LocalBlobs, monkeypatch
):
    is_reading = threading.Event()
    may_end = threading.Event()
    scandir = os.scandir

    def slow(path: Path) -> object:
        is_reading.set()
        assert may_end.wait()
        return scandir(path)

    monkeypatch.setattr(local_blobs.os, "scandir", slow)
    listing = asyncio.create_task(names(blobs))
    await asyncio.to_thread(is_reading.wait)
    listing.cancel()
    try:
        with pytest.raises(asyncio.CancelledError):
            await listing
    finally:
        may_end.set()
