"""The load generator's memory: a million jobs from a template into a queue that takes no time.

It is that of the first tenth at the end, too.

python benchmarks/sending/memory.py [--jobs 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import Priority
from loadgen.load import Load
from loadgen.settings import LoadSettings
from loadgen.template_source import TemplateSource

TEMPLATE = Path(__file__).parents[2] / "templates" / "demo.yaml"

#: Measurements, evenly spread over the load.
POINTS = 10


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def instantly(_bodies: Iterable[str], _priority: Priority = "normal") -> None:
    await asyncio.sleep(0)


async def fill(jobs: int, folder: Path) -> list[tuple[int, float, int]]:
    """Jobs sent, seconds and resident bytes, now and then."""
    settings = LoadSettings(storage=f"local:{folder}", verify_share=0)
    points: list[tuple[int, float, int]] = []
    began_at = time.monotonic()

    def note(confirmed: int) -> None:
        if confirmed >= (len(points) + 1) * jobs // POINTS:
            points.append((confirmed, time.monotonic() - began_at, resident_bytes()))

    async with open_storage(settings) as storage:
        storage.models.send = instantly  # type: ignore[method-assign]
        source = TemplateSource(TEMPLATE, count=jobs)
        await Load(storage, source, settings, folder / "checkpoint", restart=True).run(note)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as folder:
        points = asyncio.run(fill(jobs, Path(folder)))
    table = Table("jobs", "seconds", "jobs/s", "RSS, MiB")
    for sent, seconds, resident in points:
        row = f"{sent:,}", f"{seconds:,.0f}", f"{sent / seconds:,.0f}", f"{resident / 2**20:,.1f}"
        table.add_row(*row)
    Console().print(table)
    (_, _, first), (sent, seconds, last) = points[0], points[-1]
    result = {
        "jobs": sent,
        "jobs_per_second": round(sent / seconds, 1),
        "rss_mib_after_a_tenth": round(first / 2**20, 1),
        "rss_mib_at_the_end": round(last / 2**20, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
