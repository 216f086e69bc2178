"""A worker and a campaign that is cancelled while its jobs are queued, waiting or being drawn."""

import asyncio
import math
import threading
from collections import Counter
from typing import Any

import pytest

import polling
from benchmarks.stand_in import StandInEngine
from imagefleet import cancelled
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobRecord
from messages import blobs, message, records, redelivered
from worker.engine import contract

pytestmark = pytest.mark.usefixtures("cancel_at_once")

#: Seeds from here on are of jobs of autumn.
AUTUMN = 1_000_000


class Noting(StandInEngine):
    """Notes which images it begins; after *held_after* of spring it waits for *may_go_on*."""

    def __init__(
        self,
        held_after: float = math.inf,
        may_go_on: threading.Event | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.begun: list[str] = []
        self._held_after = held_after
        self._may_go_on = may_go_on

    def admit(
        self, ticket: int, prepared: contract.PreparedRequest, **how: Any
    ) -> None:
        campaign = "autumn" if prepared.request.seed >= AUTUMN else "spring"
        self.begun.append(campaign)
        super().admit(ticket, prepared, **how)

    def tick(self) -> list[contract.Finished]:
        if self._may_go_on is not None and self.count("spring") >= self._held_after:
            self._may_go_on.wait()
        return super().tick()

    def count(self, campaign: str) -> int:
        return self.begun.count(campaign)


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    """The list is read every 0.2 seconds, and `cancel` does not wait for running loads."""
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 0.2)
    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 0.0)


