"""A bundle's way through a worker on both storages: packs, records, poison, and its message."""

import asyncio
import contextlib

import pytest

from bundled import NAME, bundle_of_jobs, faults, job, logged, packed
from imagefleet import errors
from imagefleet.files import pack
from imagefleet.storage import bundle
from imagefleet.storage.open import Storage
from messages import (
    Drawing,
    blobs,
    failing,
    failures,
    message,
    redelivered,
)
from worker.jobs.bundles import BundleStage

NAMES = [f"j{number}" for number in range(8)]


async def is_empty(storage: Storage) -> bool:
    return (await storage.queue.depth()).messages == 0


async def test_a_bundle_becomes_one_pack_one_append_and_no_other_blob(
    storage: Storage, run_pipeline
):
    pipeline = await run_pipeline(sent=[bundle_of_jobs(8)])
    found = await packed(storage)
    assert found.parts == [f"default/{NAME}~1.tar"]
    assert found.images == dict.fromkeys(NAMES, found.parts)
    assert await blobs(storage) == []
    assert len([name async for name in storage.blobs.names("-records/")]) == 1
    assert not await faults(storage, NAMES)
    assert pipeline.metrics.outcomes == {"completed": 8}
    assert await is_empty(storage)


async def test_a_picture_of_a_pack_is_found_by_its_record(
    storage: Storage, run_pipeline
):
    await run_pipeline(sent=[bundle_of_jobs(3), message(id="alone")])
    for record in await logged(storage):
        if record.id == "alone":
            assert record.pack is None
            continue
        assert record.pack
        assert record.offset
        assert record.size_bytes
        part = await storage.packs.read_part(
            record.pack, record.offset, record.size_bytes
        )
        assert part is not None
        assert part.data.startswith(b"\x89PNG")
        assert b'"id":"' + record.id.encode() in part.data  # its own job's text
        assert b"jobs" not in part.data


async def test_a_bad_job_goes_to_poison_alone_and_its_bundle_completes(
    storage: Storage, run_pipeline
):
    def fails(request):
        return errors.JobError("cannot be drawn") if request.seed == 2 else None

    pipeline = await run_pipeline(Drawing(fails), sent=[bundle_of_jobs(8)])
    (failed,) = (await failures(storage)).values()
    assert (failed.id, failed.reason) == ("j2", "cannot be drawn")
    assert failed.body == job(2)
    assert (await packed(storage)).ends == {"j2": ["failed"]}
    assert not await faults(storage, NAMES)
    assert pipeline.metrics.outcomes == {"completed": 7, "failed": 1}
    assert await is_empty(storage)


async def test_a_job_that_fails_for_a_while_is_drawn_again_without_the_others(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)
    left = [errors.TransientError("out of memory")]

    def fails(request):
        return left.pop() if request.seed == 2 and left else None

    engine = Drawing(fails)
    pipeline = await run_pipeline(engine, sent=[bundle_of_jobs(8)])
    assert sorted(engine.seeds) == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    found = await packed(storage)
    assert found.images["j2"] == [f"default/{NAME}~2.tar"]
    assert not await faults(storage, NAMES)
    assert pipeline.metrics.outcomes["retried"] == 1
    assert await is_empty(storage)


async def test_a_job_that_fails_too_often_is_the_only_one_that_fails(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)

    def fails(request):
        return errors.TransientError("out of memory") if request.seed == 2 else None

    engine = Drawing(fails)
    await run_pipeline(engine, sent=[bundle_of_jobs(4)], max_attempts=3)
    (failed,) = (await failures(storage)).values()
    assert (failed.id, failed.attempts) == ("j2", 3)
    assert engine.seeds.count(2) == 3
    assert not await faults(storage, NAMES[:4])


async def test_a_taken_name_is_read_and_what_it_lacks_is_the_next_part(
    storage: Storage, run_pipeline
):
    await run_pipeline(sent=[bundle_of_jobs(3)])
    pipeline = await run_pipeline(Drawing(), sent=[bundle_of_jobs(8)])
    found = await packed(storage)
    assert found.parts == [f"default/{NAME}~{part}.tar" for part in (1, 2)]
    assert not await faults(storage, NAMES)
    assert pipeline.metrics.outcomes == {"completed": 5, "duplicate": 3}


async def test_a_redelivered_bundle_is_drawn_as_far_as_it_is_not_stored(
    storage: Storage, run_pipeline
):
    await run_pipeline(sent=[bundle_of_jobs(3)])
    await redelivered(storage, bundle_of_jobs(8))
    engine = Drawing()
    await run_pipeline(engine)
    assert sorted(engine.seeds) == [3, 4, 5, 6, 7]
    assert not await faults(storage, NAMES)


@pytest.mark.parametrize("data", [b"", b"not a pack", b"x" * 20_000])
async def test_a_part_that_is_cut_or_a_strangers_counts_as_empty(
    storage: Storage, run_pipeline, data: bytes
):
    name = pack.name_of("default", NAME, 1)
    await storage.packs.create(name, data, "application/x-tar", {})
    await redelivered(storage, bundle_of_jobs(4))
    await run_pipeline()
    found = await packed(storage)
    assert found.images == {
        name: [pack.name_of("default", NAME, 2)] for name in NAMES[:4]
    }
    assert not await faults(storage, NAMES[:4])


async def test_a_picture_of_another_job_with_the_same_id_does_not_count(
    storage: Storage, run_pipeline
):
    await run_pipeline(sent=[bundle_of_jobs(2, steps=7)])
    await redelivered(storage, bundle_of_jobs(2))
    engine = Drawing()
    await run_pipeline(engine)
    assert len(engine.drawn) == 2


