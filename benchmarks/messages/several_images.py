"""What several images in one message save: rates, operations, CPU time and waits an image.

For 1, 4 and 16 images a message the same number of images goes through one worker process with the
real pipeline: once with an engine that draws at once, so that the storage sets the pace, and once
with one of 16 slots and about 60 images/s, 50 ms away from the storage, to see where it waits.
Operations are counted as requests that a queue's or an account's limit counts: deletes included.

    python benchmarks/messages/several_images.py [--images 4800]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

import overlap
from imagefleet.storage.open import open_storage
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings
from worker.testing import StandInEngine

IMAGES_PER_MESSAGE = (1, 4, 16)

#: The engine far from the storage: 16 slots, 64 images/s at best.
LATENCY_SECONDS = 0.05
SLOTS = 16
TICK_SECONDS = 0.25
FAR_SECONDS = 20

STAGES = ("pull", "prepare", "wait_gpu", "upload", "record", "acknowledge")


@dataclass(frozen=True)
class Run:
    """One worker's figures; *stage_ms* is the mean of each stage."""

    images_per_message: int
    images_per_second: float
    messages_per_second: float
    queue_operations_per_image: float
    blob_operations_per_image: float
    cpu_ms_per_image: float
    engine_idle_fraction: float
    idle_seconds: dict[str, float]
    stage_ms: dict[str, float]


def run(images_per_message: int, images: int, *, is_far: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(Path(folder), images_per_message, images, is_far=is_far))


async def _run(folder: Path, each: int, images: int, *, is_far: bool) -> Run:
    settings = WorkerSettings(storage=f"local:{folder}", model=Path("stand-in"), until_empty=True)
    messages = images // each
    async with open_storage(settings) as local:
        await local.create()
        bodies = (
            f'{{"prompt": "a house", "id": "j{n}", "n_iter": {each}}}' for n in range(messages)
        )
        await local.queue.send(bodies)
        operations = local.operations
        before = operations.queue, operations.blob_writes + operations.blob_reads
        storage = overlap.FarStorage(local) if is_far else local
        tick, slots = (TICK_SECONDS, SLOTS) if is_far else (0.0, 32)
        pipeline = Pipeline(
            storage,  # type: ignore[arg-type]
            lambda: StandInEngine(capacity=slots, tick_seconds=tick, size=(16, 16)),
            settings,
        )
        cpu = time.process_time()
        await pipeline.run(asyncio.Event(), asyncio.Event())
        cpu = time.process_time() - cpu
        queue = operations.queue - before[0] + messages  # deletes are free, but requests
        blobs = operations.blob_writes + operations.blob_reads - before[1]
        if pipeline.images_written != images:
            raise RuntimeError(f"{pipeline.images_written} of {images} images were stored")
    clock = pipeline.engine_thread.clock
    seconds = (clock.last_at or 0.0) - (clock.first_at or 0.0)
    registry = pipeline.metrics.registry

    def mean_ms(stage: str) -> float:
        found = [
            registry.get_sample_value(f"imagefleet_stage_seconds_{part}", {"stage": stage}) or 0.0
            for part in ("sum", "count")
        ]
        return 1000 * found[0] / max(1.0, found[1])

    return Run(
        each,
        images / seconds,
        messages / seconds,
        queue / images,
        blobs / images,
        1000 * cpu / images,
        clock.idle_fraction,
        {reason: round(value, 2) for reason, value in clock.idle_seconds.items()},
        {stage: round(mean_ms(stage), 1) for stage in STAGES},
    )


def in_process(each: int, images: int, *, is_far: bool) -> Run:
    """In a process of its own, so that no run pays for the one before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (each, images), {"is_far": is_far})


def far(each: int, images: int) -> Run:
    overlap.LATENCY_SECONDS = LATENCY_SECONDS
    return run(each, images, is_far=True)


def far_in_process(each: int, images: int) -> Run:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(far, (each, images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=4800, help="of each run, a multiple of 16")
    images = parser.parse_args().images
    near = [in_process(each, images, is_far=False) for each in IMAGES_PER_MESSAGE]
    few = int(FAR_SECONDS * SLOTS / TICK_SECONDS) // 16 * 16
    distant = [far_in_process(each, few) for each in IMAGES_PER_MESSAGE]
    table = Table(
        "images a message",
        "images/s",
        "messages/s",
        "queue operations an image",
        "blob operations an image",
        "CPU ms an image",
    )
    for each in near:
        table.add_row(
            f"{each.images_per_message}",
            f"{each.images_per_second:,.0f}",
            f"{each.messages_per_second:,.0f}",
            f"{each.queue_operations_per_image:.2f}",
            f"{each.blob_operations_per_image:.2f}",
            f"{each.cpu_ms_per_image:.2f}",
        )
    waits = Table("images a message", "images/s", "engine idle", "idle s by reason", *STAGES)
    for each in distant:
        waits.add_row(
            f"{each.images_per_message}",
            f"{each.images_per_second:.1f}",
            f"{each.engine_idle_fraction:.1%}",
            json.dumps(each.idle_seconds),
            *(f"{each.stage_ms[stage]:.0f} ms" for stage in STAGES),
        )
    Console(width=160).print(table, f"{1000 * LATENCY_SECONDS:.0f} ms from the storage:", waits)
    print(
        json.dumps({"near": [asdict(each) for each in near], "far": [asdict(e) for e in distant]})
    )


if __name__ == "__main__":
    main()
