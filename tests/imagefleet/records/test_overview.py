"""The overview of all campaigns: how little is read again, and that it is never wrong."""

import asyncio
from functools import partial
from typing import NamedTuple

import pytest

import made_records
import sent_jobs
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.log import RecordLog
from imagefleet.records.overview import Counts, Overview
from imagefleet.records.record import Record
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from tokens import by_tokens

MANY = 20
of_job = partial(made_records.image, digest=made_records.DIGEST)


def failed(job_id: str, campaign: str) -> Record:
    facts = {"digest": made_records.DIGEST, "error": "JobError", "reason": "no"}
    return made_records.ended(job_id, campaign=campaign, **facts)


async def fill(storage: Storage, campaigns: int = MANY) -> RecordLog:
    """Two jobs of each campaign are sent; one is drawn, and the other fails."""
    log = RecordLog(storage.blobs, "worker")
    for number in range(campaigns):
        name = f"campaign-{number}"
        await sent_jobs.note(storage, name, 3, ids=["a", "b"])
        await log.add([of_job("a", name), failed("b", name)])
    return log


class Cost(NamedTuple):
    reads: int
    writes_and_listings: int


async def count(storage: Storage) -> tuple[dict[str, Counts], Cost]:
    """Counts as a new process does."""
    before = storage.operations.blob_reads, storage.operations.blob_writes
    found = await reader.all_counts(storage, Damaged())
    after = storage.operations.blob_reads, storage.operations.blob_writes
    listings, reads = after[0] - before[0], after[1] - before[1]
    return found, Cost(listings, reads)


async def test_campaigns_take_three_reads_each_once_and_then_none(
    storage: Storage,
):
    log = await fill(storage)

    first, cost = await count(storage)
    assert {(each.sent, each.completed, each.failed) for each in first.values()} == {
        (3, 1, 1)
    }
    assert cost.reads <= 3 * MANY + 2  # and of the overview
    assert cost.writes_and_listings <= 3 + 1

    again, cost = await count(storage)
    assert again == first
    assert cost == (1, 3)

    await log.add([of_job("sent-0", "campaign-7")])
    await sent_jobs.note(storage, "campaign-8", 1, first=50)
    changed, cost = await count(storage)
    assert changed["campaign-7"].completed == 2
    assert changed["campaign-8"].sent == 4
    assert cost.reads <= 2 * 3 + 2


async def test_two_that_count_at_once_and_a_campaign_that_is_deleted_leave_true_numbers(
    storage: Storage,
):
    await fill(storage, 4)
    await asyncio.gather(*(count(storage) for _ in range(5)))
    for store in (storage.blobs, storage.files):
        for folder in ("-records", f"-sent/{storage.blobs.name}"):
            for name in [each async for each in store.names(f"{folder}/campaign-3/")]:
                await store.delete(name)

    found, _ = await count(storage)

    assert sorted(found) == ["campaign-0", "campaign-1", "campaign-2"]
    assert sorted(await Overview(storage).read()) == sorted(found)


@pytest.mark.parametrize("data", [b"", b"{", b'{"campaign-0":["","",0]}', b"[]"])
async def test_an_overview_that_is_damaged_is_counted_anew_and_replaced(
    storage: Storage, data: bytes
):
    await fill(storage, 1)
    await count(storage)
    (name,) = [each async for each in storage.files.names("-counts/")]
    part = await storage.files.read_part(name, 0, 1)
    assert part is not None
    assert await storage.files.replace(name, data, "application/json", part.version)

    found, _ = await count(storage)
    assert found["campaign-0"].completed == 1
    assert (await count(storage))[1] == (1, 3)


async def test_records_that_do_not_fit_are_counted_though_they_are_not_read_again(
    storage: Storage,
):
    log = await fill(storage, 2)
    await log.add([of_job("nobody-sent-it", "campaign-1")])
    for _ in range(2):
        damaged = Damaged()
        found = await reader.all_counts(storage, damaged)
        assert (damaged.count, found["campaign-1"].unknown) == (1, 1)


async def test_a_campaign_that_stored_images_decide_on_is_counted_each_time(
    storage: Storage,
):
    """Its record says that it failed, and another that it is drawn: until the image is stored."""
    log = await fill(storage, 1)
    await log.add([of_job("b", "campaign-0")])
    assert (await count(storage))[0]["campaign-0"].failed == 1

    await made_records.store(storage, "campaign-0/b.png")

    counted = (await count(storage))[0]["campaign-0"]
    assert (counted.completed, counted.failed) == (2, 0)


async def test_tokens_that_only_read_use_what_others_stored_and_remember_the_rest(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        log = await fill(owner)
        await count(owner)
        await log.add([of_job("sent-0", "campaign-7")])
    given = by_tokens(azurite_settings, ROLES["monitor"])
    async with open_storage(given) as watching:
        overview, reads = Overview(watching), []
        for _ in range(3):
            before = watching.operations.blob_reads
            found = await reader.all_counts(watching, Damaged(), overview)
            reads.append(watching.operations.blob_reads - before)
            assert found["campaign-7"].completed == 2
    assert reads[0] <= 1 + 3 + 1
    assert reads[1:] == [0, 0]


async def test_a_worker_can_neither_write_nor_make_the_overview(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as owner:
        await owner.create()
    given = by_tokens(azurite_settings, ROLES["worker"])
    async with open_storage(given) as worker:
        with pytest.raises(errors.SetupError, match="may not"):
            await worker.files.replace(
                "-counts/images.json", b"{}", "application/json", None
            )