async def test_what_is_larger_than_a_pack_is_several(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr("worker.jobs.bundles.PART_BYTES", 40_000)
    await run_pipeline(sent=[bundle_of_jobs(8)])
    assert len((await packed(storage)).parts) > 2
    assert not await faults(storage, NAMES)


@pytest.mark.parametrize("times", [4, 7])
async def test_a_pack_that_cannot_be_stored_is_stored_in_the_end(
    storage: Storage, run_pipeline, monkeypatch, times: int
):
    down = failing(storage.packs.create, errors.TransientError("503 busy"), times)
    monkeypatch.setattr(storage.packs, "create", down)
    await run_pipeline(sent=[bundle_of_jobs(8)], lease_seconds=2)
    assert not await faults(storage, NAMES)
    assert await is_empty(storage)


async def test_a_cancelled_bundle_ends_and_keeps_what_was_drawn(
    storage: Storage, run_pipeline, monkeypatch
):
    from imagefleet import cancelled

    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 0.0)
    monkeypatch.setattr(cancelled, "BLUR_SECONDS", 0.0)
    await run_pipeline(sent=[bundle_of_jobs(3)])
    await redelivered(storage, bundle_of_jobs(8))
    await cancelled.cancel(storage, "default")
    pipeline = await run_pipeline()
    found = await packed(storage)
    assert found.ends == {name: ["cancelled"] for name in NAMES[3:]}
    assert not await faults(storage, NAMES)
    assert pipeline.metrics.outcomes == {"duplicate": 3, "cancelled": 5}
    assert await is_empty(storage)


@pytest.mark.parametrize(
    ("body", "reason", "count"),
    [
        (bundle_of_jobs(4)[:-40], "not JSON", 1),
        (bundle_of_jobs(2).replace('"j1"', '"j0"'), "a job twice", 1),
        (
            bundle_of_jobs(2).replace('"id":"j1"', '"id":"j1","campaign":"other"'),
            "campaign differs",
            2,
        ),
        (bundle_of_jobs(2).replace(NAME, "../x"), "32 hexadecimal digits", 2),
        (bundle_of_jobs(2).replace('"id":"j1"', '"id":"j1","n_iter":2'), "itself", 2),
    ],
)
async def test_a_bad_bundle_is_poison_whole_with_the_reason_and_readable_jobs(
    storage: Storage, run_pipeline, body: str, reason: str, count: int
):
    engine = Drawing()
    await run_pipeline(engine, sent=[body])
    found = await failures(storage)
    assert len(found) == count
    assert all(reason in each.reason for each in found.values())
    if reason != "not JSON":
        assert set(found) <= {"j0", "j1"}
        assert '"prompt":"a house"' in (found["j0"].body or "")
    assert not engine.drawn
    assert (await packed(storage)).parts == []
    assert await is_empty(storage)


async def test_a_drained_worker_stores_what_is_drawn_and_leaves_the_rest(
    storage: Storage, run_pipeline
):
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fails(request):
        if request.seed == 2:
            loop.call_soon_threadsafe(stop.set)

    engine = Drawing(fails, capacity=1, tick_seconds=0.05)
    await run_pipeline(engine, sent=[bundle_of_jobs(32)], stop=stop, until_empty=False)
    names = [f"j{number}" for number in range(32)]
    found = await packed(storage)
    assert len(found.parts) == 1
    assert 3 <= len(found.images) < 32
    (left,) = await storage.queue.receive(1, 30)  # whole, and at once
    assert len(bundle.messages_of(left.body)) == 32
    await storage.queue.release(left)
    rest = Drawing()
    await run_pipeline(rest)
    assert len(rest.drawn) == 32 - len(found.images)
    assert not await faults(storage, names)


async def test_a_bundle_of_another_model_is_moved_whole(storage: Storage, run_pipeline):
    body = bundle_of_jobs(4, model="other")
    await run_pipeline(Drawing(), sent=[body])
    (moved,) = await storage.models.of("other")["normal"].receive(1, 30)
    assert moved.body == body
    assert (await packed(storage)).parts == []


async def test_a_bundle_that_has_killed_workers_writes_a_part_for_each_job(
    storage: Storage, run_pipeline
):
    await storage.queue.send([bundle_of_jobs(4)])
    for _ in range(3):
        (leased,) = await storage.queue.receive(1, 60)
        await storage.queue.release(leased)
    await run_pipeline()
    assert len((await packed(storage)).parts) == 4
    assert not await faults(storage, NAMES[:4])


async def test_the_job_that_workers_die_of_is_the_only_one_of_its_bundle_that_fails(
    storage: Storage, run_pipeline, monkeypatch
):
    async def expire(self, lease, *_, **__) -> None:  # as after the death of a worker
        await self.keeper.queue.release(lease.message)
        self.keeper.drop(lease)

    def fails(request):
        if request.seed == 2:
            raise errors.NodeError("died")

    monkeypatch.setattr(BundleStage, "release", expire)
    await storage.queue.send([bundle_of_jobs(4)])
    for _ in range(3):
        (leased,) = await storage.queue.receive(1, 60)
        await storage.queue.release(leased)
    seeds = []
    deaths = 0
    while not await is_empty(storage):
        engine = Drawing(fails)
        with contextlib.suppress(errors.NodeError):
            await run_pipeline(engine)
        seeds += engine.seeds
        deaths += 1
    (failed,) = (await failures(storage)).values()
    assert failed.id == "j2"
    assert "while they generated nothing else" in failed.reason
    assert seeds == [0, 1, *[2] * (deaths - 1), 3]
    assert not await faults(storage, NAMES[:4])
