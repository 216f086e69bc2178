"""`imagefleet results --follow`: new results as they come, until the campaign's end or Ctrl-C."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import polling
import sent_jobs
from imagefleet.records import follower, reader
from imagefleet.records.follower import Follower, follow
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet

Add = Callable[..., Awaitable[Any]]
Start = Callable[..., Awaitable["asyncio.Task[subprocess.CompletedProcess[str]]"]]


IDS = [f"{number:04}" for number in range(1, 10)]


@pytest.fixture(autouse=True)
def _fast(monkeypatch) -> None:
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.05)


@pytest.fixture
def start(
    in_process: Imagefleet,
    local_settings: StorageSettings,
    monkeypatch,
) -> Start:
    """Starts the command, and returns once it follows."""
    follows = threading.Event()
    real = Follower.poll

    async def poll(self: Follower) -> Any:
        follows.set()
        return await real(self)

    async def run(*arguments: str) -> asyncio.Task[subprocess.CompletedProcess[str]]:
        monkeypatch.setattr(Follower, "poll", poll)
        storage = ("spring", "--storage", local_settings.storage)
        command = asyncio.to_thread(
            in_process, "results", *storage, "--follow", *arguments
        )
        running = asyncio.create_task(command)
        assert await asyncio.to_thread(follows.wait)
        return running

    return run


async def test_it_ends_with_the_campaign_and_misses_nothing(
    local_settings: StorageSettings,
    start: Start,
    store_images: Add,
    add_job: Add,
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        await sent_jobs.note(storage, "spring", 4, ids=IDS)
        running = await start("--json")
        await store_images(storage, "0002", "0003")
        assert not running.done()
        await add_job(storage, "0004", "failed")

        result = await running

    assert result.returncode == 0
    outcomes = [
        (each["id"], each["outcome"])
        for each in map(json.loads, result.stdout.splitlines())
    ]
    assert sorted(outcomes) == [
        *((f"000{number}", "completed") for number in (1, 2, 3)),
        ("0004", "failed"),
    ]


async def test_people_see_the_table_and_then_what_is_new(
    local_settings: StorageSettings, start: Start, store_images: Add
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        await sent_jobs.note(storage, "spring", 2, ids=IDS)
        running = await start()
        await store_images(storage, "0002")
        result = await running

    assert result.stdout.count("0001") == 2, "the id and the prompt of the table"
    last = result.stdout.splitlines()[-1]
    assert last.startswith("0002  0  32x32  20  1.5  w1  a house 0002")


async def test_images_are_downloaded_as_they_arrive(
    local_settings: StorageSettings, start: Start, store_images: Add, tmp_path
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        await sent_jobs.note(storage, "spring", 2, ids=IDS)
        running = await start("--download", "images")
        await polling.until((tmp_path / "images" / "0001.png").is_file)
        await store_images(storage, "0002")
        result = await running

    assert (tmp_path / "images" / "0002.png").is_file()
    assert "2 images downloaded to images" in result.stdout


async def test_ctrl_c_is_a_usual_end(
    local_settings: StorageSettings, store_images: Add
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
    command = [
        *(sys.executable, "-m", "fleet.entry", "results", "spring"),
        *("--storage", local_settings.storage, "--follow", "--json"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()

    assert json.loads(first)["id"] == "0001"
    assert (process.returncode, errors) == (0, b"")


async def test_a_campaign_that_goes_on_is_not_counted_at_each_poll(
    local_settings: StorageSettings, store_images: Add, monkeypatch
):
    """On Azure that would be a read of each shard every five seconds."""
    monkeypatch.setattr(follower, "POLL_SECONDS", 0)
    real, counted = reader.counts, list[str]()

    async def counts(storage: Storage, campaign: str) -> reader.Counts:
        counted.append(campaign)
        return await real(storage, campaign)

    monkeypatch.setattr(reader, "counts", counts)
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001")
        await sent_jobs.note(storage, "spring", 2, ids=IDS)
        new = Follower(storage, "spring")
        polls = follow(storage, new, "spring", {"completed"}, print)
        for _ in range(50):
            await anext(polls)

    assert 3 <= len(counted) <= 5


async def test_a_follower_that_begins_at_the_end_reads_only_what_comes(
    storage: Storage, store_images: Add
):
    await store_images(storage, "0001")
    new = Follower(storage, "spring", await reader.end(storage, "spring"))
    assert await new.poll() == []

    await store_images(storage, "0002")
    assert [each.id for each in await new.poll()] == ["0002"]
