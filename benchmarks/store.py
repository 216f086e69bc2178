"""The local storage's throughput: its queue alone, and 10,000 jobs through workers.

The queue alone: each process leases 32 messages at once, renews each and deletes it, 16 at a time.
Workers: each is a process with the real pipeline and a stand-in engine; it leases from the same
SQLite file, writes a tiny PNG per job and acknowledges it. A run is timed from its first image to
its last.

    python benchmarks/store.py [--jobs 10000]
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.stand_in import StandInEngine
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import MAX_RECEIVE, LeasedMessage
from worker.process import run_worker
from worker.progress import WorkerReport
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from multiprocessing.pool import AsyncResult

SEND_BATCH = 1000

LEASE_SECONDS = 120
CALLS_AT_ONCE = 16


class Deleted(NamedTuple):
    """Results of one process; times in seconds."""

    messages: int
    began_at: float
    ended_at: float
    longest_call: float
    cpu_seconds: float


def settings_for(folder: Path) -> WorkerSettings:
    return WorkerSettings(
        storage=f"local:{folder}", model=Path("stand-in"), until_empty=True
    )


def work(folder: Path) -> tuple[WorkerReport, float]:
    """One worker process, until the queue is empty; with its CPU seconds."""
    load = lambda: StandInEngine(capacity=32, size=(16, 16))  # noqa: E731 - a short factory
    began_at = time.process_time()
    report = asyncio.run(run_worker(settings_for(folder), load=load))
    return report, time.process_time() - began_at


async def fill(folder: Path, jobs: int) -> float:
    """Sends the jobs; returns messages/s."""
    async with open_storage(settings_for(folder)) as storage:
        await storage.create()
        began_at = time.monotonic()
        for first in range(0, jobs, SEND_BATCH):
            numbers = range(first, min(first + SEND_BATCH, jobs))
            await storage.queue.send(
                f'{{"prompt": "a house", "id": "j{n}"}}' for n in numbers
            )
        return jobs / (time.monotonic() - began_at)


def delete_all(folder: Path) -> Deleted:
    return asyncio.run(_delete_all(folder))


async def _delete_all(folder: Path) -> Deleted:
    """Leases, renews and deletes messages until there are none."""
    deleted, longest = 0, 0.0
    leased: asyncio.Queue[LeasedMessage] = asyncio.Queue(MAX_RECEIVE)

    async with open_storage(settings_for(folder)) as storage:

        async def end() -> None:
            nonlocal deleted, longest
            while True:
                message = await leased.get()
                for call in (
                    lambda message: storage.queue.renew(message, LEASE_SECONDS),
                    storage.queue.delete,
                ):
                    began_at = time.monotonic()
                    message = await call(message)
                    longest = max(longest, time.monotonic() - began_at)
                deleted += 1
                leased.task_done()

        ends = [asyncio.create_task(end()) for _ in range(CALLS_AT_ONCE)]
        began_at, cpu_began_at = time.time(), time.process_time()
        while messages := await storage.queue.receive(MAX_RECEIVE, LEASE_SECONDS):
            for each in messages:
                await leased.put(each)
        await leased.join()
        for task in ends:
            task.cancel()
    cpu_seconds = time.process_time() - cpu_began_at
    return Deleted(deleted, began_at, time.time(), longest, cpu_seconds)


def empty(folder: Path, jobs: int, processes: int) -> tuple[float, list[Deleted]]:
    """Fills a queue, and lets processes empty it; returns messages/s."""
    asyncio.run(fill(folder, jobs))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        runs = pool.map(delete_all, [folder] * processes, chunksize=1)
    began_at = min(run.began_at for run in runs)
    seconds = max(run.ended_at for run in runs) - began_at
    return jobs / seconds, runs


async def stored(folder: Path) -> set[str]:
    async with open_storage(settings_for(folder)) as storage:
        return {
            name async for name in storage.blobs.names() if not name.startswith("-")
        }


def drain(
    folder: Path, processes: int
) -> tuple[float, list[tuple[WorkerReport, float]]]:
    """Runs workers until the queue is empty; returns the seconds from first to last image."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        runs: list[AsyncResult[tuple[WorkerReport, float]]] = [
            pool.apply_async(work, (folder,)) for _ in range(processes)
        ]
        reports = [run.get(timeout=600) for run in runs]
    images_at = [path.stat().st_mtime for path in folder.rglob("*.png")]
    return max(images_at) - min(images_at), reports


def measure_queue(folder: Path, jobs: int) -> dict[str, float]:
    """Prints the queue's own speed."""
    result: dict[str, float] = {}
    table = Table(
        "processes, queue alone",
        "messages/s",
        "CPU a message",
        "of each",
        "longest call",
    )
    for processes in (1, 4):
        rate, runs = empty(folder / f"queue-{processes}", jobs, processes)
        longest_ms = 1e3 * max(each.longest_call for each in runs)
        cpu_ms = 1e3 * sum(each.cpu_seconds for each in runs) / jobs
        result[f"queue_alone_{processes}"] = round(rate, 1)
        result[f"queue_alone_cpu_ms_{processes}"] = round(cpu_ms, 3)
        result[f"longest_call_ms_{processes}"] = round(longest_ms, 1)
        table.add_row(
            f"{processes}",
            f"{rate:,.0f}",
            f"{cpu_ms:.3f} ms",
            " ".join(f"{each.messages:,}" for each in runs),
            f"{longest_ms:.0f} ms",
        )
    Console().print(table)
    return result


def measure_workers(folder: Path, jobs: int) -> dict[str, float]:
    """Prints the speed of workers."""
    result: dict[str, float] = {"lost": 0, "done_twice": 0}
    table = Table(
        "worker processes",
        "messages/s",
        "CPU a message",
        "sent/s",
        "lost",
        "done twice",
    )
    for processes in (1, 4):
        storage = folder / f"workers-{processes}"
        sent_per_second = asyncio.run(fill(storage, jobs))
        seconds, runs = drain(storage, processes)
        names = asyncio.run(stored(storage))
        drawn = sum(
            report.images + report.jobs.get("duplicate", 0) for report, _ in runs
        )
        cpu_ms = 1e3 * sum(cpu_seconds for _, cpu_seconds in runs) / jobs
        lost, done_twice = jobs - len(names), drawn - len(names)
        result["lost"] += lost
        result["done_twice"] += done_twice
        result[f"messages_per_second_{processes}"] = round(jobs / seconds, 1)
        result[f"cpu_ms_{processes}"] = round(cpu_ms, 3)
        table.add_row(
            f"{processes}",
            f"{jobs / seconds:,.0f}",
            f"{cpu_ms:.2f} ms",
            f"{sent_per_second:,.0f}",
            f"{lost}",
            f"{done_twice}",
        )
    Console().print(table)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    jobs = parser.parse_args().jobs
    # Removed at the end alone: without a journal, ext4 takes no file's number again for minutes
    # after its end, and to look for another takes the next run half a millisecond for each image.
    with tempfile.TemporaryDirectory() as temporary:
        queue = measure_queue(Path(temporary), 2 * jobs)
        workers = measure_workers(Path(temporary), jobs)
    print(json.dumps({**queue, **workers, "jobs": jobs}))


if __name__ == "__main__":
    main()
