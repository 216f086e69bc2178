"""Several workers of a machine with one cache: this process and another, which may be killed."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from imagefleet.files import kinds
from worker.files.disk_cache import DiskCache
from worker.files.library import FileLibrary, Source

LoraBytes = Callable[[str], bytes]  # the fixture of conftest.py

#: A storage that says when a download of so many seconds begins.
STORAGE = """
import asyncio
from pathlib import Path

class Blobs:
    name = "files"
    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), float(seconds)
    def address(self, name):
        return f"https://example.com/{name}"
    async def read(self, name, max_bytes=None):
        if name.endswith(".json"):
            return None
        print("begins", flush=True)
        await asyncio.sleep(self.seconds)
        return (self.folder / "lora").read_bytes()
"""

#: Fetches the LoRA once its parent says so.
WORKER = f"""
import sys
from imagefleet.files.kinds import LORA
from worker.files.library import FileLibrary, Source
{STORAGE}
async def main():
    source = Source(Blobs(".", sys.argv[1]), Path("cache"), cache_bytes=10**6)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return await FileLibrary(source, LORA).resolve("style")

print(asyncio.run(main()).name)
"""

Worker = subprocess.Popen[str]
Start = Callable[[float], Worker]


@pytest.fixture
def library(tmp_path, lora_bytes: LoraBytes) -> FileLibrary:
    """This process's."""
    (tmp_path / "lora").write_bytes(lora_bytes("style"))
    made: dict[str, Any] = {}
    exec(STORAGE, made)
    blobs = made["Blobs"](tmp_path, 0.3)
    return FileLibrary(Source(blobs, tmp_path / "cache", 10**6), kinds.LORA)


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Starts a worker that fetches a LoRA, with a download of so many seconds."""
    started: list[Worker] = []

    def run(seconds: float) -> Worker:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(seconds)],
                cwd=tmp_path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert line(started[-1]) == "ready"
        return started[-1]

    yield run
    for each in started:
        each.kill()
        each.communicate()


def line(worker: Worker) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def begin(worker: Worker) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


async def test_a_lora_that_two_gpus_want_at_once_is_downloaded_once(
    start: Start, library: FileLibrary, tmp_path, capsys
):
    other = start(0.3)
    begin(other)
    (said, _), path = await asyncio.gather(
        asyncio.to_thread(other.communicate), library.resolve("style")
    )
    begun, own = said.split(), capsys.readouterr().out.split()
    assert sorted([begun[:-1], own]) == [[], ["begins"]]
    assert begun[-1] == path.name == "style.safetensors"
    assert len(list((tmp_path / "cache" / "loras").glob("*.safetensors"))) == 1


async def test_a_worker_killed_as_it_downloads_does_not_hold_up_the_others(
    start: Start, library: FileLibrary, capsys
):
    killed = start(60)
    begin(killed)
    assert line(killed) == "begins"
    other = asyncio.create_task(library.resolve("style"))
    await asyncio.sleep(0)
    killed.kill()
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
