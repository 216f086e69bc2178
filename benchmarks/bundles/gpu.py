"""A real worker that draws few-step jobs in bundles from an Azurite far away; needs a GPU."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.one_machine import far_azurite, workers
from imagefleet.storage.open import open_storage
from loadgen.load import Load
from loadgen.settings import LoadSettings
from loadgen.sources import open_source

#: Share of the images, at both ends, that are not timed: the start, and the last bundles.
EDGE = 0.1


class Given(NamedTuple):
    model: str
    loras: Path | None
    jobs: int
    bundle: int
    round_trip_seconds: float
    side: int


class Row(NamedTuple):
    images_per_second: float
    #: While it was busy: what the engine alone does.
    engine_images_per_second: float
    idle_fraction: float


def prompts(count: int, loras: Path | None) -> Iterator[str]:
    """Each with the next of the LoRAs in a folder, if there is one."""
    names = sorted(path.stem for path in loras.glob("*.safetensors")) if loras else []
    for number in range(count):
        prompt = f"a photo of a house, number {number}"
        if names:
            prompt += f" <lora:{names[number % len(names)]}:0.8>"
        yield prompt


def jobs(given: Given, *, with_loras: bool) -> Iterator[str]:
    sizes = {"width": given.side, "height": given.side}
    numbered = enumerate(prompts(given.jobs, given.loras if with_loras else None))
    for number, prompt in numbered:
        yield json.dumps(
            {"prompt": prompt, "steps": 4, "cfg_scale": 1, "id": f"{number}", **sizes}
        )


async def measure(given: Given) -> dict[str, float]:
    """The figures of `benchmarks/results/bundles.json` that need a GPU."""
    plain = await row(given, with_loras=False)
    found = {
        "images_per_second": plain.images_per_second,
        "over_engine_4_steps": plain.images_per_second / plain.engine_images_per_second,
        "idle_fraction_4_steps": plain.idle_fraction,
    }
    if given.loras:
        loras = await row(given, with_loras=True)
        found["lora_over_no_lora_4_steps"] = (
            loras.images_per_second / plain.images_per_second
        )
    return {name: round(value, 4) for name, value in found.items()}


async def row(given: Given, *, with_loras: bool) -> Row:
    """Draws the jobs, and times all but the first and the last of them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "jobs.jsonl")
        lines = "\n".join(jobs(given, with_loras=with_loras))
        await asyncio.to_thread(file.write_text, lines)
        async with far_azurite.running(given.round_trip_seconds) as storage:
            settings = LoadSettings(
                storage=storage, bundle=given.bundle, verify_share=0, concurrency=256
            )
            async with open_storage(settings) as opened:
                await Load(opened, open_source(str(file)), settings).run(lambda _: None)
            flags = ["--model", given.model, "--port", "0"]
            if given.loras:
                flags += ["--lora-directory", str(given.loras)]
            environment = {**os.environ, "IMAGEFLEET_STORAGE": storage}
            async with (
                workers.running(["0"], flags, environment, print) as machine,
                aiohttp.ClientSession() as client,
            ):
                return await timed(machine, client, given.jobs)


async def timed(
    machine: workers.Machine, client: aiohttp.ClientSession, count: int
) -> Row:
    samples = []
    while True:
        sample = await machine.sample(client)
        images = sum(sample.images.values())
        if EDGE * count <= images and not sample.compiling:
            samples.append(sample)
        if images >= (1 - EDGE) * count and len(samples) > 1:
            break
        await asyncio.sleep(workers.SAMPLE_SECONDS)
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    images = sum(last.images.values()) - sum(first.images.values())
    busy = sum(last.busy_seconds.values()) - sum(first.busy_seconds.values())
    await machine.end()
    return Row(images / seconds, images / busy, 1 - busy / seconds)
