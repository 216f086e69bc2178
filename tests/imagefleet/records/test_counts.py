"""The numbers of all campaigns: how little is read again, and that they are never wrong."""

from functools import partial
from typing import NamedTuple

import made_records
import sent_jobs
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.counts import CachedCounts, Counts
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from tokens import by_tokens

MANY = 9
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


Counted = dict[str, CachedCounts]


async def count(
    storage: Storage, counted: Counted | None = None
) -> tuple[dict[str, Counts], Cost]:
    """Counts as a process that has *counted* before, or as a new one."""
    before = storage.operations.blob_reads, storage.operations.blob_writes
    found = await reader.all_counts(
        storage, Damaged(), {} if counted is None else counted
    )
    after = storage.operations.blob_reads, storage.operations.blob_writes
    listings = after[0] - before[0]
    reads = after[1] - before[1]
    return found, Cost(listings, reads)


async def test_campaigns_take_three_reads_each_once_and_then_none(
    storage: Storage,
):
    log = await fill(storage)
    known: Counted = {}

    first, cost = await count(storage, known)
    assert {(each.sent, each.completed, each.failed) for each in first.values()} == {
        (3, 1, 1)
    }
    assert cost.reads <= 3 * MANY
    assert cost.writes_and_listings == 4

    again, cost = await count(storage, known)
    assert again == first
    assert cost == (0, 4)

    await log.add([of_job("sent-0", "campaign-7")])
    await sent_jobs.note(storage, "campaign-8", 1, first=50)
    changed, cost = await count(storage, known)
    assert changed["campaign-7"].completed == 2
    assert changed["campaign-8"].sent == 4
    assert cost.reads <= 2 * 3


async def test_a_campaign_that_is_deleted_is_forgotten(storage: Storage):
    await fill(storage, 4)
    known: Counted = {}
    await count(storage, known)
    for store in (storage.blobs, storage.files):
        for folder in ("-records", f"-sent/{storage.blobs.name}"):
            for name in [each async for each in store.names(f"{folder}/campaign-3/")]:
                await store.delete(name)

    found, _ = await count(storage, known)

    assert sorted(found) == ["campaign-0", "campaign-1", "campaign-2"]
    assert sorted(known) == sorted(found)


async def test_records_that_do_not_fit_are_counted_though_they_are_not_read_again(
    storage: Storage,
):
    log = await fill(storage, 2)
    await log.add([of_job("nobody-sent-it", "campaign-1")])
    counted: Counted = {}
    for _ in range(2):
        damaged = Damaged()
        found = await reader.all_counts(storage, damaged, counted)
        assert (damaged.count, found["campaign-1"].unknown) == (1, 1)


async def test_a_campaign_that_stored_images_decide_on_is_counted_each_time(
    storage: Storage,
):
    """Its record says that it failed, and another that it is drawn: until the image is stored."""
    log = await fill(storage, 1)
    await log.add([of_job("b", "campaign-0")])
    known: Counted = {}
    assert (await count(storage, known))[0]["campaign-0"].failed == 1

    await made_records.store(storage, "campaign-0/b.png")

    counted = (await count(storage, known))[0]["campaign-0"]
    assert (counted.completed, counted.failed) == (2, 0)


async def test_tokens_that_only_read_count_all_campaigns(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        await fill(owner, 2)
    given = by_tokens(azurite_settings, ROLES["monitor"])
    async with open_storage(given) as watching:
        found, _ = await count(watching)
    assert {each.completed for each in found.values()} == {1}
