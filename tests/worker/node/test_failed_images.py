"""Failed images: a campaign's own fault costs no node, and a broken GPU is detected."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.storage.open import Storage
from messages import blobs, message
from storages import local_only
from worker.engine import contract

Draw = Callable[[contract.ImageRequest], contract.Pixels]


def nan(_: contract.ImageRequest) -> contract.Pixels:
    raise errors.TransientError("the image came out as NaN")


def black(request: contract.ImageRequest) -> contract.Pixels:
    return np.zeros((request.height, request.width, 3), np.uint8)


def is_plain(request: contract.ImageRequest) -> bool:
    return str(request.prompt) not in {"good", "bad"}


def fails_jobs(by: Draw, plain_images: list[contract.ImageRequest]) -> Draw:
    """A healthy engine that draws bad jobs as *by*, and keeps the requests of plain_images."""

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if is_plain(request):
            plain_images.append(request)
        return by(request) if str(request.prompt) == "bad" else draw_noise(request)

    return draw


async def send(storage: Storage, prompt: str, count: int) -> None:
    jobs = (message(prompt=prompt, id=f"{prompt}{at}") for at in range(count))
    await storage.queue.send(jobs)


@pytest.mark.parametrize("failing", [nan, black])
async def test_a_campaign_whose_images_all_fail_goes_to_the_poison_queue_and_costs_no_node(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    caplog,
    failing: Draw,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("worker.node.watchdog.FAILURES_IN_A_ROW", 4)
    caplog.set_level(logging.WARNING)
    plain_images: list[contract.ImageRequest] = []
    await send(storage, "bad", 16)
    await send(storage, "good", 6)
    pipeline = await run_pipeline(
        StandInEngine(draw=fails_jobs(failing, plain_images)), max_attempts=2
    )
    assert pipeline.metrics.outcomes == {"completed": 6, "retried": 16, "failed": 16}
    assert (await storage.poison.depth()).messages == 16
    assert plain_images
    assert {
        (request.width, request.height, request.loras) for request in plain_images
    } == {(16, 16, ())}
    log = [
        record.getMessage() for record in caplog.records if record.module == "checks"
    ]
    assert log
    for line in log:
        assert line.startswith(
            "the engine failed 4 images in a row, the last with: the image came"
        )
        assert line.endswith("the jobs are at fault, not this node")

    # A plain image is no job's.
    assert len(await blobs(storage, "default/good")) == len(await blobs(storage)) == 6
    assert pipeline.metrics.images_stored == 6
    sample = pipeline.metrics.registry.get_sample_value
    assert sample("imagefleet_images_total") == 6
    assert sample("imagefleet_stage_seconds_count", {"stage": "generate"}) == 6 + 2 * 16


@local_only
@pytest.mark.parametrize(("failing", "how"), [(nan, "NaN"), (black, "one colour")])
async def test_a_gpu_that_fails_every_image_is_a_broken_node_named_with_the_count(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    failing: Draw,
    how: str,
):
    monkeypatch.setattr("worker.node.watchdog.FAILURES_IN_A_ROW", 5)
    plain_images = 0

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        nonlocal plain_images
        plain_images += is_plain(request)
        return failing(request)

    await send(storage, "bad", 30)
    with pytest.raises(
        errors.NodeError,
        match=f"5 images in a row.*a plain image failed as well: .*{how}",
    ):
        await run_pipeline(StandInEngine(draw=draw))
    assert plain_images == 1
    assert (await storage.queue.depth()).messages == 30
