"""Failed jobs by model: those of one whose checkpoint was mended go back to its own queue."""

import asyncio
from typing import Any

import pytest

import made_records
from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, told

BODIES = (
    '{"prompt": "a", "id": "one", "model": "pony"}',
    '{"prompt": "a", "id": "old", "override_settings": {"sd_model_checkpoint": "pony"}}',
    '{"prompt": "a", "id": "other", "model": "dream"}',
    '{"prompt": "a", "id": "none"}',
    '{"prompt": "pony", "id": "invalid", "model": "pony", "stesp": 3}',
)


@pytest.fixture
def settings(tmp_path) -> StorageSettings:
    """A storage with a failed job of each body, besides a message that is no record."""
    found = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")

    async def prepare() -> None:
        async with open_storage(found) as storage:
            await storage.create()
            await storage.poison.send(["what is this?"])
            for body in BODIES:
                await storage.queue.send([body])
                (message,) = await storage.queue.receive(1, 60)
                try:
                    job = read_job(message.body, message.id)
                    error: errors.FleetError = errors.MissingFileError(
                        "a damaged checkpoint"
                    )
                except errors.JobError as invalid:
                    job = None
                    error = invalid
                failed = await made_records.dead_letter(
                    storage, message, job, error, "worker-1"
                )
                await RecordLog(storage.blobs, "worker-1").add([failed])
                await storage.queue.delete(message)

    asyncio.run(prepare())
    return found


def listed(imagefleet: Imagefleet, *arguments: str) -> set[str]:
    result = imagefleet("failed", *arguments, "--json")
    return {job["id"] for job in told(result)["jobs"]}


@pytest.mark.usefixtures("settings")
def test_failed_jobs_are_listed_by_model(in_process: Imagefleet):
    assert listed(in_process, "--model", "pony") == {"one", "old", "invalid"}
    assert listed(in_process, "--model", "dream") == {"other"}
    assert not listed(in_process, "--model", "unknown")


def test_a_models_failed_jobs_are_replayed_into_its_queue(
    in_process: Imagefleet, settings: StorageSettings
):
    result = in_process("replay", "--model", "pony", "--yes")

    async def left() -> tuple[dict[str | None, int], Any]:
        async with open_storage(settings) as storage:
            depth = await storage.queue.depth()
            poison = await storage.poison.depth()
            return {
                each.model: each.messages
                for each in depth.by_queue.values()
                if each.messages
            }, poison.messages

    assert asyncio.run(left()) == ({"pony": 2}, 4), result.stderr
    assert listed(in_process, "--model", "pony") == {"invalid"}
