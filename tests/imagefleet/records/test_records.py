"""What is written to shards is read again: on both storages, each image once."""

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

import polling
import sent_jobs
from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.records import catalog, dedupe, outcomes, reader, record
from imagefleet.records.catalog import Damaged
from imagefleet.records.follower import Follower
from imagefleet.records.log import (
    MAX_MEMBER_BYTES,
    TOTALS_BYTES,
    RecordLog,
    ShardName,
    Totals,
    shard_part,
    totals_at,
)
from imagefleet.records.record import Lora, Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import BlobPart
from imagefleet.storage.settings import StorageSettings
from made_records import ended, image
from stored_images import ImageLog

_Item = TypeVar("_Item")


async def everything(items: AsyncIterator[_Item]) -> list[_Item]:
    return [each async for each in items]


@pytest.fixture
def log(storage: Storage) -> RecordLog:
    return ImageLog(storage.blobs, "worker 1/é")


@pytest.fixture
def operator(storage: Storage) -> RecordLog:
    return RecordLog(storage.files, "operator")


async def test_a_job_of_several_images_is_counted_once_all_are_stored(
    storage: Storage, log: RecordLog
):
    def of_several(index: int, **fields: Any) -> Record:
        name = f"spring/job-1~{index}.png" if index else "spring/job-1.png"
        return image(1, blob=name, images=3, index=index, **fields)

    await log.add([of_several(index, completes=False) for index in (0, 2)])
    assert (await reader.counts(storage, "spring")).completed == 0
    await log.add([of_several(1, completes=False)])
    # The worker that drew the rest finds the last one stored.
    await log.add([of_several(2, completes=True)], again=True)
    await log.add([of_several(2, completes=True)], again=True)
    assert (await reader.counts(storage, "spring")).completed == 1
    assert (await reader.counts(storage, "spring")).images == 3


async def test_records_are_read_as_they_were_written(storage: Storage, log: RecordLog):
    written = [
        image(
            1,
            prompt='a "red" house\n\\',
            loras=(Lora("magic", 0.35),),
            metadata={"a": [1]},
        ),
        image(
            2, seed=2**32 - 1, width=512, price_per_hour=0.08, size_bytes=1, seconds=1.5
        ),
    ]
    await log.add(written[:1])
    await log.add(written[1:])
    assert await everything(reader.images(storage, "spring")) == written


async def test_a_shard_is_what_zcat_reads(storage: Storage, log: RecordLog):
    await log.add([image(1)])
    await log.add([image(2), image(3)])
    (name,) = [each async for each in storage.blobs.names("-records/spring/")]
    data = await storage.blobs.read(name) or b""
    lines = gzip.decompress(data).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["job-1", "job-2", "job-3"]
    assert lines[0].startswith(b'{"outcome":"completed","blob":"spring/job-1.png"')
    assert totals_at(data[-TOTALS_BYTES:]) == Totals(3, 3)


async def test_an_image_whose_name_was_taken_counts_only_if_nobody_has_its_record(
    storage: Storage, log: RecordLog
):
    other = RecordLog(storage.blobs, "other")
    await log.add([image(1), image(2)])
    await other.add([image(2), image(3)], again=True)
    await log.add([image(3), image(4)], again=True)
    found = [record.id for record in await everything(reader.images(storage, "spring"))]
    assert found == ["job-1", "job-2", "job-3", "job-4"]
    counted = await reader.counts(storage, "spring")
    assert (counted.images, counted.completed) == (4, 4)


async def test_names_that_were_taken_do_not_make_a_count_read_every_record(
    storage: Storage, log: RecordLog, monkeypatch
):
    """Each interrupted node leaves some: a count of a million images must not take a minute."""
    await log.add(image(number, prompt="é" * 9) for number in range(100))
    other = ImageLog(storage.blobs, "other")
    await other.add([image(7), image(900), image(900)], again=True)
    found = len(await everything(reader.images(storage, "spring")))
    monkeypatch.setattr(catalog, "PART_BYTES", 500)  # a campaign of more is a large one
    reads = 0
    read = Record.read

    def counted(line: bytes) -> Record:
        nonlocal reads
        reads += 1
        return read(line)

    monkeypatch.setattr(Record, "read", counted)
    counts = await reader.counts(storage, "spring")
    assert (counts.images, counts.completed) == (found, found) == (101, 101)
    assert reads < 20


