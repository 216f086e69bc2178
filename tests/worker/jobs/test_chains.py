"""Jobs of several stages on both storages: each stage once, in its model's queue, none lost."""

import asyncio
import io
import json
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

import polling
from benchmarks.stand_in import draw_noise
from imagefleet import cancelled, errors
from imagefleet.files import picture
from imagefleet.job.change import Change
from imagefleet.job.message import Job, Output, read_job
from imagefleet.records import outcomes, reader
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.open import Storage
from messages import (
    Drawing,
    blobs,
    chained,
    counts,
    failed_jobs,
    failing,
    message,
    records,
    redelivered,
)
from storages import local_only, on_both
from worker.engine import contract
from worker.jobs import chains
from worker.stages import encode

pytestmark = pytest.mark.usefixtures("soon")

IMAGES = ["default/a.png", "default/a~s2.png", "default/a~s3.png"]


def second_fails(request: contract.ImageRequest) -> errors.FleetError | None:
    return errors.UnusableFileError("a bad file") if request.steps == 12 else None


def picture_file() -> bytes:
    pixels = draw_noise(contract.ImageRequest("", "", (), "", 1, 1.0, 0, 16, 16))
    return encode.encode(pixels, Output(), "").data


@on_both
async def test_each_stage_is_drawn_once_and_the_job_completes_with_the_last(
    storage: Storage, run_pipeline
):
    engine = Drawing()
    await run_pipeline(engine, sent=[chained(metadata={"order": 7})])

    assert engine.steps == [11, 12, 13]
    assert await blobs(storage) == IMAGES
    assert engine.drawn[0].init is None
    for name, request in zip(IMAGES, engine.drawn[1:], strict=False):
        assert request.init is not None
        file = io.BytesIO(await storage.blobs.read(name) or b"")
        assert np.array_equal(np.asarray(Image.open(file)), request.init.pixels)
    found = sorted(await records(storage), key=lambda each: each.stage)
    assert [(each.id, each.blob, each.stage, each.stages) for each in found] == [
        ("a", name, number, 3) for number, name in enumerate(IMAGES, 1)
    ]
    assert await counts(storage) == (3, 1, 0)
    (job,) = [each async for each in outcomes.of_campaign(storage, "default")]
    assert (job.status, job.blobs, job.metadata) == (
        "completed",
        (IMAGES[2],),
        {"order": 7},
    )
    outcome = await outcomes.look_up(storage, outcomes.JobFacts("a", "default"))
    assert (outcome.status, outcome.blobs) == ("completed", (IMAGES[2],))
    assert (await storage.queue.depth()).messages == 0


@local_only
async def test_half_a_surrogate_pair_in_a_field_without_effect_stops_no_chain(
    storage: Storage, run_pipeline
):
    then = [{"steps": 12, "hr_prompt": "\ud800"}]
    text = json.dumps(
        {**json.loads(message(id="a", steps=11)), "comments": "\udfff", "then": then}
    )
    assert text.isascii()  # as a sender's JSON has it; it is valid
    engine = Drawing()
    await run_pipeline(engine, sent=[text])
    assert engine.steps == [11, 12]
    assert await blobs(storage) == IMAGES[:2]
    assert await failed_jobs(storage) == []


@local_only
@pytest.mark.parametrize(("bugs", "drawn"), [(1, [11, 12, 13, 14]), (99, [11, 14])])
async def test_a_bug_between_two_stages_is_retried_and_fails_no_other_job(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    bugs: int,
    drawn: list[int],
):
    buggy = failing(chains.send_next, KeyError("a bug"), bugs)
    monkeypatch.setattr("worker.jobs.chains.send_next", buggy)
    engine = Drawing()
    await run_pipeline(engine, sent=[chained(), message(id="b", steps=14)])
    assert sorted(engine.steps) == drawn
    failures = [
        (each.id, "a bug" in each.reason) for each in await failed_jobs(storage)
    ]
    assert failures == [("a", True)] * (len(drawn) == 2)
    assert await blobs(storage) == [*IMAGES[: len(drawn) - 1], "default/b.png"]


