"""The pipeline's gain: the same jobs sequentially and pipelined.

An engine with 100 ms per image and a storage with 300 ms per call, the latency of a home connection
to a far region. (a) pulls, generates, uploads and acknowledges sequentially, as the worker of the
public run did; (b) is the worker's own pipeline. Both run in one process, with the same jobs and
local storage. The rates exclude the first images, since start-up is not compared.

    python benchmarks/overlap.py [--jobs 60]
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.stand_in import StandInEngine
from imagefleet.job.message import read_job
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.routing.queue import Queues
from worker.engine import contract
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings
from worker.stages import encode, infotext

TICK_SECONDS = 0.1
LATENCY_SECONDS = 0.3
SIZE = (512, 512)
WARM_UP_JOBS = 5

#: The calls that a storage answers.
QUEUE = {"send", "receive", "renew", "release", "delete", "depth"}
BLOBS = {"create", "append", "exists", "read", "metadata", "delete", "read_part"}


class Far:
    """A queue or a container, *calls* of which take LATENCY_SECONDS longer."""

    def __init__(self, near: Any, calls: Collection[str]) -> None:
        self._near, self._calls = near, calls
        #: Times at which blobs were created.
        self.written_at: list[float] = []

    def add(self, model: str, queues: Queues) -> None:
        """None of a model's queues: they would only be empty."""

    def __getattr__(self, name: str) -> Any:
        if name not in self._calls:
            return getattr(self._near, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(LATENCY_SECONDS)
            answer = await getattr(self._near, name)(*arguments, **named)
            if name == "create":
                self.written_at.append(time.monotonic())
            return answer

        return call


class FarStorage:
    """An open storage whose every call takes LATENCY_SECONDS longer."""

    def __init__(self, storage: Storage) -> None:
        self.url, self.operations = storage.url, storage.operations
        self.queue = Far(storage.queue, QUEUE)
        self.poison = Far(storage.poison, QUEUE)
        self.blobs = Far(storage.blobs, BLOBS)
        self.files = Far(storage.files, BLOBS)
        self.models = FarModels(storage.models)
        self.prover = storage.prover


class FarModels:
    """The queues of models, of which this benchmark sends to none."""

    def __init__(self, models: ModelQueues) -> None:
        self._models = models

    def served(self, names: Iterable[str]) -> Far:
        return Far(self._models.served(names), QUEUE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._models, name)


async def sequential(storage: FarStorage, settings: WorkerSettings) -> float:
    """Images/s of a sequential worker."""
    engine = StandInEngine(capacity=1, tick_seconds=TICK_SECONDS, size=SIZE)
    while messages := await storage.queue.receive(1, settings.lease_seconds):
        job = read_job(messages[0].body, messages[0].id)
        request = contract.ImageRequest(
            job.parsed_prompt, job.parsed_negative_prompt, (), job.sampler, job.steps,
            job.cfg_scale, job.seed, *SIZE,
        )  # fmt: skip
        engine.admit(0, engine.prepare(request))
        (finished,) = engine.tick()
        if not isinstance(finished.outcome, Exception):
            text = infotext.parameters(job, 0, SIZE, engine.model_name)
            file = encode.encode(finished.outcome, job.output, text)
            await storage.blobs.create(
                job.blob_name(0), file.data, file.content_type, {}
            )
        await storage.queue.delete(messages[0])
    return images_per_second(storage.blobs.written_at)


async def pipelined(
    storage: FarStorage, settings: WorkerSettings
) -> tuple[float, float]:
    """Images/s and the engine's idle fraction in the worker's pipeline."""
    pipeline = Pipeline(
        storage,
        lambda: StandInEngine(capacity=1, tick_seconds=TICK_SECONDS, size=SIZE),
        settings,
    )
    await pipeline.run(asyncio.Event(), asyncio.Event())
    return images_per_second(
        storage.blobs.written_at
    ), pipeline.engine_thread.clock.idle_fraction


def images_per_second(written_at: list[float]) -> float:
    counted = written_at[WARM_UP_JOBS:]
    return (len(counted) - 1) / (counted[-1] - counted[0])


async def measure(folder: Path, jobs: int) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name in ("sequential", "pipelined"):
        settings = WorkerSettings(
            storage=f"local:{folder / name}", model=Path("stand-in"), until_empty=True
        )
        async with open_storage(settings) as local:
            await local.create()
            bodies = [
                f'{{"prompt": "a house", "id": "j{number}"}}' for number in range(jobs)
            ]
            await local.queue.send(bodies)
            storage = FarStorage(local)
            if name == "sequential":
                rates["sequential_images_per_second"] = await sequential(
                    storage, settings
                )
            else:
                rate, idle = await pipelined(storage, settings)
                rates["pipelined_images_per_second"] = rate
                rates["ratio"] = rate / rates["sequential_images_per_second"]
                rates["pipelined_idle_fraction"] = idle
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=60, help="number of jobs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = asyncio.run(measure(Path(folder), arguments.jobs))
    table = Table("", "images/s", "engine idle")
    table.add_row("sequential", f"{rates['sequential_images_per_second']:.2f}", "")
    table.add_row(
        "pipeline",
        f"{rates['pipelined_images_per_second']:.2f}",
        f"{rates['pipelined_idle_fraction']:.1%}",
    )
    Console().print(table, f"ratio {rates['ratio']:.1f}")
    print(json.dumps({name: round(value, 4) for name, value in rates.items()}))


if __name__ == "__main__":
    main()
