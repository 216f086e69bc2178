"""What a worker must not do more of with each job: lose one, keep files open, add metrics."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from evaluation.stand_in import StandInEngine
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from messages import blobs, message
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "million" / "run.py"
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
    assert dict(pipeline.metrics.outcomes) == {"completed": JOBS}
    (series, descriptors, threads), last = used[JOBS // 10], used[-1]
    assert last[0] == series
    assert last[1] <= descriptors + 20
    assert last[2] <= threads + 8


@pytest.mark.slow
def test_the_benchmarks_worker_loses_no_job_and_draws_none_twice():
    command = [sys.executable, str(BENCHMARK), "--jobs", "1000", "--processes", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    ended = {
        name: figures[name]
        for name in ("stored", "left_in_queue", "lost", "done_twice")
    }
    assert ended == {"stored": 1000, "left_in_queue": 0, "lost": 0, "done_twice": 0}
    assert figures["series_at_end"] == figures["series_at_start"]
    assert figures["descriptors_at_end"] <= figures["descriptors_at_start"] + 20
    assert figures["threads_at_end"] <= figures["threads_at_start"] + 8