async def test_a_replaced_drawing_is_left_out_and_the_next_one_of_its_worker_is_not(
    storage: Storage, log: RecordLog, operator: RecordLog
):
    async def listed() -> list[tuple[str, str]]:
        found = await everything(reader.images(storage, "spring"))
        assert (await reader.counts(storage, "spring")).images == len(found)
        return sorted((each.id, each.worker) for each in found)

    started = "2026-11-22T12:00:00.123+00:00"
    facts = {"job": "job-1", "worker": "w?rker", "started_at": started}
    drawn = {"worker": "wörker", "started_at": started}
    await log.add([image(1, **drawn), image(2, **drawn)])
    note = dedupe.note("spring/job-1.png", facts, "redo/1.json", datetime.now(UTC))
    assert note is not None
    for _ in range(2):  # it was killed after the first time
        await operator.add([note])
    assert await listed() == [("job-2", "wörker")]
    await log.add([image(1, **drawn)])
    assert await listed() == [("job-1", "wörker"), ("job-2", "wörker")]
    await operator.add([note.model_copy(update={"source": "redo/2.json"})])
    await log.add([image(1, worker="other")], again=True)
    assert await listed() == [("job-1", "other"), ("job-2", "wörker")]
    assert (
        dedupe.note("-checks/spring/job-1.png", facts, "redo/1.json", datetime.now(UTC))
        is None
    )
    followed = await Follower(storage, "spring").poll()
    assert {each.outcome for each in followed} == {"completed"}


async def test_counts_are_those_of_the_records(
    storage: Storage, log: RecordLog, operator: RecordLog
):
    began_at = datetime.now(UTC).replace(microsecond=0)  # as in names of records
    await operator.open("spring", "cancelled")
    await sent_jobs.note(
        storage, "spring", 70, ids=(f"job-{number}" for number in range(1, 6))
    )
    await log.add(
        [
            image(1, images=2, completes=False),
            image(1, images=2, index=1, completes=True, blob="spring/job-1~1.png"),
            image(2),
        ]
    )
    await log.add([ended(3, "failed"), ended(4, "cancelled"), ended(5, "failed")])
    await operator.add([ended(5, "replayed")])
    counted = await reader.counts(storage, "spring")
    assert (counted.sent, counted.images, counted.completed) == (70, 3, 2)
    assert (counted.failed, counted.cancelled, counted.pending) == (1, 1, 66)
    assert counted.first_at is not None
    assert counted.last_at is not None
    assert began_at <= counted.first_at <= counted.last_at <= datetime.now(UTC)


async def test_a_campaign_without_records_has_zeros(storage: Storage):
    counted = await reader.counts(storage, "nothing")
    assert counted == reader.Counts(None, 0, 0, 0, 0, None, None)
    assert counted.pending is None


async def test_a_job_that_failed_is_listed_until_it_is_replayed_and_again_if_it_fails_again(
    storage: Storage, log: RecordLog, operator: RecordLog
):
    await log.add(
        [ended(1, "failed"), ended(2, "failed"), ended(2, "failed"), ended(3, "failed")]
    )
    await operator.add([ended(1, "replayed"), ended(3, "discarded")])
    await log.add([ended(1, "failed", source="message-of-the-replay")])
    found = await everything(reader.ended(storage, "spring"))
    assert [(record.id, record.source) for record in found] == [
        ("job-2", "message-2"),
        ("job-1", "message-of-the-replay"),
    ]


async def test_shards_of_a_short_campaign_are_read_once_for_its_images(
    storage: Storage, log: RecordLog, monkeypatch
):
    await log.add([image(1), image(2), ended(3, "failed"), ended(4, "failed")])
    kinds: list[str | None] = []
    read_part = storage.blobs.read_part

    async def note(name: str, offset: int, max_bytes: int) -> BlobPart | None:
        found = ShardName.read(name)
        kinds.append(found and found.kind)
        return await read_part(name, offset, max_bytes)

    monkeypatch.setattr(storage.blobs, "read_part", note)

    assert len(await everything(reader.images(storage, "spring"))) == 2
    assert sorted(map(str, kinds)) == ["images", "jobs"]

    kinds.clear()
    statuses = Counter(
        [each.status async for each in outcomes.of_campaign(storage, "spring")]
    )
    assert statuses == {"completed": 2, "failed": 2}
    assert Counter(kinds) == {
        "images": 1,
        "jobs": 2,
    }  # the second time for what they say


async def test_a_follower_gets_each_record_once_and_goes_on_from_its_position(
    storage: Storage, log: RecordLog
):
    follower = Follower(storage)
    assert await follower.poll() == []
    await log.add([image(1)])
    assert [record.id for record in await follower.poll()] == ["job-1"]
    assert await follower.poll() == []
    await log.add([image(2), ended(3, "failed")])
    later = Follower(storage, position=json.loads(json.dumps(follower.position)))
    assert {record.id for record in await later.poll()} == {"job-2", "job-3"}
    assert await later.poll() == []
    assert {record.id for record in await follower.poll()} == {"job-2", "job-3"}


