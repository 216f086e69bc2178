"""Two jobs of one name: each has an outcome of its own, and no picture is taken for another's."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from browsing import visible
from imagefleet import concurrency, errors
from imagefleet.files import picture
from imagefleet.job.message import read_job
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from messages import (
    blobs,
    counts,
    failed_jobs,
    message,
    records,
    redelivered,
)
from storages import azurite_only, on_both
from tokens import by_tokens

pytestmark = pytest.mark.usefixtures("soon")


async def prompts(storage: Storage) -> dict[str, str]:
    """The prompt of the job in each stored image."""
    found = {}
    async for name in storage.blobs.names("default/"):
        job = picture.job_in(await storage.blobs.read(name) or b"")
        found[name] = job[1].prompt if job else "?"
    return found


@asynccontextmanager
async def with_worker_tokens(
    settings: StorageSettings, role: str = "worker"
) -> AsyncIterator[Any]:
    """The storage as a worker's tokens open it."""
    worker = ROLES["worker"].for_chains() if role == "chains" else ROLES["worker"]
    given = by_tokens(settings, worker, ["stand-in"])
    async with AzureStorage(given, concurrency.NEVER) as opened:
        yield opened


@on_both
@pytest.mark.parametrize("first", ["a house", "a cat"])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_job_with_the_id_of_another_fails_and_both_are_named(
    storage: Storage,
    run_pipeline,
    first: str,
    is_lost: bool,
):
    bodies = {prompt: message(id="1", prompt=prompt) for prompt in ("a house", "a cat")}
    second = next(prompt for prompt in bodies if prompt != first)
    await run_pipeline(sent=[bodies[first]], name="the first")
    if is_lost:
        await redelivered(storage, bodies[second])
    else:
        await storage.queue.send([bodies[second]])
    pipeline = await run_pipeline(name="the second")

    assert pipeline.metrics.outcomes == {"failed": 1}
    assert await prompts(storage) == {"default/1.png": first}
    assert await blobs(storage, "-duplicates/") == []
    (record,) = await failed_jobs(storage)
    jobs = {prompt: read_job(body, "m") for prompt, body in bodies.items()}
    assert (record.error, record.digest) == ("NameTakenError", jobs[second].digest)
    assert json.loads(record.body or "")["prompt"] == second
    listed = dead_letter_queue.recorded(storage, Selection())
    assert [each.error async for each in listed] == ["NameTakenError"]
    assert (
        f"another job, of digest {jobs[first].digest[:12]}, that the first"
        in record.reason
    )
    assert (
        f"this job is {second!r}, of digest {jobs[second].digest[:12]}" in record.reason
    )
    assert await counts(storage) == (1, 1, 1)
    blob = await storage.blobs.metadata("default/1.png")
    (image,) = await records(storage)
    assert blob is not None
    assert (image.digest, image.sha256) == (blob["digest"], blob["sha256"])
    assert image.digest == jobs[first].stage_digest


@pytest.mark.parametrize("single_first", [True, False])
async def test_a_job_of_several_images_and_one_of_a_single_one_meet(
    storage: Storage, run_pipeline, single_first: bool
):
    bodies = [
        message(id="1", prompt="one"),
        message(id="1", prompt="two", batch_size=2),
    ]
    for body in bodies if single_first else reversed(bodies):
        await run_pipeline(sent=[body])
    (record,) = await failed_jobs(storage)
    assert record.error == "NameTakenError"
    first = (await prompts(storage))["default/1.png"]
    assert first == ("one" if single_first else "two")
    assert (await counts(storage))[1:] == (1, 1)


async def test_images_of_a_job_and_ids_that_end_in_numbers_are_apart(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="dup", batch_size=2, prompt="two")])
    pipeline = await run_pipeline(
        sent=(message(id=f"dup-{each}", prompt=f"{each}") for each in range(2))
    )
    assert pipeline.metrics.outcomes == {"completed": 3}
    assert await prompts(storage) == {
        "default/dup.png": "two",
        "default/dup~1.png": "two",
        "default/dup-0.png": "0",
        "default/dup-1.png": "1",
    }


async def test_two_chains_of_one_id_meet_at_the_stage_in_which_they_differ(
    storage: Storage, run_pipeline
):
    for steps in (12, 13):
        pipeline = await run_pipeline(
            sent=[message(id="1", steps=11, then=[{"steps": steps}])]
        )
    assert pipeline.metrics.outcomes == {"duplicate": 1, "failed": 1}
    (record,) = await failed_jobs(storage)
    assert (record.error, record.stage) == ("NameTakenError", 2)
    assert "default/1~s2.png" in record.reason
    assert (await counts(storage))[1:] == (1, 1)


