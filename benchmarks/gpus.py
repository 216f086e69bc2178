"""Measures `imagefleet worker --gpus all` against one GPU of a machine, on one local storage.

    python benchmarks/gpus.py --model ./model --seconds 60 --out /tmp/gpus.json

Both runs draw the same kind of jobs, from the queue to the stored PNG. Images are counted from the
metrics on the workers' one port, from when all GPUs have drawn for *warm* seconds, while the queue
stays full: start-up and compilation are left out. `--gpus 0,1 --device cpu` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

#: The slowest start: a cold cache, and GPUs that wait for the first one's kernels.
START_SECONDS = 900.0


async def images_by_gpu(client: aiohttp.ClientSession, address: str) -> tuple[float, list[int]]:
    """When they were counted, and the images of each GPU; none before a worker serves metrics."""
    try:
        async with client.get(f"{address}/metrics") as answer:
            text = await answer.text()
    except aiohttp.ClientError:
        return time.monotonic(), []
    families = text_string_to_metric_families(text)
    return time.monotonic(), [
        int(sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "imagefleet_images_total"
    ]


def jobs(count: int, steps: int) -> Iterator[str]:
    for number in range(count):
        yield json.dumps({"id": f"j{number}", "prompt": f"photo of house {number}", "steps": steps})


async def measure(arguments: argparse.Namespace, gpus: str, count: int, port: int) -> float:
    """The images/s of that many GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"local:{folder}"
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            await storage.queue.send(jobs(arguments.jobs * count, arguments.steps))
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fleet.entry", "worker", "--model", arguments.model),
                *("--device", arguments.device, "--gpus", gpus, "--port", str(port)),
                *("--storage", address, "--log-format", "text", *arguments.flags),
            )
            try:
                rate = asyncio.create_task(_rate(f"http://127.0.0.1:{port}", count, arguments))
                await asyncio.wait(
                    [rate, asyncio.create_task(worker.wait())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not rate.done():
                    sys.exit(f"the worker ended with exit code {worker.returncode}")
                return rate.result()
            finally:
                if worker.returncode is None:
                    worker.send_signal(signal.SIGTERM)
                    await worker.wait()


async def _rate(address: str, count: int, arguments: argparse.Namespace) -> float:
    async with aiohttp.ClientSession() as client:
        async with asyncio.timeout(START_SECONDS):
            while True:
                _, images = await images_by_gpu(client, address)
                if len(images) == count and min(images) > 0:
                    break
                await asyncio.sleep(0.5)
        await asyncio.sleep(arguments.warm)
        began_at, before = await images_by_gpu(client, address)
        await asyncio.sleep(arguments.seconds)
        ended_at, after = await images_by_gpu(client, address)
    drawn = sum(after) - sum(before)
    if sum(after) >= 0.95 * arguments.jobs * count:
        sys.exit(f"the queue ran low: more than --jobs {arguments.jobs} per GPU are needed")
    return drawn / (ended_at - began_at)


def gpu_count(arguments: argparse.Namespace) -> int:
    if arguments.gpus != "all":
        return len(arguments.gpus.split(","))
    from worker.gpus import choice
    from worker.settings import MachineSettings

    return len(choice.choose(MachineSettings(model=arguments.model, gpus="all")))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one GPU against all of this machine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpus", default="all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, of each run")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before that")
    parser.add_argument("--jobs", type=int, default=4000, help="in the queue, for each GPU")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--port", type=int, default=9470)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of the worker, after --")
    arguments = parser.parse_args(given)
    if arguments.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    count = gpu_count(arguments)
    first = arguments.gpus.split(",")[0] if arguments.gpus != "all" else "0"
    one = asyncio.run(measure(arguments, first, 1, arguments.port))
    many = asyncio.run(measure(arguments, arguments.gpus, count, arguments.port + 1))
    found = {
        "images_per_second_one_gpu": round(one, 3),
        "images_per_second_all_gpus": round(many, 3),
        "multi_gpu_count": count,
        "multi_gpu_linear_fraction": round(many / (count * one), 4),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
