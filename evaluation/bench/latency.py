"""`imagefleet bench latency`: how long one image takes, and a few at once."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet import console, options
from imagefleet.pricing import families
from worker.node import libraries

if TYPE_CHECKING:
    from evaluation.bench.engine import Setup

#: Images that a user may wait for at the same time, each with an engine of as many slots.
AT_ONCE = (1, 2, 4)

REPEATS = 3


@console.one_line_errors()
def command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint, as for the worker. By default random weights on a GPU, and the"
            " small demo checkpoint on a CPU."
        ),
    ] = None,
    family: Annotated[
        str,
        typer.Option(
            metavar="|".join(families.FAMILIES), help="Of the checkpoint with random weights."
        ),
    ] = "sd1",
    steps: Annotated[
        int | None,
        typer.Option(min=2, max=150, help="Of each image. [default: 15, or SDXL's 20]"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measures the seconds from a prompt to its images: one, two and four at once.

    Euler ancestral steps with guidance and another LoRA for each image, in the checkpoint's own
    size. Each number of images has an engine with as many slots: on a GPU it is compiled first,
    which takes minutes.

    imagefleet bench latency

    imagefleet bench latency --family sdxl --json-file latency.json
    """
    console.check_writable(json_file)
    from worker.files import check

    check.require_path(model)  # before torch is imported
    libraries.require()
    from evaluation.bench import engine as bench_engine
    from evaluation.bench import machine
    from worker.engine import device as devices

    torch_device = devices.find_device(device)
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as name:
        console.print_note("creating the model and the LoRAs")
        loras = max(AT_ONCE)
        setup = bench_engine.prepare(model, Path(name), device, loras, family)
        found = families.of_title(check.family(setup.model))
        steps = steps or found.steps
        report = measure(setup, steps, device, console.print_note)
    report |= {
        "family": found.slug,
        "hardware": machine.hardware(torch_device),
        "versions": machine.versions(),
    }
    if json_file is not None:
        console.write_file(json_file, console.json_text(report))
    if as_json:
        console.print_json(report)
    else:
        _show(report)


def measure(
    setup: Setup, steps: int, device: str, on_step: Callable[[str], None]
) -> dict[str, Any]:
    """The median seconds for so many images at once."""
    from evaluation.bench import work
    from worker.engine import load

    seconds = {}
    width = height = 0
    for images in AT_ONCE:
        on_step(f"loading an engine for {console.counted(images, 'image')} at once")
        engine = load.load_engine(setup.model, device, slots=images)
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


def _show(report: dict[str, Any]) -> None:
    what = "{hardware[device]}: {model}, {width}x{height}, {steps} steps".format_map(report)
    console.stdout.print(what, soft_wrap=True, highlight=False)
    for images, seconds in report["seconds"].items():
        line = f"{console.counted(images, 'image') + ' at once':<20}{seconds:.2f} s"
        console.stdout.print(line, soft_wrap=True, highlight=False)