@pytest.mark.parametrize("priority", ["normal", "high"])
async def test_a_stage_waits_in_the_queue_of_its_model_with_the_priority_of_the_job(
    storage: Storage, run_pipeline, priority
):
    body = chained({"model": "second", "steps": 12}, {"model": None, "steps": 13})
    await storage.models.send([body], priority)
    first = Drawing()
    await run_pipeline(first)
    assert first.steps == [11]
    assert (await storage.models.of("second")[priority].depth()).messages == 1
    facts = outcomes.JobFacts("a", "default")
    assert (await outcomes.look_up(storage, facts)).status == "pending"

    second = Drawing(model="second")
    await run_pipeline(second)
    assert second.steps == [12, 13]
    assert await blobs(storage) == IMAGES


async def test_a_worker_that_was_lost_before_it_sent_the_next_stage_loses_none(
    storage: Storage,
    run_pipeline,
    store_images,
):
    await redelivered(storage, chained())
    await store_images(chained(), data=picture_file())
    engine = Drawing()
    await run_pipeline(engine)
    assert engine.steps == [12, 13]
    assert await blobs(storage) == IMAGES
    assert len(await records(storage)) == 3


async def test_stages_that_were_sent_twice_are_drawn_and_counted_once(
    storage: Storage, run_pipeline
):
    fields = json.loads(chained())
    again = [
        json.dumps({**fields, "stage": {"number": number, "message": "m"}})
        for number in (2, 3)
    ]
    engine = Drawing()
    await run_pipeline(engine, sent=[chained()])
    await run_pipeline(engine, sent=[*again, *again])
    assert Counter(engine.steps) == {11: 1, 12: 1, 13: 1}
    assert await blobs(storage) == IMAGES
    assert await counts(storage) == (3, 1, 0)
    assert not [name async for name in storage.blobs.names("-duplicates/")]


@pytest.mark.parametrize("steps", [12, 20])
async def test_a_failed_stage_is_one_failed_job_and_a_replay_goes_on_from_there(
    storage: Storage, run_pipeline, steps: int
):
    await run_pipeline(Drawing(second_fails), sent=[chained()])
    (record,) = await failed_jobs(storage)
    assert (record.id, record.stage, record.reason) == (
        "a",
        2,
        "stage 2 of 3: a bad file",
    )
    assert await blobs(storage) == IMAGES[:1]
    assert await counts(storage) == (1, 0, 1)

    check = Check(change=Change({"steps": steps} if steps != 12 else {}))
    swept = await dead_letter_queue.replay(storage, Selection(), check=check)
    assert swept.done == 1
    engine = Drawing()
    await run_pipeline(engine)
    assert engine.steps == [steps, 13]
    assert await blobs(storage) == IMAGES
    assert await counts(storage) == (3, 1, 0)


@local_only
async def test_a_stage_that_fails_in_two_messages_is_one_failed_job(
    storage: Storage,
    run_pipeline,
    store_images,
):
    body = json.loads(chained()) | {"stage": {"number": 2, "message": "m"}}
    await store_images(chained(), data=picture_file())
    await run_pipeline(
        Drawing(fails=lambda _: errors.UnusableFileError("a bad file")),
        sent=[json.dumps(body)] * 2,
    )
    assert (await counts(storage))[2] == 1
    assert len([each async for each in reader.ended(storage, "default")]) == 1


@local_only
async def test_what_is_the_whole_jobs_cannot_be_changed_in_a_later_stage(
    storage: Storage, run_pipeline
):
    await run_pipeline(
        Drawing(fails=lambda _: errors.UnusableFileError("a bad file")),
        sent=[json.dumps(json.loads(chained()) | {"stage": {"number": 2}})],
    )
    check = Check(change=Change({"campaign": "autumn"}))
    swept = await dead_letter_queue.replay(storage, Selection(), check=check)
    assert swept.done == 0
    reason = swept.refused[0].reason
    assert "stage 2: campaign is the job's: give it outside then" in reason


