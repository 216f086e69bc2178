"""Every image has one record, every record an image, and no job ends before its records."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any, Self

import pytest

import polling
from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.job.message import Job
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from messages import blobs, failing, message, records
from worker import tasks
from worker.engine import contract
from worker.jobs.in_flight import InFlightJob
from worker.metrics import WorkerMetrics
from worker.stages import record as stage


async def ended(storage: Storage) -> list[Record]:
    return [record async for record in reader.ended(storage)]


async def test_each_image_has_a_record_and_each_record_an_image(
    storage: Storage,
    run_pipeline,
    store_images,
):
    await store_images(message(id="taken"), data=b"another's")
    await run_pipeline(
        sent=[
            message(id="one", prompt="a house", seed=7, metadata={"order": 5}),
            message(id="three", batch_size=3, campaign="spring"),
            message(id="taken"),
            message(id="bad", stepz=1),
        ]
    )

    found = await records(storage) + await records(storage, "spring")
    stored = await blobs(storage) + await blobs(storage, "spring/")
    assert sorted(str(record.blob) for record in found) == stored
    (one,) = [record for record in found if record.id == "one"]
    assert (one.prompt, one.seed, one.metadata) == ("a house", 7, {"order": 5})
    assert (one.worker, one.attempts, one.images, one.index) == ("test-worker", 1, 1, 0)
    assert one.size_bytes == len(await storage.blobs.read("default/one.png") or b"")
    assert one.started_at is not None
    assert one.seconds is not None
    seeds = [record.seed for record in found if record.id == "three"]
    assert sorted(seeds) == [min(seeds) + number for number in range(3)]
    (failed,) = await ended(storage)
    assert (failed.outcome, failed.error) == ("failed", "InvalidMessageError")
    assert "stepz" in (failed.reason or "")
    assert failed.id == "bad"
    assert json.loads(failed.body or "")["stepz"] == 1


async def test_an_image_whose_worker_died_before_its_record_gets_one(
    storage: Storage, run_pipeline, monkeypatch
):
    await storage.queue.send(message(id=f"j{number}") for number in range(4))
    dies = failing(storage.blobs.append, errors.SetupError("as good as killed"), 1)
    monkeypatch.setattr(storage.blobs, "append", dies)
    with pytest.raises(errors.SetupError, match="as good as killed"):
        await run_pipeline(lease_seconds=2)
    assert await blobs(storage)
    assert await records(storage) == []

    pipeline = await run_pipeline(lease_seconds=2)
    assert pipeline.metrics.outcomes["duplicate"]
    names = sorted(str(record.blob) for record in await records(storage))
    assert names == await blobs(storage)
    assert len(names) == 4


async def test_an_image_that_is_being_stored_while_another_of_its_job_fails_has_a_record(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    is_storing = threading.Event()
    has_failed = asyncio.Event()
    create = storage.blobs.create
    image_failed = InFlightJob.image_failed

    async def slow(name: str, *arguments: Any, **options: Any) -> bool:
        if name.startswith("-"):  # no image
            return await create(name, *arguments, **options)
        is_storing.set()
        await has_failed.wait()
        return await create(name, *arguments, **options)

    def noted(self: InFlightJob, index: int, error: errors.FleetError) -> None:
        image_failed(self, index, error)
        has_failed.set()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if request.seed == 8:
            assert is_storing.wait()
            raise errors.JobError("it cannot be drawn")
        return draw_noise(request)

    monkeypatch.setattr(storage.blobs, "create", slow)
    monkeypatch.setattr(InFlightJob, "image_failed", noted)
    pipeline = await run_pipeline(
        StandInEngine(capacity=1, draw=draw),
        sent=[message(id="j", seed=7, batch_size=2)],
    )
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert [record.blob for record in await records(storage)] == await blobs(storage)
    assert await blobs(storage) == ["default/j.png"]


async def test_a_job_whose_record_cannot_be_stored_is_delivered_again(
    storage: Storage, run_pipeline, monkeypatch
):
    await storage.queue.send([message(id="j")])
    down = failing(storage.blobs.append, errors.TransientError("503 server busy"), 7)
    monkeypatch.setattr(storage.blobs, "append", down)
    pipeline = await run_pipeline(lease_seconds=2)
    assert pipeline.metrics.outcomes == {"lost": 1, "duplicate": 1}
    assert [record.blob for record in await records(storage)] == ["default/j.png"]


async def test_records_are_written_in_batches_while_more_images_are_in_the_making(
    storage: Storage, run_pipeline
):
    await storage.queue.send(message(id=f"j{number}") for number in range(60))
    before = storage.operations.blob_writes
    await run_pipeline(StandInEngine(capacity=4, tick_seconds=0.005))
    assert len(await records(storage)) == 60
    assert storage.operations.blob_writes - before < 60 + 30


def ended_job(*found: Record, **fields: Any) -> InFlightJob:
    """A job in flight that has ended with these records."""
    job = Job(prompt="a", **fields)
    return InFlightJob(None, job=job, records=list(found))  # type: ignore[arg-type]


FAILED = Record.model_validate(
    {"outcome": "failed", "id": "a", "at": "2026-11-22T12:00:00Z"}
)


class Stage:
    """A record stage at work beside so many jobs in flight, and what it has done."""

    def __init__(self, in_flight: int, flush_seconds: float = 60) -> None:
        self.written: list[list[str]] = []
        self.finished = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.pending = stage.RecordStage(
            self,  # type: ignore[arg-type]
            WorkerMetrics(),
            flush_seconds,
            range(in_flight),  # type: ignore[arg-type]
            SimpleNamespace(prover=None),  # type: ignore[arg-type]
        )

    async def add(self, found: list[Record], *, again: bool = False) -> None:
        if not again:
            self.written.append([record.campaign for record in found])

    async def put(self, campaign: str = "default", **job: Any) -> None:
        record = FAILED.model_copy(update={"campaign": campaign})
        await self.pending.put(ended_job(record, **job), self._finish)

    async def _finish(self, _: object) -> None:
        await self.answers.wait()
        self.finished += 1

    async def __aenter__(self) -> Self:
        runs = (self.pending.run, self.pending.finish)
        self._tasks = [asyncio.create_task(run()) for run in runs]
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.cancel(self._tasks)


async def test_a_record_waits_for_others_only_while_there_can_be_others():
    async with Stage(in_flight=2) as work:
        await work.put()
        await polling.turn(20)
        assert not work.finished, "the other job may end soon"
        await work.put()
        await polling.until(lambda: work.finished == 2)
        assert len(work.written) == 1


async def test_jobs_that_wait_to_be_acknowledged_are_told_from_jobs_that_wait_for_records():
    async with Stage(in_flight=100, flush_seconds=0.05) as work:
        work.answers.clear()
        await work.put()
        await work.put()
        assert work.pending.behind_seconds == 0
        await polling.until(lambda: work.pending.behind_seconds > 0)
        work.answers.set()
        await polling.until(lambda: not work.pending.jobs)
        assert work.pending.behind_seconds == 0


async def test_an_awaited_jobs_record_is_written_soon_with_those_that_wait():
    async with Stage(in_flight=1_000) as work:
        work.answers.clear()  # so many jobs are in flight all the time
        await work.put("bulk")
        await polling.turn(20)
        for _ in range(3):
            await work.put("shop", awaited=True)
        await polling.until(lambda: work.written)
        assert work.written == [["bulk", "shop", "shop", "shop"]]
        for _ in range(stage.MAX_RECORDS):
            await work.put("bulk")
        await polling.until(lambda: len(work.written) == 2)
        assert work.written[1] == ["bulk"] * stage.MAX_RECORDS


def test_records_of_short_leases_wait_no_longer_than_the_leases_allow():
    assert stage.flush_seconds(120, is_local=False) == 15
    assert stage.flush_seconds(4, is_local=False) == 0.5
    assert stage.flush_seconds(120, is_local=True) == 1