async def test_the_end_of_a_shard_that_is_still_written_is_read_later(
    storage: Storage,
):
    whole = shard_part([image(1).line()], Totals(1, 1))
    more = shard_part([image(2).line()], Totals(2, 2))
    name = "-records/spring/20261122T120000Z-w-1.images.jsonl.gz"
    for number in (1, 2):
        await storage.blobs.create(
            f"spring/job-{number}.png", b"x", "image/png", {"job": "x"}
        )
    await storage.blobs.append(name, whole + more[:20], 0)
    damaged = Damaged()
    follower = Follower(storage, damaged=damaged)
    assert [record.id for record in await follower.poll()] == ["job-1"]
    assert (await reader.counts(storage, "spring")).images == 1
    await storage.blobs.append(name, more[20:], len(whole) + 20)
    assert [record.id for record in await follower.poll()] == ["job-2"]
    assert not damaged.count


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"no json\n"),
        gzip.compress(b'{"outcome":"completed"}\n'),
        gzip.compress(image(1, "autumn").line()),
        gzip.compress(ended(1, "failed").line()),
        gzip.compress(b" " * (2 * MAX_MEMBER_BYTES)),
    ],
    ids=[
        "no gzip",
        "no json",
        "no record",
        "another campaign's",
        "another kind's",
        "a bomb",
    ],
)
async def test_a_forged_shard_is_left_out_with_a_reason(
    storage: Storage, log: RecordLog, content: bytes
):
    await log.add([image(7)])
    await storage.blobs.append("-records/spring/x.images.jsonl.gz", content, 0)
    damaged = Damaged()
    found = await everything(reader.images(storage, "spring", damaged))
    assert [record.id for record in found] == ["job-7"]
    assert damaged.count == 1
    assert (await reader.counts(storage, "spring")).images == 1
    assert len(await Follower(storage).poll()) == 1


async def test_another_writer_of_the_same_shard_costs_a_new_shard_and_no_record(
    storage: Storage, log: RecordLog
):
    await log.add([image(1)])
    (name,) = [each async for each in storage.blobs.names("-records/")]
    size = len(await storage.blobs.read(name) or b"")
    await storage.blobs.append(name, b"forged", size)
    await log.add([image(2)])
    found = await everything(reader.images(storage, "spring"))
    assert {record.id for record in found} == {"job-1", "job-2"}


async def test_many_long_records_are_appended_in_parts(
    storage: Storage, log: RecordLog
):
    await log.add(
        [image(number, prompt=f"{number} " + "x" * 60_000) for number in range(120)]
    )
    assert len(await everything(reader.images(storage, "spring"))) == 120
    assert (await reader.counts(storage, "spring")).images == 120


def test_a_record_that_cannot_be_is_refused_in_one_sentence():
    with pytest.raises(errors.JobError, match="campaign"):
        Record.read(
            b'{"outcome":"failed","id":"a","campaign":"../x","at":"2026-11-22T12:00:00Z"}'
        )


async def test_many_small_shards_are_not_read_one_after_the_other(
    storage: Storage, monkeypatch
):
    for number in range(16):
        await RecordLog(storage.blobs, f"w{number}").add([image(number)])
    real = type(storage.blobs).read_part
    reading = most = 0
    together = asyncio.Event()

    async def read_part(self: Any, *arguments: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        if reading == 4:
            together.set()
        await together.wait()
        await polling.turn(3)
        try:
            return await real(self, *arguments)
        finally:
            reading -= 1

    monkeypatch.setattr(type(storage.blobs), "read_part", read_part)

    found = [record.id async for record in reader.images(storage, "spring")]

    assert sorted(found) == sorted(f"job-{number}" for number in range(16))
    assert 4 <= most <= 64


async def test_whoever_stops_reading_leaves_no_read_behind(storage: Storage):
    for number in range(16):
        await RecordLog(storage.blobs, f"w{number}").add([image(number)])
    before = asyncio.all_tasks()

    records = reader.images(storage, "spring")
    await anext(records)
    await records.aclose()  # type: ignore[attr-defined]

    await polling.until(lambda: asyncio.all_tasks() == before)


def test_an_error_of_whoever_reads_is_all_that_is_logged(
    local_settings: StorageSettings, caplog
):
    """A full disk or a closed pipe, say: asyncio.run() then closes what is being read."""

    async def fail_while_reading() -> None:
        async with open_storage(local_settings) as storage:
            await storage.create()
            for number in range(16):
                await RecordLog(storage.blobs, f"w{number}").add([image(number)])
            records = reader.images(storage, "spring")
            async for _ in records:
                raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        asyncio.run(fail_while_reading())
    assert not caplog.messages


def test_numbers_and_times_that_no_table_holds_are_damage():
    for wrong in ({"size_bytes": 2**53}, {"steps": -1}, {"at": "3000-01-01T00:00:00Z"}):
        with pytest.raises(errors.JobError, match=next(iter(wrong))):
            Record.read(json.dumps(json.loads(image(1).line()) | wrong).encode())


def test_a_lora_that_a_prompt_names_twice_is_recorded_twice():
    """It is applied twice, with its last weight."""
    text = json.dumps({"prompt": "a <lora:x:.2><lora:x:.8>", "id": "a"})
    fields = record.of_job(read_job(text, "a"))
    assert fields["loras"] == (record.Lora("x", 0.8), record.Lora("x", 0.8))
