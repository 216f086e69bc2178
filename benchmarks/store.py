"""The local storage's throughput: 10,000 jobs through workers with a stand-in engine.

Each worker is a process with the real pipeline: it leases from the same SQLite file, writes a tiny
PNG per job and acknowledges it. A run is timed from its first image to its last.

    python benchmarks/store.py [--jobs 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from imagefleet.storage.open import open_storage
from worker.process import run_worker
from worker.progress import WorkerReport
from worker.settings import WorkerSettings
from worker.testing import StandInEngine

if TYPE_CHECKING:
    from multiprocessing.pool import AsyncResult

SEND_BATCH = 1000


def settings_for(folder: Path) -> WorkerSettings:
    return WorkerSettings(storage=f"local:{folder}", model=Path("stand-in"), until_empty=True)


def work(folder: Path) -> WorkerReport:
    """One worker process, until the queue is empty."""
    load = lambda: StandInEngine(capacity=32, size=(16, 16))  # noqa: E731 - a short factory
    return asyncio.run(run_worker(settings_for(folder), load=load))


async def fill(folder: Path, jobs: int) -> float:
    """Sends the jobs; returns messages/s."""
    async with open_storage(settings_for(folder)) as storage:
        await storage.create()
        began_at = time.monotonic()
        for first in range(0, jobs, SEND_BATCH):
            numbers = range(first, min(first + SEND_BATCH, jobs))
            await storage.queue.send(f'{{"prompt": "a house", "id": "j{n}"}}' for n in numbers)
        return jobs / (time.monotonic() - began_at)


async def stored(folder: Path) -> set[str]:
    async with open_storage(settings_for(folder)) as storage:
        return {name async for name in storage.blobs.names() if not name.startswith("-")}


def drain(folder: Path, processes: int) -> tuple[float, list[WorkerReport]]:
    """Runs workers until the queue is empty; returns the seconds from first to last image."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        runs: list[AsyncResult[WorkerReport]] = [
            pool.apply_async(work, (folder,)) for _ in range(processes)
        ]
        reports = [run.get(timeout=600) for run in runs]
    images_at = [path.stat().st_mtime for path in folder.rglob("*.png")]
    return max(images_at) - min(images_at), reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    jobs = parser.parse_args().jobs
    result: dict[str, float] = {}
    lost = done_twice = 0
    table = Table("worker processes", "messages/s", "sent/s", "lost", "done twice")
    for processes in (1, 4):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            sent_per_second = asyncio.run(fill(folder, jobs))
            seconds, reports = drain(folder, processes)
            names = asyncio.run(stored(folder))
        drawn = sum(report.images + report.jobs.get("duplicate", 0) for report in reports)
        lost_here, twice_here = jobs - len(names), drawn - len(names)
        lost, done_twice = lost + lost_here, done_twice + twice_here
        result[f"messages_per_second_{processes}"] = round(jobs / seconds, 1)
        table.add_row(
            f"{processes}",
            f"{jobs / seconds:,.0f}",
            f"{sent_per_second:,.0f}",
            f"{lost_here}",
            f"{twice_here}",
        )
    Console().print(table)
    print(json.dumps({**result, "jobs": jobs, "lost": lost, "done_twice": done_twice}))


if __name__ == "__main__":
    main()
