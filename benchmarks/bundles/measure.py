"""What bundles save: operations, processor time and messages, against single jobs in the same run.

Each kind fills a queue of an Azurite of its own with `Load`, and a worker with a stand-in engine
draws it empty; both are processes whose processor time and billed operations are counted. Then the
same jobs go through the queue alone. With --gpu, a real worker draws jobs of few steps, with LoRAs
and without, by `engine.py`.

    python -m benchmarks.bundles.measure [--jobs 10000] [--bundle 32]
    python -m benchmarks.bundles.measure --gpu
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "chaos"))

from rich.console import Console
from rich.progress import track
from rich.table import Table

import azurite
from benchmarks import operations
from benchmarks.bundles import gpu
from benchmarks.stand_in import StandInEngine
from imagefleet.pricing import prices
from imagefleet.storage import bundle
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import MAX_RECEIVE, LeasedMessage, Operations
from imagefleet.storage.settings import StorageSettings
from loadgen.load import Load
from loadgen.settings import LoadSettings
from loadgen.sources import open_source
from worker import process
from worker.settings import WorkerSettings

#: Jobs like those of a large campaign: a prompt of its own, and fields that all share.
TEMPLATE = """\
prompt: "a photo of a {thing} in the {place}, number {number}, highly detailed, sharp focus"
negative_prompt: blurry, deformed, watermark, text
lists:
  thing: [house, tree, fox, boat, bridge, lamp, clock, chair]
  place: [snow, rain, city, desert, forest, harbour, mountains, garden]
  number: [%s]