async def test_a_name_that_somebody_has_squatted_is_no_picture_of_its_job(
    storage: Storage, run_pipeline
):
    await storage.blobs.create("default/1.png", b"squatted", "image/png", {"job": "1"})
    await run_pipeline(sent=[message(id="1")])
    (record,) = await failed_jobs(storage)
    assert record.error == "NameTakenError"
    assert "of digest none, that an unknown worker stored at" in record.reason


async def test_images_found_before_a_taken_name_have_records(
    storage: Storage,
    run_pipeline,
    store_images,
):
    body = message(id="1", batch_size=3)
    await store_images(body, 1, 2)
    await store_images(message(id="1", prompt="another"))
    await redelivered(storage, body)
    pipeline = await run_pipeline()
    assert pipeline.metrics.outcomes == {"failed": 1}
    (record,) = await failed_jobs(storage)
    assert record.reason.endswith("of its 3 images are stored: 1-2")
    found = [str(each.blob) for each in await records(storage)]
    assert sorted(found) == ["default/1~1.png", "default/1~2.png"]


@azurite_only
async def test_a_token_that_cannot_read_takes_a_new_jobs_taken_name_for_anothers(
    storage: Storage,
    storage_settings: StorageSettings,
    run_pipeline,
):
    bodies = [
        message(id="1", prompt=prompt) for prompt in ("a house", "a house", "a cat")
    ]
    async with with_worker_tokens(storage_settings) as opened:
        for body in bodies:
            await storage.queue.send([body])
            await run_pipeline(opened=opened)
    found = await failed_jobs(storage)
    assert [each.error for each in found] == ["NameTakenError"] * 2
    assert all(
        "this worker's token cannot read by which job" in each.reason for each in found
    )
    assert await prompts(storage) == {"default/1.png": "a house"}

    swept = await dead_letter_queue.replay(storage, Selection(error="NameTakenError"))
    assert swept.done == 1
    waiting = [read_job(each.body, "m").prompt async for each in visible(storage.queue)]
    assert waiting == ["a cat"], "of the other, the image is stored"


@azurite_only
async def test_a_token_that_cannot_read_takes_a_redelivered_jobs_taken_name_for_its_own(
    storage: Storage,
    storage_settings: StorageSettings,
    run_pipeline,
    store_images,
):
    own = message(id="own")
    other = message(id="other", prompt="a dog")
    await store_images(own)
    await store_images(message(id="other", prompt="a cat"))
    await redelivered(storage, own, other)
    async with with_worker_tokens(storage_settings) as opened:
        pipeline = await run_pipeline(opened=opened)
    assert pipeline.metrics.outcomes == {"duplicate": 2}
    # Its reader sees the digests, and that the dog was never stored.
    assert (await counts(storage))[1:] == (1, 1)


@azurite_only
async def test_tokens_for_chains_tell_jobs_of_one_id_apart(
    storage: Storage,
    storage_settings: StorageSettings,
    run_pipeline,
):
    outcomes: Counter[str] = Counter()
    async with with_worker_tokens(storage_settings, "chains") as opened:
        for prompt in ("a house", "a house", "a cat"):
            await storage.queue.send([message(id="1", prompt=prompt)])
            outcomes += (await run_pipeline(opened=opened)).metrics.outcomes
    assert outcomes == {"completed": 1, "duplicate": 1, "failed": 1}


async def test_an_image_whose_reply_was_lost_is_told_from_another_jobs(
    storage: Storage,
    run_pipeline,
    store_images,
    monkeypatch,
):
    await store_images(message(id="1", prompt="a cat"))
    create = storage.blobs.create
    is_lost = True

    async def losing(name: str, *arguments: Any, **options: Any) -> bool:
        nonlocal is_lost
        is_written = await create(name, *arguments, **options)
        if is_lost and name.startswith("default/"):
            is_lost = False
            error = errors.TransientError("the reply was lost")
            error.outcome_is_unknown = True
            raise error
        return is_written

    monkeypatch.setattr(storage.blobs, "create", losing)
    pipeline = await run_pipeline(sent=[message(id="1", prompt="a dog")])
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert pipeline.metrics.images_stored == 0
    (record,) = await failed_jobs(storage)
    assert record.error == "NameTakenError"


async def test_a_second_drawing_of_another_job_is_none(
    storage: Storage,
    run_pipeline,
    store_images,
):
    await store_images(message(id="1", prompt="a cat", verify=True))
    pipeline = await run_pipeline(sent=[message(id="1", prompt="a dog", verify=True)])
    assert pipeline.metrics.outcomes == {"unverified": 1}
    assert await failed_jobs(storage) == []
