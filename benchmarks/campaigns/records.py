"""A campaign of 1,000,000 records on the embedded storage: the time and memory that results take.

Workers with an instant engine write them as real ones do, in batches of 256; the commands are
processes of their own.

    python benchmarks/campaigns/records.py [--records 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from imagefleet.records import writer
from imagefleet.records.record import Lora, Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.stages.record import MAX_RECORDS

#: Workers, each of which writes a shard.
WORKERS = 100

#: As after the interruption of some nodes.
DRAWN_TWICE = 200

CAMPAIGN = "spring"
BEGAN_AT = datetime(2026, 11, 1, tzinfo=UTC)

#: The commands, in the order of the table.
COMMANDS = {
    "counts and 20 results": (),
    "Parquet file": ("--parquet", "{folder}/results.parquet"),
    "JSON lines": ("--json", "--output", "{folder}/results.jsonl"),
}
AGAIN = "counts, some drawn twice"


def record(number: int, worker: int) -> Record:
    """The record of an image, of the usual size."""
    return Record(
        outcome="completed",
        id=f"{number:07}",
        campaign=CAMPAIGN,
        at=BEGAN_AT + timedelta(seconds=number / 300),
        source=f"{number:032x}",
        worker=f"node-{worker}",
        gpu="NVIDIA GeForce RTX 4090",
        started_at=BEGAN_AT,
        start_up_seconds=31.5,
        price_per_hour=0.18,
        blob=f"{CAMPAIGN}/{number:07}.png",
        size_bytes=400_000 + number % 5_000,
        seconds=7.125,
        prompt=f"photo of a house number {number}, <lora:outline-style:0.8>, digital art,"
        " volumetric light, best quality, masterpiece, detailed",
        negative_prompt="oversaturation, blurry, deformed, distorted, mutated hands",
        seed=number * 2_654_435_761 % 2**32,
        model="dreamshaper-8",
        sampler="euler_a",
        steps=20,
        cfg_scale=7.0,
        clip_skip=1,
        width=512,
        height=512,
        loras=(Lora("outline-style", 0.8),),
    )


async def write(folder: Path, records: int) -> float:
    """Writes the records; returns records/s."""
    async with open_storage(StorageSettings(storage=f"local:{folder}")) as storage:
        await storage.create()
        began_at = time.monotonic()
        for worker in range(WORKERS):
            log = writer.RecordLog(storage.blobs, f"node-{worker}")
            numbers = range(worker, records, WORKERS)
            for first in range(0, len(numbers), MAX_RECORDS):
                batch = numbers[first : first + MAX_RECORDS]
                await log.add([record(number, worker) for number in batch])
        await writer.RecordLog(storage.blobs, "filler").sent(CAMPAIGN, records)
        return records / (time.monotonic() - began_at)


async def draw_again(folder: Path, records: int) -> None:
    """A second worker has drawn some of the images, and one whose record was lost."""
    async with open_storage(StorageSettings(storage=f"local:{folder}")) as storage:
        numbers = [*range(0, records, max(1, records // DRAWN_TWICE)), records]
        log = writer.RecordLog(storage.blobs, "another node")
        await log.add([record(number, WORKERS) for number in numbers], again=True)


def run(folder: Path, arguments: tuple[str, ...]) -> tuple[float, float, float]:
    """The seconds and CPU seconds of a command, and its peak memory in MB."""
    command = [
        *(sys.executable, "-m", "fleet.entry", "results", CAMPAIGN),
        *("--storage", f"local:{folder}", *(each.format(folder=folder) for each in arguments)),
    ]
    began_at = time.monotonic()
    variables = {name: value for name, value in os.environ.items() if "IMAGEFLEET" not in name}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - began_at, used.ru_utime + used.ru_stime, peak_megabytes(used)


def peak_megabytes(used: resource.struct_rusage) -> float:
    return used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    most = parser.parse_args().records
    result: dict[str, float] = {}
    table = Table("records", "command", "seconds", "CPU seconds", "peak MB")
    for records in (most // 10, most):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            result[f"written_per_second_{records}"] = round(asyncio.run(write(folder, records)))
            for name, arguments in (*COMMANDS.items(), (AGAIN, ())):
                if name == AGAIN:
                    asyncio.run(draw_again(folder, records))
                seconds, cpu_seconds, megabytes = run(folder, arguments)
                slug = name.replace(",", "").replace(" ", "_").lower()
                result[f"{slug}_seconds_{records}"] = round(seconds, 1)
                result[f"{slug}_cpu_seconds_{records}"] = round(cpu_seconds, 1)
                result[f"{slug}_megabytes_{records}"] = round(megabytes)
                figures = f"{seconds:.1f}", f"{cpu_seconds:.1f}", f"{megabytes:,.0f}"
                print(f"{records:,} records, {name}:", *figures, file=sys.stderr, flush=True)
                table.add_row(f"{records:,}", name, *figures)
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
