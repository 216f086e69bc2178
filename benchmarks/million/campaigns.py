"""The time in which `imagefleet status` counts very many campaigns.

    python benchmarks/million/campaigns.py [--campaigns 10000] [--storage local:FOLDER]
    PYTHONPATH=tests/chaos python benchmarks/million/campaigns.py --storage azurite

Each campaign has a shard of images, one of failed jobs, and a note of what was sent. A storage that
is given keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from fleet.campaigns.table import Campaigns
from imagefleet import concurrency
from imagefleet.job.message import Job
from imagefleet.records import sent
from imagefleet.records.record import Record, RecordLog
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

#: Campaigns that are filled at the same time.
_AT_ONCE = 32

_IMAGES = 5


def jobs(campaign: str) -> Iterator[Job]:
    return (Job(prompt="a house", id=f"{n}", campaign=campaign) for n in range(_IMAGES + 1))


async def fill(storage: Storage, campaigns: int) -> None:
    """Sends and ends the jobs of each campaign: one fails, the others are drawn."""
    log = RecordLog(storage.blobs, "worker")
    now = datetime.now(UTC)

    async def fill_one(campaign: str) -> None:
        await sent.note(storage, [job.to_message() for job in jobs(campaign)])
        failed, *drawn = (
            {"id": job.id, "campaign": campaign, "at": now, "digest": job.digest}
            for job in jobs(campaign)
        )
        records = [
            Record(outcome="completed", blob=f"{campaign}/{facts['id']}.png", **facts)
            for facts in drawn
        ]
        await log.add([*records, Record(outcome="failed", **failed)])

    names = [f"campaign-{number}" for number in range(campaigns)]
    await concurrency.for_each(names, fill_one, _AT_ONCE)


async def measure(url: str, campaigns: int) -> None:
    async with open_storage(StorageSettings(storage=url)) as storage:
        await storage.create()
        await fill(storage, campaigns)
        counted = Campaigns(storage)
        reads, listings = storage.operations.blob_reads, storage.operations.blob_writes
        began_at, cpu = time.perf_counter(), time.process_time()
        await counted.refresh()
        seconds = time.perf_counter() - began_at
        print(
            f"{len(counted.rows):,} campaigns in {seconds:.1f} s, {time.process_time() - cpu:.1f} s"
            f" of processor: {storage.operations.blob_writes - listings:,} listings,"
            f" {storage.operations.blob_reads - reads:,} reads"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaigns", type=int, default=10_000)
    parser.add_argument(
        "--storage", default="", help="azurite, or an address; a new folder if none"
    )
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = arguments.storage
        if url == "azurite":
            import azurite

            url = stack.enter_context(azurite.running())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        asyncio.run(measure(url or f"local:{folder}", arguments.campaigns))


if __name__ == "__main__":
    main()