async def test_no_image_of_a_cancelled_campaign_is_begun_and_the_other_is_untouched(
    storage: Storage,
    run_pipeline,
    spring_is_read: threading.Event,
):
    is_local = storage.url.startswith("local:")
    many, others = (600, 30) if is_local else (200, 20)
    bodies = [
        message(id=f"s{seed}", seed=seed, campaign="spring") for seed in range(many)
    ]
    for number in range(others):  # all over the queue
        body = message(id=f"a{number}", seed=AUTUMN + number, campaign="autumn")
        bodies.insert(number * len(bodies) // others, body)
    await storage.queue.send(bodies)
    engine = Noting(held_after=8, may_go_on=spring_is_read)
    running = asyncio.create_task(run_pipeline(engine))
    await polling.until(lambda: engine.count("spring") >= 8)
    await cancelled.cancel(storage, "spring")
    pipeline = await running

    drawn = engine.count("spring")
    assert 8 <= drawn < 8 + engine.capacity
    assert engine.count("autumn") == others == len(await blobs(storage, "autumn/"))
    assert pipeline.metrics.outcomes == {
        "completed": others + drawn,
        "cancelled": many - drawn,
    }
    recorded = [record.blob for record in await records(storage, "spring")]
    assert sorted(map(str, recorded)) == await blobs(storage, "spring/")
    counts = await reader.counts(storage, "spring")
    assert (counts.images, counts.cancelled) == (drawn, many - drawn)
    assert (await storage.queue.depth()).messages == 0
    registry = pipeline.metrics.registry
    labels = {"outcome": "cancelled"}
    assert registry.get_sample_value("imagefleet_jobs_total", labels) == many - drawn


async def test_a_paused_campaigns_jobs_wait_until_it_is_resumed_and_are_no_failures(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr("worker.stages.prepare.PAUSED_SECONDS", 0.2)
    monkeypatch.setattr("worker.stages.prepare.MAX_LIST_AGE_SECONDS", 0.0)
    spring = [message(id=f"s{seed}", seed=seed, campaign="spring") for seed in range(6)]
    autumn = message(id="a", seed=AUTUMN, campaign="autumn")
    await storage.create()
    assert await cancelled.pause(storage, "spring", is_paused=True)
    assert not await cancelled.pause(storage, "spring", is_paused=True)
    await storage.queue.send([*spring, autumn])
    engine = Noting()
    stop = asyncio.Event()
    running = asyncio.create_task(run_pipeline(engine, stop=stop, until_empty=False))
    await polling.until(lambda: engine.count("autumn") == 1)

    async def deliveries() -> int:
        found = [each async for each, _ in storage.queue.find("spring")]
        return max((each.delivery_count for each in found), default=0)

    if storage.queue.is_local:
        await polling.until(deliveries, lambda count: count > 3)
    assert engine.count("spring") == 0
    assert await cancelled.pause(storage, "spring", is_paused=False)
    await polling.until(lambda: engine.count("spring") == len(spring))
    stop.set()
    pipeline = await running
    assert pipeline.metrics.outcomes["completed"] == len(spring) + 1
    assert pipeline.metrics.outcomes["failed"] == 0
    assert len(await blobs(storage, "spring/")) == len(spring)


async def test_a_campaign_that_is_cancelled_is_paused_no_more(storage: Storage):
    await storage.create()
    await cancelled.pause(storage, "spring", is_paused=True)
    await cancelled.pause(storage, "autumn", is_paused=True)
    await cancelled.cancel(storage, "spring")
    found = cancelled.CancelledCampaigns(storage.files, storage.queue.name)
    await found.refresh(0)
    assert (found.paused, set(found.times)) == ({"autumn"}, {"spring"})


async def test_of_a_job_of_several_images_those_that_are_begun_are_stored(
    storage: Storage,
    run_pipeline,
    spring_is_read: threading.Event,
):
    await storage.queue.send(
        [
            message(id="s", seed=1, batch_size=8, campaign="spring"),
            message(id="a", seed=AUTUMN, batch_size=2, campaign="autumn"),
        ]
    )
    engine = Noting(held_after=2, may_go_on=spring_is_read, capacity=1)
    running = asyncio.create_task(run_pipeline(engine))
    await polling.until(lambda: engine.count("spring") >= 2)
    await cancelled.cancel(storage, "spring")
    pipeline = await running

    drawn = engine.count("spring")
    assert drawn == 2
    assert len(await blobs(storage, "spring/")) == drawn
    recorded = [record.blob for record in await records(storage, "spring")]
    assert sorted(map(str, recorded)) == await blobs(storage, "spring/")
    assert len(await blobs(storage, "autumn/")) == 2
    assert pipeline.metrics.outcomes == {"cancelled": 1, "completed": 1}
    assert Counter([each.id async for each in reader.ended(storage)]) == {"s": 1}


async def test_a_worker_that_was_idle_for_hours_reads_the_list_before_it_draws(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 60.0)
    monkeypatch.setattr("worker.stages.prepare.MAX_LIST_AGE_SECONDS", 0.0)
    await storage.queue.send([message(id="a", seed=AUTUMN, campaign="autumn")])
    await storage.queue.send([message(id="s", seed=1, campaign="spring")])
    (first, held) = await storage.queue.receive(2, 600)
    await storage.queue.release(first)
    engine = Noting()
    stop = asyncio.Event()
    running = asyncio.create_task(run_pipeline(engine, stop=stop, until_empty=False))
    await polling.until(lambda: engine.count("autumn") == 1)
    await cancelled.cancel(storage, "spring")
    await storage.queue.release(held)  # its worker has died, say
    await polling.until(storage.queue.depth, lambda depth: not depth.messages)
    stop.set()
    pipeline = await running
    assert engine.count("spring") == 0
    assert pipeline.metrics.outcomes == {"completed": 1, "cancelled": 1}


async def test_images_of_a_worker_that_died_get_records_when_their_jobs_end_otherwise(
    storage: Storage,
    run_pipeline,
    store_images,
    monkeypatch,
):
    of_spring = {"campaign": "spring", "batch_size": 3, "seed": 1}
    of_autumn = {"campaign": "autumn", "prompt": "a <lora:nowhere:1>"}
    bodies = [
        message(id="stopped", **of_spring),
        message(id="done", campaign="spring"),
        message(id="failing", batch_size=2, **of_autumn),
        message(id="fine", **of_autumn),
    ]
    await redelivered(storage, *bodies)  # they die after they have stored some
    await storage.queue.send([message(id="once", **of_spring)])
    stored = (
        "spring/stopped",
        "spring/stopped~1",
        "spring/done",
        "autumn/failing",
        "autumn/fine",
    )
    for body, index in zip((bodies[0], *bodies), (0, 1, 0, 0, 0), strict=True):
        await store_images(body, index)
    looked_for: list[str] = []
    record = storage.blobs.record

    async def noted(name: str) -> BlobRecord | None:
        looked_for.append(name)
        return await record(name)

    monkeypatch.setattr(storage.blobs, "record", noted)
    await cancelled.cancel(storage, "spring")
    pipeline = await run_pipeline()

    assert len(looked_for) == 3 + 1 + 2 + 1, "only of jobs that were delivered before"
    assert pipeline.metrics.outcomes == {"cancelled": 2, "failed": 1, "duplicate": 2}
    found = {
        str(record.blob).removesuffix(".png"): record
        for campaign in ("spring", "autumn")
        for record in await records(storage, campaign)
    }
    assert found.keys() == set(stored)
    image = found["spring/stopped~1"]
    assert (image.id, image.index, image.images, image.seed) == ("stopped", 1, 3, 2)
    assert (image.worker, image.seconds) == ("?", None), "who has drawn it is not known"
    counts = await reader.counts(storage, "spring")
    assert (counts.images, counts.completed, counts.cancelled) == (3, 1, 2)
    ended = {(record.id, record.outcome) async for record in reader.ended(storage)}
    assert ended == {
        ("stopped", "cancelled"),
        ("once", "cancelled"),
        ("failing", "failed"),
    }
    assert (await storage.poison.depth()).messages == 1


async def test_a_second_drawing_of_a_cancelled_job_leaves_no_record_of_its_own(
    storage: Storage, run_pipeline
):
    both = [
        message(id="s", seed=1, campaign="spring", **each)
        for each in ({}, {"verify": True})
    ]
    await storage.queue.send(both)
    await cancelled.cancel(storage, "spring")
    pipeline = await run_pipeline()
    assert pipeline.metrics.outcomes == {"cancelled": 1, "unverified": 1}
    assert (await reader.counts(storage, "spring")).cancelled == 1


async def test_a_job_that_this_worker_could_not_draw_is_cancelled_all_the_same(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="s", model="another", campaign="spring")])
    await cancelled.cancel(storage, "spring")
    pipeline = await run_pipeline()
    assert pipeline.metrics.outcomes == {"cancelled": 1}
