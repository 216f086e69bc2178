"""`imagefleet bench latency`: how long one image takes, and a few at once. Imports torch."""

import statistics
import tempfile
import timeit
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from evaluation.bench import engine as bench_engine
from evaluation.bench import machine, work
from evaluation.bench.options import Asked
from fleet import console
from imagefleet.pricing import families
from worker.engine import device as devices
from worker.engine import load
from worker.files import check

#: Images that a user may wait for at the same time, each with an engine of as many slots.
AT_ONCE = (1, 2, 4)

REPEATS = 3


def measure(asked: Asked) -> dict[str, Any]:
    """The median seconds for so many images at once: with guidance, and another LoRA for each."""
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as name:
        console.print_note("creating the model and the LoRAs")
        loras = max(AT_ONCE)
        setup = bench_engine.prepare(
            asked.model, Path(name), asked.device, loras, asked.family
        )
        family = families.of_title(check.family(setup.model))
        steps = asked.steps or family.steps
        seconds = {}
        width = height = 0
        for images in AT_ONCE:
            console.print_note(
                f"loading an engine for {console.counted(images, 'image')} at once"
            )
            settings = load.EngineSettings(setup.model, asked.device, slots=images)
            engine = load.load_engine(settings)
            width, height = engine.default_size
            workload = replace(setup.workload, sizes=((width, height),), steps=(steps,))
            requests = [workload.request(number) for number in range(images)]
            draw = partial(work.draw, engine, requests)
            draw()  # reads the LoRAs
            seconds[images] = statistics.median(
                timeit.repeat(draw, number=1, repeat=REPEATS)
            )
            engine.close()
    return {
        "model": str(setup.model),
        "width": width,
        "height": height,
        "steps": steps,
        "seconds": seconds,
        "family": family.slug,
        "hardware": machine.hardware(devices.find_device(asked.device)),
        "versions": machine.versions(),
    }


def show(report: dict[str, Any]) -> None:
    what = "{hardware[device]}: {model}, {width}x{height}, {steps} steps".format_map(
        report
    )
    console.stdout.print(what, soft_wrap=True, highlight=False)
    for images, seconds in report["seconds"].items():
        line = f"{console.counted(images, 'image') + ' at once':<20}{seconds:.2f} s"
        console.stdout.print(line, soft_wrap=True, highlight=False)
