"""What a follower hands on: nothing that what is stored, or what was sent, does not bear out."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import made_records
import sent_jobs
from imagefleet import Job, aio, errors
from imagefleet.records import dedupe, log
from imagefleet.records.catalog import Damaged
from imagefleet.records.follower import Follower
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from stored_images import ImageLog

ONE = made_records.DIGEST
OTHER = "2" * 64


def record(job_id: str, outcome: str = "completed", **fields: Any) -> Record:
    if outcome == "completed":
        return made_records.image(job_id, **{"digest": ONE, "sha256": ONE} | fields)
    return made_records.ended(job_id, outcome, **{"digest": ONE} | fields)


@pytest.fixture
async def storage(storage: Storage) -> Storage:
    await sent_jobs.note(storage, "spring", 4, ids="abcd")
    return storage


@pytest.fixture
def worker(storage: Storage) -> ImageLog:
    return ImageLog(storage.blobs, "worker")


@pytest.fixture
def thief(storage: Storage) -> RecordLog:
    return RecordLog(storage.blobs, "thief")


async def test_only_what_fits_is_handed_on(
    storage: Storage, worker: ImageLog, thief: RecordLog
):
    await worker.add([record("a"), record("b", "failed")])
    forged = [
        record("a", sha256=OTHER),
        record("a", blob="spring/a.jpg"),
        record("c"),
        record("a", "failed"),
        record("a", "failed", digest=None),
        record("made-up", "failed"),
        record("d", "failed", digest=OTHER),
    ]
    await thief.add(forged)
    others = [
        record("a", digest=OTHER),
        record("c", sha256=None),
        record("a", sha256=OTHER),
    ]
    await thief.add(others, again=True)
    damaged = Damaged()

    found = await Follower(storage, "spring", damaged=damaged).poll()

    assert sorted((each.id, each.outcome) for each in found) == [
        ("a", "completed"),
        ("b", "failed"),
    ]
    assert damaged.count == len(forged) + len(others)
    assert "records do not fit" in str(damaged)


async def test_what_a_second_record_says_of_a_stored_image_comes_after_the_first(
    storage: Storage, worker: ImageLog, thief: RecordLog
):
    """A worker that finds the image of one that died may not read it, and so does not prove it."""
    await worker.add([record("a", prompt="honest")])
    follower = Follower(storage)
    first = await follower.poll()
    await thief.add([record("a", sha256=None, prompt="forged")], again=True)
    found = [*first, *await follower.poll()]
    assert [each.prompt for each in found] == ["honest", "forged"]


async def test_a_job_of_several_images_is_not_complete_before_all_are_stored(
    storage: Storage, worker: ImageLog, thief: RecordLog
):
    await worker.add([record("a", images=2, completes=False, sha256=None)])
    forged = record("a", images=2, completes=True, sha256=None)
    await thief.add([forged], again=True)
    found = await Follower(storage).poll()
    assert [each.completes for each in found] == [False]


async def test_the_record_of_a_job_that_a_load_has_not_noted_yet_waits(
    storage: Storage, worker: ImageLog
):
    now = datetime.now(UTC)
    await worker.add([record("e", at=now), record("a"), record("x", "failed", at=now)])
    await worker.add([record("y", "failed", at=now - timedelta(hours=1))])
    damaged = Damaged()
    follower = Follower(storage, damaged=damaged)
    assert [each.id for each in await follower.poll()] == ["a"]
    assert damaged.count == 1
    start = follower.start
    await sent_jobs.note(storage, "spring", 1, ids="e")
    assert [each.id for each in await follower.poll()] == ["e"]
    assert await follower.poll() == []
    later = Follower(storage, position=start)
    assert {each.id for each in await later.poll()} == {"a", "e"}, (
        "it was killed meanwhile"
    )


async def test_a_replaced_drawing_is_no_misfit(storage: Storage, worker: ImageLog):
    told = {"worker": "w1", "started_at": "2026-11-22T12:00:00.123+00:00"}
    await worker.add([record("a", **told)])
    await storage.blobs.delete("spring/a.png")
    note = dedupe.note(
        "spring/a.png", told | {"job": "a"}, "redo/1.json", made_records.NOON
    )
    assert note is not None
    await RecordLog(storage.files, "operator").add([note])
    await worker.add([record("a", sha256=OTHER, worker="w2")])
    damaged = Damaged()
    found = await Follower(storage, damaged=damaged).poll()
    assert [each.worker for each in found] == ["w2"]
    assert damaged.count == 0


async def test_the_client_has_the_picture_of_a_job_that_somebody_says_has_failed(
    local_settings: StorageSettings,
):
    async with aio.connect(local_settings.storage) as fleet:
        batch = await fleet.submit(
            [Job(prompt="a fox", id=name) for name in ("a", "b")]
        )
        [digest, _] = [job.digest for job in batch._jobs.values()]
        known = {"campaign": "default", "digest": digest}
        told = {"job": "a", "digest": str(digest), "sha256": ONE, "images": "1"}
        await fleet.storage.blobs.create("default/a.png", b"pixels", "image/png", told)
        forged = record("a", blob="default/a.png", **known)
        lies = [
            record("a", "failed", **known),
            forged.model_copy(update={"sha256": OTHER}),
        ]
        await RecordLog(fleet.storage.blobs, "thief").add(lies)
        results = batch.results(0)
        found = await anext(results)
        assert (found.id, found.status) == ("a", "completed")
        assert found.records[0].sha256 == ONE
        with pytest.raises(TimeoutError):
            await anext(results)
        with pytest.raises(errors.MisfitError):
            await found.data()  # these pixels have another SHA-256


async def test_shards_that_hold_nothing_are_read_once_until_they_grow(
    storage: Storage, worker: ImageLog, monkeypatch
):
    """Whoever may store images may store thousands of them: each poll would read them all."""
    await worker.add([record("a")])
    late = record("b")
    whole = log.shard_part([late.line()], log.Totals(1, 1))
    name = "-records/spring/20261122T120000Z-thief-{:08x}.images.jsonl.gz"
    contents = (b"x", b"\x1f" * 99, whole[:99])
    for place, content in enumerate(contents):
        await storage.blobs.append(name.format(place), content, 0)
    told = {"job": "b", "images": "1", "digest": ONE, "sha256": ONE}
    await storage.blobs.create(str(late.blob), b"pixels", "image/png", told)
    read_part = storage.blobs.read_part
    reads = list[str]()

    async def noting(blob: str, *terms: Any) -> Any:
        reads.append(blob)
        return await read_part(blob, *terms)

    monkeypatch.setattr(storage.blobs, "read_part", noting)
    follower = Follower(storage, "spring")
    assert [each.id for each in await follower.poll()] == ["a"]
    assert len(reads) == 3, "the first is too short for a record"
    for _ in range(3):
        assert await follower.poll() == []
    assert len(reads) == 3

    await storage.blobs.append(name.format(2), whole[99:], 99)
    assert [each.id for each in await follower.poll()] == ["b"]
