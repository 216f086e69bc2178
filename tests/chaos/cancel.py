"""Cancels a campaign of many jobs that wait among another's, while a worker draws both.

The worker is whole but for its engine, a stand-in of a consumer card's speed.

    PYTHONPATH=. python tests/chaos/cancel.py [--jobs 100000] [--others 200]
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evaluation.stand_in import StandInEngine
from imagefleet import cancelled
from imagefleet.records import reader
from imagefleet.storage.open import Storage, open_storage
from worker.engine import contract
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

#: Two images a second, eight at once.
CAPACITY = 8
TICK_SECONDS = 4.0

#: Images that are drawn before the campaign is cancelled.
DRAWN_BEFORE = 2 * CAPACITY

#: No image is begun later after `cancel` has written the list.
OBEY_SECONDS = 10.0

#: How often it looks whether all are cancelled.
LOOK_SECONDS = 0.5

#: Seeds from here on are of the other campaign.
OTHERS = 10_000_000

BATCH = 1_000


class NotingEngine(StandInEngine):
    """Notes when it begins which image."""

    def __init__(self) -> None:
        super().__init__(capacity=CAPACITY, tick_seconds=TICK_SECONDS)
        self.begun: list[tuple[bool, float]] = []
        self.has_begun = threading.Event()

    def admit(self, ticket: int, prepared: contract.PreparedRequest) -> None:
        self.begun.append((prepared.request.seed >= OTHERS, time.monotonic()))
        if len(self.begun) >= DRAWN_BEFORE:
            self.has_begun.set()
        super().admit(ticket, prepared)


def messages(jobs: int, others: int) -> list[str]:
    """The other campaign's jobs all over the queue."""
    bodies = [
        json.dumps(
            {"prompt": "a house", "id": f"s{seed}", "seed": seed, "campaign": "spring"}
        )
        for seed in range(jobs)
    ]
    step = max(1, jobs // others)
    mixed: list[str] = []
    for start in range(0, jobs, step):
        number = start // step
        if number < others:
            fields = {"id": f"a{number}", "seed": OTHERS + number, "campaign": "autumn"}
            mixed.append(json.dumps({"prompt": "a house", **fields}))
        mixed += bodies[start : start + step]
    return mixed


async def measure(
    storage: Storage, settings: WorkerSettings, jobs: int
) -> dict[str, float]:
    engine = NotingEngine()
    pipeline = Pipeline(storage, lambda: engine, settings)
    running = asyncio.create_task(pipeline.run(asyncio.Event(), asyncio.Event()))
    await asyncio.to_thread(engine.has_begun.wait)
    asked_at = time.monotonic()
    cancelling = asyncio.create_task(cancelled.cancel(storage, "spring"))
    empty_at = None
    while not running.done():
        await asyncio.sleep(LOOK_SECONDS)
        if empty_at is None and pipeline.metrics.outcomes["cancelled"] >= jobs - drawn(
            engine
        ):
            empty_at = time.monotonic()
    await cancelling
    running.result()
    counts = await reader.counts(storage, "spring")
    seconds = (empty_at or time.monotonic()) - asked_at
    late = [
        at
        for is_other, at in engine.begun
        if not is_other and at > asked_at + OBEY_SECONDS
    ]
    last = max((at for is_other, at in engine.begun if not is_other), default=asked_at)
    return {
        "cancelled_jobs": counts.cancelled,
        "drawn_jobs": counts.completed,
        "other_images": len([True for is_other, _ in engine.begun if is_other]),
        "begun_after_10_seconds": len(late),
        "last_begun_seconds": round(last - asked_at, 2),
        "queue_seconds": round(seconds, 1),
        "messages_per_second": round(counts.cancelled / seconds, 1),
    }


def drawn(engine: NotingEngine) -> int:
    return sum(not is_other for is_other, _ in engine.begun)


async def run(folder: Path, jobs: int, others: int) -> dict[str, Any]:
    settings = WorkerSettings(
        storage=f"local:{folder}",
        model=Path("stand-in"),
        cache=folder / "cache",
        until_empty=True,
    )
    async with open_storage(settings) as storage:
        await storage.create()
        bodies = messages(jobs, others)
        for start in range(0, len(bodies), BATCH):
            await storage.queue.send(bodies[start : start + BATCH])
        return await measure(storage, settings, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=100_000, help="jobs of the cancelled campaign"
    )
    parser.add_argument("--others", type=int, default=200, help="jobs of the other")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(Path(folder), arguments.jobs, arguments.others))
    table = Table("", "")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
