"""A worker on the queues of three priorities."""

import asyncio
import threading

import pytest

import polling
from bundled import bundle_of_jobs
from imagefleet import errors
from imagefleet.storage.open import Storage
from messages import Drawing, message
from worker.engine import contract
from worker.gpu_thread import EngineThread


async def test_until_empty_ends_when_the_queues_of_all_priorities_are_empty(
    storage: Storage, run_pipeline
):
    engine = Drawing(capacity=1)
    for steps, priority in enumerate(("low", "normal", "high"), start=1):
        await storage.queues[priority].send(
            message(id=f"{priority}{number}", steps=steps) for number in range(3)
        )
    pipeline = await run_pipeline(engine)
    assert pipeline.metrics.outcomes == {"completed": 9}
    assert engine.steps == [3, 3, 3, 2, 2, 2, 1, 1, 1], "the high ones first"


async def test_a_job_that_is_retried_stays_in_the_queue_of_its_priority(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 30)
    stop = asyncio.Event()
    engine = Drawing(lambda _: errors.TransientError("x"))
    for priority in ("high", "low"):
        await storage.queues[priority].send([message(id=priority)])
    running = asyncio.create_task(run_pipeline(engine, stop=stop, until_empty=False))
    await polling.until(lambda: len(engine.drawn) == 2)
    stop.set()
    assert (await running).metrics.outcomes == {"retried": 2}
    counts = [
        (await storage.queues[each].depth()).messages
        for each in ("high", "normal", "low")
    ]
    assert counts == [1, 0, 1]


@pytest.mark.parametrize(
    ("long", "jobs"),
    [
        (message(id="long", n_iter=60, steps=9), 1),
        (bundle_of_jobs(60, steps=9), 60),
    ],
    ids=["a job of 60 images", "a bundle of 60 jobs"],
)
async def test_an_urgent_job_overtakes_what_has_many_images_image_by_image(
    storage: Storage, run_pipeline, monkeypatch, long: str, jobs: int
):
    """What is of low priority, and longer than what a worker pulls ahead."""
    begun = threading.Event()
    is_urgent_there = threading.Event()
    submit = EngineThread.submit

    async def noting(self: EngineThread, *given: object, is_urgent: bool) -> bool:
        if is_urgent:
            is_urgent_there.set()
        return await submit(self, *given, is_urgent=is_urgent)  # type: ignore[arg-type]

    def hold(_: contract.ImageRequest) -> None:
        if len(engine.drawn) == 6:
            begun.set()
            is_urgent_there.wait()

    monkeypatch.setattr(EngineThread, "submit", noting)
    engine = Drawing(hold, capacity=2)
    await storage.queues["low"].send([long])
    running = asyncio.create_task(run_pipeline(engine))
    await polling.until(begun.is_set)
    await storage.queues["high"].send([message(id="urgent", steps=1)])
    pipeline = await running
    assert pipeline.metrics.outcomes == {"completed": 1 + jobs}
    assert len(engine.drawn) == 61
    # What the engine holds is drawn before, and no more.
    assert engine.steps.index(1) <= 6 + 2 * engine.capacity
