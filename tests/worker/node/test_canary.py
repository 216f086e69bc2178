"""Failed images: a campaign's own fault costs no node, and a broken GPU is detected."""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import polling
from evaluation.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.storage.open import Storage
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.node.self_check import NodeSelfCheck

RunPipeline = Callable[..., Any]  # the fixture of conftest.py
Draw = Callable[[contract.ImageRequest], contract.Pixels]

#: Tickets of another canary.
CANARIES = 1000

local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)


def nan(_: contract.ImageRequest) -> contract.Pixels:
    raise errors.TransientError("the image came out as NaN")


def black(request: contract.ImageRequest) -> contract.Pixels:
    return np.zeros((request.height, request.width, 3), np.uint8)


def is_canary(request: contract.ImageRequest) -> bool:
    return str(request.prompt) not in {"good", "bad"}


def fails_jobs(by: Draw, canaries: list[contract.ImageRequest]) -> Draw:
    """A healthy engine that draws bad jobs as *by*, and keeps the requests of canaries."""

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if is_canary(request):
            canaries.append(request)
        return by(request) if str(request.prompt) == "bad" else draw_noise(request)

    return draw


async def send(storage: Storage, prompt: str, count: int) -> None:
    await storage.queue.send(
        json.dumps({"prompt": prompt, "id": f"{prompt}{number}"})
        for number in range(count)
    )


@pytest.mark.parametrize("failing", [nan, black])
async def test_a_campaign_whose_images_all_fail_goes_to_the_poison_queue_and_costs_no_node(
    storage: Storage,
    run_pipeline: RunPipeline,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: Draw,
) -> None:
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("worker.node.watchdog.FAILURES_IN_A_ROW", 4)
    caplog.set_level(logging.WARNING, "worker.node.self_check")
    canaries: list[contract.ImageRequest] = []
    await send(storage, "bad", 16)
    await send(storage, "good", 6)
    pipeline = await run_pipeline(
        StandInEngine(draw=fails_jobs(failing, canaries)), max_attempts=2
    )
    assert pipeline.metrics.outcomes == {"completed": 6, "retried": 16, "failed": 16}
    assert (await storage.poison.depth()).messages == 16
    assert canaries
    assert {(request.width, request.height, request.loras) for request in canaries} == {
        (16, 16, ())
    }
    log = [
        record.getMessage()
        for record in caplog.records
        if record.name == "worker.node.self_check"
    ]
    assert log
    for line in log:
        assert line.startswith(
            "the engine failed 4 images in a row, the last with: the image came"
        )
        assert line.endswith("the jobs are at fault, not this node")

    # A canary's image is not a job's.
    assert {name async for name in storage.blobs.names("default/")} == {
        f"default/good{number}.png" for number in range(6)
    }
    assert pipeline.metrics.images_stored == 6
    sample = pipeline.metrics.registry.get_sample_value
    assert sample("imagefleet_images_total") == 6
    assert sample("imagefleet_stage_seconds_count", {"stage": "generate"}) == 6 + 2 * 16


@local_only
@pytest.mark.parametrize(("failing", "how"), [(nan, "NaN"), (black, "one colour")])
async def test_a_gpu_that_fails_every_image_is_a_broken_node_named_with_the_count(
    storage: Storage,
    run_pipeline: RunPipeline,
    monkeypatch: pytest.MonkeyPatch,
    failing: Draw,
    how: str,
) -> None:
    monkeypatch.setattr("worker.node.watchdog.FAILURES_IN_A_ROW", 5)
    canaries = 0

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        nonlocal canaries
        canaries += is_canary(request)
        return failing(request)

    await send(storage, "bad", 30)
    with pytest.raises(
        errors.NodeError,
        match=f"5 images in a row.*a plain image failed as well: .*{how}",
    ):
        await run_pipeline(StandInEngine(draw=draw))
    assert canaries == 1
    assert (await storage.queue.depth()).messages == 30


class LosesCanaries(StandInEngine):
    """Never finishes a canary."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(tick_seconds=0.01, draw=draw)
        self.has_canary = threading.Event()

    def tick(self) -> list[contract.Finished]:
        lost = [
            (ticket, request)
            for ticket, request in self._admitted
            if is_canary(request)
        ]
        finished = super().tick()
        if lost:
            self.has_canary.set()
        self._admitted.extend(lost)
        return [each for each in finished if each.ticket not in dict(lost)]


@local_only
async def test_a_drain_does_not_wait_for_a_canary(
    storage: Storage, run_pipeline: RunPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.node.watchdog.FAILURES_IN_A_ROW", 4)
    engine, stop = LosesCanaries(nan), asyncio.Event()
    await send(storage, "bad", 4)
    running = asyncio.create_task(
        run_pipeline(engine, stop=stop, until_empty=False, grace_seconds=3600)
    )
    await asyncio.to_thread(engine.has_canary.wait)
    stop.set()
    pipeline = await running
    assert set(pipeline.metrics.outcomes) <= {"retried", "handed_back"}


@asynccontextmanager
async def canary_at(
    engine: StandInEngine,
) -> AsyncIterator[tuple[NodeSelfCheck, EngineThread]]:
    engine_thread = EngineThread(lambda: engine, why_idle=lambda: "starved", backlog=64)
    suspects: Any = None  # of engines that check nothing
    canary = NodeSelfCheck(
        await engine_thread.start(), engine_thread, itertools.count(), suspects
    )

    try:
        yield canary, engine_thread
    finally:
        await engine_thread.stop()


async def test_two_alarms_at_a_time_are_never_two_canaries_in_flight() -> None:
    at_once = []

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        at_once.append(len(engine._admitted) + len(engine_thread._urgent))
        return draw_noise(request)

    engine = StandInEngine(draw=draw, tick_seconds=0.05)
    async with canary_at(engine) as (canary, engine_thread):
        assert await asyncio.gather(canary.diagnose("one"), canary.diagnose("two")) == [
            None,
            None,
        ]
    assert at_once == [1, 1]


async def test_a_canary_that_the_drain_cancels_proves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    drawing, may_end = threading.Event(), threading.Event()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        drawing.set()
        may_end.wait()
        return draw_noise(request)

    async with canary_at(StandInEngine(capacity=1, draw=draw)) as (
        canary,
        engine_thread,
    ):
        before = asyncio.create_task(canary.diagnose("before"))
        await asyncio.to_thread(drawing.wait)
        other = NodeSelfCheck(
            canary.engine, engine_thread, itertools.count(CANARIES), canary.suspects
        )
        waiting = asyncio.create_task(other.diagnose("waiting"))
        await polling.until(lambda: engine_thread._urgent)
        assert engine_thread.stop_accepting() == []  # no jobs
        assert await waiting is None
        assert await other.diagnose("after") is None
        assert not [
            record
            for record in caplog.records
            if record.name == "worker.node.self_check"
        ]
        may_end.set()
        assert await before is None
