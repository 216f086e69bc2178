"""Rows of the UNet a second with ADetailer's jobs in mixed slots, over those of plain jobs.

    python benchmarks/details.py --out benchmarks/results/a1111.json

Every second job has a unit, whose detector finds the reddest part of a picture. Both kinds of
batches are drawn by one engine on the CPU, by turns; the figure is the median of the pairs' ratios.
Seconds are those of the processor: an empty slot is drawn as well, so that what waits costs as much
there, and what else the machine does costs nothing.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import imagefleet
from evaluation.bench import machine
from imagefleet.files import demo
from imagefleet.job import samplers
from imagefleet.validation import JSONDict
from rows.groups import add_figures
from worker.engine import contract, device

#: Width and height of what the detector sees, and of its cells.
SIDE, CELL = 64, 16

STEPS = 20
UNIT = {"ad_model": "red", "ad_mask_k": 1, "ad_confidence": 0.01}
PROMPTS = ("a red house", "a red star at night", "a red car in the city", "a red fish")


def write_detector(path: Path) -> None:
    """Writes a network of YOLO's form whose confidence is a cell's red, less its other colours."""
    count = (SIDE // CELL) ** 2
    colours = np.array([2, -1, -1], np.float32) / CELL**2
    weights = np.broadcast_to(colours[None, :, None, None], (1, 3, CELL, CELL))
    middles = np.arange(CELL / 2, SIDE, CELL, dtype=np.float32)
    x, y = (each.ravel() for each in np.meshgrid(middles, middles))
    sides = np.full(count, 1.5 * CELL, np.float32)
    given = {
        "weights": weights,
        "places": np.stack([x, y, sides, sides])[None],
        "shape": np.array([1, 1, count]),
    }
    nodes = [
        helper.make_node("Conv", ["images", "weights"], ["red"], strides=[CELL, CELL]),
        helper.make_node("Sigmoid", ["red"], ["sure"]),
        helper.make_node("Reshape", ["sure", "shape"], ["row"]),
        helper.make_node("Concat", ["places", "row"], ["output0"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "red",
        [
            helper.make_tensor_value_info(
                "images", TensorProto.FLOAT, [1, 3, SIDE, SIDE]
            )
        ],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [1, 5, count])],
        [numpy_helper.from_array(np.array(each), name) for name, each in given.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


class CountingEngine(imagefleet.AsyncEngine):
    """Counts the rows of what it draws, and its parts."""

    rows = 0
    parts = 0

    async def _pixels(
        self, request: contract.ImageRequest, at: int = 0
    ) -> contract.Pixels:
        steps = request.steps
        if request.init is not None:
            self.parts += 1
            steps = int(request.init.denoising_strength * steps) + 1
        self.rows += 2 * samplers.unet_calls(request.sampler, steps)
        return await super()._pixels(request, at)


async def rate(engine: CountingEngine, jobs: list[JSONDict]) -> float:
    """Rows a second of processor time of a batch of jobs."""
    before, begin = engine.rows, time.process_time()
    async for drawn in engine.draw(jobs):
        if drawn.error is not None:
            raise drawn.error
    return (engine.rows - before) / (time.process_time() - begin)


async def measure(arguments: argparse.Namespace, folder: Path) -> JSONDict:
    write_detector(folder / "red.onnx")
    seeds = itertools.count()

    def jobs(*, detailed: bool) -> list[JSONDict]:
        found = []
        for number in range(arguments.jobs):
            args = [UNIT] if detailed and number % 2 else []
            found.append(
                {
                    "prompt": PROMPTS[number % len(PROMPTS)],
                    "steps": STEPS,
                    "seed": next(seeds),
                    "alwayson_scripts": {"ADetailer": {"args": args}},
                }
            )
        return found

    async with CountingEngine(
        demo.find_checkpoint(), detectors=folder, device="cpu", slots=arguments.slots
    ) as engine:
        await rate(engine, jobs(detailed=True))
        engine.parts = 0
        pairs = []
        for _ in range(arguments.pairs):
            plain = await rate(engine, jobs(detailed=False))
            pairs.append([await rate(engine, jobs(detailed=True)), plain])
        parts = engine.parts
    return {
        "details_over_plain": round(
            statistics.median(mixed / plain for mixed, plain in pairs), 4
        ),
        "details_and_plain_rows_per_second": [
            [round(each, 2) for each in pair] for pair in pairs
        ],
        "details_parts": parts,
        "details_measured": {
            "command": "python benchmarks/details.py",
            "model": "the demo's",
            "slots": arguments.slots,
            "hardware": machine.hardware(device.find_device("cpu")),
            "versions": machine.versions(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=24, help="jobs of a batch")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imagefleet-details-") as folder:
        figures = asyncio.run(measure(arguments, Path(folder)))
    add_figures(arguments.out, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
