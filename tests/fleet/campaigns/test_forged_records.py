"""What a worker's token can write says nothing of others: on Azurite, it is written with one."""

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

import made_records
import sent_jobs
from fleet.campaigns.table import Campaigns
from imagefleet.records import catalog, reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.follower import Follower
from imagefleet.records.log import RecordLog, ShardName, Totals, shard_part
from imagefleet.records.record import Record
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from made_records import store
from tokens import by_tokens

SHARD = "-records/spring/20261122T120000Z-thief-0.{}.jsonl.gz"
ONE = made_records.DIGEST
OTHER = "2" * 64

image = partial(made_records.image, digest=ONE)
ended = partial(made_records.ended, digest=ONE, error="JobError", reason="no")


@pytest.fixture
async def worker(
    storage: Storage, storage_settings: StorageSettings
) -> AsyncIterator[RecordLog]:
    """The records as a worker may write them."""
    if storage_settings.is_local:
        yield RecordLog(storage.blobs, "worker")
        return
    given = by_tokens(storage_settings, ROLES["worker"])
    async with open_storage(given) as theirs:
        yield RecordLog(theirs.blobs, "worker")


async def images(storage: Storage, damaged: Damaged | None = None) -> list[str | None]:
    return [
        each.sha256 or each.id
        async for each in reader.images(storage, "spring", damaged)
    ]


async def failures(storage: Storage) -> list[str]:
    return [each.id async for each in reader.ended(storage, "spring")]


async def append(worker: RecordLog, kind: Any, *records: Record) -> None:
    """Into a shard of any kind, whatever the records are."""
    await worker._append(ShardName("spring", kind), records)


async def test_what_only_the_operator_says_is_not_believed_of_a_worker(
    storage: Storage, worker: RecordLog
):
    await worker.add([image(1), ended(2), ended(3)])
    await store(storage, "spring/job-1.png")
    await append(worker, "settled", ended(2, "discarded"), ended(3, "replayed"))
    await append(worker, "jobs", ended(2, "discarded"), ended(3, "replayed"))
    replaced = {"blob": "spring/job-1.png", "source": "redo/1.json"}
    await append(worker, "replaced", ended(1, "replaced", **replaced))
    damaged = Damaged()

    assert await images(storage, damaged) == ["job-1"]
    assert damaged.count == 2, "the shards"
    assert await failures(storage) == ["job-2", "job-3"]
    counted = await reader.counts(storage, "spring")
    assert (counted.images, counted.failed, counted.discarded) == (1, 2, 0)
    listed = [
        each.id async for each in dead_letter_queue.recorded(storage, Selection())
    ]
    assert listed == ["job-2", "job-3"]
    assert {each.outcome for each in await Follower(storage).poll()} == {
        "completed",
        "failed",
    }


async def test_a_job_is_cancelled_only_if_the_operator_has_cancelled_its_campaign(
    storage: Storage, worker: RecordLog
):
    await worker.add([ended(1, "cancelled")])
    await worker.open("spring", "cancelled")
    follower = Follower(storage)

    assert await failures(storage) == []
    assert (await reader.counts(storage, "spring")).cancelled == 0
    assert await follower.poll() == []
    await RecordLog(storage.files, "operator").open("spring", "cancelled")
    assert await failures(storage) == ["job-1"]
    assert (await reader.counts(storage, "spring")).cancelled == 1


@pytest.mark.parametrize("totals", [Totals(10**9, 10**9), Totals(2**60, 0)])
async def test_a_short_shard_cannot_say_that_it_holds_a_billion_records(
    storage: Storage, worker: RecordLog, totals: Totals
):
    await worker.add([image(1)])
    part = shard_part([], totals)
    assert await worker._blobs.append(SHARD.format("images"), part, 0)

    counted = await reader.counts(storage, "spring")

    assert (counted.images, counted.completed) == (1, 1)


async def test_no_more_jobs_have_ended_than_were_sent(
    storage: Storage, worker: RecordLog
):
    await send(storage, 3)
    await worker.add([image(1), ended(2)])
    await worker.add(image(number) for number in range(10, 20))
    await worker.add(ended(number) for number in range(20, 30))

    damaged = Damaged()
    counted = await reader.counts(storage, "spring", damaged)

    assert (counted.sent, counted.completed, counted.failed, counted.pending) == (
        3,
        1,
        1,
        1,
    )
    assert (counted.images, damaged.count) == (1, 20)


