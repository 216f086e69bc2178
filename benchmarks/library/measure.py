"""Images/s of `imagefleet.Engine` over those of a worker, with another LoRA in each job.

    python benchmarks/library/measure.py --out benchmarks/results/library.json

The worker goes from a local queue to the stored PNG. Both have an engine of their own with as many
slots, and draw by turns; the figure is the median of the pairs' ratios. On a GPU the checkpoint is
SD1.5 with random weights, on a CPU the demo's, or a tiny one with `--tiny`.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import imagefleet
import tiny_model
from evaluation.bench import engine as bench_engine
from evaluation.bench import machine
from library import turns
from rows.groups import Figures, add_figures
from worker.engine import contract, device, load
from worker.process import engine_settings

#: Of a turn, each of all slots.
ROUNDS = 8

#: Before the pairs: a GPU compiles meanwhile.
WARM_SECONDS = {"cuda": 180.0, "cpu": 0.0}


async def measure(arguments: argparse.Namespace, folder: Path) -> Figures:
    given = arguments.device
    model = (
        tiny_model.build_tiny_checkpoint(folder / "tiny")
        if arguments.tiny
        else arguments.model
    )
    setup = bench_engine.prepare(model, folder, given)
    settings = bench_engine.worker_settings(setup, "queue").model_copy(
        update={"until_empty": False, "device": given, "slots": arguments.slots}
    )
    size = (0, 0)

    def load_engine() -> contract.Engine:
        nonlocal size
        engine = load.load_engine(engine_settings(settings))
        size = engine.default_size
        return engine

    numbers = itertools.count()
    async with turns.working(settings, load_engine) as worker:
        workload = replace(setup.workload, sizes=(size,))

        def messages() -> list[str]:
            return list(
                map(workload.message, itertools.islice(numbers, ROUNDS * worker.slots))
            )

        async def of_worker() -> float:
            bodies = messages()
            return await worker.rate(len(bodies), worker.storage.queue.send(bodies))

        async def of_library() -> float:
            done_at = []
            async for drawn in engine.draw(
                map(imagefleet.Job.model_validate_json, messages())
            ):
                if drawn.error is not None:
                    raise drawn.error
                done_at.append(time.perf_counter())
            return turns.rate_of(done_at, worker.slots)

        loras = str(workload.lora_directory)
        async with imagefleet.AsyncEngine(
            setup.model, loras=loras, device=given, slots=worker.slots
        ) as engine:
            seconds = arguments.warm
            if seconds is None:
                seconds = WARM_SECONDS[device.find_device(given).type]
            warm_at = time.monotonic() + seconds
            while (
                await turns.compare(of_library, of_worker, 1)
                and time.monotonic() < warm_at
            ):
                pass
            pairs = await turns.compare(of_library, of_worker, arguments.pairs)
    return {
        "library_over_worker": turns.ratio(pairs),
        "library_and_worker_images_per_second": pairs,
        "library_measured": {
            "command": "python benchmarks/library/measure.py",
            "model": setup.model.name,
            "slots": worker.slots,
            "hardware": machine.hardware(device.find_device(given)),
            "versions": machine.versions(),
        },
    }


def run(arguments: argparse.Namespace) -> Figures:
    """The figures of given options, measured in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="imagefleet-library-") as folder:
        return asyncio.run(measure(arguments, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--slots", type=int, help="images at once (default: by free memory)"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--warm", type=float, help="seconds before the pairs")
    parser.add_argument("--tiny", action="store_true", help="a trial with a tiny model")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figures = run(arguments)
    add_figures(arguments.out, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
