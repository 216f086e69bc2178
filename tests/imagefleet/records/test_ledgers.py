"""What a program has sent is counted, however it submits, and costs one shard a campaign."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import polling
from imagefleet import Job, aio, concurrency, errors
from imagefleet.records import ledger
from imagefleet.storage.settings import StorageSettings


@pytest.fixture
async def fleet(storage_settings: StorageSettings) -> AsyncIterator[aio.Fleet]:
    names = ("queue", "container", "files_container")
    settings: Any = {name: getattr(storage_settings, name) for name in names}
    async with aio.connect(storage_settings.storage, **settings) as fleet:
        await fleet.storage.create()
        yield fleet


async def submit(fleet: aio.Fleet, campaign: str = "spring", jobs: int = 1) -> None:
    await fleet.submit([Job(prompt="a house")] * jobs, campaign=campaign)


async def blobs(fleet: aio.Fleet, campaign: str = "spring") -> list[str]:
    """The ledger's blobs."""
    folder = f"{ledger.folder_of(fleet.storage)}{campaign}/"
    return [
        name.removeprefix(folder) async for name in fleet.storage.files.names(folder)
    ]


async def counted(fleet: aio.Fleet) -> dict[str, int | None]:
    return {name: counts.sent for name, counts in (await fleet.campaigns()).items()}


async def test_a_program_that_submits_jobs_one_by_one_leaves_one_blob(
    fleet: aio.Fleet,
):
    for _ in range(12):
        await submit(fleet)
    assert await counted(fleet) == {"spring": 12}
    assert await blobs(fleet) == ["0000"]


async def test_submissions_at_the_same_time_share_writes_and_each_is_counted(
    fleet: aio.Fleet, monkeypatch
):
    appends = 0
    spring = fleet._ledgers.of("spring")
    append = fleet.storage.files.append

    async def counting(*arguments: Any) -> bool:
        nonlocal appends
        appends += 1
        await polling.until(lambda: appends > 1 or len(spring.pending) == 20 * 16)
        return await append(*arguments)

    monkeypatch.setattr(fleet.storage.files, "append", counting)
    await asyncio.gather(*(submit(fleet, jobs=2) for _ in range(10)))
    assert await counted(fleet) == {"spring": 20}
    assert await blobs(fleet) == ["0000"]
    assert appends < 10


async def test_jobs_whose_note_failed_are_in_the_next_one(
    fleet: aio.Fleet, monkeypatch, caplog
):
    async def fails(*_: object) -> bool:
        raise errors.TransientError("the storage does not answer")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(fleet.storage.files, "append", fails)
        patched.setattr(ledger, "RETRIES", concurrency.NEVER)
        await submit(fleet, jobs=3)
    assert "does not answer" in caplog.text
    await submit(fleet)
    assert await counted(fleet) == {"spring": 4}


async def test_more_campaigns_than_are_remembered_are_all_counted(
    fleet: aio.Fleet, monkeypatch
):
    monkeypatch.setattr(ledger, "MAX_LEDGERS", 2)
    names = [f"campaign-{number}" for number in range(5)]
    for _ in range(2):
        for name in names:
            await submit(fleet, name)
    await fleet.submit([Job(prompt="a house", campaign=name) for name in names])
    assert await counted(fleet) == dict.fromkeys(names, 3)
    assert len(fleet._ledgers._ledgers) <= 3


async def test_a_submission_that_is_cancelled_during_its_note_breaks_no_other(
    fleet: aio.Fleet, monkeypatch
):
    append = fleet.storage.files.append
    begun = asyncio.Event()
    may_end = asyncio.Event()

    async def held(*arguments: Any) -> bool:
        begun.set()
        await may_end.wait()
        return await append(*arguments)

    monkeypatch.setattr(fleet.storage.files, "append", held)
    first = asyncio.create_task(submit(fleet))
    await begun.wait()
    second = asyncio.create_task(submit(fleet))
    await polling.until(lambda: len(fleet._ledgers.of("spring").pending) == 2 * 16)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    may_end.set()
    await second
    assert await counted(fleet) == {"spring": 2}
