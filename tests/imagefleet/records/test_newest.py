"""The latest records of a campaign of any length are found without reading the rest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from imagefleet.records import reader, stored
from imagefleet.records.record import Record, Totals, shard_part
from imagefleet.storage.open import Storage
from stored_images import ImageLog

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def image(number: int) -> Record:
    """Of a prompt that cannot be compressed to nothing."""
    return Record(
        outcome="completed",
        id=f"job-{number:04}",
        campaign="spring",
        blob=f"spring/job-{number:04}.png",
        at=NOON + timedelta(seconds=number),
        prompt=str(pow(7, 500 + number)),
    )


async def fill(storage: Storage, *, workers: int, appends: int, each: int) -> int:
    """Workers take turns; returns how many records there are."""
    logs = [ImageLog(storage.blobs, f"worker-{number}") for number in range(workers)]
    for turn in range(appends):
        first = turn * each
        await logs[turn % workers].add([image(number) for number in range(first, first + each)])
    return appends * each


async def test_the_latest_records_of_all_shards_come_from_a_small_read_of_each(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_END_BYTES", 4_000)
    count = await fill(storage, workers=3, appends=24, each=6)
    sizes = (await reader.end(storage, "spring")).values()
    assert min(sizes) > 3 * 4_000, "or all of it is read"
    reads = storage.operations.blob_reads

    found = await reader.newest(storage, "spring", 10)

    assert [record.id for record in found] == [f"job-{n:04}" for n in range(count - 10, count)]
    assert storage.operations.blob_reads - reads == 3 + 10 + 1, (
        "a look at each image, and the ledger"
    )


async def test_a_short_campaign_is_read_whole(storage: Storage) -> None:
    assert await reader.newest(storage, "spring", 10) == []
    await fill(storage, workers=2, appends=3, each=1)

    found = await reader.newest(storage, "spring", 10)

    assert [record.id for record in found] == ["job-0000", "job-0001", "job-0002"]


async def test_the_end_of_a_shard_may_be_anything(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_END_BYTES", 500)
    name = "-records/spring/20261122T120000Z-w-1.images.jsonl.gz"
    for number in range(2):
        told = {"job": image(number).id}
        await storage.blobs.create(str(image(number).blob), b"pixels", "image/png", told)
    members = [shard_part([image(n).line()], Totals(n, n)) for n in range(2)]
    whole = members[0] + members[1]
    await storage.blobs.append(name, whole + b"\x1f\x8b no gzip" + bytes(100), 0)

    assert await reader.newest(storage, "spring", 10) == []
    everything = await reader.Follower(storage, "spring").poll()
    assert [record.id for record in everything] == ["job-0000", "job-0001"]


async def test_a_follower_reads_a_long_shard_in_the_parts_that_it_is_told(
    storage: Storage,
) -> None:
    count = await fill(storage, workers=1, appends=20, each=5)
    follower = reader.Follower(storage, "spring", most=10, part_bytes=2_000)
    polls = []
    while some := await follower.poll():
        polls.append(some)

    assert max(map(len, polls)) <= 15
    assert [record.id for some in polls for record in some] == [f"job-{n:04}" for n in range(count)]
