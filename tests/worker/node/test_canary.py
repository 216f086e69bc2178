"""Spoilt images: a campaign's own fault costs no node, and a broken GPU is found out."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from imagefleet import errors
from imagefleet.storage.protocol import Storage
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.node import canary
from worker.node.canary import Canary
from worker.testing import StandInEngine, draw_noise

RunPipeline = Callable[..., Any]  # the fixture of conftest.py
Draw = Callable[[contract.ImageRequest], contract.Pixels]

#: Tickets of another proof.
PROOFS = 1000

local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)


def nan(_: contract.ImageRequest) -> contract.Pixels:
    raise errors.TransientError("the image came out as NaN")


def black(request: contract.ImageRequest) -> contract.Pixels:
    return np.zeros((request.height, request.width, 3), np.uint8)


def is_proof(request: contract.ImageRequest) -> bool:
    return str(request.prompt) not in {"good", "bad"}


def spoils_jobs(by: Draw, proofs: list[contract.ImageRequest]) -> Draw:
    """A sound engine that draws bad jobs as *by*, and keeps the requests of proofs."""

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if is_proof(request):
            proofs.append(request)
        return by(request) if str(request.prompt) == "bad" else draw_noise(request)

    return draw


async def send(storage: Storage, prompt: str, count: int) -> None:
    await storage.queue.send(
        json.dumps({"prompt": prompt, "id": f"{prompt}{number}"}) for number in range(count)
    )


@pytest.mark.parametrize("spoil", [nan, black])
async def test_a_campaign_whose_every_image_is_spoilt_is_poison_and_costs_no_node(
    storage: Storage,
    run_pipeline: RunPipeline,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Draw,
) -> None:
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.01)
    caplog.set_level(logging.WARNING, "worker.node.canary")
    proofs: list[contract.ImageRequest] = []
    await send(storage, "bad", 16)
    await send(storage, "good", 6)
    pipeline = await run_pipeline(
        StandInEngine(draw=spoils_jobs(spoil, proofs)), engine_failures=4, max_attempts=2
    )
    assert pipeline.settler.outcomes == {"completed": 6, "retried": 16, "failed": 16}
    assert (await storage.poison.depth()).messages == 16
    assert proofs
    assert {(request.width, request.height, request.loras) for request in proofs} == {(16, 16, ())}
    log = [record.getMessage() for record in caplog.records if record.name == "worker.node.canary"]
    assert log
    for line in log:
        assert line.startswith("the engine failed 4 images in a row, the last with: the image came")
        assert line.endswith("the jobs are at fault, not this node")

    # Nobody takes a proof for an image of a job.
    assert {name async for name in storage.blobs.names()} == {
        f"default/good{number}.png" for number in range(6)
    }
    assert pipeline.images_written == 6
    told = pipeline.metrics.registry.get_sample_value
    assert told("imagefleet_images_total") == 6
    assert told("imagefleet_stage_seconds_count", {"stage": "generate"}) == 6 + 2 * 16


@local_only
@pytest.mark.parametrize(("spoil", "how"), [(nan, "NaN"), (black, "one colour")])
async def test_a_gpu_that_spoils_everything_is_found_out_with_the_count(
    storage: Storage, run_pipeline: RunPipeline, spoil: Draw, how: str
) -> None:
    proofs = 0

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        nonlocal proofs
        proofs += is_proof(request)
        return spoil(request)

    await send(storage, "bad", 30)
    with pytest.raises(
        errors.NodeError, match=f"5 images in a row.*a plain image failed as well: .*{how}"
    ):
        await run_pipeline(StandInEngine(draw=draw), engine_failures=5)
    assert proofs == 1
    assert (await storage.queue.depth()).messages == 30


class LosesProofs(StandInEngine):
    """Works on a proof for ever."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(tick_seconds=0.01, draw=draw)
        self.has_proof = threading.Event()

    def tick(self) -> list[contract.Finished]:
        lost = [(ticket, request) for ticket, request in self._admitted if is_proof(request)]
        finished = super().tick()
        if lost:
            self.has_proof.set()
        self._admitted.extend(lost)
        return [each for each in finished if each.ticket not in dict(lost)]


@local_only
async def test_a_proof_that_does_not_come_in_the_engines_time_is_a_broken_node(
    storage: Storage, run_pipeline: RunPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "LONGEST_BUSY_SECONDS", 0.1)
    monkeypatch.setattr(canary, "LOOK_SECONDS", 0.02)
    await send(storage, "bad", 4)
    with pytest.raises(errors.NodeError, match=r"4 images in a row.*did not come in 0\.1 s"):
        await run_pipeline(LosesProofs(nan), engine_failures=4)


@local_only
async def test_a_drain_does_not_wait_for_a_proof(
    storage: Storage, run_pipeline: RunPipeline
) -> None:
    engine, stop = LosesProofs(nan), asyncio.Event()
    await send(storage, "bad", 4)
    running = asyncio.create_task(
        run_pipeline(engine, stop=stop, until_empty=False, engine_failures=4, grace_seconds=60)
    )
    await asyncio.to_thread(engine.has_proof.wait)
    began_at = time.monotonic()
    stop.set()
    pipeline = await running
    assert time.monotonic() - began_at < 5
    assert set(pipeline.settler.outcomes) <= {"retried", "handed_back"}


@asynccontextmanager
async def proof_at(engine: StandInEngine) -> AsyncIterator[tuple[Canary, EngineThread]]:
    engine_thread = EngineThread(lambda: engine, why_idle=lambda: "starved", backlog=64)
    canary = Canary(await engine_thread.start(), engine_thread, itertools.count())

    async def collect() -> None:
        while True:
            delivery = await engine_thread.finished()
            canary.finished(delivery.finished.ticket, delivery.finished.outcome)

    collecting = asyncio.create_task(collect())
    try:
        yield canary, engine_thread
    finally:
        collecting.cancel()
        await engine_thread.stop()


async def test_two_suspicions_at_a_time_are_never_two_proofs_in_flight() -> None:
    at_once = []

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        at_once.append(len(engine._admitted) + len(engine_thread._preparer))
        return draw_noise(request)

    engine = StandInEngine(draw=draw, tick_seconds=0.05)
    async with proof_at(engine) as (canary, engine_thread):
        assert await asyncio.gather(canary.verdict("one"), canary.verdict("two")) == [None, None]
    assert at_once == [1, 1]


async def test_a_proof_that_the_drain_withdraws_says_nothing_of_anybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    drawing, may_end = threading.Event(), threading.Event()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        drawing.set()
        may_end.wait()
        return draw_noise(request)

    async with proof_at(StandInEngine(capacity=1, draw=draw)) as (canary, engine_thread):
        before = asyncio.create_task(canary.verdict("before"))
        await asyncio.to_thread(drawing.wait)
        other = Canary(canary._engine, engine_thread, itertools.count(PROOFS))
        waiting = asyncio.create_task(other.verdict("at the door"))
        while not engine_thread._preparer:
            await asyncio.sleep(0.01)
        for ticket in engine_thread.shut():
            other.finished(ticket, None)
        assert await waiting is None
        assert await other.verdict("after") is None
        assert not [record for record in caplog.records if record.name == "worker.node.canary"]
        may_end.set()
        assert await before is None
