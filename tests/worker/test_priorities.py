"""A worker on the queues of three priorities."""

import asyncio

import polling
from imagefleet import errors
from imagefleet.storage.open import Storage
from messages import Drawing, RunPipeline, message


async def test_until_empty_ends_when_the_queues_of_all_priorities_are_empty(
    storage: Storage, run_pipeline: RunPipeline
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
    run_pipeline: RunPipeline,
    monkeypatch,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 30)
    stop, engine = asyncio.Event(), Drawing(lambda _: errors.TransientError("x"))
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