async def test_of_two_records_of_an_image_the_one_of_the_stored_image_counts(
    storage: Storage, worker: RecordLog
):
    await store(storage, "spring/job-1.png", "spring/job-2.png", sha256=ONE)
    await worker.add([image(1, sha256=OTHER), image(2, sha256=ONE), image(3)])
    await worker.add([image(1, sha256=ONE), image(2, sha256=OTHER), image(3)])
    damaged = Damaged()
    before = storage.operations.blob_reads

    assert await images(storage, damaged) == [ONE, "job-3", ONE]
    assert damaged.count == 2
    reads = storage.operations.blob_reads - before
    others = 2
    assert reads == 1 + 3 + others, (
        "one shard, the metadata where two compete, other formats"
    )


async def test_no_job_has_images_or_stages_that_were_never_drawn(
    storage: Storage, worker: RecordLog
):
    await send(storage, 2)
    several = {"images": 2, "digest": ONE}
    honest = [
        image(1),
        image(2, completes=False, **several),
        image(2, index=1, completes=True, blob="spring/job-2~1.png", **several),
    ]
    await store(storage, *(each.blob for each in honest))
    forged = [
        image(1, images=64, index=5, blob="spring/job-1~5.png"),
        image(1, stage=2, stages=2, blob="spring/job-1~s2.png"),
        image(2, images=64, index=7, blob="spring/job-2~7.png"),
    ]
    await RecordLog(worker._blobs, "thief").add(forged)
    await worker.add(honest)
    await worker.add(forged, again=True)
    damaged = Damaged()

    found = [each.blob async for each in reader.images(storage, "spring", damaged)]
    counted = await reader.counts(storage, "spring")

    assert sorted(map(str, found)) == sorted(str(each.blob) for each in honest)
    assert damaged.count == len(forged)
    assert (counted.images, counted.completed, counted.pending) == (3, 2, 0)


async def test_of_a_failed_job_only_the_images_that_are_stored_are_counted(
    storage: Storage, worker: RecordLog
):
    await send(storage, 2)
    told = {"digest": OTHER, "stages": "2", "job": "job-2"}
    await store(storage, "spring/job-2.png", **told)
    await worker.add(
        [ended(1), ended(2), image(1, stages=2), image(2, digest=OTHER, stages=2)]
    )
    counted = await reader.counts(storage, "spring")
    assert (counted.images, counted.completed, counted.failed) == (1, 0, 2)


async def test_a_job_whose_name_another_job_took_has_failed_and_is_no_duplicate(
    storage: Storage, worker: RecordLog
):
    await store(storage, "spring/job-1.png", "spring/job-2.png")
    await worker.add([image(1)])
    again = [
        image(1),
        image(1, digest=OTHER, source="m1"),
        image(1, digest=OTHER, source="m1"),
    ]
    # A worker stored the second one, and died before it wrote its record.
    again += [image(2, digest=OTHER, source="m2"), image(2, source="m3")]
    await worker.add(again, again=True)

    assert await images(storage) == ["job-1", "job-2"]
    failed = [each async for each in reader.ended(storage, "spring")]
    assert [(each.id, each.digest, each.error) for each in failed] == [
        ("job-1", OTHER, "NameTakenError"),
        ("job-2", OTHER, "NameTakenError"),
    ]
    assert "spring/job-1.png" in str(failed[0].reason)
    counted = await reader.counts(storage, "spring")
    assert (counted.images, counted.completed, counted.failed) == (2, 2, 2)
    followed = await Follower(storage).poll()
    assert sum(each.outcome == "failed" for each in followed) >= 1
    await RecordLog(storage.files, "operator").add(
        [each.model_copy(update={"outcome": "discarded"}) for each in failed]
    )
    assert await failures(storage) == []
    assert (await reader.counts(storage, "spring")).discarded == 2


async def test_a_failure_that_a_fault_had_written_twice_is_one(
    storage: Storage, worker: RecordLog
):
    await worker.add([ended(1, attempts=5), ended(2, attempts=5)])
    await RecordLog(worker._blobs, "another worker").add([ended(1, attempts=6)])
    # Its message was sent twice by a load that was killed, and both have failed.
    await worker.add([ended(2, source="its second message")])

    assert await failures(storage) == ["job-1", "job-2"]
    assert (await reader.counts(storage, "spring")).failed == 2


