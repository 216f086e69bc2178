"""Measures the speed and memory of `imagefleet score`: python benchmarks/scoring/speed.py.

A campaign of pictures that a program drew lies in the embedded storage; the command is a process of
its own with as many as it starts. A tenth of the images comes first: memory is flat if that takes
as much. Prints a table; the last line is one JSON object.
"""

import argparse
import asyncio
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/demo_model/training", str(ROOT)]

from rich.console import Console
from rich.table import Table

from demo_world import captions, world
from imagefleet import concurrency
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

#: Different pictures; the names differ all the same.
PICTURES = 500
BATCH = 250


def drawn() -> list[tuple[bytes, str]]:
    """Files and their captions."""
    rng, found = random.Random(1), []
    for _ in range(PICTURES):
        scene = world.sample_scene(rng, world.SceneOptions(emphasis_share=0))
        stored = io.BytesIO()
        world.draw_scene(scene).save(stored, "PNG", compress_level=1)
        found.append((stored.getvalue(), captions.plain_caption(scene, rng)))
    return found


async def fill(storage: Storage, campaign: str, images: int) -> None:
    """Stores the images and their records as workers do."""
    pictures = drawn()
    log = RecordLog(storage.blobs, "w1")

    async def add(number: int) -> None:
        data, _ = pictures[number % PICTURES]
        await storage.blobs.create(f"{campaign}/{number:07}.png", data, "image/png", {})

    for first in range(0, images, BATCH):
        numbers = range(first, min(first + BATCH, images))
        await concurrency.for_each(numbers, add, 16)
        await log.add(
            [
                record(campaign, number, *pictures[number % PICTURES])
                for number in numbers
            ]
        )


def record(campaign: str, number: int, data: bytes, caption: str) -> Record:
    return Record(
        outcome="completed",
        id=f"{number:07}",
        campaign=campaign,
        at=datetime.now(UTC),
        blob=f"{campaign}/{number:07}.png",
        size_bytes=len(data),
        prompt=caption,
        cfg_scale=7.0,
    )


def megabytes(process: int) -> float:
    """Memory of a process and those that it has started; shared pages count once."""
    tree, total = [process], 0
    for each in tree:
        try:
            children = Path(f"/proc/{each}/task/{each}/children").read_text()
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        tree += map(int, children.split())
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1024


def score(folder: Path, campaign: str, arguments: argparse.Namespace) -> JSONDict:
    """Runs the command, and looks at its memory meanwhile."""
    command = [
        sys.executable,
        "-m",
        "fleet.entry",
        "score",
        campaign,
        "--extractor",
        "demo",
    ]
    command += [
        "--storage",
        f"local:{folder}/storage",
        "--state",
        f"{folder}/{campaign}-score",
    ]
    command += ["--processes", str(arguments.processes), "--json"]
    most, began_at = 0.0, time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        while run.poll() is None:
            most = max(most, megabytes(run.pid))
            time.sleep(0.5)
        assert run.stdout is not None
        assert run.stderr is not None
        printed, noted = run.stdout.read(), run.stderr.read()
    assert run.returncode == 0, noted
    speed = re.search(r"([\d.,]+) images/s", noted)
    assert speed is not None, noted
    (group,) = json.loads(printed)["groups"]
    return {
        "images": group["images"],
        "images_per_second": float(speed[1].replace(",", "")),
        "seconds": round(time.monotonic() - began_at, 1),
        "megabytes": round(most),
        "fid": group["fid"],
    }


async def measure(folder: Path, arguments: argparse.Namespace) -> list[JSONDict]:
    rows = []
    async with open_storage(
        StorageSettings(storage=f"local:{folder}/storage")
    ) as storage:
        await storage.create()
        for campaign, images in (
            ("tenth", arguments.images // 10),
            ("whole", arguments.images),
        ):
            print(f"storing {images:,} images", file=sys.stderr, flush=True)
            await fill(storage, campaign, images)
            rows.append(await asyncio.to_thread(score, folder, campaign, arguments))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), arguments))
    table = Table(
        "images", "images/s", "s, with the figures", "MB, all processes", "FID"
    )
    for row in rows:
        table.add_row(
            *(
                f"{row[name]:,}"
                for name in ("images", "images_per_second", "seconds", "megabytes")
            ),
            f"{row['fid']:.3f}",
        )
    Console().print(table)
    print(json.dumps({"processes": arguments.processes, "rows": rows}))


if __name__ == "__main__":
    main()
