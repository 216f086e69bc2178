"""The client's results, from records as workers write them: what is counted, and what it costs."""

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from imagefleet import Job, aio, concurrency, errors
from imagefleet.job.message import read_job
from imagefleet.records import follower, reader
from imagefleet.records.ledger import Ledger, entry_of
from imagefleet.records.log import RecordLog, Totals, shard_part
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart
from imagefleet.storage.settings import StorageSettings
from made_records import ended, image
from stored_images import ImageLog


def name(job_id: str, index: int) -> str:
    return f"spring/{job_id}~{index}.png" if index else f"spring/{job_id}.png"


def images(job_id: str, *indices: int, of: int) -> list[Record]:
    return [
        image(job_id, blob=name(job_id, index), index=index, images=of, seed=9 + index)
        for index in indices
    ]


def end(job_id: str, outcome: str, message: str = "m", **fields: Any) -> Record:
    source = f"{message}-{job_id}"
    reason = f"{job_id} has {outcome}"
    return ended(job_id, outcome, source=source, reason=reason, **fields)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(aio, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(
        aio, "RETRIES", concurrency.RetryPolicy(tries=3, first_wait_seconds=0.001)
    )


@pytest.fixture
async def fleet(local_settings: StorageSettings) -> AsyncIterator[aio.Fleet]:
    async with aio.connect(local_settings.storage) as fleet:
        await fleet.storage.create()
        yield fleet


@pytest.fixture
def log(fleet: aio.Fleet) -> RecordLog:
    return ImageLog(fleet.storage.blobs, "worker")


async def submit(fleet: aio.Fleet, *ids: str | None, **fields: Any) -> aio.Batch:
    """Jobs whose messages a worker has taken."""
    jobs = [Job(prompt="a house", id=job_id, **fields) for job_id in ids]
    batch = await fleet.submit(jobs, campaign="spring")
    await fleet.storage.queue.receive(32, lease_seconds=3600)
    return batch


async def test_a_job_whose_message_waits_has_not_failed_whatever_a_record_says(
    storage: Storage,
):
    """Anybody with a worker's token can write that it has."""
    await storage.create()
    fleet = aio.Fleet(storage)
    jobs = [Job(prompt="a house", id="a"), Job(prompt="a house", id="b")]
    batch = await fleet.submit(jobs, campaign="spring")
    log = ImageLog(storage.blobs, "worker")
    await log.add([end("a", "failed"), end("b", "failed")])
    with pytest.raises(TimeoutError, match="2 of 2 jobs are not done"):
        await statuses(batch.results(0))
    first, second = await storage.queue.receive(2, 60)
    await storage.queue.delete(second)
    await log.add([image(read_job(first.body, "").id)])
    found = await statuses(batch.results(0))
    assert sorted(found.values()) == ["completed", "failed"]


async def statuses(results: aio.Results) -> dict[str, str]:
    found = [result async for result in results]
    assert len({result.id for result in found}) == len(found), "each job once"
    return {result.id: result.status for result in found}


async def test_a_batch_ends_with_images_failures_and_cancellations(
    fleet: aio.Fleet, log: RecordLog
):
    batch = await submit(fleet, "a", "b", "c")
    await RecordLog(fleet.storage.files, "operator").open("spring", "cancelled")
    await log.add([image("a"), end("b", "failed"), end("c", "cancelled")])
    found = {result.id: result async for result in batch.results(0)}

    assert {each.id: each.status for each in found.values()} == {
        "a": "completed",
        "b": "failed",
        "c": "cancelled",
    }
    assert found["c"].reason == "c has cancelled"
    with pytest.raises(errors.JobError, match="job c has no image: c has cancelled"):
        await found["c"].data()


async def test_a_failure_that_was_replayed_is_not_one_whatever_order_the_shards_are_in(
    fleet: aio.Fleet, log: RecordLog
):
    batch = await submit(fleet, "a", "b", "c")
    operator = RecordLog(fleet.storage.files, "operator")
    await log.add([end("a", "failed"), end("b", "failed"), end("c", "failed")])
    await operator.add(
        [end("a", "replayed"), end("b", "replayed"), end("c", "discarded")]
    )
    await log.add([end("b", "failed", "again")])
    results = batch.results(0)

    assert {(await anext(results)).id for _ in range(2)} == {"b", "c"}, (
        "a discarded job ends, too"
    )
    with pytest.raises(TimeoutError, match="1 of 3 jobs"):
        await anext(results)


async def test_old_failures_do_not_count_and_old_images_do(
    fleet: aio.Fleet, log: RecordLog
):
    await log.add([image("a"), end("b", "failed")])
    batch = await submit(fleet, "a", "b")
    results = batch.results(0)
    assert (await anext(results)).id == "a"
    with pytest.raises(TimeoutError, match="1 of 2 jobs"):
        await anext(results)
    await log.add([end("b", "failed", "now")])
    assert await statuses(batch.results(0)) == {"a": "completed", "b": "failed"}


async def test_what_was_there_before_ids_of_its_own_is_not_read(
    fleet: aio.Fleet, log: RecordLog
):
    await log.add(
        image(f"old-{number}", prompt="a house " * 20) for number in range(100)
    )
    batch = await submit(fleet, None, None)
    await log.add([image(job_id) for job_id in batch.ids])
    parsed: list[bytes] = []
    read = Record.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "read", lambda line: parsed.append(line) or read(line))
        assert len(await statuses(batch.results(0))) == 2
    assert len(parsed) == 2


