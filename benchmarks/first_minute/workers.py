"""The rows of a whole `imagefleet worker`, from its process' start; the metrics are its own."""

import asyncio
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from first_minute import packages
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from one_machine.workers import SAMPLE_SECONDS, Sample, running
from rows.groups import Figures

#: The only GPU's name.
GPU = "0"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The jobs of a worker, and the seconds that it draws."""

    jobs: str
    #: True if its storage has no packages; its own disk never has any.
    is_cold: bool
    #: From the process' start, of which the pictures are counted; 0: until full speed.
    seconds: float = 0.0
    #: At full speed. A worker has shared what it has compiled by then.
    steady_seconds: float = 30.0


ROWS = {
    "worker_cold": WorkerRow("sizes", is_cold=True, seconds=90.0),
    "worker_one_size_cold": WorkerRow("uniform", is_cold=True),
    "worker_one_size": WorkerRow("uniform", is_cold=False),
}


def measure(emit: Callable[..., None], row: WorkerRow, arguments: Namespace) -> None:
    asyncio.run(_measure(emit, row, arguments))


async def _measure(
    emit: Callable[..., None], row: WorkerRow, arguments: Namespace
) -> None:
    folder, tiny = arguments.folder, arguments.tiny
    storage_folder, cache = folder / f"worker-{row.jobs}", folder / "worker-cache"
    shutil.rmtree(cache, ignore_errors=True)
    if row.is_cold:
        shutil.rmtree(storage_folder, ignore_errors=True)
    jobs = (folder / f"{row.jobs}.jsonl").read_text().splitlines()
    model = folder / ("tiny-sd1" if tiny else "sd1")
    flags = ["--model", model, "--lora-directory", model / "loras", "--cache", cache]
    flags += ["--storage", f"local:{storage_folder}", "--device", arguments.device]
    flags += ["--slots", arguments.slots] if arguments.slots else []
    settings = StorageSettings(storage=f"local:{storage_folder}")
    async with open_storage(settings) as storage, aiohttp.ClientSession() as client:
        await storage.create()
        if row.is_cold:
            await storage.queue.send(jobs)
        stored = await _stored(storage)
        told = list(map(str, flags))
        node = {**os.environ, **packages.forget_compiled(cache)}
        async with running([GPU], told, node, _say) as machine:
            samples: list[Sample] = []
            while not _is_over(row, samples, machine.began_at, tiny=tiny):
                await asyncio.sleep(SAMPLE_SECONDS)
                sample = await machine.sample(client)
                if sample.images.get(GPU) and not _drawn(samples):
                    emit(first_picture_seconds=sample.at - machine.began_at)
                samples.append(sample)
            seconds = samples[-1].at - machine.began_at
            new = await _stored(storage) - stored
            work = sum(map(_row_pixels, (json.loads(jobs[int(name)]) for name in new)))
            emit(
                pictures=len(new),
                row_pixels_per_second=work / seconds,
                **_speeds(samples, machine.began_at),
                **samples[-1].told,
            )
            emit(worker_exit_code=await machine.end(), is_complete=True)


def _is_over(
    row: WorkerRow, samples: Sequence[Sample], began_at: float, *, tiny: bool
) -> bool:
    drawn = _drawn(samples)
    if not drawn:
        return False
    now = samples[-1].at
    if row.seconds and not tiny:
        return now - began_at >= row.seconds
    return now - _ready_at(samples) >= (1.0 if tiny else row.steady_seconds)


def _drawn(samples: Sequence[Sample]) -> list[Sample]:
    """The samples since the first picture of a job."""
    return [sample for sample in samples if sample.images.get(GPU)]


def _ready_at(samples: Sequence[Sample]) -> float:
    """When a picture was there and nothing was compiled any more, as far as is known by now."""
    compiling = [sample.at for sample in samples if sample.compiling]
    return max([_drawn(samples)[0].at, *compiling[-1:]])


def _speeds(samples: Sequence[Sample], began_at: float) -> Figures:
    """The moment of full speed, and rows of UNet calls per second before and after it."""
    ready_at = _ready_at(samples)
    drawn = _drawn(samples)
    before = [sample for sample in drawn if sample.at <= ready_at]
    after = [sample for sample in drawn if sample.at >= ready_at]
    return {
        "ready_seconds": ready_at - began_at,
        "compiling_rows_per_second": _rate(before),
        "rows_per_second": _rate(after),
    }


def _rate(samples: Sequence[Sample]) -> float | None:
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    rows = [each.told.get("imagefleet_unet_rows_total", 0.0) for each in (first, last)]
    return (rows[1] - rows[0]) / (last.at - first.at)


async def _stored(storage: Storage) -> set[str]:
    """The ids of the jobs whose pictures are stored."""
    return {Path(name).stem async for name in storage.blobs.names("default/")}


def _row_pixels(job: JSONDict) -> float:
    """Pixels of a picture times the rows of the UNet's calls that it takes."""
    rows = job["steps"] * (1 if job["cfg_scale"] == 1 else 2)
    return float(rows * job["width"] * job["height"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