async def test_another_jobs_failure_of_a_known_message_hides_none(
    storage: Storage, worker: RecordLog
):
    await worker.add([ended(7, source="message-1")])
    await worker.add([ended(1)])
    assert sorted(await failures(storage)) == ["job-1", "job-7"]


async def test_a_job_that_was_sent_again_after_its_failure_has_one_outcome(
    storage: Storage, worker: RecordLog
):
    await send(storage, 1)
    await worker.add([ended(1)])
    await worker.add([image(1)])
    assert (await reader.counts(storage, "spring")).failed == 1, (
        "its image is not stored"
    )
    await store(storage, "spring/job-1.png")

    counted = await reader.counts(storage, "spring")

    assert (counted.completed, counted.failed) == (1, 0)
    assert (counted.pending, counted.unknown) == (0, 0)
    assert await failures(storage) == []


async def test_what_is_said_of_a_job_that_waits_is_believed_until_its_image_is_stored(
    storage: Storage, worker: RecordLog
):
    await send(storage, 2)
    await worker.add([ended(1), image(2)])
    counted = await reader.counts(storage, "spring")
    assert (counted.completed, counted.failed, counted.pending) == (1, 1, 0)

    await store(storage, "spring/job-1.png")
    await worker.add([image(1)])

    counted = await reader.counts(storage, "spring")
    assert (counted.completed, counted.failed, counted.pending) == (2, 0, 0)


async def test_of_a_large_campaign_the_ends_of_shards_are_believed_up_to_what_was_sent(
    storage: Storage, worker: RecordLog, monkeypatch
):
    await send(storage, 5)
    await worker.add([image(1)])
    line = image(1).line()
    assert await worker._blobs.append(
        SHARD.format("images"), shard_part([line], Totals(3, 3)), 0
    )
    assert (await reader.counts(storage, "spring")).completed == 1, "all of it was read"
    monkeypatch.setattr(catalog, "PART_BYTES", 10)

    assert (await reader.counts(storage, "spring")).completed == 4
    await worker.add([image(2), image(3)])
    assert (await reader.counts(storage, "spring")).completed == 3, (
        "more than was sent: recounted"
    )


async def test_jobs_of_a_producer_that_notes_none_are_named_beside_those_that_were_sent(
    storage: Storage, worker: RecordLog
):
    await worker.add(image(number) for number in range(10, 188))
    assert (await reader.counts(storage, "spring")).completed == 178
    await send(storage, 12)
    await worker.add(image(number) for number in range(1, 10))
    campaigns = Campaigns(storage, "spring")

    await campaigns.refresh()

    ((_, counted),) = campaigns.rows
    assert (counted.sent, counted.completed, counted.unknown) == (12, 12, 175)
    assert "spring: 175 jobs with records" in " ".join(campaigns.notes(10, 0))


async def send(storage: Storage, jobs: int) -> None:
    """Notes the jobs of `image` and `ended` from number 1 on as sent."""
    ids = (f"job-{number}" for number in range(1, jobs + 1))
    await sent_jobs.note(storage, "spring", jobs, ids=ids)


async def test_shards_that_hold_nothing_are_read_once_or_not_at_all(
    storage: Storage, worker: RecordLog, monkeypatch
):
    """Whoever may store images may store thousands of them, in a minute."""
    await sent_jobs.note(storage, "spring", 1, ids=["job-1"])
    await worker.add([image(1)])
    name = "-records/spring/20261122T120000Z-thief-{:08x}.{}.jsonl.gz"
    begun = shard_part([random.Random(1).randbytes(300)], Totals(1, 1))[:99]
    contents = (b"x", b"x" * 99, begun)
    kinds = ("images", "jobs", "again")
    for place, (content, kind) in enumerate(itertools.product(contents, kinds)):
        await storage.blobs.append(name.format(place, kind), content, 0)
    read_part = storage.blobs.read_part
    reads = Counter[str]()

    async def counting(blob: str, *terms: Any) -> Any:
        reads[blob] += "thief" in blob
        return await read_part(blob, *terms)

    monkeypatch.setattr(storage.blobs, "read_part", counting)
    for _ in range(2):
        found = await reader.counts(storage, "spring", damaged := Damaged())
        assert (found.images, found.completed) == (1, 1)
        assert len(damaged.shards) == 9
        assert await images(storage) == [made_records.image(1).id]
    assert max(reads.values()) == 1
    assert reads.total() == 6
