from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jobs import errors
from jobs.storage import Storage
from worker.loras import LoraLibrary

FILE = b"a LoRA, as far as this room can tell"


class CountingBlobs:
    """Counts the reads, and answers no sooner than it is told to."""

    def __init__(self, storage: Storage) -> None:
        self._blobs = storage.blobs
        self.reads = 0
        self.answer = asyncio.Event()

    async def read(self, name: str) -> bytes | None:
        self.reads += 1
        await self.answer.wait()
        return await self._blobs.read(name)


def library(blobs: object, tmp_path: Path, directory: Path | None = None) -> LoraLibrary:
    return LoraLibrary(
        blobs,  # type: ignore[arg-type]
        directory=directory,
        cache=tmp_path / "cache",
        max_bytes=1000,
    )


async def test_a_lora_of_the_store_is_fetched_once_for_all_who_want_it(
    storage: Storage, tmp_path: Path
) -> None:
    await storage.blobs.create("loras/style.safetensors", FILE, "application/octet-stream", {})
    blobs = CountingBlobs(storage)
    loras = library(blobs, tmp_path)
    waiting = [asyncio.create_task(loras.resolve("style")) for _ in range(5)]
    await asyncio.sleep(0)
    blobs.answer.set()
    paths = set(await asyncio.gather(*waiting))
    assert [path.read_bytes() for path in paths] == [FILE]
    assert blobs.reads == 1
    await loras.resolve("style")
    assert blobs.reads == 1
    assert loras.lookups == {"miss": 5, "hit": 1}


async def test_a_fetch_goes_on_when_the_job_that_began_it_is_called_off(
    storage: Storage, tmp_path: Path
) -> None:
    await storage.blobs.create("loras/style.safetensors", FILE, "application/octet-stream", {})
    blobs = CountingBlobs(storage)
    loras = library(blobs, tmp_path)
    first, second = (asyncio.create_task(loras.resolve("style")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    blobs.answer.set()
    assert (await second).read_bytes() == FILE
    assert blobs.reads == 1


async def test_a_failed_fetch_is_not_remembered(storage: Storage, tmp_path: Path) -> None:
    loras = library(storage.blobs, tmp_path)
    with pytest.raises(errors.MissingFileError, match=r"no LoRA style\.safetensors"):
        await loras.resolve("style")
    await storage.blobs.create("loras/style.safetensors", FILE, "application/octet-stream", {})
    assert (await loras.resolve("style")).read_bytes() == FILE


async def test_the_folder_comes_before_the_store(storage: Storage, tmp_path: Path) -> None:
    await storage.blobs.create("loras/style.safetensors", FILE, "application/octet-stream", {})
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "style.safetensors").write_bytes(b"mine, and another one")
    loras = library(storage.blobs, tmp_path, directory)
    assert await loras.resolve("style") == directory / "style.safetensors"


@pytest.mark.parametrize("size", [0, 8, 1001])
async def test_a_file_of_an_impossible_size_is_refused_by_name(
    storage: Storage, tmp_path: Path, size: int
) -> None:
    await storage.blobs.create("loras/odd.safetensors", b"x" * size, "text/plain", {})
    with pytest.raises(errors.UnusableFileError, match=r"odd\.safetensors"):
        await library(storage.blobs, tmp_path).resolve("odd")