async def test_a_batch_may_be_of_several_campaigns(fleet: aio.Fleet, log: RecordLog):
    names = ("autumn", "spring", "winter")
    await log.add([end("a", "failed", campaign=name) for name in names])
    batch = await fleet.submit(
        Job(prompt="a house", id="a", campaign=name) for name in names
    )
    await fleet.storage.queue.receive(32, lease_seconds=3600)
    await log.add([end("a", "failed", "now", campaign=name) for name in names[:2]])
    results = batch.results(0)
    assert {(await anext(results)).campaign for _ in range(2)} == {"autumn", "spring"}
    with pytest.raises(TimeoutError):
        await anext(results)
    assert {
        name: counts.sent for name, counts in (await fleet.campaigns()).items()
    } == dict.fromkeys(names, 1)


async def test_a_job_of_several_images_needs_them_all_and_a_failed_one_keeps_what_it_has(
    fleet: aio.Fleet, log: RecordLog
):
    batch = await submit(fleet, "a", "b", batch_size=3)
    await log.add([*images("a", 2, 0, of=3), *images("b", 1, of=3)])
    with pytest.raises(TimeoutError):
        await statuses(batch.results(0))
    assert await statuses(fleet.results("spring")) == {}
    await ImageLog(fleet.storage.blobs, "another").add(images("a", 1, of=3), again=True)
    await log.add([end("b", "failed", seed=9)])
    await fleet.storage.blobs.create(name("b", 1), b"pixels", "image/png", {"job": "b"})

    for results in (batch.results(0), fleet.results("spring")):
        found = {result.id: result async for result in results}
        assert found["a"].blobs == tuple(name("a", index) for index in range(3))
        assert (found["b"].status, found["b"].blobs) == ("failed", ("spring/b~1.png",))
    assert found["a"].seed == 9


async def test_a_record_of_another_jobs_image_is_no_result(
    fleet: aio.Fleet, log: RecordLog
):
    batch = await submit(fleet, "a")
    await log.add(
        [image("a", blob="autumn/secret.png"), image("a", blob="spring/b.png")]
    )
    with pytest.raises(TimeoutError):
        await statuses(batch.results(0))
    assert await statuses(fleet.results("spring")) == {}


async def test_a_campaigns_results_have_each_job_once_as_it_is_now(
    fleet: aio.Fleet, log: RecordLog
):
    await log.add([end("a", "failed"), end("b", "failed"), end("b", "failed", "again")])
    operator = RecordLog(fleet.storage.files, "operator")
    await operator.open("spring", "cancelled")
    await log.add([image("a", seed=5, metadata={"order": 7}), end("c", "cancelled")])
    await fleet.storage.blobs.create(
        "spring/a.png", b"pixels", "image/png", {"job": "a"}
    )
    await log.add([image("a")], again=True)
    await operator.add([end("d", "replayed")])
    await log.add([end("d", "failed"), image("e", campaign="autumn")])
    results = {result.id: result async for result in fleet.results("spring")}
    assert {each.id: each.status for each in results.values()} == {
        "a": "completed",
        "b": "failed",
        "c": "cancelled",
    }
    assert (results["a"].seed, results["a"].metadata) == (5, {"order": 7})
    assert results["a"].records[0].blob == "spring/a.png"


async def test_a_fault_between_two_shards_loses_no_result(
    fleet: aio.Fleet, monkeypatch
):
    batch = await submit(fleet, "a", "b", "c")
    for job_id in batch.ids:
        await ImageLog(fleet.storage.blobs, f"worker-{job_id}").add([image(job_id)])
    read_part = fleet.storage.blobs.read_part
    reads: list[str] = []

    async def faulty(name: str, offset: int, max_bytes: int) -> BlobPart | None:
        reads.append(name)
        if len(reads) == 2:
            raise errors.TransientError
        return await read_part(name, offset, max_bytes)

    monkeypatch.setattr(fleet.storage.blobs, "read_part", faulty)
    assert set(await statuses(batch.results(5))) == {"a", "b", "c"}


async def test_jobs_that_are_sent_during_an_append_get_their_results(
    fleet: aio.Fleet,
):
    name = "-records/spring/20261122T120000Z-w-1.images.jsonl.gz"
    whole = shard_part([image("old").line()], Totals(1, 1))
    await submit(fleet, "old")
    blobs = fleet.storage.blobs
    await blobs.create("spring/old.png", b"pixels", "image/png", {"job": "old"})
    await blobs.append(name, whole[:30], 0)  # a local file grows while it is written
    batch = await submit(fleet, None)
    await blobs.append(name, whole[30:], 30)
    (job_id,) = batch.ids
    more = shard_part([image(job_id).line()], Totals(2, 2))
    await blobs.create(f"spring/{job_id}.png", b"pixels", "image/png", {"job": job_id})
    await blobs.append(name, more, len(whole))
    assert await statuses(batch.results(0)) == {job_id: "completed"}


