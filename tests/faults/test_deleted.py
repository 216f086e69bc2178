"""A queue or a container deleted while workers and fillers use it."""

import shutil
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from azure.storage.blob import BlobServiceClient
from azure.storage.queue import QueueServiceClient

from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import concurrency, errors
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen.file_source import FileSource
from loadgen.load import Load
from loadgen.settings import LoadSettings
from proxy import FaultProxy
from worker.engine import contract

pytestmark = pytest.mark.slow

Jobs = Callable[..., list[str]]
RunPipeline = Callable[..., Coroutine[Any, Any, Any]]


def delete(settings: StorageSettings, what: str) -> None:
    if folder := settings.local_folder:
        if what == "container":
            shutil.rmtree((folder / "images").rename(folder / "deleted"))
        else:
            for file in folder.glob("queue.sqlite*"):
                file.unlink()
    elif what == "container":
        with BlobServiceClient.from_connection_string(
            settings.storage, api_version=API_VERSION
        ) as blobs:
            blobs.delete_container(settings.container)
    else:
        with QueueServiceClient.from_connection_string(
            settings.storage, api_version=API_VERSION
        ) as queues:
            queues.delete_queue(settings.queue)


@pytest.mark.parametrize("what", ["queue", "container"])
async def test_a_worker_ends_with_one_line_and_goes_on_after_the_storage_is_made_anew(
    storage_settings: StorageSettings,
    storage: Storage,
    jobs: Jobs,
    work: RunPipeline,
    what: str,
):
    drawn = 0

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        nonlocal drawn
        drawn += 1
        if drawn == 5:
            delete(storage_settings, what)
        return draw_noise(request)

    await storage.queue.send(jobs(20))
    with pytest.raises(errors.SetupError, match=r"no queue|no folder|does not exist"):
        await work(storage_settings, engine=StandInEngine(tick_seconds=0.02, draw=draw))
    await storage.create()
    if what == "queue":
        await storage.queue.send(jobs(20))
    in_queue = (await storage.queue.depth()).messages
    stored = {name async for name in storage.blobs.names("default/")}
    pipeline = await work(storage_settings)
    outcomes = pipeline.metrics.outcomes
    assert set(outcomes) <= {"completed", "duplicate"}
    assert sum(outcomes.values()) == in_queue
    now_stored = {name async for name in storage.blobs.names("default/")}
    assert len(now_stored - stored) == outcomes["completed"]
    if what == "queue":
        assert len(now_stored) == 20
    assert (await storage.poison.depth()).messages == 0


async def test_a_load_whose_queue_is_deleted_says_so_and_does_not_go_on_as_if_nothing_was(
    storage_settings: StorageSettings, jobs: Jobs, tmp_path
):
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{job}\n" for job in jobs(160)))
    settings = LoadSettings(
        **storage_settings.model_dump(), concurrency=1, verify_share=0
    )

    async def load(*, restart: bool, on_confirmed: Callable[[int], None]) -> int:
        async with open_storage(storage_settings) as opened:
            loading = Load(opened, FileSource(file), settings, restart=restart)
            loading.check()
            return (await loading.run(on_confirmed)).confirmed

    def delete_once(confirmed: int) -> None:
        if 0 < confirmed <= 32:
            delete(storage_settings, "queue")

    for _ in range(2):
        with pytest.raises(errors.SetupError, match=r"no queue|does not exist"):
            await load(restart=False, on_confirmed=delete_once)
    assert await load(restart=True, on_confirmed=lambda _: None) == 160
    async with open_storage(storage_settings) as opened:
        assert (await opened.queue.depth()).messages == 160


@pytest.mark.parametrize("code", ["QueueBeingDeleted", "ContainerBeingDeleted"])
async def test_a_name_that_azure_still_deletes_is_waited_for(
    azurite_settings: StorageSettings, azurite_address: str, code: str
):
    answers = [(409, code)] * 2
    proxy = FaultProxy(lambda: answers.pop() if answers else "pass")
    policy = concurrency.RetryPolicy(
        tries=3, first_wait_seconds=0.01, longest_wait_seconds=0.01
    )
    async with proxy.running(azurite_address):
        settings = azurite_settings.model_copy(update={"storage": proxy.address})
        async with open_storage(settings, policy) as storage:
            await storage.create()
            await storage.check()
            answers += [(409, code)] * 3
            with pytest.raises(
                errors.TransientError, match=r"is being deleted, and its name"
            ):
                await storage.blobs.create("a.png", b"x", "image/png", {})
