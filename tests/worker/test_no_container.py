"""A fleet without a container of files, on both storages."""

import json
from collections import Counter
from collections.abc import Callable

from benchmarks.stand_in import StandInEngine
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from messages import failures
from worker import process
from worker.settings import WorkerSettings

JOBS = {
    "plain": {"prompt": "a house"},
    "lora": {"prompt": "a house <lora:style:1>"},
    "image": {"prompt": "a house", "init_images": ["a.png"]},
}


async def test_a_worker_without_a_container_of_files_draws_what_needs_none(
    storage_settings: StorageSettings,
    tmp_path,
    caplog,
    worker_settings: Callable[..., WorkerSettings],
):
    settings = storage_settings.model_copy(update={"files_container": "no-such-files"})
    async with open_storage(storage_settings) as storage:
        await storage.create()
    async with open_storage(settings) as storage:
        await storage.queue.send(
            json.dumps({"id": id_} | job) for id_, job in JOBS.items()
        )
        outcomes: Counter[str] = Counter()
        own = worker_settings(
            **settings.model_dump(), cache=tmp_path / "cache", until_empty=True
        )
        await process.run_worker(
            own,
            load=lambda: StandInEngine(size=(64, 64)),
            on_settled=lambda outcome: outcomes.update([outcome]),
        )
        failed = await failures(storage)
    assert outcomes == {"completed": 1, "failed": 2}
    assert (
        "no LoRA style.safetensors in loras/ of the container 'no-such-files'"
        in failed["lora"].reason
    )
    assert (
        "there is no 'inputs/a.png' in the container 'no-such-files'"
        in failed["image"].reason
    )
    assert caplog.text.count("no files, and no list of what is cancelled: ") == 1
    assert "cannot be read" not in caplog.text
