"""Measures a worker that serves two models by turns against the same with one, on a local storage.

    python benchmarks/models/by_turns.py ./first ./second --out /tmp/two-models.json

The worker has both models all the time. First only one of them has jobs: its rate is measured once
all is compiled. Then both queues are full, with equal numbers of jobs, and images are counted from
one change to the same model to another, so over whole turns: what the changes cost is in.
`--stay 5` makes the shortest stay five seconds, to try it on a CPU with tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from engine import commit
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from worker.models import choice

#: The slowest start: loading and compiling.
START_SECONDS = 900.0

#: The longest time between two changes, when both models have jobs.
CHANGE_SECONDS = 2 * choice.LONGEST_STAY_SECONDS

#: A worker whose shortest stay is another than usual.
PROGRAM = """
import sys
from worker.models import change, choice
choice.SHORTEST_STAY_SECONDS = change.LOOK_SECONDS = float(sys.argv.pop(1))
from fleet.entry import main
main()
"""


Figures = dict[str, Any]


class Sample(NamedTuple):
    """Totals of the worker at a moment (monotonic seconds)."""

    at: float
    images: float
    changes: float
    change_seconds: float
    is_compiling: bool


def jobs(model: str, count: int, steps: int) -> Iterator[str]:
    for number in range(count):
        fields = {"id": f"{model}-{number}", "model": model, "steps": steps}
        yield json.dumps({"prompt": f"photo of house {number}", **fields})


async def sample(client: aiohttp.ClientSession, address: str) -> Sample | None:
    """None before the worker serves metrics."""
    try:
        async with client.get(f"{address}/metrics") as answer:
            text = await answer.text()
    except aiohttp.ClientError:
        return None
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            totals[each.name] = totals.get(each.name, 0.0) + each.value
    return Sample(
        time.monotonic(),
        totals.get("imagefleet_images_total", 0.0),
        totals.get("imagefleet_model_switches_total", 0.0),
        totals.get("imagefleet_model_switch_seconds_total", 0.0),
        bool(totals.get("imagefleet_engine_compiling")),
    )


class Worker:
    """A worker process with both models, and what it says of itself."""

    def __init__(self, process: Process, client: aiohttp.ClientSession, address: str) -> None:
        self._process = process
        self._client = client
        self._address = address

    async def wait(self, is_reached: Callable[[Sample], bool], limit_seconds: float) -> Sample:
        """The first sample, of one each second, of which that is true."""
        async with asyncio.timeout(limit_seconds):
            while True:
                await asyncio.sleep(1)
                if self._process.returncode is not None:
                    sys.exit(f"the worker ended with exit code {self._process.returncode}")
                found = await sample(self._client, self._address)
                if found is not None and is_reached(found):
                    return found

    async def after(self, began: Sample, seconds: float) -> Sample:
        return await self.wait(lambda each: each.at - began.at >= seconds, 2 * seconds + 60)


@contextlib.asynccontextmanager
async def run_worker(arguments: argparse.Namespace, storage_address: str) -> AsyncIterator[Worker]:
    flags = [flag for model in arguments.models for flag in ("--model", str(model))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(arguments.stay), "worker", *flags),
        *("--device", arguments.device, "--port", str(arguments.port)),
        *("--storage", storage_address, "--log-format", "text", *arguments.flags),
    )
    try:
        async with aiohttp.ClientSession() as client:
            yield Worker(process, client, f"http://127.0.0.1:{arguments.port}")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def run(arguments: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        storage_address = f"local:{folder}"
        async with open_storage(StorageSettings(storage=storage_address)) as storage:
            await storage.create()
            async with run_worker(arguments, storage_address) as worker:
                figures = await measure(arguments, storage, worker)
            if (await storage.queue.depth()).messages < 100:
                sys.exit(f"the queues ran low: more than --jobs {arguments.jobs} are needed")
    return figures


async def measure(arguments: argparse.Namespace, storage: Storage, worker: Worker) -> Figures:
    first, second = (
        jobs(model.stem, arguments.jobs, arguments.steps) for model in arguments.models
    )
    await storage.models.send(first)
    one = await worker.wait(lambda each: each.images > 0 and not each.is_compiling, START_SECONDS)
    one_end = await worker.after(one, arguments.seconds)
    await storage.models.send(second)
    changed = [
        await worker.wait(lambda each, number=number: each.changes >= number, CHANGE_SECONDS)
        for number in range(1, 2 + 2 * arguments.turns)
    ]
    return summarise(one, one_end, changed, arguments.stay)


def summarise(
    one: Sample, one_end: Sample, changed: Sequence[Sample], least_stay_seconds: float
) -> Figures:
    """Of a worker with one model, and then with two from the first change to the last."""

    def rate(began: Sample, ended: Sample) -> float:
        return (ended.images - began.images) / (ended.at - began.at)

    began, ended = changed[0], changed[-1]
    change_seconds = [
        later.change_seconds - earlier.change_seconds
        for earlier, later in itertools.pairwise([one_end, *changed])
    ]
    stay = max(least_stay_seconds, choice.STAY_PER_CHANGE * max(change_seconds))
    stay = min(stay, choice.LONGEST_STAY_SECONDS)
    return {
        "one_model_images_per_second": rate(one, one_end),
        "two_models_images_per_second": rate(began, ended),
        "two_models_over_one": rate(began, ended) / rate(one, one_end),
        "changes": len(changed) - 1,
        "change_seconds": change_seconds[1:],
        "longest_absence_seconds": max(
            later.at - earlier.at for earlier, later in itertools.pairwise(changed)
        ),
        "longest_wait_seconds": 2 * (stay + max(change_seconds)),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="two models by turns against one")
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="with one model")
    parser.add_argument("--turns", type=int, default=2, help="to both models and back")
    parser.add_argument("--stay", type=float, default=choice.SHORTEST_STAY_SECONDS)
    parser.add_argument("--jobs", type=int, default=20_000, help="of each model")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--port", type=int, default=9471)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=commit(), help="recorded in the results")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more of the worker, quoted")
    arguments = parser.parse_args(given)
    found = {"commit": arguments.commit, **asyncio.run(run(arguments))}
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
