"""Several workers of a machine with one cache: this process and another, which may be killed."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from filelock import AsyncFileLock, Timeout

import polling
from imagefleet.files import kinds
from worker.files import disk_cache
from worker.files.disk_cache import DiskCache
from worker.files.library import FileLibrary, Source

LoraBytes = Callable[[str], bytes]  # the fixture of conftest.py

#: A storage that says when a download begins, and waits with it.
STORAGE = """
import asyncio
from pathlib import Path

class Blobs:
    name = "files"
    def __init__(self, folder, wait):
        self.folder, self.wait = Path(folder), wait
    def address(self, name):
        return f"https://example.com/{name}"
    async def read(self, name, max_bytes=None):
        if name.endswith(".json"):
            return None
        print("begins", flush=True)
        await self.wait()
        return (self.folder / "lora").read_bytes()
"""

#: Fetches the LoRA, whose download ends with a line from its parent.
WORKER = f"""
import sys
from imagefleet.files.kinds import LORA
from worker.files.library import FileLibrary, Source
{STORAGE}
async def main():
    wait = lambda: asyncio.to_thread(sys.stdin.readline)
    source = Source(Blobs(".", wait), Path("cache"), cache_bytes=10**6)
    return await FileLibrary(source, LORA).resolve("style")

print(asyncio.run(main()).name)
"""

Worker = subprocess.Popen[str]


@pytest.fixture
def library(tmp_path, lora_bytes: LoraBytes) -> FileLibrary:
    """This process's, whose downloads take no time."""
    (tmp_path / "lora").write_bytes(lora_bytes("style"))
    made: dict[str, Any] = {}
    exec(STORAGE, made)
    blobs = made["Blobs"](tmp_path, partial(asyncio.sleep, 0))
    return FileLibrary(Source(blobs, tmp_path / "cache", 10**6), kinds.LORA)


@pytest.fixture
def downloading(tmp_path, library: FileLibrary) -> Iterator[Worker]:
    """Another worker that downloads a LoRA, and is not ready with it."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "begins\n"
    yield worker
    worker.kill()
    worker.communicate()


@pytest.fixture
def locked(monkeypatch) -> asyncio.Event:
    """Set once a fetch of this process finds that another worker has the lock."""
    found = asyncio.Event()

    class Lock(AsyncFileLock):
        async def acquire(self, *given: Any, **options: Any) -> Any:
            try:
                return await super().acquire(blocking=False)
            except Timeout:
                found.set()
            return await super().acquire(*given, **options)

    monkeypatch.setattr(disk_cache, "AsyncFileLock", Lock)
    return found


async def test_a_lora_that_two_gpus_want_at_once_is_downloaded_once(
    downloading: Worker, library: FileLibrary, locked: asyncio.Event, tmp_path, capsys
):
    own = asyncio.create_task(library.resolve("style"))
    await polling.until(lambda: locked.is_set() or own.done())
    said, _ = await asyncio.to_thread(downloading.communicate, "\n")
    path = await own
    assert capsys.readouterr().out == "", "it downloads as well"
    assert said.strip() == path.name == "style.safetensors"
    assert len(list((tmp_path / "cache" / "loras").glob("*.safetensors"))) == 1


async def test_a_worker_killed_as_it_downloads_does_not_hold_up_the_others(
    downloading: Worker, library: FileLibrary, locked: asyncio.Event, capsys
):
    other = asyncio.create_task(library.resolve("style"))
    await polling.until(lambda: locked.is_set() or other.done())
    downloading.kill()
    assert (await other).name == "style.safetensors"
    assert capsys.readouterr().out.split() == ["begins"]


async def test_a_worker_that_hangs_as_it_downloads_holds_up_the_others_for_a_time(
    tmp_path, caplog
):
    cache = DiskCache(tmp_path)
    async with cache.fetching("style"):
        async with cache.fetching("other"):
            pass
        assert not caplog.messages
        async with cache.fetching("style", seconds=0.1):
            assert "is fetched without a lock" in caplog.text
    caplog.clear()
    async with cache.fetching("style"):
        assert not caplog.messages


async def test_a_folder_without_locks_stops_no_fetch(tmp_path, caplog):
    (tmp_path / "file").touch()
    async with DiskCache(tmp_path / "file").fetching("style"):
        assert "is fetched without a lock" in caplog.text
