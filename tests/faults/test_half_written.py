"""Files that are half there, or change: models, LoRAs, jobs; and folders that cannot be used."""

import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from header_files import file_of
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen.file_source import FileSource
from worker.files import model
from worker.settings import WorkerSettings

pytestmark = pytest.mark.slow

Imagefleet = Callable[..., tuple[int, str]]
Jobs = Callable[..., list[str]]
RunPipeline = Callable[..., Coroutine[Any, Any, Any]]

CONTENT = file_of(data=b"x" * 100_000)


async def put(storage: Storage, name: str, content: bytes) -> None:
    assert await storage.files.create(name, content, "application/octet-stream", {})


# Models


@pytest.fixture
def settings(local_settings: StorageSettings, tmp_path) -> WorkerSettings:
    return WorkerSettings(
        storage=local_settings.storage,
        model="store:sd.safetensors",
        cache=tmp_path / "cache",
    )


async def fetched(settings: WorkerSettings) -> Path:
    async with open_storage(settings) as storage:
        await storage.create()
        if not [name async for name in storage.files.names("models/")]:
            await put(storage, "models/sd.safetensors", CONTENT)
        await model.fetch(settings, storage.files)
    return model.local_path(settings)


@pytest.mark.parametrize("content", [CONTENT[:50_000], b"", b"\0" * len(CONTENT)])
async def test_a_cached_model_that_a_power_failure_cut_off_is_fetched_again(
    settings: WorkerSettings, content: bytes
):
    path = await fetched(settings)
    path.write_bytes(content)
    assert (await fetched(settings)).read_bytes() == CONTENT


async def test_a_cached_folder_with_half_a_file_is_not_whole(tmp_path):
    folder = tmp_path / "sd"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    weights = folder / "unet" / "weights.safetensors"
    weights.write_bytes(CONTENT)
    assert model.is_whole(folder)
    weights.write_bytes(CONTENT[:-1])
    assert not model.is_whole(folder)
    weights.write_bytes(CONTENT)
    (folder / "model_index.json").unlink()
    assert not model.is_whole(folder)


# LoRAs


async def test_a_folder_of_loras_that_is_gone_sends_no_job_to_the_poison_queue(
    local_settings: StorageSettings, jobs: Jobs, work: RunPipeline, tmp_path
):
    """A network drive that is not mounted, say."""
    async with open_storage(local_settings) as storage:
        await storage.create()
        await storage.queue.send(jobs(5, prompt="a house <lora:style:1>"))
        folder = tmp_path / "loras"
        with pytest.raises(
            errors.SetupError, match=r"loras cannot be read: it does not exist"
        ):
            await work(local_settings, lora_directory=folder)
        depth = await storage.queue.depth()
        assert (depth.messages, depth.leased) == (5, 0)
        folder.mkdir()
        (folder / "style.safetensors").write_bytes(CONTENT)
        pipeline = await work(local_settings, lora_directory=folder)
    assert dict(pipeline.metrics.outcomes) == {"completed": 5}


async def test_a_container_of_loras_that_is_gone_sends_no_job_to_the_poison_queue(
    local_settings: StorageSettings, jobs: Jobs, work: RunPipeline, tmp_path
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        shutil.rmtree(tmp_path / "storage" / local_settings.files_container)
        await storage.queue.send(jobs(5, prompt="a house <lora:style:1>"))
        with pytest.raises(errors.SetupError, match="no folder"):
            await work(local_settings)
        depth = await storage.queue.depth()
    assert (depth.messages, depth.leased) == (5, 0)


# Sources of jobs


@pytest.mark.parametrize("change", ["cut off", "longer", "another"])
def test_a_file_of_jobs_that_changes_while_it_is_loaded_is_an_error_not_a_shorter_load(
    jobs: Jobs, tmp_path, change: str
):
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(f"{job}\n" for job in jobs(2000)))
    source = FileSource(path)
    bodies = source.bodies()
    assert json.loads(next(bodies) or "")["id"] == "j0"
    content = path.read_text()
    if change == "another":
        path.unlink()
        path.write_text(content)
        bodies = source.bodies()
    else:
        lines = content.splitlines(keepends=True)
        path.write_text("".join(lines[:1500] if change == "cut off" else lines * 2))
    with pytest.raises(errors.SetupError, match="has changed while it was being read"):
        list(bodies)


# Folders


@pytest.mark.parametrize("command", ["load", "status", "report"])
def test_a_storage_that_cannot_be_written_is_one_line(
    mount, jobs: Jobs, tmp_path, imagefleet: Imagefleet, command: str
):
    disk = mount(1024)
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{job}\n" for job in jobs(3)))
    storage = ("--storage", f"local:{disk.folder}/data")
    if command != "load":
        assert imagefleet("load", str(file), *storage)[0] == 0
        if command == "report":
            shutil.rmtree(disk.folder / "data" / "images")
    disk.change("ro")
    code, said = imagefleet(
        command, *([str(file)] if command == "load" else []), *storage
    )
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith("error: ")


async def test_a_cache_on_a_read_only_disk_hands_every_job_back(
    mount, local_settings: StorageSettings, jobs: Jobs, work: RunPipeline
):
    disk = mount(1024, read_only=True)
    async with open_storage(local_settings) as storage:
        await storage.create()
        await put(storage, "loras/style.safetensors", CONTENT)
        await storage.queue.send(jobs(5, prompt="a house <lora:style:1>"))
        with pytest.raises(errors.SetupError, match="Read-only file system"):
            await work(local_settings, cache=disk.folder)
        depth = await storage.queue.depth()
    assert (depth.messages, depth.leased) == (5, 0)