@local_only
async def test_a_campaign_that_is_cancelled_while_the_queue_does_not_answer_goes_no_further(
    storage: Storage,
    run_pipeline,
    spring_is_read: threading.Event,
    monkeypatch,
):
    send = storage.models.send
    calls = iter([True])

    async def unanswered(*given: Any) -> None:
        if next(calls, False):
            await cancelled.cancel(storage, "spring")
            await polling.until(spring_is_read.is_set)
            raise errors.TransientError("no answer")
        await send(*given)

    monkeypatch.setattr("imagefleet.cancelled.LOAD_SECONDS", 0.5)
    monkeypatch.setattr("imagefleet.cancelled.PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(storage.models, "send", unanswered)
    engine = Drawing()
    await run_pipeline(engine, sent=[chained(campaign="spring")])
    assert engine.steps == [11]
    found = await reader.counts(storage, "spring")
    assert (found.images, found.completed, found.cancelled) == (1, 0, 1)


async def test_a_chain_whose_next_stage_cannot_be_sent_is_delivered_again(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    stop = asyncio.Event()

    async def refuse(*_: object) -> None:
        stop.set()
        raise errors.MissingResourceError("there is no token for the queue")

    monkeypatch.setattr("worker.settle.NOT_MOVED_SECONDS", 0.0)
    with monkeypatch.context() as refusing:
        refusing.setattr(storage.models, "send", refuse)
        await run_pipeline(Drawing(), stop=stop, sent=[chained()])
    assert await blobs(storage) == IMAGES[:1]
    engine = Drawing()
    await run_pipeline(engine)
    assert engine.steps == [12, 13]
    assert await blobs(storage) == IMAGES


@local_only
async def test_a_stage_that_is_drawn_anew_leaves_the_later_ones_as_they_are(
    storage: Storage, run_pipeline
):
    await run_pipeline(Drawing(), sent=[chained()])
    assert await storage.blobs.delete(
        IMAGES[1]
    )  # as `imagefleet redo` does, and sends its job
    found = picture.message_in(await storage.blobs.read(IMAGES[0]) or b"")
    fields = json.loads(found or "") | {"stage": {"number": 2}}
    engine = Drawing()
    await run_pipeline(engine, sent=[json.dumps(fields)])
    assert engine.steps == [12]
    assert await blobs(storage) == IMAGES
    assert (await counts(storage))[1] == 1


@local_only
async def test_an_image_of_a_stage_carries_the_message_that_draws_it_again(
    storage: Storage, run_pipeline
):
    await run_pipeline(Drawing(), sent=[chained()])
    for number, name in enumerate(IMAGES, 1):
        job = read_job(
            picture.message_in(await storage.blobs.read(name) or b"") or "", "another"
        )
        assert (job.stage, job.blob_name(0)) == (number, name)
        assert job.place is None or job.place.message is None


async def test_a_signed_chain_goes_on_at_workers_without_the_signing_key(
    storage: Storage, run_pipeline, tmp_path
):
    key = SigningKey.create(tmp_path / "key.pem")
    then = ({"steps": 12}, {"steps": 13})
    job = Job(prompt="a house", id="a", steps=11, then=then)
    engine = Drawing(
        lambda each: errors.UnusableFileError("x") if each.steps == 13 else None
    )
    await run_pipeline(
        engine,
        trusted_key=key.public,
        sent=[job.to_message(JobSigner(key, storage.scope))],
    )
    assert engine.steps == [11, 12, 13]
    (record,) = await failed_jobs(storage)
    assert (record.error, record.stage) == ("UnusableFileError", 3)
    await dead_letter_queue.replay(storage, Selection())
    again = Drawing()
    await run_pipeline(again, trusted_key=key.public)
    assert again.steps == [13]
    assert await blobs(storage) == IMAGES
