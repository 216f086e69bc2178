"""A million jobs through one storage: filled, leased, drawn by an instant engine, stored and done.

Each worker is a process with the real pipeline. The rate, and each worker's memory, descriptors and
metrics, are printed ten times; what grows from the second to the last grows without bound. At the
end each image is looked up: none may be missing, none may have been drawn twice.

    python benchmarks/million/run.py [--jobs 1000000] [--processes 4]
    PYTHONPATH=tests/chaos python benchmarks/million/run.py --jobs 100000 --storage azurite
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from workers import Usage, Workers, running

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

#: Jobs in one send.
BATCH = 1_000

#: Rows of the table, of as many jobs each.
PARTS = 10
LAST_SHARE = 0.99

SAMPLE_SECONDS = 0.1


class Sample(NamedTuple):
    """Progress after some seconds, and the resources that the workers used."""

    seconds: float
    ended: int
    usage: list[Usage]

    @property
    def cpu_seconds(self) -> float:
        return sum(each.cpu_seconds for each in self.usage)


async def fill(storage_url: str, jobs: int) -> float:
    """Sends the jobs; returns messages/s."""
    async with open_storage(StorageSettings(storage=storage_url)) as storage:
        await storage.create()
        began_at = time.monotonic()
        for first in range(0, jobs, BATCH):
            numbers = range(first, min(first + BATCH, jobs))
            await storage.queue.send(
                f'{{"prompt": "a house", "id": "{n:07}", "campaign": "million"}}'
                for n in numbers
            )
        return jobs / (time.monotonic() - began_at)


async def missing(storage_url: str, jobs: int) -> tuple[int, int]:
    """Jobs without an image, and messages left in the queue."""
    found = bytearray(jobs)
    async with open_storage(StorageSettings(storage=storage_url)) as storage:
        async for name in storage.blobs.names("million/"):
            if number := re.fullmatch(r"million/(\d{7})\.png", name):
                found[int(number[1])] = 1
        left = (await storage.queue.depth()).messages
    return jobs - sum(found), left


def watch(
    workers: Workers, jobs: int, most_seconds: float, console: Console
) -> list[Sample]:
    """A sample at each tenth of the jobs, and one when the workers have begun."""
    samples: list[Sample] = []
    began_at = time.monotonic()
    while workers.are_running:
        time.sleep(SAMPLE_SECONDS)
        ended, seconds = workers.ended_jobs, time.monotonic() - began_at
        # The last part ends before the first worker does.
        share = min(len(samples) / PARTS, LAST_SHARE)
        is_due = len(samples) <= PARTS and ended > 0 and ended >= jobs * share
        if is_due and (usage := workers.usage()):
            samples.append(Sample(seconds, ended, usage))
            if len(samples) > 1:
                console.print(line(samples[-2], samples[-1]), highlight=False)
        if seconds > most_seconds:
            console.print(f"stopped after {seconds:,.0f} s, {ended:,} jobs")
            most_seconds = float("inf")
            workers.stop()
    return samples


def rate(first: Sample, last: Sample) -> float:
    return (last.ended - first.ended) / max(last.seconds - first.seconds, 1e-9)


def cpu_milliseconds(first: Sample, last: Sample) -> float:
    """Resources of all workers for each job."""
    return (
        1e3 * (last.cpu_seconds - first.cpu_seconds) / max(last.ended - first.ended, 1)
    )


def line(first: Sample, last: Sample) -> str:
    most = [max(values) for values in zip(*last.usage, strict=True)]
    return (
        f"{last.ended:>9,} jobs  {rate(first, last):>7,.0f}/s"
        f"  {cpu_milliseconds(first, last):.2f} ms CPU a job"
        f"  {most[0]:.0f} MB  {most[1]} descriptors  {most[2]} threads  {most[3]} series"
    )


def summary(samples: list[Sample]) -> dict[str, float | None]:
    """Figures of the samples; the first is taken when the workers have begun."""
    if len(samples) < 3:
        return {}
    first, second, *_ = samples
    *_, earlier, last = samples
    start, end = rate(first, second), rate(earlier, last)
    usage = {
        name: [
            max(getattr(each, name) for each in sample.usage) for sample in samples[1:]
        ]
        for name in ("rss_mb", "descriptors", "threads", "series")
    }
    grown = {
        f"{name}_at_{when}": round(values[at], 1)
        for name, values in usage.items()
        for when, at in (("start", 0), ("end", -1))
    }
    return {
        "messages_per_second": round(rate(first, last), 1),
        "messages_per_second_at_start": round(start, 1),
        "messages_per_second_at_end": round(end, 1),
        "end_to_start": round(end / start, 3) if start else None,
        "cpu_ms_at_start": round(cpu_milliseconds(first, second), 3),
        "cpu_ms_at_end": round(cpu_milliseconds(earlier, last), 3),
        **grown,
    }


@contextlib.contextmanager
def storage_of(choice: str) -> Iterator[str]:
    """The address of the storage: a new folder, an Azurite of its own, or *choice*."""
    if choice == "azurite":
        import azurite

        with azurite.running() as connection:
            yield connection
    elif choice:
        yield choice
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"local:{folder}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--storage", default="", help="azurite, or an address; a new folder if none"
    )
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop the workers then"
    )
    arguments = parser.parse_args()
    jobs, console = arguments.jobs, Console(width=110)
    os.nice(arguments.nice)
    with storage_of(arguments.storage) as storage:
        sent_per_second = asyncio.run(fill(storage, jobs))
        filler_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        console.print(
            f"{jobs:,} jobs sent, {sent_per_second:,.0f}/s, {filler_mb:.0f} MB"
        )
        with running(storage, arguments.processes) as workers:
            samples = watch(workers, jobs, arguments.seconds, console)
            reports = workers.reports()
        outcomes = sum((Counter(report.jobs) for report in reports), Counter())
        lost, left = asyncio.run(missing(storage, jobs))
    stored = jobs - lost
    drawn = sum(each.images for each in reports) + outcomes["duplicate"]
    table = Table(
        "outcome", "jobs", *(f"worker {number}" for number in range(len(reports)))
    )
    for outcome, count in sorted(outcomes.items()):
        table.add_row(
            outcome,
            f"{count:,}",
            *(f"{each.jobs.get(outcome, 0):,}" for each in reports),
        )
    console.print(table)
    result = {
        "jobs": jobs,
        "processes": arguments.processes,
        "sent_per_second": round(sent_per_second, 1),
        "filler_mb": round(filler_mb, 1),
        **summary(samples),
        "stored": stored,
        "left_in_queue": left,
        "lost": lost - left,
        "done_twice": drawn - stored,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
