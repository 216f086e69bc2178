"""Several workers of a machine with one cache: real processes, of which one may be killed."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from worker.files.disk_cache import DiskCache

LoraBytes = Callable[[str], bytes]  # the fixture of conftest.py

#: Fetches the LoRA once its parent says so; says when the download begins, and of which file.
WORKER = """
import asyncio, sys
from pathlib import Path
from imagefleet.files.kinds import LORA
from worker.files.library import FileLibrary, Source

class Blobs:
    name = "files"
    def address(self, name):
        return f"https://example.com/{name}"
    async def read(self, name, max_bytes=None):
        if name.endswith(".json"):
            return None
        print("begins", flush=True)
        await asyncio.sleep(float(sys.argv[2]))
        return Path("lora").read_bytes()

async def main():
    library = FileLibrary(Source(Blobs(), Path("cache"), cache_bytes=10**6), LORA)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return await library.resolve(sys.argv[1])

print(asyncio.run(main()).name)
"""

Worker = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path, lora_bytes: LoraBytes) -> Iterator[Callable[..., list[Worker]]]:
    """Starts workers that fetch a LoRA, each with a download of so many seconds."""
    (tmp_path / "lora").write_bytes(lora_bytes("style"))
    started: list[Worker] = []

    def run(*seconds: float) -> list[Worker]:
        started.extend(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, "style", str(each)],
                cwd=tmp_path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for each in seconds
        )
        for each in started:
            assert line(each) == "ready"
        return started

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


def test_a_lora_that_two_gpus_want_at_once_is_downloaded_once(
    start: Callable[..., list[Worker]], tmp_path
):
    workers = start(0.3, 0.3)
    for each in workers:
        begin(each)
    said = sorted(each.communicate()[0].split() for each in workers)
    assert said == [["begins", "style.safetensors"], ["style.safetensors"]]
    assert len(list((tmp_path / "cache" / "loras").glob("*.safetensors"))) == 1


def test_a_worker_killed_as_it_downloads_does_not_hold_up_the_others(
    start: Callable[..., list[Worker]],
):
    killed, other = start(60, 0)
    begin(killed)
    assert line(killed) == "begins"
    begin(other)
    killed.kill()
    assert other.communicate()[0].split() == ["begins", "style.safetensors"]


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
