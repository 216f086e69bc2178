"""Measures how long a worker takes to its first image, and until it is compiled.

    python benchmarks/start_up/first_image.py --out first-image.json

A real worker process on a local storage with one job, started twice: with an empty cache of
compiled kernels, and with what the first one has left there. Time counts from the start of the
process; the image counts once it is stored. Without --model it is SD1.5 with random weights; --tiny
tries it on a CPU, where nothing is compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

ROOT = Path(__file__).resolve().parents[2]

POLL_SECONDS = 0.05

#: The slowest start that is waited for.
FIRST_IMAGE_SECONDS = 120.0

IMAGES, COMPILING = "imagefleet_images_total", "imagefleet_engine_compiling"


@dataclass(slots=True)
class Start:
    """One worker's start; seconds since that of its process, None for what was not waited for."""

    first_image_seconds: float | None = None
    compiled_seconds: float | None = None
    images_until_compiled: int | None = None
    stop_seconds: float | None = None
    """From SIGTERM to the process' end."""
    log_seconds: dict[str, float] = field(default_factory=dict)
    """When the log first had a line with each action."""


async def follow(stream: asyncio.StreamReader, began_at: float, start: Start) -> None:
    """Passes a worker's log on, and notes when each action came first."""
    async for line in stream:
        seconds = time.monotonic() - began_at
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            record = {}
        if action := record.get("action"):
            start.log_seconds.setdefault(action, round(seconds, 2))
        print(f"{seconds:7.2f} {record.get('message') or line.decode().rstrip()}", flush=True)


async def read(client: aiohttp.ClientSession, address: str) -> dict[str, float]:
    """The metrics without labels of their own; none before the worker serves them."""
    try:
        async with client.get(f"{address}/metrics") as answer:
            text = await answer.text()
    except aiohttp.ClientError:
        return {}
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


async def watch(address: str, began_at: float, start: Start, compiled_seconds: float) -> None:
    async with aiohttp.ClientSession() as client:
        found: dict[str, float] = {}
        while not found.get(IMAGES):
            if time.monotonic() - began_at > FIRST_IMAGE_SECONDS:
                sys.exit(f"there is no image after {FIRST_IMAGE_SECONDS:g} s")
            await asyncio.sleep(POLL_SECONDS)
            found = await read(client, address)
        start.first_image_seconds = round(time.monotonic() - began_at, 2)
        if not found[COMPILING]:
            return  # as on a CPU, or it was faster than the image
        while found[COMPILING]:
            if time.monotonic() - began_at > compiled_seconds:
                return
            await asyncio.sleep(POLL_SECONDS)
            found = await read(client, address)
        start.compiled_seconds = round(time.monotonic() - began_at, 2)
        start.images_until_compiled = int(found[IMAGES])


async def measure(
    arguments: argparse.Namespace, model: Path, cache: Path, port: int, compiled_seconds: float
) -> Start:
    """Starts a worker with that cache of kernels and ends it once it is compiled."""
    start = Start()
    with tempfile.TemporaryDirectory() as folder:
        address = f"local:{folder}"
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            await storage.queue.send(
                json.dumps({"id": f"j{number}", "prompt": f"photo of house {number}", "steps": 15})
                for number in range(arguments.jobs)
            )
        began_at = time.monotonic()
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.entry", "worker", "--model", str(model)),
            *("--device", arguments.device, "--port", str(port), "--storage", address),
            *("--log-format", "json", *arguments.flags),
            cwd=ROOT,
            env=environment(cache),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        if worker.stdout is None:
            raise RuntimeError("its output is a pipe")
        following = asyncio.create_task(follow(worker.stdout, began_at, start))
        watching = asyncio.create_task(
            watch(f"http://127.0.0.1:{port}", began_at, start, compiled_seconds)
        )
        ending = asyncio.create_task(worker.wait())
        try:
            await asyncio.wait([watching, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                sys.exit(f"the worker ended with exit code {worker.returncode}")
            watching.result()
        finally:
            stopped_at = time.monotonic()
            if worker.returncode is None:
                worker.send_signal(signal.SIGTERM)
            await ending
            start.stop_seconds = round(time.monotonic() - stopped_at, 2)
            watching.cancel()
            await following
    return start


def environment(folder: Path) -> dict[str, str]:
    """Has all that compiles for a GPU use *folder*: a new one makes a cold start."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("IMAGEFLEET_")}
    return {
        **kept,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }


def build(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model, made by a process of its own: this one would hold memory of the GPU."""
    if arguments.model is not None:
        return Path(arguments.model).resolve()
    call = (
        "from tiny_model import build_tiny_checkpoint as build; build(folder)"
        if arguments.tiny
        else "from evaluation.bench.random_model import build_random_checkpoint as build;"
        " import torch; build(folder, torch.device('cuda'))"
    )
    program = f"import pathlib, sys; folder = pathlib.Path(sys.argv[1]); {call}"
    model = folder / "random"
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", program, str(model)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    subprocess.run(command, env=environment, check=True)
    return model


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="seconds from a worker's start to its first image")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="in the queue")
    parser.add_argument(
        "--compiled-seconds",
        type=float,
        default=180.0,
        help="to wait at most until it is compiled, half of it with the caches",
    )
    parser.add_argument("--port", type=int, default=9490)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of the worker, after --")
    arguments = parser.parse_args(given)
    if arguments.tiny:
        arguments.device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model, cache = build(arguments, Path(folder)), Path(folder, "cache")
        print("empty caches", flush=True)
        port, limit = arguments.port, arguments.compiled_seconds
        cold = asyncio.run(measure(arguments, model, cache, port, limit))
        print("the same caches", flush=True)
        cached = asyncio.run(measure(arguments, model, cache, port + 1, limit / 2))
    found = {
        "first_image_cold_seconds": cold.first_image_seconds,
        "first_image_cached_seconds": cached.first_image_seconds,
        "compiled_cold_seconds": cold.compiled_seconds,
        "compiled_cached_seconds": cached.compiled_seconds,
        "images_until_compiled_cold": cold.images_until_compiled,
        "images_until_compiled_cached": cached.images_until_compiled,
        "stop_seconds": max(cold.stop_seconds or 0, cached.stop_seconds or 0),
        "log_seconds_cold": cold.log_seconds,
        "log_seconds_cached": cached.log_seconds,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