job: {campaign: bundles-%d, steps: 4, cfg_scale: 1, sampler_name: LCM}
"""

#: Jobs that are planned: so many that the start of a replica no longer matters.
PLANNED = "50000"

#: The most jobs that are queued at once: Azurite takes longer for each message the more it holds,
#: and stops answering at 10,000.
QUEUED = 1_000

LEASE_SECONDS = 120
CALLS_AT_ONCE = 32

CONSOLE = Console(stderr=True)


class Spent(NamedTuple):
    """What a process took."""

    cpu_seconds: float
    operations: Operations


def template(folder: Path, campaign: int = 0) -> Path:
    path = folder / "template.yaml"
    path.write_text(TEMPLATE % (", ".join(map(str, range(10_000))), campaign))
    return path


def filled(storage: str, file: Path, jobs: int, bundle: int) -> Spent:
    """Fills the queue; a process of its own."""

    async def fill() -> Operations:
        settings = LoadSettings(storage=storage, bundle=bundle, verify_share=0)
        source = open_source(str(file), count=jobs)
        async with open_storage(settings) as opened:
            await Load(opened, source, settings).run(lambda _: None)
            return opened.operations

    began_at = time.process_time()
    used = asyncio.run(fill())
    return Spent(time.process_time() - began_at, used)


def drawn(storage: str) -> Spent:
    """Draws the queue empty; a process of its own."""
    settings = WorkerSettings(storage=storage, model=Path("stand-in"), until_empty=True)
    load = lambda: StandInEngine(capacity=32, size=(64, 64))  # noqa: E731 - a short factory
    began_at = time.process_time()
    with operations.opened() as opened:
        report = asyncio.run(process.run_worker(settings, load=load))
    spent = time.process_time() - began_at
    if report.jobs.keys() - {"completed", "handed_back"}:
        sys.exit(f"not all jobs were drawn: {report.jobs}")
    (storage_used,) = opened
    return Spent(spent, storage_used.operations)


async def through(storage: Storage, bodies: list[str]) -> float:
    """Seconds that messages take to be sent, leased and deleted."""
    leased: asyncio.Queue[LeasedMessage] = asyncio.Queue(MAX_RECEIVE)

    async def end() -> None:
        while True:
            await storage.queue.delete(await leased.get())
            leased.task_done()

    ends = [asyncio.create_task(end()) for _ in range(CALLS_AT_ONCE)]
    began_at = time.monotonic()
    await storage.queue.send(bodies)
    while messages := await storage.queue.receive(MAX_RECEIVE, LEASE_SECONDS):
        for message in messages:
            await leased.put(message)
    await leased.join()
    seconds = time.monotonic() - began_at
    for task in ends:
        task.cancel()
    return seconds


def queue_rate(storage: str, file: Path, jobs: int, per_message: int) -> float:
    """Jobs/s through one queue."""
    messages = [
        bundle.Sent(body)
        for body in open_source(str(file), count=jobs).bodies()
        if body
    ]
    bodies = bundle.bundled(messages, per_message, bundle.any_name)

    async def run() -> float:
        async with open_storage(StorageSettings(storage=storage)) as opened:
            await opened.create()
            return jobs / await through(opened, bodies)

    return asyncio.run(run())


def measure(jobs: int, per_message: int) -> dict[str, float]:
    """Figures of one kind, per job or per million; 1 job a message: single jobs."""
    spawn = multiprocessing.get_context("spawn")
    used = Counter[str]()
    cpu = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, azurite.running() as storage:
        rounds = range(math.ceil(jobs / QUEUED))
        for number in track(rounds, f"{per_message} a message", console=CONSOLE):
            file = template(Path(folder), number)
            count = min(QUEUED, jobs - number * QUEUED)
            for name, work, given in (
                ("load", filled, (storage, file, count, per_message)),
                ("worker", drawn, (storage,)),
            ):
                with spawn.Pool(1) as pool:
                    spent = pool.apply(work, given)
                used.update(asdict(spent.operations))
                cpu[name] += spent.cpu_seconds
        with spawn.Pool(1) as pool:
            rate = pool.apply(
                queue_rate, (storage, file, min(jobs, QUEUED), per_message)
            )
    million = 1_000_000 / jobs
    return {
        "jobs_per_message": per_message,
        "queue_operations_per_million": used["queue"] * million,
        "blob_writes_per_million": used["blob_writes"] * million,
        "blob_reads_per_million": used["blob_reads"] * million,
        "dollars_per_million": prices.BUILT_IN.storage.dollars(Operations(**used))
        * million,
        "load_cpu_seconds_per_million": cpu["load"] * million,
        "worker_cpu_seconds_per_million": cpu["worker"] * million,
        "jobs_per_second_through_queue": rate,
    }


def planned(per_message: int) -> float:
    """Images per dollar by `imagefleet plan`: RTX 3060 Ti, SD1.5, 4 steps, batch price."""
    with tempfile.TemporaryDirectory() as folder:
        few_steps = template(Path(folder))
        given = [
            "plan",
            str(few_steps),
            "--jobs",
            PLANNED,
            "--bundle",
            str(per_message),
        ]
        command = [sys.executable, "-m", "fleet.entry", *given, "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["images_per_dollar"])


def show(rows: list[dict[str, float]]) -> None:
    table = Table("", *(f"{row['jobs_per_message']:.0f} a message" for row in rows))
    for name in rows[0]:
        table.add_row(name.replace("_", " "), *(f"{row[name]:,.2f}" for row in rows))
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--bundle", type=int, default=32)
    parser.add_argument(
        "--gpu", action="store_true", help="rows that take a GPU, alone"
    )
    parser.add_argument("--tiny", action="store_true", help="a trial of --gpu")
    arguments = parser.parse_args()
    if arguments.gpu:
        trial = ["--tiny", "--device", "cpu", "--scale", "0.1"] * arguments.tiny
        print(json.dumps(gpu.measure(arguments.bundle, *trial)))
        return
    single, bundled = (measure(arguments.jobs, each) for each in (1, arguments.bundle))
    show([single, bundled])
    cpu = [
        row["load_cpu_seconds_per_million"] + row["worker_cpu_seconds_per_million"]
        for row in (single, bundled)
    ]
    rates = [row["jobs_per_second_through_queue"] for row in (single, bundled)]
    found = {
        "jobs": arguments.jobs,
        "bundle": arguments.bundle,
        "dollars_per_million_operations": round(bundled["dollars_per_million"], 3),
        "dollars_per_million_operations_single": round(
            single["dollars_per_million"], 3
        ),
        "images_per_dollar_3060ti_4_steps": round(planned(arguments.bundle)),
        "processor_time_over_single": round(cpu[1] / cpu[0], 3),
        "jobs_per_second_over_single": round(rates[1] / rates[0], 1),
        "single": single,
        "bundled": bundled,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
