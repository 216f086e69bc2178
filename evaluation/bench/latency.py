"""`imagefleet bench latency`: how long one image takes, and a few at once. Imports torch."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.bench import engine as bench_engine
from evaluation.bench import machine, work
from evaluation.bench.engine import Setup
from evaluation.bench.options import Asked
from fleet import console
from imagefleet.pricing import families
from worker.engine import device as devices
from worker.engine import load
from worker.files import check

#: Images that a user may wait for at the same time, each with an engine of as many slots.
AT_ONCE = (1, 2, 4)

REPEATS = 3


def measure_all(asked: Asked) -> dict[str, Any]:
    """Euler ancestral steps with guidance and another LoRA an image, in the checkpoint's size."""
    torch_device = devices.find_device(asked.device)
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as name:
        console.print_note("creating the model and the LoRAs")
        loras = max(AT_ONCE)
        setup = bench_engine.prepare(asked.model, Path(name), asked.device, loras, asked.family)
        found = families.of_title(check.family(setup.model))
        report = measure(setup, asked.steps or found.steps, asked.device, console.print_note)
    return report | {
        "family": found.slug,
        "hardware": machine.hardware(torch_device),
        "versions": machine.versions(),
    }


def measure(
    setup: Setup, steps: int, device: str, on_step: Callable[[str], None]
) -> dict[str, Any]:
    """The median seconds for so many images at once."""
    seconds = {}
    width = height = 0
    for images in AT_ONCE:
        on_step(f"loading an engine for {console.counted(images, 'image')} at once")
        engine = load.load_engine(load.EngineSettings(setup.model, device, slots=images))
        workload = replace(setup.workload, sizes=(engine.default_size,), steps=(steps,))
        requests = [workload.request(number) for number in range(images)]
        work.draw(engine, requests)  # reads the LoRAs
        taken = []
        for _ in range(REPEATS):
            began_at = time.perf_counter()
            work.draw(engine, requests)
            taken.append(time.perf_counter() - began_at)
        seconds[images] = statistics.median(taken)
        width, height = engine.default_size
        engine.close()
    return {
        "model": str(setup.model),
        "width": width,
        "height": height,
        "steps": steps,
        "seconds": seconds,
    }


def show(report: dict[str, Any]) -> None:
    what = "{hardware[device]}: {model}, {width}x{height}, {steps} steps".format_map(report)
    console.stdout.print(what, soft_wrap=True, highlight=False)
    for images, seconds in report["seconds"].items():
        line = f"{console.counted(images, 'image') + ' at once':<20}{seconds:.2f} s"
        console.stdout.print(line, soft_wrap=True, highlight=False)
