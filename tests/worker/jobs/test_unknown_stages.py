"""Messages of later stages whose input is not stored: they wait, and fail no job but themselves."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from evaluation.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.records import outcomes
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage
from worker.engine import contract

Message = Callable[..., str]
RunPipeline = Callable[..., Any]  # the fixture of conftest.py

pytestmark = pytest.mark.usefixtures("soon", "one_hand_back")

IMAGES = ["default/a.png", "default/a~s2.png", "default/a~s3.png"]


class Drawing(StandInEngine):
    """Counts the steps of what it draws; those of *fails* cannot be drawn."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        super().__init__(draw=self._drawn)
        self.drawn: list[int] = []
        self._fails = fails

    def _drawn(self, request: contract.ImageRequest) -> contract.Pixels:
        self.drawn.append(request.steps)
        if request.steps in self._fails:
            raise errors.JobError("it cannot be drawn")
        return draw_noise(request)


@pytest.fixture
def chained(message: Message) -> Message:
    """The message of a job of three stages of 11, 12 and 13 steps."""

    def make(**fields: Any) -> str:
        return message(
            **{"id": "a", "steps": 11, "then": [{"steps": 12}, {"steps": 13}], **fields}
        )

    return make


async def stored(storage: Storage) -> list[str]:
    return sorted([name async for name in storage.blobs.names("default/")])


async def failed(storage: Storage) -> list[dead_letter.FailedJob]:
    found = [
        dead_letter.FailedJob.parse(each.body) async for each in storage.poison.browse()
    ]
    return [each for each in found if each is not None]


async def test_a_stage_that_nobody_may_draw_yet_fails_no_job_but_itself(
    storage: Storage, run_pipeline: RunPipeline, chained: Message
) -> None:
    forged = json.dumps(
        json.loads(chained()) | {"stage": {"number": 3, "message": "m"}}
    )
    await storage.queue.send([forged])
    pipeline = await run_pipeline(Drawing())
    assert pipeline.metrics.outcomes == {"handed_back": 1, "failed": 1}
    (record,) = await failed(storage)
    assert (record.error, record.attempts) == ("UnknownStageError", 1)
    assert (record.campaign, record.digest, record.stages) == ("default", None, 1)
    assert record.id == record.source not in {"a", "m"}
    assert (
        "stage 3 of job default/a begins with the image 'default/a~s2.png'"
        in record.reason
    )
    await storage.queue.send([chained()])
    await run_pipeline(Drawing())
    assert await stored(storage) == IMAGES
    (job,) = [
        each
        async for each in outcomes.of_campaign(storage, "default")
        if each.id == "a"
    ]
    assert job.status == "completed"


async def test_a_stage_that_is_sent_too_early_waits_for_its_input(
    storage: Storage, run_pipeline: RunPipeline, chained: Message
) -> None:
    early = json.dumps(json.loads(chained()) | {"stage": {"number": 2, "message": "m"}})
    await storage.queue.send([early, chained()])
    engine = Drawing()
    pipeline = await run_pipeline(engine)
    assert Counter(engine.drawn) == {11: 1, 12: 1, 13: 1}
    assert await stored(storage) == IMAGES
    assert pipeline.metrics.outcomes["failed"] == 0
    assert await failed(storage) == []


async def test_a_stage_is_not_drawn_from_another_jobs_image(
    storage: Storage, run_pipeline: RunPipeline, chained: Message
) -> None:
    await storage.queue.send([chained(prompt="a cat")])
    await run_pipeline(Drawing(fails=(12,)))
    forged = json.loads(chained(prompt="a dog")) | {"stage": {"number": 2}}
    await storage.queue.send([json.dumps(forged)])
    await run_pipeline(Drawing())
    assert await stored(storage) == IMAGES[:1]
    assert {each.error for each in await failed(storage)} == {
        "JobError",
        "UnknownStageError",
    }
