"""Second drawings and duplicates: what is stored beside the images, by whom, and how it counts."""

import asyncio
import json

import numpy as np
import pytest

from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.files import picture
from imagefleet.job.message import read_job
from imagefleet.job.sizes import MAX_IMAGES_PER_JOB, MAX_MESSAGE_BYTES
from imagefleet.storage.open import Storage
from messages import Drawing, image, message
from worker.engine import contract

#: Beside images, what says something about jobs and workers.
NOTES = ("-records/", "-models/", "-serving/")


async def drawings(storage: Storage) -> set[str]:
    return {name async for name in storage.blobs.names() if not name.startswith(NOTES)}


async def test_the_second_drawing_is_another_workers_and_no_image_of_the_jobs(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    monkeypatch.setattr(
        "worker.stages.prepare.HAND_BACKS", 100
    )  # one of two takes it each time
    monkeypatch.setattr("worker.stages.prepare.HAND_BACK_SECONDS_UNTIL_EMPTY", 0.1)
    job = {"id": "j", "seed": 7, "campaign": "c", "batch_size": 2}
    await storage.queue.send([message(**job), message(**job, verify=True)])
    first, second = await asyncio.gather(run_pipeline(name="a"), run_pipeline(name="b"))

    metadata = {each.name: each.metadata async for each in storage.blobs.records()}
    found = {name: metadata[name]["worker"] for name in await drawings(storage)}
    assert set(found) == {"c/j.png", "c/j~1.png", "-checks/c/j.png"}
    assert found["c/j.png"] != found["-checks/c/j.png"]
    names = ("c/j.png", "-checks/c/j.png")
    one, two = [np.asarray(await image(storage, name)) for name in names]
    assert np.array_equal(one, two)
    assert first.metrics.images_stored + second.metrics.images_stored == 2
    outcomes = first.metrics.outcomes + second.metrics.outcomes
    assert outcomes["completed"] == outcomes["verified"] == 1
    assert (await storage.queue.depth()).messages == 0


@pytest.mark.usefixtures("one_hand_back")
async def test_a_lone_worker_draws_nothing_twice_and_still_ends(
    storage: Storage, run_pipeline
):
    jobs = [message(id=f"j{number}", seed=number) for number in range(20)]
    checks = [
        message(id=f"j{number}", seed=number, verify=True) for number in range(20)
    ]
    await storage.queue.send(jobs)
    pipeline = await run_pipeline(sent=checks)

    assert await drawings(storage) == {f"default/j{number}.png" for number in range(20)}
    assert (
        pipeline.metrics.outcomes["completed"]
        == pipeline.metrics.outcomes["unverified"]
        == 20
    )
    assert pipeline.engine_thread.clock.images == 20
    assert (await storage.queue.depth()).messages == 0


@pytest.mark.usefixtures("one_hand_back")
async def test_a_message_too_large_for_a_count_is_not_handed_back_for_ever(
    storage: Storage, run_pipeline
):
    fields = {"prompt": "a" * 6000, "negative_prompt": ""}
    size = len(message(**fields, id="j", verify=True))
    fields["negative_prompt"] = "b" * (MAX_MESSAGE_BYTES - size)
    pipeline = await run_pipeline(
        sent=[message(**fields, id="k"), message(**fields, id="k", verify=True)]
    )
    assert pipeline.metrics.outcomes["unverified"] == 1
    assert (await storage.queue.depth()).messages == 0


@pytest.mark.parametrize(
    "error", [errors.JobError("no"), errors.TransientError("never")]
)
async def test_a_second_drawing_that_fails_is_no_failed_job(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    error: errors.FleetError,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.01)

    pipeline = await run_pipeline(
        Drawing(lambda _: error), sent=[message(id="j", verify=True)], max_attempts=2
    )
    assert (
        (await storage.poison.depth()).messages
        == (await storage.queue.depth()).messages
        == 0
    )
    assert pipeline.metrics.outcomes["unverified"] == 1
    assert pipeline.metrics.outcomes["failed"] == 0


async def test_second_drawings_cost_time_but_are_no_images(run_pipeline):
    pipeline = await run_pipeline(
        StandInEngine(tick_seconds=0.05),
        sent=[message(id="a"), message(id="b", verify=True)],
    )
    read = pipeline.metrics.registry.get_sample_value
    assert read("imagefleet_images_total") == 1
    assert read("imagefleet_jobs_total", {"outcome": "verified"}) == 1
    assert pipeline.cost.wasted_seconds()["second_drawing"] > 0
    assert pipeline.cost.wasted_seconds()["duplicate"] == 0


async def test_what_took_an_images_name_has_the_workers_drawing_kept_beside_it(
    storage: Storage,
    run_pipeline,
    store_images,
):
    await store_images(message(id="victim", seed=3), data=b"garbage")
    pipeline = await run_pipeline(sent=[message(id="victim", seed=3)], name="../we/ird")

    kept = "-duplicates/default/victim.png/_we_ird.png"
    assert await drawings(storage) == {"default/victim.png", kept}
    drawn = np.asarray(await image(storage, kept))
    request = contract.ImageRequest(
        "a house", "", (), "euler_ancestral", 20, 7.0, 3, 16, 16
    )
    assert np.array_equal(drawn, draw_noise(request))
    assert pipeline.metrics.outcomes == {"duplicate": 1}


async def test_a_worker_keeps_one_duplicate_of_an_image_and_none_of_a_second_drawing(
    storage: Storage,
    run_pipeline,
    store_images,
):
    for each in (message(id="j"), message(id="j", verify=True)):
        await store_images(each, data=b"garbage")
    await run_pipeline(sent=[message(id="j"), message(id="j")])
    await run_pipeline(sent=[message(id="j", verify=True)], name="other")
    assert await drawings(storage) == {
        "default/j.png",
        "-checks/default/j.png",
        "-duplicates/default/j.png/test-worker.png",
    }


async def test_every_image_of_a_job_has_the_job_with_it(storage: Storage, run_pipeline):
    body = message(id="j", batch_size=2, output={"format": "webp"}, metadata={"a": "ü"})
    await storage.queue.send([body])
    (leased,) = await storage.queue.receive(1, 30)
    await storage.queue.release(
        leased, body=json.dumps({**json.loads(body), "deliveries": {}})
    )
    await run_pipeline()
    for name in ("j", "j~1"):
        data = await storage.blobs.read(f"default/{name}.webp")
        assert data is not None
        found = picture.message_in(data)
        assert found is not None
        digest = read_job(body, "").digest
        assert json.loads(found) == json.loads(body) | {"digest": digest}
        assert read_job(found, "").images == 2 <= MAX_IMAGES_PER_JOB
