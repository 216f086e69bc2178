"""What a worker must not do more of with each job: lose one, keep files open, add metrics."""

import asyncio
import threading
from pathlib import Path

from prometheus_client import generate_latest

from benchmarks.stand_in import StandInEngine
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from messages import blobs, message
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

JOBS = 300


async def test_a_worker_keeps_no_file_open_and_adds_no_series_per_job(
    local_settings: StorageSettings, tmp_path
):
    used: list[tuple[int, int, int]] = []

    def note(_outcome: object) -> None:
        text = generate_latest(pipeline.metrics.registry).decode()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        used.append((len(text.splitlines()), descriptors, threading.active_count()))

    async with open_storage(local_settings) as storage:
        await storage.create()
        await storage.queue.send(message(id=f"j{each}") for each in range(JOBS))
        settings = WorkerSettings(
            storage=local_settings.storage,
            model=Path("stand-in"),
            cache=tmp_path / "cache",
            until_empty=True,
        )
        pipeline = Pipeline(
            storage, lambda: StandInEngine(capacity=32), settings, on_settled=note
        )
        await pipeline.run(asyncio.Event(), asyncio.Event())
        assert len(await blobs(storage)) == JOBS
        assert (await storage.queue.depth()).messages == 0
    assert pipeline.metrics.outcomes == {"completed": JOBS}
    (series, descriptors, threads) = used[JOBS // 10]
    last = used[-1]
    assert last[0] == series
    assert last[1] <= descriptors + 20
    assert last[2] <= threads + 8
