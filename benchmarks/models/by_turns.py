"""Measures a worker that serves two models by turns against the same with one, on a local storage.

    python benchmarks/models/by_turns.py ./first ./second --seconds 500 --out /tmp/two-models.json

Both queues are full all the time, with equal numbers of jobs. Images are counted from the worker's
metrics between two changes to the same model, so over whole turns: what the changes cost is in. The
run with one model takes half as long; what counts is the second half of it, when all is compiled.
`--stay 5` makes the shortest stay five seconds, to try it on a CPU with tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.models import choice

#: The slowest start: loading and compiling.
START_SECONDS = 900.0

#: A worker whose shortest stay is another than usual.
PROGRAM = """
import sys
from worker.models import change, choice
choice.SHORTEST_STAY_SECONDS = change.LOOK_SECONDS = float(sys.argv.pop(1))
from fleet.entry import main
main()
"""


class Sample(NamedTuple):
    """Totals of the worker at a moment (monotonic seconds)."""

    at: float
    images: float
    changes: float
    change_seconds: float


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
    )


async def measure(
    arguments: argparse.Namespace, models: Sequence[Path], seconds: float
) -> list[Sample]:
    """A sample each second for *seconds*, from the first image on."""
    address = f"http://127.0.0.1:{arguments.port}"
    with tempfile.TemporaryDirectory() as folder:
        storage_address = f"local:{folder}"
        async with open_storage(StorageSettings(storage=storage_address)) as storage:
            await storage.create()
            for model in models:
                await storage.models.send(jobs(model.stem, arguments.jobs, arguments.steps))
            flags = [flag for model in models for flag in ("--model", str(model))]
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, str(arguments.stay), "worker", *flags),
                *("--device", arguments.device, "--port", str(arguments.port)),
                *("--storage", storage_address, "--log-format", "text", *arguments.flags),
            )
            found: list[Sample] = []
            try:
                async with aiohttp.ClientSession() as client, asyncio.timeout(START_SECONDS):
                    while not found or time.monotonic() - found[0].at < seconds:
                        await asyncio.sleep(1)
                        if worker.returncode is not None:
                            sys.exit(f"the worker ended with exit code {worker.returncode}")
                        each = await sample(client, address)
                        if each is not None and each.images:
                            found.append(each)
            finally:
                if worker.returncode is None:
                    worker.send_signal(signal.SIGTERM)
                    await worker.wait()
            if (await storage.queue.depth()).messages < len(models) * 100:
                sys.exit(f"the queues ran low: more than --jobs {arguments.jobs} are needed")
            return found


def whole_turns(found: Sequence[Sample]) -> tuple[Sample, Sample]:
    """The first sample after the first change, and that after the last one to the same model."""
    changed = {
        int(each.changes): each for each in reversed(found) if each.changes
    }  # the first sample with each number
    last = max((number for number in changed if number % 2), default=1)
    if last < 3:
        sys.exit("the worker has not taken two whole turns: give more --seconds")
    return changed[1], changed[last]


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    one = await measure(arguments, arguments.models[:1], arguments.seconds / 2)
    first, last = one[len(one) // 2], one[-1]
    one_rate = (last.images - first.images) / (last.at - first.at)
    began, ended = whole_turns(await measure(arguments, arguments.models, arguments.seconds))
    rate = (ended.images - began.images) / (ended.at - began.at)
    changes = ended.changes - began.changes
    change_seconds = (ended.change_seconds - began.change_seconds) / changes
    stay = max(arguments.stay, choice.STAY_PER_CHANGE * change_seconds)
    return {
        "one_model_images_per_second": one_rate,
        "two_models_images_per_second": rate,
        "two_models_over_one": rate / one_rate,
        "changes": changes,
        "change_seconds": change_seconds,
        "longest_wait_seconds": 2 * (min(stay, choice.LONGEST_STAY_SECONDS) + change_seconds),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="two models by turns against one")
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=500.0, help="of the run with both")
    parser.add_argument("--stay", type=float, default=choice.SHORTEST_STAY_SECONDS)
    parser.add_argument("--jobs", type=int, default=20_000, help="of each model")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--port", type=int, default=9471)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flags", type=shlex.split, default=[], help="more of the worker, quoted")
    arguments = parser.parse_args(given)
    found = asyncio.run(run(arguments))
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
