"""New results as they come, until the campaign's end."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import sent_jobs
from imagefleet.records import follower, reader
from imagefleet.records.follower import Follower, follow
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

Add = Callable[..., Awaitable[Any]]
Start = Callable[..., Awaitable["asyncio.Task[subprocess.CompletedProcess[str]]"]]


IDS = [f"{number:04}" for number in range(1, 10)]


@pytest.fixture(autouse=True)
def _fast(monkeypatch) -> None:
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.05)


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
