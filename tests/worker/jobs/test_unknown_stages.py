"""Messages of later stages whose input is not stored: they wait, and fail no job but themselves."""

import json

import pytest

from imagefleet import errors
from imagefleet.records import outcomes
from imagefleet.storage.open import Storage
from messages import Drawing, blobs, chained, failed_jobs
from worker.engine import contract

pytestmark = pytest.mark.usefixtures("soon", "one_hand_back")


def second_fails(request: contract.ImageRequest) -> errors.FleetError | None:
    return errors.JobError("it cannot be drawn") if request.steps == 12 else None


async def statuses_of(storage: Storage, job_id: str) -> list[str]:
    return [
        job.status
        async for job in outcomes.of_campaign(storage, "default")
        if job.id == job_id
    ]


IMAGES = ["default/a.png", "default/a~s2.png", "default/a~s3.png"]


async def test_a_stage_that_nobody_may_draw_yet_fails_no_job_but_itself(
    storage: Storage, run_pipeline
):
    forged = json.dumps(
        json.loads(chained()) | {"stage": {"number": 3, "message": "m"}}
    )
    pipeline = await run_pipeline(Drawing(), sent=[forged])
    assert pipeline.metrics.outcomes == {"handed_back": 1, "failed": 1}
    (record,) = await failed_jobs(storage)
    assert (record.error, record.attempts) == ("UnknownStageError", 1)
    assert (record.campaign, record.digest, record.stages) == ("default", None, 1)
    assert record.id == record.source not in {"a", "m"}
    assert (
        "stage 3 of job default/a begins with the image 'default/a~s2.png'"
        in record.reason
    )
    await run_pipeline(Drawing(), sent=[chained()])
    assert await blobs(storage) == IMAGES
    assert await statuses_of(storage, "a") == ["completed"]


async def test_a_stage_that_is_sent_too_early_waits_for_its_input(
    storage: Storage, run_pipeline
):
    early = json.dumps(json.loads(chained()) | {"stage": {"number": 2, "message": "m"}})
    engine = Drawing()
    pipeline = await run_pipeline(engine, sent=[early, chained()])
    # The early message may come back while the job's own one draws the second stage; then both
    # draw it, and the job is still done once.
    assert set(engine.steps) == {11, 12, 13}
    assert engine.steps.count(11) == 1
    assert await blobs(storage) == IMAGES
    assert await statuses_of(storage, "a") == ["completed"]
    assert pipeline.metrics.outcomes["failed"] == 0
    assert await failed_jobs(storage) == []


async def test_a_stage_is_not_drawn_from_another_jobs_image(
    storage: Storage, run_pipeline
):
    await run_pipeline(Drawing(second_fails), sent=[chained(prompt="a cat")])
    forged = json.loads(chained(prompt="a dog")) | {"stage": {"number": 2}}
    await run_pipeline(Drawing(), sent=[json.dumps(forged)])
    assert await blobs(storage) == IMAGES[:1]
    assert {each.error for each in await failed_jobs(storage)} == {
        "JobError",
        "UnknownStageError",
    }