async def test_many_results_cost_a_read_for_each_shard_and_few_listings(
    fleet: aio.Fleet, monkeypatch
):
    monkeypatch.setattr(follower, "_POLLED", 80)
    batch = await submit(fleet, *[None] * 100)
    shards = 5
    for worker in range(shards):
        log = ImageLog(fleet.storage.blobs, f"worker-{worker}")
        await log.add(image(job_id) for job_id in batch.ids[worker::shards])
    operations = fleet.storage.operations
    listings = operations.blob_writes
    reads = operations.blob_reads

    assert sum([1 async for _ in batch.results(60)]) == 100
    assert operations.blob_writes - listings == 4, "80 records at a time"
    assert operations.blob_reads - reads == shards + 100, "a look at each image"


async def test_an_idle_poll_is_a_listing_of_each_store(
    fleet: aio.Fleet, log: RecordLog
):
    batch = await submit(fleet, "a", "b")
    await log.add([image("a")])
    results = batch.results(0)
    await anext(results)
    before = fleet.storage.operations.blob_writes
    with pytest.raises(TimeoutError):
        await anext(results)
    assert fleet.storage.operations.blob_writes - before == 2


async def test_one_job_is_looked_up_without_its_neighbours(
    fleet: aio.Fleet, log: RecordLog, monkeypatch
):
    await submit(fleet, "a")
    for number in range(50):
        await fleet.storage.blobs.create(
            f"spring/a~{number + 1}.png", b"x", "image/png", {}
        )
    await log.add([end("a", "failed"), image("b")])
    listed: list[str] = []
    records = fleet.storage.blobs.records

    def listing(prefix: str = "") -> AsyncIterator[Any]:
        listed.append(prefix)
        return records(prefix)

    monkeypatch.setattr(fleet.storage.blobs, "records", listing)
    assert await fleet.job("spring/a").status() == "failed"
    assert listed == ["-records/spring/"]


async def test_a_failed_job_that_is_looked_up_keeps_the_images_that_it_has(
    fleet: aio.Fleet, log: RecordLog
):
    facts = {"job": "a", "images": "3", "seconds": "1"}
    for stem in ("a", "a~2", "a-1"):
        await fleet.storage.blobs.create(f"spring/{stem}.png", b"x", "image/png", facts)
    await log.add([end("a", "failed")])
    found = await fleet.job("spring/a").result(1)
    assert (found.status, found.blobs) == ("failed", ("spring/a.png", "spring/a~2.png"))


async def test_nothing_of_a_batch_is_sent_before_all_of_it_is_checked(
    fleet: aio.Fleet,
):
    good = [Job(prompt="a house", id=f"{number}") for number in range(40)]

    def broken() -> Iterator[Job]:
        yield from good
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fleet.submit(broken(), campaign="spring")
    with pytest.raises(errors.JobError, match="two jobs have the id spring/3"):
        await fleet.submit([*good, Job(prompt="a cat", id="3")], campaign="spring")
    assert (await fleet.depth()).queue.messages == 0
    assert await fleet.campaigns() == {}


async def test_a_second_job_of_an_id_is_refused_however_long_the_first_is_done(
    fleet: aio.Fleet, log: RecordLog
):
    first = await submit(fleet, "a")
    await log.add([image("a", digest=first._jobs["spring/a"].digest)])
    await submit(fleet, "a")  # the same job
    async with aio.connect(fleet.storage.url) as other:
        for each in (fleet, other):
            with pytest.raises(
                errors.NameTakenError, match="job spring/a is not the one"
            ):
                await each.submit([Job(prompt="a cat", id="a")], campaign="spring")
    assert (await fleet.depth()).queue.messages == 2
    assert (await fleet.campaigns())["spring"].sent == 1


async def test_an_older_picture_of_the_id_is_not_the_result_of_a_new_job(
    fleet: aio.Fleet, log: RecordLog
):
    old = Job(prompt="a cat", id="a", campaign="spring").digest
    await log.add([image("a", digest=old), end("b", "failed", digest=old)])
    batch = await submit(fleet, "a", "b")
    with pytest.raises(TimeoutError, match="2 of 2 jobs"):
        await statuses(batch.results(0))
    # An operator has this one drawn in its place.
    changed = Ledger(fleet.storage, "spring")
    changed.pending += entry_of("a", old)
    await changed.note()
    assert (await anext(batch.results(0))).id == "a"


async def test_jobs_are_sent_with_credentials_that_neither_list_nor_append(
    fleet: aio.Fleet, monkeypatch, caplog
):
    async def refused(*_: object) -> bool:
        raise errors.SetupError("the SAS token may not append to records")

    monkeypatch.setattr(reader, "end", refused)
    monkeypatch.setattr(fleet.storage.files, "append", refused)
    with caplog.at_level(logging.WARNING):
        await submit(fleet, "a")
    assert (await fleet.depth()).queue.messages == 1
    assert "may not append to records" in caplog.text
