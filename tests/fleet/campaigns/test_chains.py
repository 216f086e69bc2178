"""What the commands, webhooks and the client tell of jobs in stages."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import exported
from benchmarks.stand_in import draw_noise
from fleet.webhooks import events
from imagefleet import aio, errors
from imagefleet.job.message import Job
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from storages import flags, local_only
from worker.engine import contract

RunWorker = Callable[..., Awaitable[None]]  # the fixture of conftest.py


CHAIN: JSONDict = {
    "prompt": "a house",
    "id": "0001",
    "campaign": "spring",
    "steps": 20,
    "then": [{"steps": 10, "denoising_strength": 0.5}, {"steps": 30}],
}

BAD_STEPS = 10


def draw(request: contract.ImageRequest) -> contract.Pixels:
    if request.steps == BAD_STEPS:
        raise errors.UnusableFileError("a bad file")
    return draw_noise(request)


@pytest.fixture
def run(
    storage_settings: StorageSettings, imagefleet: Imagefleet
) -> Callable[..., Any]:
    """Runs a command on another thread, which has no event loop; returns its JSON."""

    async def call(*arguments: str) -> Any:
        command = [*arguments, *flags(storage_settings), "--json"]
        done = await asyncio.to_thread(imagefleet, *command)
        assert done.returncode == 0, done.stderr
        decoder = json.JSONDecoder()
        found = []
        place = 0
        while place < len(text := done.stdout.rstrip()):
            value, place = decoder.raw_decode(text, place)
            found.append(value)
            place += 1  # the line's end
        return found

    return call


async def test_a_job_of_stages_is_loaded_shown_failed_and_completed_as_one_job(
    storage: Storage, run, run_worker: RunWorker, tmp_path
):
    (tmp_path / "jobs.jsonl").write_text(json.dumps(CHAIN) + "\n")
    await run("load", "jobs.jsonl")
    assert "stage" in str(await run("status", "spring/0001"))
    await run_worker("w1", draw)

    (shown,) = await run("status", "spring/0001")
    assert (shown["state"], shown["stage"]) == ("failed", 2)
    assert shown["reason"] == "stage 2 of 3: a bad file"
    (listed,) = (await run("failed"))[0]["jobs"]
    assert (listed["id"], listed["stage"]) == ("0001", 2)
    counts = await reader.counts(storage, "spring")
    assert (counts.sent, counts.failed, counts.pending, counts.images) == (1, 1, 0, 1)

    await run("replay", "--all", "--yes")
    await run_worker("w2")
    counts = await reader.counts(storage, "spring")
    assert (counts.completed, counts.failed, counts.pending, counts.images) == (
        1,
        0,
        0,
        3,
    )
    (shown,) = await run("status", "spring/0001")
    assert (shown["state"], shown["stage"]) == ("completed", 3)
    names = ["spring/0001.png", "spring/0001~s2.png", "spring/0001~s3.png"]
    assert [each["blob"] for each in shown["images"]] == names
    rows = await run("results", "spring")
    assert sorted((each["stage"], each["blob"]) for each in rows) == [
        *enumerate(names, 1)
    ]


@local_only
async def test_downloads_and_exports_have_the_images_of_all_stages(
    storage: Storage, run, run_worker: RunWorker, tmp_path
):
    await storage.queue.send([json.dumps(CHAIN)])
    await run_worker("w1")
    names = ["0001.png", "0001~s2.png", "0001~s3.png"]
    await run("results", "spring", "--download", "found")
    assert sorted(each.name for each in (tmp_path / "found").iterdir()) == names
    await run("export", "spring", "set")
    urls = [str(sample.row["url"]) for sample in exported.samples(tmp_path / "set")]
    assert [url.rpartition("/")[2] for url in urls] == names


@local_only
async def test_a_webhook_tells_of_a_job_of_stages_once(
    storage: Storage, run_worker: RunWorker
):
    await storage.queue.send([json.dumps(CHAIN)])
    await run_worker("w1")
    drawn = reader.images(storage, "spring")
    found = [events.job_ended("acme/jobs", each) async for each in drawn]
    (completed,) = [each for each in found if each is not None]
    assert completed.type == "job.completed"
    assert completed.data["images"] == ["spring/0001~s3.png"]


async def test_the_clients_result_is_the_image_of_the_last_stage(
    storage_settings: StorageSettings, storage: Storage, run_worker: RunWorker
):
    names = ("storage", "queue", "container", "files_container")
    options: Any = {name: getattr(storage_settings, name) for name in names}
    async with aio.connect(**options) as fleet:
        batch = await fleet.submit([Job.model_validate(CHAIN)])
        await run_worker("w1")
        (result,) = [each async for each in batch.results(20)]
        assert (result.status, result.blobs) == ("completed", ("spring/0001~s3.png",))
        assert (await result.image()).size == (64, 64)
        (job,) = [each async for each in fleet.results("spring")]
        assert job.blobs == result.blobs
    assert storage.url
